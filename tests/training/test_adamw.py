"""AdamW's kernel against torch's AdamW in fp64, under Triton's interpreter."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from tests.support.distributed import run_distributed
from zeco_train.kernels import adamw as launch

pytestmark = pytest.mark.numeric

# One element, an empty shard, more than one program, whole programs, and the end of one.
SHAPES = [(1,), (0, 4), (7, 5), (5000,), (4096,)]
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
STEPS, SKIPPED, SCALE = 4, 2, 2.5


def _tensors(seed: int, device: torch.device, offset: int) -> list[Tensor]:
    """Normal numbers in these shapes; with an offset they begin that many elements into their storage."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in SHAPES:
        numbers = torch.randn(shape, generator=generator)
        storage = torch.zeros(numbers.numel() + offset, device=device)
        found.append(storage[offset:].view(shape).copy_(numbers))
    return found


def _trained(device: torch.device, offset: int) -> dict[str, float]:
    """Largest relative differences of weights, moments and counts from torch's in fp64, after steps one of which is
    skipped."""
    weights, updater = _tensors(0, device, offset), launch.Updater()
    means, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    steps = [torch.zeros((), device=device) for _ in weights]
    expected = [weight.double().requires_grad_() for weight in weights]
    oracle = torch.optim.AdamW(expected, **SETTINGS, foreach=False)  # type: ignore[arg-type]
    for number in range(STEPS):
        grads = _tensors(number + 1, device, offset)
        is_skipped = torch.tensor(float(number == SKIPPED), device=device)
        if number == SKIPPED:
            grads[1].fill_(torch.nan)
        # As a number and as a tensor; with a scale and without.
        lr = SETTINGS["lr"] if number % 2 else torch.tensor(SETTINGS["lr"], device=device)
        scale = torch.tensor(SCALE, device=device) if number % 3 else None
        kept = [grad.clone() for grad in grads]
        updater.update(
            weights, grads, means, squares, steps,
            **SETTINGS | {"lr": lr}, grad_scale=scale, found_inf=is_skipped,
        )  # type: ignore[arg-type]  # fmt: skip
        assert all(torch.equal(*pair) for pair in zip(grads, kept, strict=True) if not pair[1].isnan().any())
        if number != SKIPPED:
            for weight, grad in zip(expected, grads, strict=True):
                weight.grad = grad.double() / (1.0 if scale is None else SCALE)
            oracle.step()
    states = [oracle.state[weight] for weight in expected]
    pairs = {
        "weights": zip(weights, expected, strict=True),
        "exp_avg": zip(means, [state["exp_avg"] for state in states], strict=True),
        "exp_avg_sq": zip(squares, [state["exp_avg_sq"] for state in states], strict=True),
        "step": zip(steps, [state["step"].to(device) for state in states], strict=True),
    }
    return {
        name: max(float((one - other).norm() / other.norm()) for one, other in of if one.numel())
        for name, of in pairs.items()
    }


def _interpreted(rank: int, world_size: int) -> list[dict[str, float]]:
    # Triton, which a forked rank has imported already, looks for the interpreter where a kernel is defined. A new
    # process would take four times as long.
    importlib.reload(launch)
    return [_trained(torch.device("cpu"), offset) for offset in (0, 1)]


@pytest.mark.slow
def test_kernel_matches_fp64_under_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for errors in run_distributed(_interpreted, 1)[0]:
        assert errors.pop("step") == 0.0
        assert all(error <= 5e-7 for error in errors.values()), errors


def test_addresses_of_captures_stay_and_are_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two comparisons of one optimizer warm up on their own streams, and capture after both."""
    is_captured = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)
    monkeypatch.setattr(launch, "_page_locked", torch.empty_like)
    updater, rows = launch.Updater(), [[16, 32], [48, 64]]
    launched = [updater._addresses(rows, stream) for stream in (1, 1, 2, 2)]
    assert len({table.data_ptr() for table in launched}) == 4
    is_captured = True
    captured = [updater._addresses([[16, 32], [grad, 64]], stream) for stream, grad in ((1, 80), (2, 96))]
    assert [table.tolist() for table in captured] == [[16, 32, 80, 64], [16, 32, 96, 64]]
    with pytest.raises(RuntimeError, match="has to run on this stream before it is captured"):
        updater._addresses(rows, 1)
    is_captured = False
    updater._addresses(rows, 1).zero_()
    assert captured[0].tolist() == [16, 32, 80, 64]
