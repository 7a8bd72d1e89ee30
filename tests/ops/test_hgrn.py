"""The elementwise recurrence against fla's own, and its digits; test_passes.py and test_kernels.py have the rest."""

from __future__ import annotations

import pytest
import torch

from tests.support.operator_cases import expected, make, sharded
from zeco_train.ops.mix import mix
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

pytestmark = pytest.mark.numeric


def test_weak_and_strong_decays_have_all_digits() -> None:
    """Each channel relative to its own: where decays are e^-50, dg is 1e-22 of dx."""
    values = make("hgrn", 200, H=1, K=4)
    values["g"][..., 3] = -50.0
    found, wanted = sharded("hgrn", values, [0, 200]), expected("hgrn", values)
    for key in ("o", "dx", "dg"):
        for channel in range(4):
            off = (found[key] - wanted[key])[..., channel].norm()
            assert off <= 1e-13 * wanted[key][..., channel].norm(), (key, channel)


@pytest.mark.slow
def test_equals_fla() -> None:
    """fla's plain recurrence, in fp32: it has no other dtype."""
    from fla.ops.hgrn.naive import naive_recurrent_hgrn

    values = {key: x.float() for key, x in make("hgrn", 90, B=2).items()}
    x, g, start = values["x"].flatten(2), values["g"].flatten(2), values["carry_in"].flatten(1)
    o, end = naive_recurrent_hgrn(x, g, initial_state=start, output_final_state=True)
    shard = SequencePosition((0, 90), exchange=local_exchange())
    found, carry = mix("hgrn", [values["x"], values["g"]], shard, carry_in=values["carry_in"], want_carry=True)
    assert carry is not None
    torch.testing.assert_close(found.flatten(2), o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(carry.flatten(1), end, rtol=1e-5, atol=1e-5)
