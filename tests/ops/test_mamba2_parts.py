"""A Mamba-2 layer's parts around its operator against plain autograd in fp64, and their kernels against the same."""

from __future__ import annotations

import math
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.distributed import run_distributed
from tests.support.interpreter import patch_bf16, skip_overflow_checks
from tests.support.kernel_cases import SHARED_MEMORY, compiling, relative_error
from zeco_train.ops import mamba2
from zeco_train.ops.mamba2 import kernels as launch
from zeco_train.ops.operator import Target, assume

pytestmark = pytest.mark.numeric

EPS = 1e-3
NAMES = ("q", "k", "v", "g", "y", "du", "dlogits", "ddecay", "dz", "dweight", "do")
# bf16: results, and what the second op reads of the first's, are rounded once. Measured under the interpreter: 2.7e-3
# and 4e-7.
TOLERANCES = {torch.bfloat16: 4e-3, torch.float32: 2e-6, torch.float64: 1e-12}


class Case(NamedTuple):
    """Sizes, and the range of time steps."""

    batch: int
    tokens: int
    heads: int
    value_dim: int
    groups: int
    key_dim: int
    limit: tuple[float, float] = (0.0, math.inf)

    def tensors(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """The inputs: the gate and the logits as parts of a wider projection, decays in fp32 or wider."""
        generator, inner = torch.Generator().manual_seed(sum(self[:6])), self.heads * self.value_dim

        def normal(*size: int, of: torch.dtype = dtype) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64).to(of).to(device)

        rows = self.batch, self.tokens
        decay = normal(3, self.heads, of=torch.promote_types(dtype, torch.float32))
        # Time steps as small as those of a model, and logits beyond the limit from which softplus is the identity.
        decay[0] = torch.linspace(-7.0, 25.0, self.heads)
        projected = normal(*rows, 2 * inner + self.heads)
        return {
            "u": normal(*rows, inner + 2 * self.groups * self.key_dim),
            "logits": projected[..., 2 * inner :],
            "decay": decay,
            "z": projected[..., inner : 2 * inner],
            "weight": normal(inner),
            "o": normal(*rows, self.heads, self.value_dim),
        }

    def results(self, tensors: dict[str, Tensor], *, plain: bool) -> dict[str, Tensor]:
        """Outputs and gradients of both parts, by `NAMES`; `plain` by autograd of the equations."""
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        u, logits, decay, z, weight, o = leaves.values()
        if plain:
            found = self._plain(*leaves.values())
        else:
            *operands, skip = mamba2.operands(u, logits, decay, self.value_dim, self.groups, self.limit)
            found = [*operands, mamba2.output(o, skip, u, z, decay, weight, self.groups, EPS)]
        generator = torch.Generator().manual_seed(1)
        seeds = [torch.randn(x.shape, generator=generator, dtype=torch.float64).bfloat16().to(x) for x in found]
        grads = torch.autograd.grad(found, [*leaves.values()], seeds)
        return dict(zip(NAMES, [*found, *grads], strict=True))

    def _plain(self, u: Tensor, logits: Tensor, decay: Tensor, z: Tensor, weight: Tensor, o: Tensor) -> list[Tensor]:
        group = self.groups * self.key_dim
        values, keys, queries = F.silu(u).split((self.heads * self.value_dim, group, group), dim=-1)
        values = values.unflatten(-1, (self.heads, self.value_dim))
        keys, queries = (x.unflatten(-1, (self.groups, self.key_dim)) for x in (keys, queries))
        dt = F.softplus(logits + decay[0]).clamp(*self.limit)
        gated = ((o + decay[2].unsqueeze(-1) * values).flatten(-2) * F.silu(z)).unflatten(-1, (self.groups, -1))
        y = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + EPS)
        return [queries, keys, values * dt.unsqueeze(-1), -decay[1].exp() * dt, y.flatten(-2) * weight]

    def wrong(self, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
        """Results whose error, norm over norm, is above the tolerance."""
        tensors = self.tensors(dtype, device)
        found = self.results(tensors, plain=False)
        exact = self.results({name: x.double() for name, x in tensors.items()}, plain=True)
        leaves = dict(zip(NAMES[5:], tensors.values(), strict=True))
        assert {name: x.dtype for name, x in found.items() if name in leaves} == {
            name: x.dtype for name, x in leaves.items()
        }
        errors = {name: relative_error(found[name].detach(), exact[name].detach()) for name in NAMES}
        return {name: error for name, error in errors.items() if not error <= TOLERANCES[dtype]}


# One token; sizes that are no powers of two; groups; clamped steps; more tokens and channels than a tile.
CASES = {
    "one token": Case(1, 1, 2, 8, 1, 4),
    "odd sizes": Case(2, 5, 6, 7, 2, 3, (0.3, 0.9)),
    "a group a head": Case(2, 9, 4, 5, 4, 3, (0.0, 0.9)),
    "several tiles": Case(1, 19, 12, 64, 1, 160),
}
LARGE = {**CASES, "mamba2_1b": Case(1, 3000, 64, 64, 1, 128), "wide groups": Case(1, 70, 128, 80, 8, 128)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_parts_and_their_gradients_equal_autograd_in_fp64(name: str, dtype: torch.dtype) -> None:
    assert CASES[name].wrong(dtype, torch.device("cpu")) == {}


def _interpreted(rank: int, world_size: int, names: list[str], tile: int, channels: int) -> list[str]:
    skip_overflow_checks()
    patch_bf16()
    found = []
    # Fewer programs than tiles: some have several.
    sizes = {"_RUNS": 2, "_NORM_RUNS": 2, "_TILE": tile, "_CHANNELS": channels}
    with assume(Target("cuda")), mock.patch.multiple(launch, **sizes):
        for name in names:
            dtype = torch.bfloat16 if name == "odd sizes" else torch.float32
            if wrong := CASES[name].wrong(dtype, torch.device("cpu")):
                found.append(f"{name}, {dtype}: {wrong}")
    return found


@pytest.mark.parametrize(
    ("names", "tile", "channels"),
    [
        (["one token", "odd sizes"], 64, 16),
        pytest.param(["a group a head"], 64, 16, marks=pytest.mark.slow),
        pytest.param(["several tiles"], 512, 256, marks=pytest.mark.slow),
    ],
)
def test_kernels_equal_autograd_in_fp64_under_interpreter(
    names: list[str], tile: int, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_interpreted, 1, names, tile, channels, fresh=True) == [[]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_equal_autograd_in_fp64_on_gpu(dtype: torch.dtype) -> None:
    found = {name: case.wrong(dtype, torch.device("cuda")) for name, case in LARGE.items()}
    assert not any(found.values()), found


def test_skip_connection_takes_no_memory() -> None:
    case = CASES["odd sizes"]
    tensors = case.tensors(torch.float32, torch.device("cpu"))
    *_, skip = mamba2.operands(*(tensors[name] for name in ("u", "logits", "decay")), 7, 2, case.limit)
    assert (skip.shape, skip.untyped_storage().nbytes()) == (tensors["o"].shape, 4)


def _shared_memory(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, int]:
    case = LARGE["mamba2_1b"]._replace(tokens=64)
    with compiling(90) as shared, assume(Target("cuda")):
        case.results(case.tensors(dtype, torch.device("cpu")), plain=False)
    return shared


@pytest.mark.campaign
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_compile_for_gpus(dtype: torch.dtype) -> None:
    [shared] = run_distributed(_shared_memory, 1, dtype, fresh=True)
    assert shared.keys() == {"operands_kernel", "operand_grads_kernel", "output_kernel", "output_grads_kernel"}
    assert max(shared.values()) <= SHARED_MEMORY[90]
