"""Export of a model: an ONNX folder, compared with torch; a plain folder of `transformers`; a folder with int8 weights.

The ONNX graph is traced from the network's own modules over a padded batch. The names of its inputs and outputs are
those of the ecosystem's ONNX folders.

Legend: T tokens in the batch, B sequences, N tokens of a padded sequence, H hidden, A heads, D head size, C labels,
S texts.
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
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.files import atomic_folder, read_json, write_json
from everybert.inference.model import Model, load, pick_dtype
from everybert.model.heads import FeatureHead, Network, head_logits
from everybert.model.int8 import supported
from everybert.model.pooling import pool
from everybert.model.ragged import Ragged
from everybert.store.adapters import is_adapter
from everybert.store.hub import resolve
from everybert.store.huggingface import EXTRAS, EXTRAS_VERSION, load_network, read_extras
from everybert.store.weights import INT8, SAFE, is_quantised

FILE = "model.onnx"
OPSETS = range(18, 23)
"""ONNX versions that are written. Later ones have attention as one operator, which few runtimes support."""
TOLERANCE = 1e-4
"""Largest difference from torch, relative to the largest value if that is above 1."""
ONE_FILE = 1_900_000_000
"""Bytes of weights that fit into the graph's file (protobuf is limited to 2 GiB). Larger models have a second file."""
HEADS = {
    "hidden": None,
    "embed": None,
    "fill": "mlm",
    "next": "nsp",
    "classify": "classify",
    "regress": "classify",
    "tag": "tag",
    "answer": "answer",
    "choose": "choose",
}
"""The head that each task of a graph needs."""
NO_TOKENIZER = "the model has no tokenizer: the folder takes ids alone"


@dataclass(frozen=True)
class Similarity:
    """How similar the outputs of the int8 graph are to the model's."""

    texts: int
    mean: float
    """Mean of the cosine similarities between the outputs of each text (or token)."""
    least: float
    agree: float | None
    """The share of outputs with the same largest logit. None if outputs are vectors."""


@dataclass(frozen=True)
class Exported:
    """An ONNX folder."""

    folder: str
    task: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opset: int
    difference: float
    """The largest difference between the outputs of the graph and of torch, over random sequences."""
    values: float
    """The largest output of torch among them."""
    bytes: int
    """Size of the graph with its weights."""
    int8: Similarity | None = None
    notes: tuple[str, ...] = ()


# ── what is exported ────────────────────────────────────────────────────────────────────────────────────────


def opened(name: str | Path, adapter: str | None = None, task: str | None = None) -> Model:
    """A model for export: on the CPU in fp32, with an adapter merged into its encoder.

    `adapter` is one of the folder's adapters or a folder. By default, it is the folder's adapter for the task, if any.
    """
    model = load(name, device="cpu", dtype="float32")
    adapter = adapter or (model.adapter_for(task) if task else None)
    if adapter is not None:
        model.use(adapter if adapter in model.bundle.folders else model.add_adapter(adapter))
    if model.adapters is not None and model.adapters.on.active is not None:
        model.merge()
    return model


def natural_task(model: Model) -> str:
    """The task of a model: that of its task head, else embed, else fill, else hidden."""
    task = (model.extras.get("task") or {}).get("task")
    heads = model.network.heads
    head = HEADS.get(str(task))
    if head is not None and head in heads:
        return str(task)
    if model.known_pooling.published or task == "embed":
        return "embed"
    if "classify" in heads:
        return "regress" if model.problem_type == "regression" else "classify"
    named = {"tag": "tag", "answer": "answer", "choose": "choose", "mlm": "fill", "nsp": "next"}
    return next((task for name, task in named.items() if name in heads), "hidden")


def _refuse_existing(out: str | Path) -> Path:
    """An export never replaces a folder."""
    path = Path(out).expanduser()
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise EverybertError(f"{path} exists already; give another folder, or delete it first")
    return path


