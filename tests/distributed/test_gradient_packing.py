"""Gradients packed for a reduction: the bits of torch's own operator, under Triton's interpreter and on a GPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.distributed import on_ranks, run_distributed
from tests.support.interpreter import patch_bf16
from zeco_train.distributed import unsharded

pytestmark = pytest.mark.numeric

# Rows that do and do not divide, fewer rows than ranks, one element, several programs, none, and more than a launch.
SHAPES = [(7,), (12, 5), (2, 3, 4), (1,), (5000,), (0, 4), (16, 13)]
CASES = [(SHAPES, 3), ([(5, 8)] * 17, 2)]


def _gradients(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _differences(device: torch.device) -> list[str]:
    """The cases in which the kernel's result is not torch's."""
    from zeco_train.kernels.pack import pack

    wrong = []
    for shapes, ranks in CASES:
        for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.bfloat16,) * 2):
            tensors = _gradients(shapes, dtype, device)
            row = sum(-(-tensor.shape[0] // ranks) * tensor[:1].numel() for tensor in tensors)
            found, expected = (torch.full((ranks, row), torch.nan, dtype=wide, device=device) for _ in range(2))
            pack(tensors, ranks, found)
            # torch's has no empty tensors.
            torch._chunk_cat([tensor for tensor in tensors if tensor.numel()], 0, ranks, out=expected)
            if not torch.equal(found, expected):
                wrong.append(f"{shapes} over {ranks}, {dtype} to {wide}")
    return wrong


# Besides numbers of usual size: signed zeros, the smallest numbers, those half-way between two of bf16, infinity.
EXTREMES = [0.0, -0.0, 1e-45, -1e-40, 1.00390625, 1.01171875, -3.3e38, 3.4e38, torch.inf]


def _differences_of_sums_and_casts(device: torch.device) -> list[str]:
    """The tensors that are not torch's after a sum in place, and after a cast."""
    from zeco_train.kernels.pack import cast, pack

    wrong = []
    extremes = torch.tensor(EXTREMES, device=device)
    for shapes in (SHAPES, [(5, 8)] * 17, [(0, 4)]):
        for dtype in (torch.bfloat16, torch.float32):
            tensors = [*_gradients(shapes, dtype, device), extremes.to(dtype)]
            sums = [*_gradients(shapes, torch.float32, device)[::-1], extremes.flip(0).clone()]
            found = torch.cat([part.view(-1) for part in sums])[None]
            parts = found.view(-1).split([tensor.numel() for tensor in tensors])
            expected = [part.clone().add_(tensor.view(-1)) for part, tensor in zip(parts, tensors, strict=True)]
            pack(tensors, 1, found, add=True)
            wrong += [
                f"the sum of {len(sum_)} with {dtype}"
                for part, sum_ in zip(parts, expected, strict=True)
                if not _same_bits(part, sum_)
            ]
            for target in (torch.bfloat16, torch.float32):
                casts = [torch.empty_like(tensor, dtype=target) for tensor in tensors]
                cast(tensors, casts)
                wrong += [
                    f"{list(tensor.shape)}: {dtype} as {target}"
                    for tensor, found_cast in zip(tensors, casts, strict=True)
                    if not _same_bits(found_cast, tensor.to(target))
                ]
    return wrong


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # Signs of zeros are compared, too; ∞ − ∞ does not occur.
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def _interpreted(rank: int, world_size: int) -> list[str]:
    patch_bf16()
    return _differences(torch.device("cpu")) + _differences_of_sums_and_casts(torch.device("cpu"))


@pytest.mark.slow
def test_kernel_has_the_bits_of_torch_under_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter is chosen when Triton is imported, so the kernel runs in a separate process.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run_distributed(_interpreted, 1, fresh=True) == [[]]


@pytest.mark.gpu
def test_kernel_has_the_bits_of_torch_on_a_gpu() -> None:
    assert _differences(torch.device("cuda")) + _differences_of_sums_and_casts(torch.device("cuda")) == []
    unsharded.use_own_packing()
    tensors = _gradients([(64, 32)], torch.bfloat16, torch.device("cuda"))
    out = torch.empty(2, 1024, device="cuda")
    with mock.patch("zeco_train.kernels.pack.pack") as pack:
        torch.ops.fsdp.chunk_cat(tensors, 0, 2, out=out)
    assert pack.call_count == 1, "FSDP2's operator is not the kernel"


@on_ranks(1)
def test_fsdp_takes_our_copy(rank: int, world_size: int) -> None:
    """torch calls the first implementation that is listed. In another process, since the replacement lasts."""
    unsharded.use_own_packing()
    table = torch._C._dispatch_dump("fsdp::chunk_cat").splitlines()
    for device in ("CPU", "CUDA"):
        active = next(line for line in table if line.startswith(device))
        assert "torch_private.py" in active
        assert "inactive" not in active


def test_what_the_kernel_does_not_know_is_summed_by_torch() -> None:
    tensors = [torch.randn(6, 4, dtype=torch.float64).t(), torch.randn(4, 2).bfloat16()]
    out = torch.randn(1, 32, dtype=torch.float64)
    expected = out + torch.cat([tensor.reshape(1, -1) for tensor in tensors], 1)
    unsharded.add_next(out)
    unsharded._chunk_cat(tensors, 0, 1, out)
    assert torch.equal(out, expected)
    # That was for one copy only.
    unsharded._chunk_cat(tensors[:1], 0, 1, out[:, :24])
    assert torch.equal(out[0, :24], tensors[0].reshape(-1))


def test_what_the_kernel_does_not_know_is_packed_by_torch() -> None:
    tensors = [torch.randn(6, 4).t(), torch.randn(4, 2)]
    found, expected = torch.empty(2, 16), torch.empty(2, 16)
    unsharded._chunk_cat(tensors, 0, 2, found)
    torch._chunk_cat(tensors, 0, 2, out=expected)
    assert torch.equal(found, expected)
