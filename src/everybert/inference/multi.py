"""One vector per token (ColBERT: Khattab & Zaharia 2020), and the score of a document for a query: MaxSim.

Short queries are filled up with [MASK]: these tokens get vectors too, but other tokens may not attend to them.

Legend: T tokens in the batch, B sequences, N the longest length, H hidden, D width of a vector, n tokens of a sequence.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.inference.embedding import specials
from everybert.model.engine import Inputs, Read, device_of, encode, run_batches
from everybert.model.heads import Network
from everybert.model.padded import Padded
from everybert.model.ragged import Ragged
from everybert.store.sentence_transformers import Pooling
from everybert.text.tokenizer import Tokenizer
from everybert.text.windows import cover


def encode_filled(network: Network, ids: Sequence[Sequence[int]], real: Sequence[int], read: Read) -> None:
    """As the engine's `encode`, but of each sequence only the first `real` tokens are attended to."""

    def work(indices: list[int], batch: Ragged) -> None:
        batch = batch.to(device_of(network.encoder))
        from_BN, _, to_T = batch.rectangle
        seen_BN = torch.arange(batch.max_length) < torch.tensor([real[k] for k in indices])[:, None]
        x_TH = network.encoder(Padded.of(batch.tokens_T[from_BN], seen_BN.to(batch.device)))
        read(indices, batch, x_TH[to_T])

    run_batches(network, Inputs(ids), work)


@torch.inference_mode()
def token_vectors(
    network: Network, tokenizer: Tokenizer, texts: Sequence[str], pooling: Pooling, task: str, size: int, long: str
) -> tuple[list[np.ndarray], list[int]]:
    """The vectors (n, D) of each text, and how many of its tokens were cut; `task` is query or document.

    A document of more than `size` tokens is read in windows, or cut if `long` is "cut"; queries are cut.
    """
    how = pooling.multi
    assert how is not None
    expansion = how.expansion if task == "query" else None
    limit = how.query_size if task == "query" else how.document_size
    if expansion is not None:
        limit = expansion["length"] if expansion["strategy"] == "fixed" else max(limit or size, expansion["length"])
    size = min(limit or size, size)
    sequences, lead, tail = _tokenized(tokenizer, texts, pooling, task)
    if size <= lead + tail:
        raise EverybertError(f"the folder reads {size} tokens of a {task}, which special tokens fill; raise its length")
    cut = [max(0, len(ids) - size) if long == "cut" or task == "query" else 0 for ids in sequences]
    for i, (ids, lost) in enumerate(zip(sequences, cut)):
        sequences[i] = [*ids[: size - tail], *ids[len(ids) - tail :]] if lost else ids
    flat = [(i, window) for i, ids in enumerate(sequences) for window in cover(ids, lead, tail, size)]
    rows = [list(window.ids) for _, window in flat]
    real = [len(ids) for ids in rows]
    if expansion is not None:
        name = expansion.get("token") or tokenizer.mask_token
        if name is None or (filler := tokenizer.id(name)) is None:
            raise EverybertError(f"the folder fills queries up with {name!r}, which its vocabulary lacks")
        if not expansion.get("attend") and network.config.relative == "disentangled":
            raise EverybertError("DeBERTa's queries are filled up only if other tokens attend to what fills them")
        rows = [ids + [filler] * (min(expansion["length"], size) - len(ids)) for ids in rows]
    skipped = [n for word in how.skip if task in how.skip_in and (n := tokenizer.id(word)) is not None]
    vectors: dict[int, np.ndarray] = {}

    def read(indices: list[int], batch: Ragged, x_TH: Tensor) -> None:
        for module in pooling.modules:
            x_TH = module(x_TH.float())
        for k, x_nD in zip(indices, batch.split(x_TH)):
            owned = flat[k][1].own if task == "document" else slice(None)
            vectors[k] = x_nD[owned].cpu().numpy()[~np.isin(rows[k][owned], skipped)]

    if expansion is None or expansion.get("attend"):
        encode(network, Inputs(rows), read)
    else:
        encode_filled(network, rows, real, read)
    parts: list[list[np.ndarray]] = [[] for _ in texts]
    for k, (i, _) in enumerate(flat):
        parts[i].append(vectors[k])
    return [np.concatenate(several) for several in parts], cut


def _tokenized(
    tokenizer: Tokenizer, texts: Sequence[str], pooling: Pooling, task: str
) -> tuple[list[list[int]], int, int]:
    """The ids of texts with prompt and prefix, and the numbers of tokens before and after each."""
    assert pooling.multi is not None
    lead, tail = specials(tokenizer)
    prefix = pooling.multi.prefixes.get(task, "")
    ids = [tokenizer.id(name) for name in (prefix, prefix.split(" ")[0]) if name]
    marker = [i for i in ids if i is not None][:1]
    prefix = "" if marker else prefix
    names = [task, "passage", "corpus"] if task == "document" else [task]
    before = prefix + next((pooling.prompts[name] for name in names if name in pooling.prompts), "")
    prompted = [before + (text.lower() if pooling.lowercase else text) for text in texts]
    return [[*ids[:lead], *marker, *ids[lead:]] for ids in tokenizer.ids_batch(prompted)], lead + len(marker), tail


def maxsim(query: np.ndarray, documents: Iterable[np.ndarray], per_token: bool = False) -> np.ndarray:
    """(N): Σ over the tokens of a query of the largest product with a token of each document; `per_token`: the mean."""
    scores = np.array([(query @ document.T).max(1, initial=-np.inf).sum() for document in documents], dtype=np.float64)
    return scores / len(query) if per_token else scores
