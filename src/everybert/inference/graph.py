"""A model as one ONNX graph: what goes in and out of it, and how onnxruntime runs it.

The graph is traced from the network's own modules over a padded batch; there is no second model. Names of inputs
and outputs are those of the ecosystem's ONNX folders.

Legend: T tokens in the batch, B sequences, N tokens of each once padded, H hidden, C labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from everybert.errors import EverybertError
from everybert.inference.embedding import Pooling
from everybert.model.config import EncoderConfig
from everybert.model.features import head_logits
from everybert.model.heads import Network
from everybert.model.pooling import pool
from everybert.model.ragged import Ragged

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
    """(B, out): one vector per sequence, as the folder's sentence-transformers files make it."""
    vectors = torch.cat([pool(x_TH, batch, mode) for mode in pooling.modes], dim=-1)
    for layer in pooling.dense:
        vectors = layer(vectors)
    return nn.functional.normalize(vectors, dim=-1) if pooling.normalize else vectors


# ── padded batches ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Rectangle(Ragged):
    """B sequences padded to N tokens, end to end: ONNX graphs have no ragged batches.

    Positions count from the left, so the padding must be on the right, as it is for every tokenizer here.
    """

    visible_BN: Tensor
    """bool: which tokens are real; the others are padding."""

    @classmethod
    def padded(
        cls, ids_BN: Tensor, visible_BN: Tensor, segments_BN: Tensor | None = None, globals_BN: Tensor | None = None
    ) -> Rectangle:
        """A batch from the tensors that an ONNX model is given. Their sizes may be symbols."""
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
        """fp32: the number of real tokens of each sequence."""
        return self.visible_BN.sum(1).float()

    def reduce(self, x_TH: Tensor, how: Literal["mean", "max"]) -> Tensor:
        """(B·N, H) → (B, H): the mean or maximum over each sequence's real tokens."""
        x_BNH, there_BN1 = self.square(x_TH), self.visible_BN[..., None]
        if how == "max":
            return x_BNH.masked_fill(~there_BN1, torch.finfo(x_TH.dtype).min).amax(1)
        total_BH = (x_BNH.float() * there_BN1).sum(1)
        return (total_BH / there_BN1.sum(1).clamp(min=1)).to(x_TH.dtype)

    def attend(  # type: ignore[override]
        self, q_TAD: Tensor, k_TAD: Tensor, v_TAD: Tensor, window: int | None, own_TAD: tuple[Tensor, ...] | None
    ) -> Tensor:
        """All pairs of each padded sequence, what must not be seen masked away. No dropout."""
        q, k, v = (self.square(x).transpose(1, 2) for x in (q_TAD, k_TAD, v_TAD))  # (B, A, N, D)
        there = self.visible_BN[:, None, None]  # (B, 1, 1, N), over keys
        seen = there
        if window is not None:
            at = torch.arange(self.visible_BN.shape[1], device=q.device)
            seen = (at[:, None] - at[None]).abs() <= window
            if own_TAD is not None and self.globals_T is not None:
                seen = seen | self.square(self.globals_T)[:, None, None]
            seen = seen & there
        mixed = sdpa(q, k, v, attn_mask=_penalty(seen, q))
        if own_TAD is not None and self.globals_T is not None:
            q, k, v = (self.square(x).transpose(1, 2) for x in own_TAD)
            chosen = self.square(self.globals_T)[:, None, :, None]
            mixed = torch.where(chosen, sdpa(q, k, v, attn_mask=_penalty(there, q)), mixed)
        return mixed.transpose(1, 2).flatten(0, 1)


def _penalty(seen: Tensor, like: Tensor) -> Tensor:
    """0 or the least number, to be added to scores; −∞ would make padding that sees nothing NaN, which then spreads."""
    least = torch.full((), torch.finfo(like.dtype).min, dtype=like.dtype, device=like.device)
    return torch.where(seen, torch.zeros_like(least), least)


# ── the graph ────────────────────────────────────────────────────────────────────────────────────────────────


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
