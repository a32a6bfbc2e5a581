"""Convert a trained model: to a wider vocabulary, or to a Longformer.

Legend: V vocabulary, E embedding width, P positions.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.text.tokenizer import Tokenizer


def padded_vocabulary(size: int) -> int:
    """A vocabulary size rounded up to a multiple of 64, for fast matrix products."""
    return -(-size // 64) * 64


def rebuild(network: Network, config: EncoderConfig, replaced: Mapping[str, Tensor]) -> Network:
    """The same heads and weights with another configuration, and some tensors replaced."""
    state = network.state_dict()
    sized = ("classify", "tag")
    heads = {name: len(state[f"heads.{name}.output.weight"]) if name in sized else None for name in network.heads}
    fresh = Network(config, heads, pooler=network.pooler is not None)
    like = network.encoder.embeddings.token.weight
    fresh.to(like.device, like.dtype).load_state_dict({**state, **replaced})
    return fresh.train(network.training)


# ── words added to the vocabulary ────────────────────────────────────────────────────────────────────────────


def extend(network: Network, known: Tokenizer, wider: Tokenizer) -> Network:
    """A network for a tokenizer with all tokens of `known` and more; a new token starts as the mean of its pieces."""
    if wider.digest == known.digest:
        return network
    vocabulary = wider.vocab()
    moved = next((token for token, i in known.vocab().items() if vocabulary.get(token) != i), None)
    if moved is not None:
        raise EverybertError(
            f"the corpus' tokenizer is not the model's nor an extension of it ({moved!r} differs): "
            "build the corpus with the model's tokenizer, or with that of contrib/extend_vocabulary.py"
        )
    table_VE = network.encoder.embeddings.token.weight.detach()
    rows = max(table_VE.shape[0], padded_vocabulary(wider.size))
    pieces = {i: known.encode(token, specials=False).ids for token, i in vocabulary.items() if i >= known.size}
    replaced = {"encoder.embeddings.token.weight": _grown(table_VE, rows, pieces)}
    if "mlm" in network.heads:
        head = network.heads["mlm"].state_dict()
        for name in {"bias", "decoder.weight"} & head.keys():
            replaced[f"heads.mlm.{name}"] = _grown(head[name], rows, pieces)
    return rebuild(network, network.config.replace(vocab_size=rows), replaced)


def _grown(table: Tensor, rows: int, pieces: Mapping[int, Sequence[int]]) -> Tensor:
    """A table with more rows: row i is the mean of the rows pieces[i], or of all rows."""
    out = torch.cat((table, table.mean(0, keepdim=True).expand(rows - table.shape[0], *table.shape[1:])))
    for i, ids in pieces.items():
        if ids:
            out[i] = table[list(ids)].mean(0)
    return out


# ── a Longformer from a model with 512 positions ─────────────────────────────────────────────────────────────


def to_longformer(network: Network, positions: int, window: int) -> Network:
    """BERT or RoBERTa as a Longformer: position embeddings are repeated, global projections copied from the local.

    Copying keeps the local structure that the model has learnt, except at the boundaries (Beltagy et al. 2020, §5).
    """
    config = network.config
    if config.family not in ("bert", "roberta", "xlm-roberta", "longformer") or config.positions != "learned":
        raise EverybertError(f"a Longformer can be made of BERT or RoBERTa, not of {config.family}")
    offset = config.pad_id + 1
    table = network.encoder.embeddings.position.weight.detach()  # type: ignore[union-attr]
    own_PE = table[config.position_offset :]
    copies = own_PE.repeat(-(-positions // len(own_PE)), 1)[:positions]
    unused = table[:offset] if config.position_offset == offset else torch.zeros(offset, table.shape[1])
    long = config.replace(
        family="longformer",
        max_positions=positions,
        position_offset=offset,
        windows=(window // 2,) * config.layers,
        global_attention=True,
    )
    state = network.state_dict()
    replaced = {"encoder.embeddings.position.weight": torch.cat((unused, copies))}
    for name, value in state.items():
        if ".attention.qkv." in name:
            twin = name.replace(".qkv.", ".qkv_global.")
            replaced[twin] = state.get(twin, value)
    if "nsp" in network.heads:
        del network.heads["nsp"]  # `transformers`' Longformer has no such head
    return rebuild(network, long, replaced)
