"""Export: a model as an ONNX folder, checked against torch, and as a plain folder of `transformers`.

Legend: T tokens in the batch, B sequences, N tokens of each once padded.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.files import atomic_folder, read_json, write_json
from everybert.inference import embedding, task_use
from everybert.inference.embedding import Pooling
from everybert.inference.graph import Graph, Session, head_of, input_names, outputs
from everybert.inference.model import Model, _dtype, load
from everybert.model.features import FeatureHead
from everybert.model.ragged import Ragged
from everybert.store.huggingface import EXTRAS, EXTRAS_VERSION, load_network, read_extras, save_network
from everybert.store.weights import SAFE

FILE = "model.onnx"
OPSETS = range(18, 23)
"""Versions of ONNX that are written: what torch writes, short of attention as one operator, which few runtimes know."""
TOLERANCE = 1e-4
"""The largest difference from torch that an export may have, in units of the largest value where that is above 1."""
ONE_FILE = 1_900_000_000
"""Bytes of weights that fit the graph's own file (protobuf ends at 2 GiB); larger models have them beside it."""


@dataclass(frozen=True)
class Likeness:
    """How near the int8 graph's outputs are to the model's."""

    texts: int
    mean: float
    """Of the cosines between the outputs of each text (or token)."""
    least: float
    agree: float | None
    """The share whose largest logit is the same; None where outputs are vectors."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: str
    task: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opset: int
    difference: float
    """The largest between the graph's outputs and torch's, over random sequences of unequal length."""
    values: float
    """The largest output of torch among them."""
    bytes: int
    """Of the graph with its weights."""
    int8: Likeness | None = None
    notes: tuple[str, ...] = ()


# ── what is exported ─────────────────────────────────────────────────────────────────────────────────────────


def opened(name: str | Path, adapter: str | None = None, task: str | None = None) -> Model:
    """A model for export: on the CPU in fp32, int8 weights widened, an adapter merged into its trunk.

    `adapter` is one of the folder's own or a folder; None takes the one that the folder has for the task, if it does.
    """
    model = load(name, device="cpu", dtype="float32")
    adapter = adapter or (task_use.chosen(model, task) if task else None)
    if adapter is not None:
        model.use(adapter if adapter in model.bundle.folders else model.add_adapter(adapter))
    if model.adapters is not None and model.adapters.on.active is not None:
        model.merge()
    return model


def natural_task(model: Model) -> str:
    """What a model is for: its task head, else sentence vectors, else blanks, else hidden states."""
    task = (model.extras.get("task") or {}).get("task")
    heads = model.network.heads
    if task in ("classify", "regress", "tag", "answer", "choose") and (task in heads or task == "regress"):
        return str(task)
    if model._plain_pooling.published or task == "embed":
        return "embed"
    if "classify" in heads:
        return "regress" if model.problem_type == "regression" else "classify"
    named = {"tag": "tag", "answer": "answer", "choose": "choose", "mlm": "fill", "nsp": "next"}
    return next((task for head, task in named.items() if head in heads), "hidden")


def refuse_existing(out: str | Path) -> Path:
    """Exports replace nothing."""
    path = Path(out).expanduser()
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise EverybertError(f"{path} exists already; give another folder, or delete it first")
    return path


def _write(model: Model, folder: Path) -> None:
    """The files of a model folder, weights and all."""
    pooling = model._plain_pooling
    with task_use.saving(model, folder) as extras:
        save_network(
            model.network,
            folder,
            tokenizer=model._tokenizer,
            labels=model.labels,
            problem_type=model.problem_type,
            extras=extras,
            raw_config=model.raw_config,
        )
    if pooling.published:
        embedding.write_pooling(folder, pooling, model.config.hidden_size)


# ── ONNX ─────────────────────────────────────────────────────────────────────────────────────────────────────


def export_onnx(
    name: str | Path,
    out: str | Path,
    *,
    task: str | None = None,
    adapter: str | None = None,
    int8: bool = False,
    opset: int = OPSETS.start,
    sentences: Sequence[str] = (),
    say: Callable[[str], None] = lambda step: None,
) -> Exported:
    """Write a folder with model.onnx, config.json, the tokenizer and everybert.json.

    `task` None takes what the model is for; `adapter` is merged first (see `opened`). The graph is run beside torch on
    random sequences of unequal length; a difference above 1e-4 is an error, and nothing is written. `int8` rounds the
    weights (a scale a column) and, as it runs, the activations; how near the outputs stay is measured on `sentences`.
    `say` is told what is being done.
    """
    needs = [part for part in ("onnx", "onnxscript", "onnxruntime") if find_spec(part) is None]
    if needs:
        raise EverybertError(f"ONNX export needs {', '.join(needs)}: pip install 'everybert[onnx]'")
    if opset not in OPSETS:
        raise EverybertError(f"opsets {OPSETS.start} to {OPSETS.stop - 1} are written, not {opset}")
    out = refuse_existing(out)
    say("loading")
    model = opened(name, adapter, task)
    task = task or natural_task(model)
    head_of(model.network, task)
    pooling = model.pooling if task == "embed" else model._plain_pooling
    with atomic_folder(out) as folder:
        path = folder / ("plain.onnx" if int8 else FILE)
        say("tracing")
        _trace(model, task, pooling, opset, path)
        say("comparing with torch")
        session = Session(path, task, model.config.pad_id)
        difference, values = compare(model, task, pooling, session)
        if not difference <= TOLERANCE * max(1.0, values):
            raise EverybertError(
                f"the graph differs from torch by {difference:.1e} (allowed: {TOLERANCE:.0e}, values reach "
                f"{values:.3g}); nothing was written: try another --opset, and report it"
            )
        likeness = None
        if int8:
            say("quantising")
            quantise(path, folder / FILE)
            for file in folder.glob("plain.onnx*"):
                file.unlink()
            session = Session(folder / FILE, task, model.config.pad_id)
            likeness = alike(model, task, pooling, session, sentences)
        say("writing")
        _write(model, folder)
        (folder / SAFE).unlink()  # the graph has the weights
        done = Exported(
            folder=str(out),
            task=task,
            inputs=tuple(session.inputs),
            outputs=tuple(session.outputs),
            opset=opset,
            difference=difference,
            values=values,
            bytes=sum(file.stat().st_size for file in folder.glob(f"{FILE}*")),
            int8=likeness,
            notes=() if model._tokenizer else ("the model has no tokenizer: the folder takes ids alone",),
        )
        about = {"task": task, "opset": opset, "int8": int8, "inputs": done.inputs, "outputs": done.outputs}
        write_json(folder / EXTRAS, {"version": EXTRAS_VERSION, **read_extras(folder), "onnx": about})
    return done


def _trace(model: Model, task: str, pooling: Pooling, opset: int, path: Path) -> None:
    """Trace the network over a rectangle whose sides are symbols, and write the graph."""
    graph = Graph(model.network, task, pooling).eval()
    names = input_names(model.config)
    sides = (2, 3, 7) if task == "choose" else (3, 7)
    axes = ("batch", "choices", "length") if task == "choose" else ("batch", "length")
    given = {name: torch.zeros(sides, dtype=torch.long) for name in names}
    given["attention_mask"] += 1
    limits = {"length": model.config.max_positions} if model.config.positions != "rotary" else {}
    dims = {i: torch.export.Dim(axis, min=1, max=limits.get(axis)) for i, axis in enumerate(axes)}
    with torch.no_grad():
        called = list(outputs(model.network, task, Ragged.of([[0, 0]]), pooling))
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            graph,
            (),
            kwargs=given,
            dynamo=True,
            input_names=names,
            output_names=called,
            dynamic_shapes=dict.fromkeys(names, dims),
            opset_version=opset,
            verbose=False,
        )
        assert program is not None
        for node in program.model.graph:  # where each was traced, line by line: this machine's paths
            node.metadata_props.clear()
        program.save(path, external_data=sum(p.numel() * p.element_size() for p in graph.parameters()) > ONE_FILE)


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters tell of things that users can do nothing about."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def compare(model: Model, task: str, pooling: Pooling, session: Session, seed: int = 0) -> tuple[float, float]:
    """The largest difference between graph and torch over random sequences, and torch's largest value."""
    draw = random.Random(seed)
    windows = [w for w in model.config.windows or () if w]
    longest = min(model.config.max_positions, max([48, *(3 * w for w in windows)]))
    difference = values = 0.0
    for lengths in (
        (1,),
        (longest,),
        (1, longest // 2 or 1, longest, min(5, longest)),
        (2, 2) if longest > 1 else (1,),
    ):
        batch = _random(model, lengths, draw)
        theirs = session(batch)
        with torch.inference_mode():
            ours = outputs(model.network, task, batch, pooling)
        for name, mine in ours.items():
            gap = (mine - theirs[name].view_as(mine)).abs().max()
            difference = max(difference, float("inf") if gap.isnan() else float(gap))
            values = max(values, float(mine.abs().max()))
    return difference, values


def _random(model: Model, lengths: Sequence[int], draw: random.Random) -> Ragged:
    config = model.config
    ids = [[draw.randrange(config.vocab_size) for _ in range(n)] for n in lengths]
    segments = [[int(i > n // 2) for i in range(n)] for n in lengths] if config.segments > 1 else None
    marks = [[0, *draw.sample(range(n), n // 8)] for n in lengths] if config.global_attention else None
    return Ragged.of(ids, segments, marks)


# ── int8 ─────────────────────────────────────────────────────────────────────────────────────────────────────


def quantise(source: Path, target: Path) -> None:
    """onnxruntime's dynamic int8: weights with a scale a column, activations as they come. Embeddings stay fp32.

    One scale for a whole matrix would be the default, and brings the worst cosine of MiniLM's sentences to 0.86.
    Weights have seven bits: of eight, processors without VNNI (AVX2 alone) add two products in 16 bits, and overflow.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    model.graph.ClearField("value_info")  # it says how matrices lay before they were turned
    _turn(model.graph)
    large = len(list(source.parent.glob(f"{source.name}*"))) > 1
    with quiet():
        quantize_dynamic(
            model,
            target,
            per_channel=True,
            weight_type=QuantType.QInt8,
            reduce_range=True,
            op_types_to_quantize=["MatMul", "Gemm"],
            use_external_data_format=large,
        )


def _turn(graph: Any) -> None:
    """Let every product take its matrix as it lies, of which there is then one turned copy.

    onnxruntime's quantiser turns them in place, once for each use: a table of embeddings that is also the decoder would
    be lost to the look-up, ALBERT's layers would find theirs turned as often as there are layers.
    """
    from onnx import numpy_helper

    matrices = {matrix.name: matrix for matrix in graph.initializer}
    turned: dict[str, str] = {}
    for node in graph.node:
        flag = next((a for a in node.attribute if a.name == "transB" and a.i == 1), None)
        if node.op_type != "Gemm" or flag is None or node.input[1] not in matrices:
            continue
        name = node.input[1]
        if name not in turned:
            turned[name] = f"{name}.turned"
            lying = numpy_helper.to_array(matrices[name]).T.copy()
            graph.initializer.append(numpy_helper.from_array(lying, turned[name]))
        node.input[1] = turned[name]
        flag.i = 0
    used = {name for node in graph.node for name in node.input}
    for name in turned.keys() - used:
        graph.initializer.remove(matrices[name])


def alike(model: Model, task: str, pooling: Pooling, session: Session, sentences: Sequence[str]) -> Likeness:
    """Cosines between a graph's outputs and the model's: of each sentence, or each token where outputs are tokens'."""
    if model._tokenizer is None or not sentences:
        batch = _random(model, [min(16, model.config.max_positions)] * 16, random.Random(0))
    else:
        ids = [x[: model.window] for x in model.tokenizer.ids_batch(list(sentences))]
        batch = Ragged.of(ids, global_tokens=[[0]] * len(ids) if model.config.global_attention else None)
    name = "sentence_embedding" if task == "embed" else session.outputs[0]
    with torch.inference_mode():
        ours = outputs(model.network, task, batch, pooling)[name]
    theirs = session(batch)[name].view_as(ours)
    if ours.dim() == 1 or ours.shape[-1] == 1:  # one number a text or a token: all of them as one row
        ours, theirs = ours.flatten()[None], theirs.flatten()[None]
    cosine = F.cosine_similarity(ours, theirs, dim=-1)
    agree = None
    if name == "logits" and len(ours) > 1:
        agree = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    return Likeness(len(batch), float(cosine.mean()), float(cosine.min()), agree)


# ── transformers ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Saved:
    """What was written for `transformers`."""

    folder: str
    architecture: str
    dtype: str
    tensors: int
    parameters: int
    notes: tuple[str, ...] = ()


def export_hf(name: str | Path, out: str | Path, *, adapter: str | None = None, dtype: str | None = None) -> Saved:
    """Write a whole folder of `transformers`: adapters merged, int8 weights widened. `dtype` None keeps the folder's.

    The folder is read back before it appears under its name: every tensor must be as it was.
    """
    out = refuse_existing(out)
    model = opened(name, adapter)
    model.network.to(_dtype(dtype or _kept(model)))
    notes = [f"transformers has no such {head} head: it is in files of everybert's own" for head in _own_heads(model)]
    if model._tokenizer is None:
        notes.append("the model has no tokenizer: the folder takes ids alone")
    with atomic_folder(out) as folder:
        _write(model, folder)
        again = load_network(folder, dtype=model.network.encoder.embeddings.token.weight.dtype)
        wanted = {k: v for k, v in model.network.state_dict().items() if k.split(".")[1] not in _own_heads(model)}
        found = again.network.state_dict()
        for key in wanted.keys() | found.keys():
            if key not in found or key not in wanted or not torch.equal(found[key], wanted[key]):
                raise EverybertError(f"{key} is not what was written when read back; nothing was exported: report it")
        raw = read_json(folder / "config.json")
    return Saved(
        folder=str(out),
        architecture=raw["architectures"][0],
        dtype=raw["dtype"],
        tensors=len(found),
        parameters=sum(x.numel() for x in found.values()),
        notes=tuple(notes),
    )


def _own_heads(model: Model) -> list[str]:
    return [name for name, head in model.network.heads.items() if isinstance(head, FeatureHead)]


def _kept(model: Model) -> str:
    """The dtype that a folder's config.json names."""
    raw = model.raw_config or {}
    named = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return named if named in ("float32", "bfloat16", "float16") else "float32"