# ── ONNX ────────────────────────────────────────────────────────────────────────────────────────────────────


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

    `task` is by default that of the model; `adapter` is merged first (see `opened`). The graph and torch run on the
    same random sequences; if they differ by more than 1e-4, an error is raised and nothing is written. `int8` rounds
    the weights (one scale per column) and, at run time, the activations; the similarity of the outputs is measured on
    `sentences`. `say` is called with the name of each step.
    """
    missing = [part for part in ("onnx", "onnxscript", "onnxruntime") if find_spec(part) is None]
    if missing:
        raise EverybertError(f"ONNX export needs {', '.join(missing)}: pip install 'everybert[onnx]'")
    if opset not in OPSETS:
        raise EverybertError(f"opsets {OPSETS.start} to {OPSETS.stop - 1} are written, not {opset}")
    out = _refuse_existing(out)
    say("loading")
    model = opened(name, adapter, task)
    graph = Graph(model, task or natural_task(model)).eval()
    with atomic_folder(out) as folder:
        path = folder / ("plain.onnx" if int8 else FILE)
        say("tracing")
        _trace(graph, opset, path)
        say("comparing with torch")
        session = Session(path, graph.task, model.config.pad_id)
        difference, values = compare(graph, session)
        if not difference <= TOLERANCE * max(1.0, values):
            raise EverybertError(
                f"the graph differs from torch by {difference:.1e} (allowed: {TOLERANCE:.0e}, values reach "
                f"{values:.3g}); nothing was written: try another --opset, and report it"
            )
        similarity = None
        if int8:
            say("quantising")
            quantise_graph(path, folder / FILE)
            for file in folder.glob("plain.onnx*"):
                file.unlink()
            session = Session(folder / FILE, graph.task, model.config.pad_id)
            similarity = compare_int8(model, graph, session, sentences)
        say("writing")
        model.write(folder)
        (folder / SAFE).unlink()  # the graph has the weights
        done = Exported(
            folder=str(out),
            task=graph.task,
            inputs=tuple(session.inputs),
            outputs=tuple(session.outputs),
            opset=opset,
            difference=difference,
            values=values,
            bytes=sum(file.stat().st_size for file in folder.glob(f"{FILE}*")),
            int8=similarity,
            notes=() if model._tokenizer else (NO_TOKENIZER,),
        )
        about = {"task": done.task, "opset": opset, "int8": int8, "inputs": done.inputs, "outputs": done.outputs}
        write_json(folder / EXTRAS, {"version": EXTRAS_VERSION, **read_extras(folder), "onnx": about})
    return done


class Graph(nn.Module):
    """A network with the inputs and outputs of the exported graph: padded ids and masks → the outputs of a task."""

    def __init__(self, model: Model, task: str) -> None:
        super().__init__()
        self.network: Network = model.network
        self.task, self.config = task, model.config
        self.pooling = model.pooling if task == "embed" else model.known_pooling
        if task not in HEADS:
            raise EverybertError(f"there is no task {task!r} to export; choose one of {', '.join(HEADS)}")
        head, heads = HEADS[task], self.network.heads
        if head is not None and head not in heads:
            has = ", ".join(t for t, h in HEADS.items() if h is None or h in heads)
            raise EverybertError(f"this model has no {head} head, which {task} needs; it can be exported for: {has}")

    def inputs(self) -> list[str]:
        """The names of the inputs, which depend on the family."""
        names = ["input_ids", "attention_mask"]
        names += ["token_type_ids"] if self.config.segments > 1 else []
        return names + (["global_attention_mask"] if self.config.global_attention else [])

    def outputs(self, batch: Ragged) -> dict[str, Tensor]:
        """The outputs by name, with a row per token or per sequence, for ragged and padded batches alike."""
        head = HEADS[self.task]
        if head is None:
            x_TH = self.network.encoder(batch)
            found = {"last_hidden_state": x_TH}
            if self.task == "embed":
                found["sentence_embedding"] = self.sentence(x_TH, batch)
            elif self.network.pooler is not None:
                found["pooler_output"] = self.network.pooler(x_TH[batch.first_B])
            return found
        if head == "mlm":
            return {"logits": self.network.mlm_logits(self.network.encoder(batch))}
        logits = head_logits(self.network, batch, head)
        if head == "answer":
            return dict(zip(("start_logits", "end_logits"), logits.unbind(-1)))
        return {"logits": logits}

    def sentence(self, x_TH: Tensor, batch: Ragged) -> Tensor:
        """(B, out): one vector per sequence, as the folder's sentence-transformers files define it."""
        return self.pooling.finish(torch.cat([pool(x_TH, batch, mode) for mode in self.pooling.modes], dim=-1))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """(B, N) each → the outputs in order; for choose (B, choices, N) each → (B, choices)."""
        given = [input_ids, attention_mask, token_type_ids, global_attention_mask]
        if self.task == "choose":
            given = [None if x is None else x.flatten(0, 1) for x in given]
        ids_BN, mask_BN, segments_BN, globals_BN = given
        assert ids_BN is not None and mask_BN is not None
        batch = _Padded.of(ids_BN, mask_BN != 0, segments_BN, None if globals_BN is None else globals_BN != 0)
        found = self.outputs(batch)
        if self.task == "choose":
            return (found["logits"][:, 0].unflatten(0, input_ids.shape[:2]),)
        return tuple(batch.square(x) if _per_token(self.task, name) else x for name, x in found.items())


