"""The kernel of the recurrent step against the oracle, under the interpreter; ops/test_passes.py has all steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.distributed import run_distributed
from tests.support.recurrence import naive_gla
from zeco_train.ops.gla import GLA
from zeco_train.ops.operator import Target, assume

pytestmark = pytest.mark.numeric


def operands(dtype: torch.dtype, tokens: int = 30, device: str = "cpu") -> tuple[Tensor, ...]:
    """q, k, v, g of two sequences, with strong and weak decays, and a state before them."""
    generator = torch.Generator().manual_seed(0)
    q, k, g = (torch.randn(2, tokens, 3, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    v = torch.randn(2, tokens, 3, 20, generator=generator, dtype=torch.float64)
    state = torch.randn(2, 3, 8, 20, generator=generator, dtype=torch.float64)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    g = torch.nn.functional.logsigmoid(4 * g).to(wide)
    return tuple(x.to(device) for x in (q.to(dtype), k.to(dtype), v.to(dtype), g, state.to(wide)))


def steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> Tensor:
    columns = zip(*(x.split(1, dim=1) for x in (q, k, v, g)), strict=True)
    return torch.cat([GLA.step(*column, state) for column in columns], dim=1)


def _kernel_errors(rank: int, world_size: int) -> dict[str, float]:
    """Errors of outputs and state after three steps of the kernel, by case."""
    torch.set_num_threads(1)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, g, state = operands(dtype, tokens=3)
        expected, final_state = naive_gla(*(x.double() for x in (q, k, v, g)), initial_state=state.double())
        with assume(Target("cuda")):
            o = steps(q, k, v, g, state)
        assert o.dtype == dtype
        found[f"{dtype} o"] = float((o - expected).norm() / expected.norm())
        found[f"{dtype} state"] = float((state - final_state).norm() / final_state.norm())
    return found


@pytest.mark.slow
def test_step_kernel_in_triton_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    errors = run_distributed(_kernel_errors, 1, fresh=True)[0]
    assert errors.pop("torch.bfloat16 o") <= 4e-3
    assert all(error <= 1e-6 for error in errors.values()), errors
