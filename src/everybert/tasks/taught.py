"""A task learnt from a model that knows it: its answers beside the labels (Hinton et al. 2015).

Legend: E examples, C labels.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from everybert.model.features import head_logits
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.tasks.features import Features, gather, run

TAUGHT = "taught_E"
"""The teacher's logits (E, C) among the labels of the training examples."""
WEIGHT, TEMPERATURE = 0.8, 2.0
"""α, and T of what follows."""


def teach(
    features: Features, read: Features, teacher: Network, head: str, scale: float = 1.0, shift: float = 0.0
) -> Features:
    """The student's examples with what the teacher says of them, who reads the same ones as `read`.

    A regression's values are put in units of training.
    """
    logits_EC = gather(run(teacher, read, lambda batch: head_logits(teacher, batch, head)), read)
    return replace(features, labels={**features.labels, TAUGHT: ((logits_EC - shift) / scale).astype("float32")})


def taught_loss(
    logits_EC: Tensor, batch: Ragged, plain: Tensor, problem: str, weight_C: Tensor | None = None
) -> Tensor:
    """(1 − α) · plain + α · T² · KL(teacher ‖ student) at temperature T; `plain` where there is no teacher.

    A regression has the squared distance of the two in place of the second, several labels their cross-entropies. An
    example counts as much as its label's weight, as it does in `plain`.
    """
    if TAUGHT not in batch.extra:
        return plain
    mine_EC, theirs_EC = logits_EC.float(), batch.extra[TAUGHT].float()
    if problem == "regression":
        near = F.mse_loss(mine_EC, theirs_EC)
    elif problem == "multi":
        near = F.binary_cross_entropy_with_logits(mine_EC, torch.sigmoid(theirs_EC), pos_weight=weight_C)
    else:
        log_p, q = F.log_softmax(mine_EC / TEMPERATURE, -1), F.softmax(theirs_EC / TEMPERATURE, -1)
        near_E = TEMPERATURE**2 * F.kl_div(log_p, q, reduction="none").sum(-1)
        weight_E = torch.ones_like(near_E) if weight_C is None else weight_C[batch.extra["label_E"]]
        near = (near_E * weight_E).sum() / weight_E.sum()
    return (1 - WEIGHT) * plain + WEIGHT * near