def _per_token(task: str, name: str) -> bool:
    """Whether an output has a row per token, rather than per sequence."""
    tokens = name in ("last_hidden_state", "start_logits", "end_logits")
    return tokens or (name == "logits" and task in ("fill", "tag"))


@dataclass(frozen=True, kw_only=True)
class _Padded(Ragged):
    """B sequences padded to N tokens, concatenated, because ONNX graphs have no ragged batches.

    Positions count from the left, so the padding must be on the right, as it is for every tokenizer here.
    """

    visible_BN: Tensor
    """bool: False for padding."""

    @classmethod
    def of(  # type: ignore[override]
        cls, ids_BN: Tensor, visible_BN: Tensor, segments_BN: Tensor | None = None, globals_BN: Tensor | None = None
    ) -> _Padded:
        """A batch from the inputs of an ONNX model. Their sizes may be symbols."""
        count, size = ids_BN.shape
        return cls(
            tokens_T=ids_BN.flatten(),
            offsets_B1=torch.arange(count + 1, device=ids_BN.device) * size,
            lengths=(),
            positions_T=torch.arange(size, device=ids_BN.device)[None].expand(count, size).flatten(),
            segments_T=None if segments_BN is None else segments_BN.flatten(),
            globals_T=None if globals_BN is None else globals_BN.flatten(),
            visible_BN=visible_BN,
        )

    def square(self, x: Tensor) -> Tensor:
        """A per-token tensor (B·N, …) as (B, N, …)."""
        return x.unflatten(0, self.visible_BN.shape)

    @property
    def counts_B(self) -> Tensor:
        """fp32: tokens per sequence, without padding."""
        return self.visible_BN.sum(1).float()

    def reduce(self, x_TH: Tensor, how: Literal["mean", "max"]) -> Tensor:
        """(B·N, H) → (B, H): the mean or maximum over the tokens of each sequence, without padding."""
        x_BNH, visible_BN1 = self.square(x_TH), self.visible_BN[..., None]
        if how == "max":
            return x_BNH.masked_fill(~visible_BN1, torch.finfo(x_TH.dtype).min).amax(1)
        total_BH = (x_BNH.float() * visible_BN1).sum(1)
        return (total_BH / visible_BN1.sum(1).clamp(min=1)).to(x_TH.dtype)

    def attend(  # type: ignore[override]
        self, q_TAD: Tensor, k_TAD: Tensor, v_TAD: Tensor, window: int | None, own_TAD: tuple[Tensor, ...] | None
    ) -> Tensor:
        """Attention over all pairs of each padded sequence, with a mask. No dropout."""
        visible = self.visible_BN[:, None, None]  # (B, 1, 1, N), over keys
        seen = visible
        marked = None if own_TAD is None or self.globals_T is None else self.square(self.globals_T)
        if window is not None:
            at = torch.arange(self.visible_BN.shape[1], device=q_TAD.device)
            seen = (at[:, None] - at[None]).abs() <= window
            seen = (seen if marked is None else seen | marked[:, None, None]) & visible
        mixed = self._attend((q_TAD, k_TAD, v_TAD), seen)
        if own_TAD is not None and marked is not None:
            mixed = torch.where(marked[:, None, :, None], self._attend(own_TAD, visible), mixed)
        return mixed.transpose(1, 2).flatten(0, 1)

    def _attend(self, qkv_TAD: tuple[Tensor, ...], seen: Tensor) -> Tensor:
        """(B, A, N, D). Unseen scores get the least finite number: −∞ would make rows of padding NaN."""
        q, k, v = (self.square(x).transpose(1, 2) for x in qkv_TAD)
        least = torch.full((), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(seen, torch.zeros_like(least), least))


