"""`zeco_train.functional`: every operator, alone and over ranks, against its recurrence token by token."""

from __future__ import annotations

import itertools
import pydoc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lab.functional_stub import stub
from tests.support.distributed import on_ranks
from tests.support.operator_cases import dims_of, expected_of_rows, make, own_tokens
from zeco_train import functional
from zeco_train.errors import ConfigError
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.oracle import exact_softmax
from zeco_train.sp.backend_registry import SHARING

pytestmark = pytest.mark.numeric

LENGTHS = 17, 9, 20
# Of the two sequences, over whatever ranks there are: over an edge, at one, of one token; and one document.
STARTS = (5, 15, 16, 17, 24), ()
# Sums of up to 50 terms near 1, each rounded by 2^-53.
TOLERANCE = 1e-12
# Constants.
WITHOUT_GRADIENT = ("log_decay",)


def relative(x: Tensor, wanted: Tensor) -> float:
    assert x.shape == wanted.shape
    return ((x - wanted).abs().max() / wanted.abs().max()).item()


def operands_of(name: str, num_tokens: int) -> dict[str, Tensor]:
    values = make(name, num_tokens, "mild", B=len(STARTS))
    return {operand: values[operand] for operand in OPERATORS[name].operands}


def cases(name: str) -> list[tuple[bool, bool]]:
    """With documents, and with states before and after; an operator that reads the whole sequence has neither."""
    if OPERATORS[name].reads_whole:
        return [(False, False)]
    return [(False, False), (True, False), (False, True), (True, True)]


def check(
    name: str, ranks: functional.Ranks | None, lengths: Sequence[int], with_documents: bool, with_states: bool
) -> None:
    operator, bounds = OPERATORS[name], [*itertools.accumulate(lengths, initial=0)]
    starts = [[start for start in starts if with_documents and start < bounds[-1]] for starts in STARTS]
    whole = make(name, bounds[-1], "mild", B=len(STARTS))
    wanted = expected_of_rows(name, whole, starts, carry_in=with_states, carry_out=with_states)
    tokens = slice(*bounds[0 if ranks is None else ranks.rank :][:2])
    own = own_tokens(name, whole, tokens)
    leaves = {x: own[x].clone().requires_grad_(x not in WITHOUT_GRADIENT) for x in operator.operands}
    options: dict[str, Any] = {}
    if with_documents:
        options |= {"documents": [[0, *row, bounds[-1]] for row in starts], "bounds": bounds}
    if with_states:
        options |= {"initial_state": whole["carry_in"].clone().requires_grad_(), "output_final_state": True}
    # The oracle has the default scale, too.
    o, state = getattr(functional, name)(**leaves, **options, ranks=ranks)
    assert (state is not None) == with_states
    outputs, grads = [o], [own["do"]]
    inputs = {f"d{x}": leaf for x, leaf in leaves.items() if leaf.requires_grad}
    if with_states:
        outputs, grads = [o, state], [*grads, whole["dcarry_out"]]
        inputs["dcarry_in"] = options["initial_state"]
    found = dict(zip(inputs, torch.autograd.grad(outputs, [*inputs.values()], grads), strict=True))
    found |= {"o": o.detach()} | ({"carry_out": state.detach()} if with_states else {})
    assert o.dtype == torch.float64
    for what, x in found.items():
        if ranks is not None and not {"T", "B"} & {*dims_of(name, what)}:
            dist.all_reduce(x)
        error = relative(x, own_tokens(name, wanted, tokens)[what])
        assert error <= TOLERANCE, f"{name} {what}: {error:.1e}, {with_documents=}, {with_states=}, {ranks}"


def softmax_over_ranks(rank: int, world_size: int) -> None:
    ranks = functional.connect()
    bounds = [*itertools.accumulate(LENGTHS[:world_size], initial=0)]
    generator = torch.Generator().manual_seed(0)
    for key_heads, value_dim, window in ((2, 6, None), (4, 5, 7)):
        q, k, v, do = (
            torch.randn(2, bounds[-1], heads, width, generator=generator, dtype=torch.float64)
            for heads, width in ((4, 6), (key_heads, 6), (key_heads, value_dim), (4, value_dim))
        )
        borders = [[0, 5, 15, bounds[-1]]] * 2
        wanted = exact_softmax(q, k, v, do, borders=torch.tensor(borders[0]), window=window)
        leaves = [x[:, bounds[rank] : bounds[rank + 1]].clone().requires_grad_() for x in (q, k, v)]
        options = {"window": window, "documents": borders, "bounds": bounds, "ranks": ranks}
        o = functional.softmax_attention(*leaves, **options)
        grads = torch.autograd.grad(o, leaves, do[:, bounds[rank] : bounds[rank + 1]])
        for what, x in zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=True):
            assert relative(x, wanted[what][:, bounds[rank] : bounds[rank + 1]]) <= TOLERANCE, (what, window)
    with pytest.raises(ValueError, match="bounds"):
        functional.softmax_attention(*leaves, ranks=ranks)


@pytest.mark.few(quick=4)
@pytest.mark.parametrize("name", OPERATORS)
def test_function_alone_equals_the_recurrence(name: str) -> None:
    for case in cases(name):
        check(name, None, [23], *case)


