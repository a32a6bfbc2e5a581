"""A model as one ONNX graph: what goes in and out of it, and how onnxruntime runs it.

The graph is traced from the network's own modules over a rectangle (model/ragged.py); there is no second model. Names
of inputs and outputs are those of the ecosystem's ONNX folders.

Legend: T tokens in the batch, B sequences, N tokens of each once padded, H hidden, C labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everybert.errors import EverybertError
from everybert.inference.embedding import Pooling
from everybert.model.config import EncoderConfig
from everybert.model.features import head_logits
from everybert.model.heads import Network, pool_mean
from everybert.model.ragged import Ragged, Rectangle

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
"""What a graph can be for, and the head that it needs."""
EACH_TOKEN = ("last_hidden_state", "start_logits", "end_logits")


def head_of(network: Network, task: str) -> str | None:
    """The head a task needs, which must be there."""
    if task not in HEADS:
        raise EverybertError(f"there is no task {task!r} to export; choose one of {', '.join(HEADS)}")
    head = HEADS[task]
    if head is not None and head not in network.heads:
        has = ", ".join(t for t, h in HEADS.items() if h is None or h in network.heads)
        raise EverybertError(f"this model has no {head} head, which {task} needs; it can be exported for: {has}")
    return head


def input_names(config: EncoderConfig) -> list[str]:
    """What a graph is given: ids and their mask, and what else the family reads."""
    names = ["input_ids", "attention_mask"]
    if config.segments > 1:
        names.append("token_type_ids")
    if config.global_attention:
        names.append("global_attention_mask")
    return names


def outputs(network: Network, task: str, batch: Ragged, pooling: Pooling) -> dict[str, Tensor]:
    """A task's outputs by name, a row a token or a row a sequence; the same lines for ragged and padded batches."""
    head = head_of(network, task)
    if task in ("hidden", "embed"):
        x_TH = network.encoder(batch)
        found = {"last_hidden_state": x_TH}
        if task == "embed":
            found["sentence_embedding"] = sentence(x_TH, batch, pooling)
        elif network.pooler is not None:
            found["pooler_output"] = network.pooler(x_TH[batch.first_B])
        return found
    if task == "fill":
        return {"logits": network.mlm_logits(network.encoder(batch))}
    assert head is not None
    logits = head_logits(network, batch, head)
    return dict(zip(("start_logits", "end_logits"), logits.unbind(-1))) if task == "answer" else {"logits": logits}


def sentence(x_TH: Tensor, batch: Ragged, pooling: Pooling) -> Tensor:
    """(B, out): one vector a sequence, as the folder's sentence-transformers files make it."""
    parts = []
    for mode in pooling.modes:
        if mode == "cls":
            parts.append(x_TH[batch.first_B])
        elif mode == "max":
            parts.append(_largest(x_TH, batch))
        elif mode == "mean":
            parts.append(pool_mean(x_TH, batch))
        else:  # the sum over √n
            parts.append(pool_mean(x_TH, batch) * _counts(batch).sqrt()[:, None])
    vectors = torch.cat(parts, dim=-1)
    for layer in pooling.dense:
        vectors = layer(vectors)
    return nn.functional.normalize(vectors, dim=-1) if pooling.normalize else vectors


def _counts(batch: Ragged) -> Tensor:
    return (batch.visible_BN.sum(1) if isinstance(batch, Rectangle) else batch.offsets_B1.diff()).float()


def _largest(x_TH: Tensor, batch: Ragged) -> Tensor:
    if isinstance(batch, Rectangle):
        least = torch.finfo(x_TH.dtype).min
        return batch.square(x_TH).masked_fill(~batch.visible_BN[..., None], least).amax(1)
    return torch.stack([x_nH.amax(0) for x_nH in batch.split(x_TH)])


def by_token(task: str, name: str) -> bool:
    """Whether an output has a row a token, not a row a sequence."""
    return name in EACH_TOKEN or (name == "logits" and task in ("fill", "tag"))


class Graph(nn.Module):
    """The network as the graph has it: padded ids and masks in, a task's outputs out."""

    def __init__(self, network: Network, task: str, pooling: Pooling) -> None:
        super().__init__()
        self.network, self.task, self.pooling = network, task, pooling

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
        batch = Rectangle.padded(ids_BN, mask_BN != 0, segments_BN, None if globals_BN is None else globals_BN != 0)
        found = outputs(self.network, self.task, batch, self.pooling)
        if self.task == "choose":
            return (found["logits"][:, 0].unflatten(0, input_ids.shape[:2]),)
        return tuple(batch.square(x) if by_token(self.task, name) else x for name, x in found.items())


class Session:
    """An exported graph at work in onnxruntime: ragged batches in, rows of real tokens or of sequences out."""

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
        """As `outputs` gives them."""
        filled: dict[str, tuple[Tensor | None, int]] = {
            "input_ids": (batch.tokens_T, self.pad_id),
            "attention_mask": (torch.ones_like(batch.tokens_T), 0),
            "token_type_ids": (batch.segments_T, 0),
            "global_attention_mask": (batch.globals_T, 0),
        }
        feed = {name: _padded(batch, *filled[name]) for name in self.inputs}
        if self.task == "choose":  # each sequence a question with one choice
            feed = {name: x[:, None] for name, x in feed.items()}
        found = zip(self.outputs, map(torch.from_numpy, self.session.run(None, feed)))
        there_BN = torch.from_numpy(_padded(batch, torch.ones_like(batch.tokens_T), 0)) > 0
        return {name: x[there_BN] if by_token(self.task, name) else x for name, x in found}


def _padded(batch: Ragged, x_T: Tensor | None, fill: int) -> np.ndarray:
    """int64 (B, N)."""
    x_T = torch.zeros_like(batch.tokens_T) if x_T is None else x_T.long()
    return nn.utils.rnn.pad_sequence(batch.split(x_T), batch_first=True, padding_value=fill).numpy()


class GraphNetwork(nn.Module):
    """An exported graph in a Network's place: what reads logits from a network reads them from here as well."""

    def __init__(self, network: Network, session: Session) -> None:
        super().__init__()
        self.config = network.config
        self.encoder = _GraphEncoder(network, session)
        self.heads = nn.ModuleDict()
        for name, head in network.heads.items():  # what tasks ask of a head is how many outputs it has
            self.heads[name] = nn.ModuleDict({"output": head.output} if hasattr(head, "output") else {})  # type: ignore[dict-item]

    def sequence_logits(self, logits_BC: Tensor, batch: Ragged, name: str) -> Tensor:
        """(B, C), as they came."""
        return logits_BC

    def token_logits(self, logits_TC: Tensor, name: str) -> Tensor:
        """(T, C), as they came."""
        return logits_TC


class _GraphEncoder(nn.Module):
    """Gives the graph's first output (last hidden states, or logits); the two of `answer` side by side."""

    def __init__(self, network: Network, session: Session) -> None:
        super().__init__()
        self.embeddings = network.encoder.embeddings  # only its device is asked for
        self.session = session

    def forward(self, batch: Ragged, *_: Any) -> Tensor:
        found = list(self.session(batch).values())
        return torch.stack(found, dim=-1) if self.session.task == "answer" else found[0]