def _trace(graph: Graph, opset: int, path: Path) -> None:
    """Trace the network over a padded batch of symbolic size, and write the graph."""
    names, config = graph.inputs(), graph.config
    sides = (2, 3, 7) if graph.task == "choose" else (3, 7)
    axes = ("batch", "choices", "length") if graph.task == "choose" else ("batch", "length")
    given = {name: torch.zeros(sides, dtype=torch.long) for name in names}
    given["attention_mask"] += 1
    limits = {"length": config.max_positions} if config.positions != "rotary" else {}
    dims = {i: torch.export.Dim(axis, min=1, max=limits.get(axis)) for i, axis in enumerate(axes)}
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            graph,
            (),
            kwargs=given,
            dynamo=True,
            input_names=names,
            output_names=list(graph.outputs(Ragged.of([[0, 0]]))),
            dynamic_shapes=dict.fromkeys(names, dims),
            opset_version=opset,
            verbose=False,
        )
        assert program is not None
        for node in program.model.graph:  # their metadata has the source lines, with this machine's paths
            node.metadata_props.clear()
        program.save(path, external_data=sum(p.numel() * p.element_size() for p in graph.parameters()) > ONE_FILE)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of the exporters that users cannot act on."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


class Session:
    """An exported graph in onnxruntime: ragged batches → a row per token or per sequence."""

    def __init__(self, path: Path, task: str, pad_id: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = torch.get_num_threads()
        self.task, self.pad_id = task, pad_id
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.inputs = [x.name for x in self.session.get_inputs()]
        self.outputs = [x.name for x in self.session.get_outputs()]

    def __call__(self, batch: Ragged) -> dict[str, Tensor]:
        """The outputs by name, as `Graph.outputs` returns them."""
        filled: dict[str, tuple[Tensor | None, int]] = {
            "input_ids": (batch.tokens_T, self.pad_id),
            "attention_mask": (torch.ones_like(batch.tokens_T), 0),
            "token_type_ids": (batch.segments_T, 0),
            "global_attention_mask": (batch.globals_T, 0),
        }
        feed = {name: _pad(batch, *filled[name]) for name in self.inputs}
        visible_BN = torch.from_numpy(feed["attention_mask"]) > 0
        if self.task == "choose":  # each sequence is a question with one choice
            feed = {name: x[:, None] for name, x in feed.items()}
        found = zip(self.outputs, map(torch.from_numpy, self.session.run(None, feed)))
        return {name: x[visible_BN] if _per_token(self.task, name) else x for name, x in found}


def _pad(batch: Ragged, x_T: Tensor | None, fill: int) -> np.ndarray:
    """int64 (B, N)."""
    x_T = torch.zeros_like(batch.tokens_T) if x_T is None else x_T.long()
    return nn.utils.rnn.pad_sequence(batch.split(x_T), batch_first=True, padding_value=fill).numpy()


@torch.inference_mode()
def compare(graph: Graph, session: Session, seed: int = 0) -> tuple[float, float]:
    """The largest difference between the graph and torch over random sequences, and torch's largest value."""
    rng = random.Random(seed)
    windows = [w for w in graph.config.windows or () if w]
    longest = min(graph.config.max_positions, max([48, *(3 * w for w in windows)]))
    mixed = (1, longest // 2 or 1, longest, min(5, longest))
    difference = values = 0.0
    for lengths in ((1,), (longest,), mixed, (2, 2) if longest > 1 else (1,)):
        batch = _random(graph, lengths, rng)
        theirs = session(batch)
        for name, ours in graph.outputs(batch).items():
            gap = (ours - theirs[name].view_as(ours)).abs().max()
            difference = max(difference, float("inf") if gap.isnan() else float(gap))
            values = max(values, float(ours.abs().max()))
    return difference, values


def _random(graph: Graph, lengths: Sequence[int], rng: random.Random) -> Ragged:
    config = graph.config
    ids = [[rng.randrange(config.vocab_size) for _ in range(n)] for n in lengths]
    segments = [[int(i > n // 2) for i in range(n)] for n in lengths] if config.segments > 1 else None
    marks = [[0, *rng.sample(range(n), n // 8)] for n in lengths] if config.global_attention else None
    return Ragged.of(ids, segments, marks)


# ── int8 ────────────────────────────────────────────────────────────────────────────────────────────────────


def quantise_graph(source: Path, target: Path) -> None:
    """onnxruntime's dynamic int8: weights with one scale per column, activations at run time. Embeddings stay fp32.

    The default, one scale per matrix, lowers the worst cosine similarity of MiniLM's sentences to 0.86. Weights have
    seven bits: with eight, processors without VNNI (AVX2 alone) add two products in 16 bits, which overflows.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    model.graph.ClearField("value_info")  # it has the shapes before the transposition
    _transpose(model.graph)
    large = len(list(source.parent.glob(f"{source.name}*"))) > 1
    with _quiet():
        quantize_dynamic(
            model,
            target,
            per_channel=True,
            weight_type=QuantType.QInt8,
            reduce_range=True,
            op_types_to_quantize=["MatMul", "Gemm"],
            use_external_data_format=large,
        )


def _transpose(graph: Any) -> None:
    """Replace transposed matrices of products by transposed copies, one per matrix.

    onnxruntime's quantiser transposes them in place, once per use. That breaks matrices with several uses: token
    embeddings that are also the decoder, and ALBERT's shared layers.
    """
    from onnx import numpy_helper

    matrices = {matrix.name: matrix for matrix in graph.initializer}
    copies: dict[str, str] = {}
    for node in graph.node:
        flag = next((a for a in node.attribute if a.name == "transB" and a.i == 1), None)
        if node.op_type != "Gemm" or flag is None or node.input[1] not in matrices:
            continue
        name = node.input[1]
        if name not in copies:
            copies[name] = f"{name}.turned"
            transposed = numpy_helper.to_array(matrices[name]).T.copy()
            graph.initializer.append(numpy_helper.from_array(transposed, copies[name]))
        node.input[1] = copies[name]
        flag.i = 0
    used = {name for node in graph.node for name in node.input}
    for name in copies.keys() - used:
        graph.initializer.remove(matrices[name])


@torch.inference_mode()
def compare_int8(model: Model, graph: Graph, session: Session, sentences: Sequence[str]) -> Similarity:
    """Cosine similarities of the outputs with the model's, per sentence or per token."""
    if model._tokenizer is None or not sentences:
        batch = _random(graph, [min(16, model.config.max_positions)] * 16, random.Random(0))
    else:
        ids = [x[: model.window] for x in model.tokenizer.ids_batch(list(sentences))]
        batch = Ragged.of(ids, global_tokens=[[0]] * len(ids) if model.config.global_attention else None)
    name = "sentence_embedding" if graph.task == "embed" else session.outputs[0]
    ours = graph.outputs(batch)[name]
    theirs = session(batch)[name].view_as(ours)
    if ours.dim() == 1 or ours.shape[-1] == 1:  # one number per text or token: compare all of them as one vector
        ours, theirs = ours.flatten()[None], theirs.flatten()[None]
    cosine = F.cosine_similarity(ours, theirs, dim=-1)
    agree = None
    if name == "logits" and len(ours) > 1:
        agree = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    return Similarity(len(batch), float(cosine.mean()), float(cosine.min()), agree)


# ── transformers ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Saved:
    """A folder for `transformers`."""

    folder: str
    architecture: str
    dtype: str
    tensors: int
    parameters: int
    notes: tuple[str, ...] = ()


def export_hf(name: str | Path, out: str | Path, *, adapter: str | None = None, dtype: str | None = None) -> Saved:
    """Write a complete folder of `transformers`, with adapters merged. `dtype` is by default the folder's.

    The folder is read back before it appears under its name, and every tensor is compared.
    """
    out = _refuse_existing(out)
    model = opened(name, adapter)
    raw = model.raw_config or {}
    named = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    model.network.to(pick_dtype(dtype or (named if named in ("float32", "bfloat16", "float16") else "float32")))
    own = [name for name, head in model.network.heads.items() if isinstance(head, FeatureHead)]
    notes = [f"transformers has no such {head} head: it is in files of everybert's own" for head in own]
    notes += [] if model._tokenizer else [NO_TOKENIZER]
    with atomic_folder(out) as folder:
        model.write(folder)
        again = load_network(folder, dtype=model.network.encoder.embeddings.token.weight.dtype)
        wanted = {k: v for k, v in model.network.state_dict().items() if k.split(".")[1] not in own}
        found = again.network.state_dict()
        for key in wanted.keys() | found.keys():
            if key not in found or key not in wanted or not torch.equal(found[key], wanted[key]):
                raise EverybertError(f"{key} is not what was written when read back; nothing was exported: report it")
        raw = read_json(folder / "config.json")
    count = sum(x.numel() for x in found.values())
    return Saved(str(out), raw["architectures"][0], raw["dtype"], len(found), count, tuple(notes))


# ── int8 weights ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Agreement:
    """A quantised model compared with the original on some texts."""

    cosine_mean: float
    cosine_min: float
    """Cosine similarities of the vectors of each text."""
    same_words: float | None
    """The share of masked words with the same best candidate, if the model has an MLM head."""


@dataclass(frozen=True)
class Quantised:
    """The result of `quantise`."""

    out: str
    parameters: int
    bytes_before: int
    bytes_after: int
    """Sizes of the weights: in memory as loaded, and in the new file."""
    stored: Agreement
    """The new folder, computed in fp32."""
    computed: Agreement | None
    """The new folder, computed in int8; None if this machine cannot."""


def quantise(name: str | Path, out: str | Path, texts: Sequence[str], step: Callable[[str], None] = print) -> Quantised:
    """Write the int8 weights of a model into a new folder, load it, and compare both models on some texts."""
    source, folder = resolve(name), Path(out).expanduser()
    if is_adapter(source):
        raise EverybertError(f"{source} is an adapter; quantise the model it goes on")
    if is_quantised(source) and not (source / SAFE).exists():
        raise EverybertError(f"{source} is quantised already; there is nothing to do")
    _refuse_existing(folder)
    step("reading")
    model = load(source, device="cpu", dtype="float32")
    values = model.network.state_dict().values()
    step("writing")
    model.save(folder, int8=True)
    step("comparing")
    return Quantised(
        str(folder),
        sum(value.numel() for value in values),
        sum(value.numel() * value.element_size() for value in values),
        (folder / INT8).stat().st_size,
        compare_models(model, load(folder, device="cpu"), texts),
        compare_models(model, load(folder, device="cpu", dtype="int8"), texts) if supported() else None,
    )


def compare_models(model: Model, other: Model, texts: Sequence[str]) -> Agreement:
    """Compare two models of the same size on texts; on random ids if they have no tokenizer."""
    one_SH, two_SH = (torch.from_numpy(_vectors(m, texts)) for m in (model, other))
    cosine_S = F.cosine_similarity(one_SH, two_SH, dim=-1)
    words = None
    if "mlm" in model.network.heads and model._tokenizer is not None:
        masked = [_mask_middle(text) for text in texts]
        pairs = [(model.fill(text, 1), other.fill(text, 1)) for text in masked]
        words = float(np.mean([a[0][0].token == b[0][0].token for a, b in pairs]))
    return Agreement(float(cosine_S.mean()), float(cosine_S.min()), words)


def _vectors(model: Model, texts: Sequence[str]) -> np.ndarray:
    """(S, H): the mean of the token vectors of each text."""
    if model._tokenizer is not None:
        return model.embed(texts, pooling="mean", normalize=False)
    draw = np.random.default_rng(0)
    longest = min(32, model.window)
    ids = [draw.integers(model.config.vocab_size, size=draw.integers(1, longest + 1)).tolist() for _ in texts]
    return np.stack([x_TH.mean(0).float().numpy() for x_TH in model.hidden(ids)])


def _mask_middle(text: str) -> str:
    """The text with the word in its middle masked."""
    words = text.split()
    words[len(words) // 2] = "[MASK]"
    return " ".join(words)