@on_ranks(3)
def test_functions_over_ranks_equal_the_recurrence(rank: int, world_size: int) -> None:
    """Every operator with documents and states, by one backend each."""
    connected = {backend: functional.connect(backend=backend) for backend in SHARING}
    for number, name in enumerate(OPERATORS):
        backend = SHARING[number % len(SHARING)]
        ranks = connected[backend]
        assert (ranks.rank, ranks.size, ranks.backend) == (rank, world_size, backend)
        check(name, ranks, LENGTHS, *cases(name)[-1])
    softmax_over_ranks(rank, world_size)
    # Also over a part of the ranks, which the others need not know of.
    group = dist.new_group([1, 2])
    if rank != 0:
        check("kda", functional.connect(group), LENGTHS[:2], True, True)
    else:
        with pytest.raises(ConfigError, match="group"):
            functional.connect(group)


@pytest.mark.few(quick=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATORS)
def test_outputs_and_gradients_have_the_dtypes_of_their_operands(name: str, dtype: torch.dtype) -> None:
    wide = ("g", "log_decay", "beta")
    leaves = {
        x: (t.float() if x in wide else t.to(dtype)).requires_grad_(x != "log_decay")
        for x, t in operands_of(name, 70).items()
    }
    o, _ = getattr(functional, name)(**leaves)
    o.float().sum().backward()
    assert o.dtype == dtype
    assert all(x.grad is not None and x.grad.dtype == x.dtype for x in leaves.values() if x.requires_grad)
    exact, _ = getattr(functional, name)(**{x: t.detach().double() for x, t in leaves.items()})
    # Rounding of the operands' products and of the outputs: 2^-24 and 2^-8, times a few.
    assert relative(o.detach().double(), exact) <= (1e-5 if dtype == torch.float32 else 2e-2)


def gla(**changes: Any) -> Any:
    return functional.gla(**{**operands_of("gla", 8), **changes})


q, g = torch.randn(2, 8, 4, 6, dtype=torch.float64), torch.zeros(2, 8, 4, 6)
narrow = {name: x.float() for name, x in operands_of("gla", 8).items()}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"q": q[0]}, "q: expected a tensor of shape [B, T, H, K], got [8, 4, 6]"),
        ({"q": [1.0]}, "q: expected a tensor of shape [B, T, H, K], got list"),
        ({"k": q[:, :7]}, "k: expected shape"),
        ({"k": q.float()}, "k: expected torch.float64, the dtype of q; got torch.float32"),
        ({"q": q.long()}, "q: expected torch.bfloat16, torch.float32, torch.float64; got torch.int64"),
        ({"q": q.half()}, "q: expected torch.bfloat16, torch.float32, torch.float64; got torch.float16"),
        ({"scale": "1"}, "scale: expected a number, or None; got '1'"),
        ({"g": g.bfloat16()}, "g: expected float32 or float64"),
        ({"g": g}, "g: expected torch.float64 beside operands in torch.float64, got torch.float32"),
        (narrow | {"g": g.double()}, "g: expected torch.float32 beside operands in torch.float32, got torch.float64"),
        ({"v": q.to("meta")}, "v: is on meta, q on cpu"),
        ({"initial_state": q}, "initial_state: expected shape [2, 4, 6, 5] in torch.float64 on cpu"),
        ({"documents": [[0, 9]] * 2}, "documents: expected borders that rise from 0 to 8"),
        ({"documents": [[0, 8]]}, "documents: expected the borders of 2 sequences, got those of 1"),
        ({"bounds": [0, 4, 8]}, "bounds: expected 2 positions"),
        ({"bounds": [0, 9]}, "bounds: [0, 9] give rank 0 9 tokens, it has 8"),
        ({"ranks": 2}, "ranks: expected the result of connect(group), got int"),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is compared below
        gla(**changes)
    assert str(raised.value).startswith(field)
    assert "\n" not in str(raised.value)


def test_arguments_are_python_s() -> None:
    with pytest.raises(TypeError, match=r"^gla: .*'g'"):
        functional.gla(q, q, q)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="initial_state"):
        functional.unmasked(q, q, q, initial_state=q)  # type: ignore[call-arg]


@pytest.mark.parametrize(("backend", "field"), [("dp", "backend"), ("zeco2", "backend"), ("zeco", "group")])
def test_connect_refuses_in_one_line(backend: str, field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        functional.connect(backend=backend)
    assert raised.value.field == field


def test_every_operator_has_a_function_that_help_and_editors_show() -> None:
    assert {*OPERATORS} < {*functional.__all__}
    path = Path(functional.__file__).with_suffix(".pyi")
    assert path.read_text() == stub(), "docs/extending.md has the command that writes it"
    for name, operator in OPERATORS.items():
        text = pydoc.render_doc(getattr(functional, name), renderer=pydoc.plaintext)
        assert operator.about.partition("\n")[0]
        assert all(
            part in text
            for part in (operator.about.partition("\n")[0], f"{name}(", "_t = " if name != "unmasked" else "o_i")
        )
