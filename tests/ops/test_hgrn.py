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


@pytest.mark.gpu
def test_kernels_are_as_fast_as_those_of_fla() -> None:
    """16,384 tokens of 2,048 channels in bf16, forward + backward; also in GB/s of what has to be moved."""
    from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn

    x, do = (torch.randn(1, 16384, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    g = torch.nn.functional.logsigmoid(torch.randn(x.shape, device="cuda"))
    shard = SequencePosition((0, 16384), exchange=local_exchange())
    ways = {
        "ours": lambda x, g: mix("hgrn", [x, g], shard)[0],
        "chunk_hgrn": lambda x, g: chunk_hgrn(x.flatten(2), g.flatten(2))[0].view(x.shape),
        "fused_recurrent_hgrn": lambda x, g: fused_recurrent_hgrn(x.flatten(2), g.flatten(2))[0].view(x.shape),
    }
    milliseconds = {}
    for name, way in ways.items():
        leaves, times = [x.clone().requires_grad_(), g.clone().requires_grad_()], []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(10_000_000)
            start.record()
            torch.autograd.grad(way(*leaves), leaves, do)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        milliseconds[name] = sorted(times)[len(times) // 2]
    # Forward x, g → o; backward x, g, do → dx, dg.
    moved = x.numel() * (2 + 4 + 2 + 2 + 4 + 2 + 2 + 4)
    print({name: f"{each:.3f} ms, {moved / each / 1e6:.0f} GB/s" for name, each in milliseconds.items()})
    assert milliseconds["ours"] <= min(milliseconds.values())
