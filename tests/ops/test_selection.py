"""Which calls kernels serve, and the slow-downs of the others, on devices that are not there."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lab.campaigns import slow_paths
from zeco_train.ops import gated_norm
from zeco_train.ops.gla.kernels import launch
from zeco_train.ops.mix import mix
from zeco_train.ops.operator import WIDE, KernelRule, Target, assume
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.scalar_decay.kernels import launch as decays
from zeco_train.ops.slow_paths import (
    Call,
    Kernels,
    SlowDown,
    SlowDowns,
    check_kernels,
    find_slow_paths,
    stored_slow_downs,
)
from zeco_train.ops.softmax import attention, cudnn, flash, sdpa
from zeco_train.sp.exchange import local_exchange

CPU, GPU = Target("cpu"), Target("cuda")
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
LIMITED = ("delta", "gated_delta", "kda")


# Of each operator and target: K, V, dtype of the tokens and of decays and strengths, and whether kernels serve it.
CASES = [
    (64, 64, BF16, FP32, True),
    (4, 4, BF16, FP32, True),
    (33, 20, FP32, FP32, True),
    (256, 256, BF16, FP32, True),
    (64, 64, FP64, FP64, False),
    (64, 64, torch.float16, FP32, False),
]
# Convolutions have neither heads nor decays.
OF_WIDE = [(64, 64, BF16, FP64, False), (64, 64, FP32, BF16, False)]
WIDE_HEADS = [(256, 512, BF16, FP32), (257, 64, FP32, FP32), (64, 513, BF16, FP32)]
SERVED = [*CASES, *OF_WIDE, *((*case, True) for case in WIDE_HEADS)]
TABLE = {
    "hgrn": SERVED,
    "mamba1": [*((*case[:4], case[4] and case[0] <= 64) for case in CASES), (65, 64, BF16, FP32, False)],
    "gla": [*SERVED, (512, 1088, BF16, FP32, True), (513, 64, BF16, FP32, False)],
    "gsa": [*CASES, *OF_WIDE, *((*case, case[1] <= 512) for case in WIDE_HEADS), (513, 64, BF16, FP32, False)],
    "short_conv": CASES,
    "unmasked": [(*case[:4], False) for case in CASES],
    **{name: [*CASES, *OF_WIDE, *((*case, case[:2] == (256, 512)) for case in WIDE_HEADS)] for name in LIMITED},
    # In fp32 PyTorch is faster with such heads.
    **{
        name: [*CASES, *OF_WIDE, *((*case, case[2] is BF16) for case in WIDE_HEADS)]
        for name in ("scalar_decay", "fixed_decay")
    },
}


def _operands(name: str, key_dim: int, value_dim: int, dtype: torch.dtype, wide: torch.dtype) -> list[Tensor]:
    sizes = {"B": 1, "T": 1, "G": 1, "H": 2, "K": key_dim, "V": value_dim, "C": 8, "W": 4, "1": 1}
    return [
        torch.empty([sizes[dim] for dim in dims], dtype=wide if operand in WIDE else dtype, device="meta")
        for operand, dims in OPERATORS[name].dims_of.items()
    ]


@pytest.mark.parametrize("name", OPERATORS)
def test_choice_of_an_implementation_by_target(name: str) -> None:
    operator = OPERATORS[name]
    on_kernels = None if operator.cuda is None else resolve_name(operator.cuda)
    for key_dim, value_dim, dtype, wide, is_served in TABLE[name]:
        operands = _operands(name, key_dim, value_dim, dtype, wide)
        # Of 99 KB a program, a walk of delta rules takes 112.
        on_small = is_served and (name not in LIMITED or key_dim <= 128)
        targets = {CPU: False, GPU: is_served, Target("cuda", (8, 0)): is_served, Target("cuda", (8, 9)): on_small}
        for target, served in targets.items():
            case = target, key_dim, value_dim, dtype, wide
            expected = on_kernels if served else operator.portable
            with assume(target):
                both = operator.select(operands, target), operator.select(operands)
            for chosen in both:
                assert chosen is expected, case
            # The rule that a run is checked by before it starts; it is not told of other decays than mixers have.
            if operator.kernels is not None and wide is (FP64 if dtype is FP64 else FP32):
                call = Call(name, operator.kernels, dtype, key_dim, value_dim)
                assert (call.problem(target) is None) == served, case


def _saved(name: str) -> list[tuple[int, ...]]:
    """Shapes of what autograd keeps of a call on fake tensors."""
    found = []
    shard = SequencePosition((0, 1), exchange=local_exchange())
    with FakeTensorMode(allow_non_fake_inputs=True):
        operands = [torch.empty_like(x, device="cpu").requires_grad_() for x in _operands(name, 64, 64, BF16, FP32)]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: found.append(tuple(x.shape)), lambda x: x):
            mix(name, operands, shard)
    return found


def test_fake_tensors_on_a_cpu_keep_what_an_assumed_gpu_keeps() -> None:
    scores = 1, 1, 2, 64, 64
    assert scores not in _saved("gla")
    with assume(GPU):
        assert scores in _saved("gla")
        assert _saved("kda") != _saved("gla")
    assert scores not in _saved("gla")


def test_options_of_kernels_are_of_the_assumed_architecture() -> None:
    k = torch.empty(1, 1, 1, 128, dtype=BF16)
    for architecture, key in (((9, 0), ((9, 0), BF16, 128)), ((8, 0), (None, BF16, 128))):
        with assume(Target("cuda", architecture)):
            assert launch.options_for(k) is launch.KEPT[key]


def test_options_of_published_shapes_are_those_measured() -> None:
    """Which of them compute by chunks, and what: forward and backward pass, pairs apart."""

    def by_chunks(fixed: bool, groups: int, heads: int, key_dim: int, value_dim: int) -> tuple[bool, bool, bool]:
        k, v = (torch.empty(1, 1, *dims, dtype=BF16) for dims in ((groups, key_dim), (heads, value_dim)))
        with assume(GPU):
            options = decays.options_for(k, v, fixed)
        of_pairs = options.backward is not None and options.backward.pairs
        return options.states is not None and not options.walks_forward, options.states is not None, of_pairs

    shapes = {
        "mamba2_1b": (False, 1, 64, 128, 64),
        "Nemotron-H": (False, 8, 128, 128, 64),
        "Bamba": (False, 1, 128, 256, 64),
        "RetNet": (True, 8, 8, 256, 512),
        "retnet_1b": (True, 16, 16, 128, 256),
        "Based": (True, 16, 16, 288, 64),
        "a head's own keys": (False, 16, 16, 128, 128),
        "and few values": (False, 16, 16, 128, 64),
        "fixed": (True, 16, 16, 128, 128),
        "fixed, shared keys": (True, 2, 32, 144, 64),
        "and wide": (False, 1, 128, 272, 64),
    }
    found = {name: by_chunks(*shape) for name, shape in shapes.items()}
    backward, both, neither = (False, True, False), (True, True, False), (False, False, False)
    pairs = True, True, True
    expected = [backward, backward, pairs, backward, backward, both, neither, neither, neither, both, both]
    assert found == dict(zip(shapes, expected, strict=True))


def test_softmax_takes_kernels_only_where_their_launch_does_not_refuse() -> None:
    for dtype, dim in ((BF16, 8), (BF16, 256), (BF16, 264), (BF16, 36), (FP32, 64), (FP64, 64)):
        q = torch.empty(1, 1, 2, dim, dtype=dtype, device="meta")
        with assume(GPU):
            served = dtype is BF16 and dim <= 256 and dim % 8 == 0
            kernels = cudnn if cudnn.serves(GPU) else flash
            assert attention._kernels(q, q, q) is (kernels if served else sdpa), (dtype, dim)
        with assume(CPU):
            assert attention._kernels(q, q, q) is sdpa


@pytest.mark.parametrize(
    ("dtype", "dim", "served"), [(BF16, 36, False), (FP32, 36, True), (FP32, 38, False), (BF16, 512, True)]
)
def test_steps_of_softmax_need_rows_of_16_bytes(dtype: torch.dtype, dim: int, served: bool) -> None:
    assert (Call("softmax step", attention.STEP_KERNELS, dtype, dim, dim).problem(GPU) is None) == served


def test_each_slow_path_is_found_once_and_on_gpus_only() -> None:
    slow = ("layer 1 (x)", Call("gated_norm", gated_norm.KERNELS, FP64, 0, 64))
    calls = [("layer 0 (x)", Call("gla", KernelRule(), BF16, 64, 64)), slow, slow]
    (found,) = find_slow_paths(calls, GPU)
    assert (found.where, found.slow_down) == ("layer 1 (x)", None)
    assert not find_slow_paths(calls, CPU)
    assert check_kernels("kernels", Kernels.require, calls[:1], GPU) == []


def test_nearest_measurement_is_of_the_operator_and_dtype_and_not_far(tmp_path: Path) -> None:
    rows = [
        SlowDown("delta", "bf16", 128, 128, 4096, 3.0),
        SlowDown("delta", "bf16", 256, 256, 4096, 5.0),
        SlowDown("delta", "bf16", 256, 256, 16384, 6.0),
    ]
    slow_paths.write(SlowDowns("a toy", tuple(rows)), tmp_path / "table.json")
    table, rule = SlowDowns.read(tmp_path / "table.json"), KernelRule()
    assert table.rows == tuple(rows)

    def nearest(operator: str, dtype: torch.dtype, dims: tuple[int, int], tokens: int | None = None) -> float | None:
        found = table.nearest(Call(operator, rule, dtype, *dims), tokens)
        return None if found is None else found.slow_down

    assert nearest("delta", BF16, (256, 512), 8193) == 6
    assert nearest("delta", BF16, (512, 512), 2048) == 5
    assert nearest("delta", BF16, (64, 288)) == 3
    # Eight times the largest K · V, another dtype, another operator, and a call without heads.
    assert nearest("delta", BF16, (512, 1024)) is None
    assert nearest("delta", FP32, (256, 256)) is None
    assert nearest("kda", BF16, (256, 256)) is None
    assert nearest("delta", BF16, (0, 256)) is None


def test_stored_measurements_are_of_operators_that_are_asked_about() -> None:
    known = {*(name for name, operator in OPERATORS.items() if operator.kernels is not None), "softmax"}
    assert {row.operator for row in stored_slow_downs().rows} <= known
    assert all(row.slow_down > 0 and row.dtype in ("bf16", "fp32") for row in stored_slow_downs().rows)


def test_products_in_place_of_flash_attention_keep_fp32_sums_of_bf16_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they serve heads that FlashAttention refuses; the same formula, forced on a CPU."""
    monkeypatch.setattr(sdpa, "_is_for_torch", lambda q, v: False)
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 40, 36, dtype=FP64) for _ in range(4))
    mask = torch.zeros(40, 40).masked_fill_(torch.ones(40, 40).triu(1).bool(), -torch.inf)

    def results(dtype: torch.dtype) -> tuple[Tensor, ...]:
        as_given = [x.bfloat16().to(dtype) for x in (q, k, v, do)]
        o, lse = sdpa._forward(*as_given[:3], mask.to(dtype), 36**-0.5)
        return o, lse, *sdpa._backward(as_given[3], *as_given[:3], o, lse, mask.to(dtype), 36**-0.5)

    for found, expected in zip(results(BF16), results(FP64), strict=True):
        assert found.dtype is FP32
        # Rounding of fp32; sums in bf16 are off by 2⁻⁹ and more.
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_compiled_code_for_any_head_dims_asks_with_numbers() -> None:
    """A second model in a process has other head dims, which a compiler then takes for symbols."""
    shard = SequencePosition((0, 20), exchange=local_exchange())
    compiled = torch.compile(lambda *x: mix("scalar_decay", x, shard)[0], backend="eager", dynamic=True)
    torch._dynamo.reset()
    for dim in (8, 12):
        operands = *(torch.randn(1, 20, 2, dim) for _ in range(3)), -torch.rand(1, 20, 2)
        torch.testing.assert_close(compiled(*operands), mix("scalar_decay", operands, shard)[0])
    torch._dynamo.reset()
