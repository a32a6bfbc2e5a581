"""Pooling: each mode is what its formula says, sequence by sequence, and has the right gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everybert.errors import EverybertError
from everybert.model.pooling import MODES, check_mode, pool
from everybert.model.ragged import Ragged

FORMULAS = {
    "cls": lambda x_nH: x_nH[0],
    "max": lambda x_nH: x_nH.amax(0),
    "mean": lambda x_nH: x_nH.mean(0),
    "mean_sqrt_len_tokens": lambda x_nH: x_nH.sum(0) / len(x_nH) ** 0.5,
    "weightedmean": lambda x_nH: torch.arange(1.0, len(x_nH) + 1) @ x_nH / (len(x_nH) * (len(x_nH) + 1) / 2),
    "lasttoken": lambda x_nH: x_nH[-1],
}


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None)  # the first call warms torch up
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_mode_is_its_formula(mode, lengths):
    torch.manual_seed(1)
    batch = Ragged.of([[1] * n for n in lengths])
    x_TH = torch.randn(sum(lengths), 3, requires_grad=True)
    found = pool(x_TH, batch, mode)
    wanted = torch.stack([FORMULAS[mode](x_nH) for x_nH in batch.split(x_TH)])
    torch.testing.assert_close(found, wanted)
    mine, theirs = (torch.autograd.grad((y * torch.arange(3.0)).sum(), x_TH)[0] for y in (found, wanted))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_is_summed_in_fp32(mode):
    batch = Ragged.of([[1] * 3000])
    x_TH = torch.full((3000, 2), 0.9, dtype=torch.bfloat16)
    found = pool(x_TH, batch, mode)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), pool(x_TH.float(), batch, mode), rtol=1e-2, atol=0)


def test_an_unknown_mode_is_named():
    with pytest.raises(EverybertError, match="here: there is no pooling 'median'; choose one of cls, max"):
        check_mode("median", "here")
