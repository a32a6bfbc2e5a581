"""Export of a model: an ONNX folder, compared with torch; a plain folder of `transformers`; a folder with int8 weights.

The ONNX graph is traced from the network's own modules over a padded batch. The names of its inputs and outputs are
those of the ecosystem's ONNX folders.

Legend: T tokens in the batch, B sequences, N tokens of a padded sequence, H hidden, S texts.
"""

import logging
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.files import atomic_folder, read_json, write_json
from everybert.inference.embedding import pooled_states
from everybert.inference.model import Model, load, pick_dtype
from everybert.model.heads import SEQUENCE_HEADS, FeatureHead, Network, head_logits
from everybert.model.int8 import supported
from everybert.model.padded import Padded
from everybert.model.pooling import pool
from everybert.model.ragged import Ragged
from everybert.store.adapters import is_adapter
from everybert.store.hub import resolve
from everybert.store.huggingface import EXTRAS, EXTRAS_VERSION, read_extras
from everybert.store.layouts import LAYOUTS
from everybert.store.weights import INT8, SAFE
from everybert.tasks import TASKS

FILE = "onnx/model.onnx"
"""Where transformers.js, fastembed and sentence-transformers look for a graph."""
OPSET = 18
"""The version of ONNX that is written. Those from 23 have attention as one operator, which few runtimes support."""
TOLERANCE = 1e-4
"""Largest difference from torch, relative to the largest value if that is above 1."""
ONE_FILE = 1_900_000_000
"""Bytes of weights that fit into the graph's file (protobuf is limited to 2 GiB). Larger models have a second file."""
HEAD_OF: dict[str, str | None] = {"hidden": None, "fill": "mlm", "next": "nsp"}
HEAD_OF |= {name: task.head for name, task in TASKS.items() if task.graph_outputs}
"""The head that each task of a graph needs."""


# ── what is exported ────────────────────────────────────────────────────────────────────────────────────────


def opened(name: str | Path, adapter: str | None = None, task: str | None = None, allow_pickle: bool = False) -> Model:
    """A model for export: on the CPU in fp32, with an adapter merged into its encoder.

    `adapter` is one of the folder's adapters or a folder. By default, it is the folder's adapter for the task, if any.
    """
    model = load(name, device="cpu", dtype="float32", allow_pickle=allow_pickle)
    if model.routes:
        raise EverybertError(f"{name} is a Router of several encoders; give the folder of one of them")
    adapter = adapter or (model.adapter_for(task) if task else None)
    if adapter is not None:
        model.use(adapter)
    if model.adapter is not None:
        model.merge()
    return model


