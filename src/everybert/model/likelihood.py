"""Pseudo-log-likelihoods: each token masked in turn and predicted from all others (Salazar et al. 2020, eq. 1).

Legend: R masked copies, V vocabulary, T tokens in the batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from everybert.model.engine import Inputs, encode, fetched
from everybert.model.heads import Network
from everybert.model.ragged import Ragged


def token_log_probs(
    network: Network,
    sequences: Sequence[Sequence[int]],
    positions: Sequence[Sequence[int]],
    mask_id: int,
    ends: Sequence[Sequence[int]] | None = None,
    run: Callable[..., None] = encode,
) -> list[np.ndarray]:
    """ln P(token | the other tokens) at positions of each sequence: one float64 array per sequence.

    A position p is masked in a copy of its own, together with the tokens after it up to its end in `ends` (p + 1 by
    default). `run` is the runner, called as `engine.encode` is.
    """
    copies: list[np.ndarray] = []
    places: list[int] = []
    gold: list[int] = []
    for i, (ids, chosen) in enumerate(zip(sequences, positions)):
        for k, place in enumerate(chosen):
            copy = np.array(ids, dtype=np.int64)
            gold.append(int(copy[place]))
            copy[place : ends[i][k] if ends is not None else place + 1] = mask_id
            copies.append(copy)
            places.append(place)
    found: list[tuple[list[int], Callable[[], np.ndarray]]] = []

    def read(which: list[int], batch: Ragged, x_TH: Tensor) -> None:
        index_R, gold_R = (torch.tensor([x[k] for k in which], device=x_TH.device) for x in (places, gold))
        logits_RV = network.mlm_logits(x_TH, index_R + batch.first_B).float()
        found.append((which, fetched(logits_RV.log_softmax(-1).gather(1, gold_R[:, None])[:, 0])))

    if copies:
        run(network, Inputs(copies), read)
    out_R = np.empty(len(copies))
    for which, values in found:
        out_R[which] = values()
    return np.split(out_R, np.cumsum([len(chosen) for chosen in positions])[:-1]) if len(positions) else []