def natural_task(model: Model) -> str:
    """The task of a model: the one it was trained for, embed, that of a task head, fill, next, else hidden."""
    trained, heads = str((model.extras.get("task") or {}).get("task")), model.network.heads
    embeds = (model.pooling.published and model.pooling.vectors == "embed") or trained == "embed"
    if embeds and str(HEAD_OF.get(trained)) not in heads:
        return "embed"
    named = (str(model.main_task()), "fill", "next")
    return next((task for task in named if str(HEAD_OF.get(task)) in heads), "hidden")


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
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Write a folder with onnx/model.onnx, config.json, the tokenizer and everybert.json.

    `task` is by default that of the model; `adapter` is merged first (see `opened`). The graph and torch run on the
    same random sequences; if they differ by more than 1e-4, an error is raised and nothing is written. Returns what
    was written: the names of inputs and outputs, the largest difference, and the size with its weights.
    """
    missing = [part for part in ("onnx", "onnxscript", "onnxruntime") if find_spec(part) is None]
    if missing:
        raise EverybertError(f"ONNX export needs {', '.join(missing)}: pip install 'everybert[onnx]'")
    out = _refuse_existing(out)
    model = opened(name, adapter, task, allow_pickle)
    graph = Graph(model, task or natural_task(model)).eval()
    with atomic_folder(out) as folder:
        (folder / FILE).parent.mkdir()
        _trace(graph, folder / FILE)
        difference, values = compare(graph, folder / FILE)
        if not difference <= TOLERANCE * max(1.0, values):
            raise EverybertError(f"the graph differs from torch by {difference:.1e}, so it is not written; report it")
        model.write(folder)
        (folder / SAFE).unlink()  # the graph has the weights
        size = sum(file.stat().st_size for file in folder.glob(f"{FILE}*"))
        about = {"task": graph.task, "inputs": graph.inputs(), "outputs": [*graph.outputs(Ragged.of([[0, 0]]))]}
        write_json(folder / EXTRAS, {"version": EXTRAS_VERSION, **read_extras(folder), "onnx": about})
    return {"folder": str(out), **about, "difference": difference, "bytes": size}


class Graph(nn.Module):
    """A network with the inputs and outputs of the exported graph: padded ids and masks → the outputs of a task."""

    def __init__(self, model: Model, task: str) -> None:
        super().__init__()
        self.network: Network = model.network
        self.task, self.config = task, model.config
        self.pooling = model.pooling
        if task not in HEAD_OF:
            raise EverybertError(f"there is no task {task!r} to export; choose one of {', '.join(HEAD_OF)}")
        head, heads = HEAD_OF[task], self.network.heads
        if head is not None and head not in heads:
            has = ", ".join(t for t, h in HEAD_OF.items() if h is None or h in heads)
            raise EverybertError(f"this model has no {head} head, which {task} needs; it can be exported for: {has}")
        if task == "embed" and self.pooling.vectors != "embed":
            raise EverybertError("this model makes no single vectors; export fill (SPLADE) or hidden (ColBERT)")
        if task == "embed" and self.pooling.default_prompt and not self.pooling.include_prompt:
            raise EverybertError("the pooling leaves out this model's prompt, which a graph cannot; export hidden")

    def inputs(self) -> list[str]:
        """The names of the inputs, which depend on the family."""
        names = ["input_ids", "attention_mask"]
        names += ["token_type_ids"] if self.config.segments > 1 else []
        return names + (["global_attention_mask"] if self.config.global_attention else [])

    def outputs(self, batch: Ragged) -> dict[str, Tensor]:
        """The outputs by name, with a row per token or per sequence, for ragged and padded batches alike."""
        head = HEAD_OF[self.task]
        if head is None:
            states: list[Tensor] = []
            x_TH = self.network.encoder(batch, states)
            outputs = {"last_hidden_state": x_TH}
            if self.task == "embed":
                vectors_TH = pooled_states(x_TH, states, self.pooling)
                pooled = [pool(vectors_TH, batch, mode) for mode in self.pooling.modes]
                outputs["sentence_embedding"] = self.pooling.finish(torch.cat(pooled, dim=-1))
            elif self.network.pooler is not None:
                outputs["pooler_output"] = self.network.pooler(x_TH[batch.first_B])
            return outputs
        if self.task == "fill":
            return {"logits": self.network.mlm_logits(self.network.encoder(batch))}
        logits = head_logits(self.network, batch, head)
        names = TASKS[self.task].graph_outputs if self.task in TASKS else ("logits",)
        return {"logits": logits} if len(names) == 1 else dict(zip(names, logits.unbind(-1)))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """(B, N) each → the outputs in order."""
        marked = None if global_attention_mask is None else global_attention_mask != 0
        batch = Padded.of(input_ids, attention_mask != 0, token_type_ids, marked)
        outputs = self.outputs(batch)
        return tuple(batch.square(x) if self.per_token(name) else x for name, x in outputs.items())

    def per_token(self, output: str) -> bool:
        """Whether an output has a row per token, rather than per sequence."""
        head = HEAD_OF[self.task]
        return output == "last_hidden_state" if head is None else head not in SEQUENCE_HEADS


def _trace(graph: Graph, path: Path) -> None:
    """Trace the network over a padded batch of symbolic size, and write the graph."""
    names, config = graph.inputs(), graph.config
    inputs = {name: torch.zeros((3, 7), dtype=torch.long) for name in names}
    inputs["attention_mask"] += 1
    longest = config.max_positions if config.positions != "rotary" else None
    dims = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("length", min=1, max=longest)}
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # users cannot act on the warnings of the exporters
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            program = torch.onnx.export(
                graph,
                (),
                kwargs=inputs,
                dynamo=True,
                input_names=names,
                output_names=list(graph.outputs(Ragged.of([[0, 0]]))),
                dynamic_shapes=dict.fromkeys(names, dims),
                opset_version=OPSET,
                verbose=False,
            )
            assert program is not None
            for node in program.model.graph:  # their metadata has the source lines, with this machine's paths
                node.metadata_props.clear()
            program.save(path, external_data=sum(p.numel() * p.element_size() for p in graph.parameters()) > ONE_FILE)
    finally:
        logging.disable(level)


@torch.inference_mode()
def compare(graph: Graph, path: Path) -> tuple[float, float]:
    """The largest difference between the file and torch over random sequences, and torch's largest value."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    draw = torch.Generator().manual_seed(0)
    windows = [w for w in graph.config.windows or () if w]
    longest = min(graph.config.max_positions, max([48, *(3 * w for w in windows)]))
    difference = values = 0.0
    for lengths in ((1,), (longest,), (1, longest // 2 or 1, longest, min(5, longest)), (min(2, longest),) * 2):
        visible_BN = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        feed = {name: torch.randint(2, visible_BN.shape, generator=draw) for name in graph.inputs()}
        feed["input_ids"] = torch.randint(graph.config.vocab_size, visible_BN.shape, generator=draw)
        feed["attention_mask"] = visible_BN.long()
        flat = {name: x[visible_BN] for name, x in feed.items()}
        marked_T = flat["global_attention_mask"] > 0 if graph.config.global_attention else None
        batch = Ragged.flat(flat["input_ids"], lengths, flat.get("token_type_ids"), marked_T)
        results = map(torch.from_numpy, session.run(None, {name: x.numpy() for name, x in feed.items()}))
        for (name, ours), theirs in zip(graph.outputs(batch).items(), results):
            theirs = theirs[visible_BN] if graph.per_token(name) else theirs
            gap = (ours - theirs.view_as(ours)).abs().max()
            difference = max(difference, float("inf") if gap.isnan() else float(gap))
            values = max(values, float(ours.abs().max()))
    return difference, values


def export_hf(
    name: str | Path,
    out: str | Path,
    *,
    adapter: str | None = None,
    dtype: str | None = None,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Write a complete folder of `transformers`, with adapters merged. `dtype` is by default the folder's."""
    out = _refuse_existing(out)
    model = opened(name, adapter, allow_pickle=allow_pickle)
    family, causal = model.config.family, model.config.causal
    if causal and not (causal is True and LAYOUTS[family].generator):
        raise EverybertError(f"transformers has no {family} with causal = {causal!r}: the model can only be used here")
    raw = model.raw_config or {}
    named = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    model.network.to(pick_dtype(dtype or (named if named in ("float32", "bfloat16", "float16") else "float32")))
    feature_heads = [name for name, head in model.network.heads.items() if isinstance(head, FeatureHead)]
    notes = [f"transformers has no such {head} head: it is in files of everybert's own" for head in feature_heads]
    with atomic_folder(out) as folder:
        model.write(folder)
        raw = read_json(folder / "config.json")
    sizes = [x.numel() for key, x in model.network.state_dict().items() if key.split(".")[1] not in feature_heads]
    about = {"folder": str(out), "architecture": raw["architectures"][0], "dtype": raw["dtype"]}
    return about | {"tensors": len(sizes), "parameters": sum(sizes), "notes": notes}


# ── int8 weights ────────────────────────────────────────────────────────────────────────────────────────────


def quantise(name: str | Path, out: str | Path, texts: Sequence[str], allow_pickle: bool = False) -> dict[str, Any]:
    """Write the int8 weights of a model into a new folder, load it, and compare both models on some texts.

    Returns the sizes of the weights, in memory as loaded and in the new file, and the lowest cosine similarity of a
    text's vectors by both models: `stored`, computed in fp32, and `computed`, in int8. They are None without a
    tokenizer, or if this machine cannot compute in int8.
    """
    source, folder = resolve(name, allow_pickle=allow_pickle), Path(out).expanduser()
    if is_adapter(source):
        raise EverybertError(f"{source} is an adapter; quantise the model it goes on")
    if (source / INT8).exists() and not (source / SAFE).exists():
        raise EverybertError(f"{source} is quantised already; there is nothing to do")
    _refuse_existing(folder)
    model = opened(source, allow_pickle=allow_pickle)
    values = model.network.state_dict().values()
    model.save(folder, int8=True)
    return {
        "out": str(folder),
        "parameters": sum(value.numel() for value in values),
        "bytes_before": sum(value.numel() * value.element_size() for value in values),
        "bytes_after": (folder / INT8).stat().st_size,
        "stored": compare_models(model, load(folder, device="cpu"), texts),
        "computed": compare_models(model, load(folder, device="cpu", dtype="int8"), texts) if supported() else None,
    }


def compare_models(model: Model, other: Model, texts: Sequence[str]) -> float | None:
    """The lowest cosine similarity of the vectors of two models for a text; None if they have no tokenizer."""
    if model._tokenizer is None:
        return None
    one_SH, two_SH = (torch.from_numpy(m.embed(texts, pooling="mean", normalize=False)) for m in (model, other))
    return float(F.cosine_similarity(one_SH, two_SH, dim=-1).min())
