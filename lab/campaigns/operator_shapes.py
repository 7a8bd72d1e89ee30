"""Question: are operators right at any head dims, lengths, decays and strides, and within their tensors, on a GPU?
Command: python -m lab.campaigns.operator_shapes FOLDER
Date: 2026-11-25, one H100
Answer: at 55c9de0 47 of 939 cases failed; since then 3 of 1,542, softmax in fp32 with one or two keys, whose zero
    gradients are rounding. lab/README.md. Inputs and fresh buffers lie between guard bands of NaN
    and canaries.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.campaigns.addresses import wrong_addresses
from lab.campaigns.descriptors import wrong_descriptors
from zeco_train.ops.attend import attend_at
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.mix import mix
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.oracle import ExactTokens, exact_softmax
from zeco_train.ops.position import SequencePosition
from zeco_train.sp.exchange import local_exchange

DELTA = ("delta", "gated_delta", "kda")
BY_CHANNEL = ("gla", "kda", "gsa")
HEADS = ("gla", "scalar_decay", "fixed_decay", *DELTA, "unmasked", "gsa")
GATED = ("gla", "scalar_decay", "fixed_decay", "gated_delta", "kda", "gsa")
ALL = (*HEADS, "softmax", "short_conv", "mamba1")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

# Limits of the relative error, norm over norm, written before the first run. What each is relative to was made precise
# after it, for delta rules (`sizes_of`, `errors_of`), dg of scalar decays and softmax. bf16 rounds each operand of a
# product by 2^-9/√3 rms; two to four in a row make 2 to 5e-3 where many numbers are averaged, and twice that where
# few are. fp32 products are exact to 2^-20 or so; sums of decays in a chunk round relative to the sum. A delta rule
# solves a system of 64 equations a chunk: its error grows with the strength β. The gradients of decays and strengths
# are sums that cancel.
LIMITS: dict[tuple[str, str], dict[str, float]] = {
    ("linear", "bf16"): {"default": 1e-2, "dg": 2e-2},
    ("linear", "fp32"): {"default": 1e-4, "dg": 3e-4},
    ("delta", "bf16"): {"default": 2e-2, "dg": 4e-2, "dbeta": 4e-2},
    ("delta", "fp32"): {"default": 3e-4, "dg": 1e-3, "dbeta": 1e-3},
    ("softmax", "bf16"): {"default": 1e-2, "dq": 2e-2, "dk": 2e-2},
    ("softmax", "fp32"): {"default": 1e-4},
    ("short_conv", "bf16"): {"default": 1e-2},
    ("short_conv", "fp32"): {"default": 1e-4},
}
# The share of q ⊙ dq (scalar decays: of k ⊙ dk too) that the error of dg is relative to, where dg is less: scalar
# decays take the difference of two sums that bf16 products have rounded, delta rules multiply by transitions that are I
# less such a sum; gla avoids it.
CANCELLING = {"scalar_decay": 0.1, "gated_delta": 0.1, "kda": 0.1}
# An element's size below which its error is not relative: all inputs are of size 1, and what decays have erased is not.
FLOOR = 1e-3

# (K, V): of published models, of every width of tile and just beside, and beyond what kernels serve.
PAIRS = [
    (64, 8), (64, 4), (64, 12), (40, 8), (64, 16), (64, 20), (64, 24), (32, 8), (128, 8), (256, 8), (8, 8),
    (64, 128), (128, 128), (64, 64), (96, 192), (128, 256), (256, 256), (256, 512), (16, 16), (24, 40), (48, 64),
    (1, 1), (2, 3), (4, 4), (8, 64), (16, 4), (32, 32), (64, 1), (1, 64), (100, 7), (128, 12), (128, 64), (130, 130),
    (192, 128), (200, 40), (80, 96), (33, 65), (65, 33), (17, 256), (256, 17), (3, 200), (255, 257), (273, 64),
    (320, 64), (512, 16), (16, 512), (512, 512), (1, 512), (512, 1),
]  # fmt: skip
LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 193, 257, 300)
LONG = (1000, 2049, 4096)
DECAYS = ("none", "initial", "weak", "strong", "vanishing", "resets", "erased", "mixed")
LAYOUTS = ("contiguous", "halves", "heads first", "odd offset", "expanded do")


@dataclass(frozen=True)
class Case:
    """A call. `walk`: segments as kept ("kept"), or one segment of all chunks ("one"); documents: borders, or ()."""

    operator: str
    B: int
    T: int
    G: int
    H: int
    K: int
    V: int
    dtype: str
    decays: str
    layout: str
    documents: tuple[int, ...] = ()
    before: int = 0
    walk: str = "kept"
    beta: float = 1.0
    seed: int = 0

    @property
    def kind(self) -> str:
        return (
            self.operator
            if self.operator in ("softmax", "short_conv")
            else "delta"
            if self.operator in DELTA
            else "linear"
        )

    def limit(self, tensor: str) -> float:
        limits = LIMITS[self.kind, self.dtype]
        return limits.get(tensor, limits["default"])


def draw(
    seed: int,
    count: int,
    operators: Sequence[str] = ALL,
    pairs: Sequence[tuple[int, int]] = PAIRS,
    lengths: Sequence[int] = LENGTHS,
    long: Sequence[int] = LONG,
) -> list[Case]:
    """Cases in groups of one operator, head dims and dtype, which share compiled kernels; the first pairs first."""
    rng = random.Random(seed)
    dims = [*pairs, *((rng.randint(1, 512), rng.randint(1, 512)) for _ in range(len(pairs) // 4))]
    if pairs is not PAIRS:
        dims = list(pairs)
    groups = [
        (operator, K, V, dtype)
        for index, (K, V) in enumerate(dims)
        for operator in operators
        for dtype in DTYPES
        if dtype == "bf16" or index % 3 == 0
    ]
    rng.shuffle(groups)
    groups.sort(key=lambda group: dims.index(group[1:3]) // 16)
    # not one case too few
    each = -(-count // len(groups))
    return [_case(rng, *group, lengths, long) for group in groups for _ in range(each)][:count]


def _case(
    rng: random.Random, operator: str, K: int, V: int, dtype: str, lengths: Sequence[int], long: Sequence[int]
) -> Case:
    T = rng.choice(long) if long and rng.random() < 0.08 else rng.choice(lengths)
    documents: tuple[int, ...] = ()
    if operator != "unmasked" and T > 1 and rng.random() < 0.4:
        documents = (0, *sorted(rng.randint(0, T) for _ in range(rng.randint(0, 4))), T)
    G, H = rng.choice(((1, 1), (2, 2), (1, 2)))
    if operator in ("gla", "kda", "unmasked", "gsa"):
        G = H
    if operator == "softmax":
        V = K
    return Case(
        operator, 1 if documents else rng.choice((1, 2)), T, G, H, K, V, dtype,
        rng.choice(DECAYS) if operator in (*GATED, "mamba1") else "none",
        rng.choice(LAYOUTS), documents, rng.choice((0, 1)), rng.choice(("kept", "one")),
        rng.choice((0.0, 0.5, 1.0, 2.0)), rng.randint(0, 1 << 30),
    )  # fmt: skip


# --- guard bands ---

BAND = 4096
CANARY = 12345.0


class Guards:
    """Tensors between bands; `broken` names those of which a band was written."""

    def __init__(self) -> None:
        self._bands: list[tuple[str, Tensor, Tensor]] = []
        self._empty, self._empty_like, self._new_empty = torch.empty, torch.empty_like, Tensor.new_empty

    def place(self, values: Tensor, name: str, offset: int = 0) -> Tensor:
        """A contiguous copy of values; `offset`: elements by which it is off the alignment of an allocation."""
        inside = self.fresh(values.shape, values.dtype, values.device, name, offset)
        return inside.copy_(values)

    def fresh(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, name: str, offset: int = 0
    ) -> Tensor:
        count = math.prod(shape)
        whole = self._empty(2 * BAND + count + offset, dtype=dtype, device=device)
        before, inside, after = whole.split([BAND + offset, count, BAND])
        before.fill_(torch.nan)
        inside.fill_(torch.nan)
        after.fill_(CANARY)
        self._bands.append((name, before, after))
        return inside.view(tuple(shape))

    def broken(self) -> list[str]:
        return [
            name
            for name, before, after in self._bands
            if not bool(before.isnan().all()) or not bool((after == torch.tensor(CANARY, dtype=after.dtype)).all())
        ]

    @contextlib.contextmanager
    def around_fresh_buffers(self) -> Iterator[None]:
        """Buffers that Python code makes without values are guarded, and filled with NaN."""

        def serves(dtype: torch.dtype | None, device: Any) -> bool:
            return (dtype or torch.float32).is_floating_point and torch.device(device or "cpu").type == DEVICE.type

        def empty(*shape: Any, dtype: torch.dtype | None = None, device: Any = None, **rest: Any) -> Tensor:
            if rest or not serves(dtype, device):
                return self._empty(*shape, dtype=dtype, device=device, **rest)
            sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
            return self.fresh(sizes, dtype or torch.float32, torch.device(device), f"buffer {list(sizes)}")

        def empty_like(x: Tensor, **rest: Any) -> Tensor:
            dense = x.is_contiguous() or rest.get("memory_format") is torch.contiguous_format
            if not dense or set(rest) - {"memory_format", "dtype"} or not serves(rest.get("dtype", x.dtype), x.device):
                return self._empty_like(x, **rest)
            return self.fresh(x.shape, rest.get("dtype", x.dtype), x.device, f"buffer {list(x.shape)}")

        def new_empty(x: Tensor, *shape: Any, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
            return empty(*shape, dtype=dtype or x.dtype, device=rest.pop("device", x.device), **rest)

        with (
            mock.patch.object(torch, "empty", empty),
            mock.patch.object(torch, "empty_like", empty_like),
            mock.patch.object(Tensor, "new_empty", new_empty),
        ):
            yield


# --- one case ---

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inputs(case: Case) -> dict[str, Tensor]:
    """Random values of each operand, of the carry and of the gradients, contiguous."""
    generator = torch.Generator(DEVICE).manual_seed(case.seed)
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=DEVICE)

    B, T, G, H, K, V = case.B, case.T, case.G, case.H, case.K, case.V
    if case.operator == "short_conv":
        width = 2 + case.seed % 3
        channels = case.K
        shapes = {"x": (B, T, channels), "weight": (channels, 1, width), "bias": (channels,), "do": (B, T, channels)}
        found = {name: normal(*shape).to(dtype) for name, shape in shapes.items()}
        state = (B, 1, width - 1, channels)
    elif case.operator == "mamba1":
        # K channels of V states; the rates of A are of the case's kind, at time steps of about 1.
        shapes = {"x": (B, T, K), "dt": (B, T, K), "do": (B, T, K), "B": (B, T, V), "C": (B, T, V)}
        found = {name: normal(*shape).to(dtype) for name, shape in shapes.items()}
        a_log = {"none": -50.0, "weak": -3.0, "strong": 4.0, "vanishing": 5.0, "resets": 0.0, "erased": 20.0}
        initial = torch.arange(1, V + 1, device=DEVICE).log().expand(K, V)
        rates = initial if case.decays == "initial" else a_log.get(case.decays, 0.0) + 0.1 * normal(K, V)
        found["A_log"] = rates + (3 * normal(K, V) if case.decays == "mixed" else 0.0)
        found |= {name: normal(K) for name in ("D", "dt_bias")}
        if case.decays == "resets":
            found["dt"][uniform(B, T, K) < 0.1] = 1000.0
        state = (B, K, V, 1)
    else:
        shapes = {"q": (B, T, G, K), "k": (B, T, G, K), "v": (B, T, H, V), "do": (B, T, H, V)}
        if case.operator == "softmax":
            shapes["q"] = (B, T, H, K)
            shapes["v"] = (B, T, G, V)
        if case.operator == "gsa":
            shapes = {"q": (B, T, H, V), "k": (B, T, H, V), "s": (B, T, H, K), "do": (B, T, H, K)}
        found = {name: normal(*shape).to(dtype) for name, shape in shapes.items()}
        state = (B, H, K, V)
        if case.operator in DELTA:
            found["k"] = F.normalize(found["k"].float(), dim=-1).to(dtype)
            found["beta"] = (
                torch.full((B, T, H), case.beta, device=DEVICE)
                if case.beta in (0.0, 2.0)
                else (2 * case.beta * uniform(B, T, H))
            )
        if case.operator in GATED:
            shape = (
                (H,) if case.operator == "fixed_decay" else (B, T, H, K) if case.operator in BY_CHANNEL else (B, T, H)
            )
            match case.decays:
                case "none":
                    g = torch.zeros(shape, device=DEVICE)
                case "initial":
                    g = F.logsigmoid(normal(*shape)) / 16
                case "weak":
                    g = -0.2 * uniform(*shape)
                case "strong":
                    g = -50 * uniform(*shape)
                case "vanishing":
                    g = -50 - 60 * uniform(*shape)
                case "resets":
                    g = -0.1 * uniform(*shape) - 1e9 * (uniform(*shape) < 0.1)
                case "erased":
                    g = torch.full(shape, -1e9, device=DEVICE)
                case _:
                    g = F.logsigmoid(normal(*shape)) * torch.logspace(-6, 1.3, shape[-1], device=DEVICE)
            found["log_decay" if case.operator == "fixed_decay" else "g"] = g
    if case.operator != "softmax":
        found["carry_in"], found["dcarry_out"] = normal(*state), normal(*state)
    return found


def laid_out(case: Case, values: dict[str, Tensor], guards: Guards) -> dict[str, Tensor]:
    """The same values between bands, with the case's strides."""
    found = {}
    for name, x in values.items():
        of_tokens = x.dim() >= 3 and name not in ("carry_in", "dcarry_out", "weight")
        if case.layout == "halves" and of_tokens:
            whole = guards.place(torch.cat([x, torch.full_like(x, torch.nan)], -1), name)
            found[name] = whole[..., : x.shape[-1]]
        elif case.layout == "heads first" and x.dim() == 4 and of_tokens:
            found[name] = guards.place(x.transpose(1, 2).contiguous(), name).transpose(1, 2)
        elif case.layout == "odd offset":
            found[name] = guards.place(x, name, offset=3)
        elif case.layout == "expanded do" and name == "do":
            values[name] = x[:1, :1].expand(x.shape)
            found[name] = guards.place(x[:1, :1].contiguous(), name).expand(x.shape)
        else:
            found[name] = guards.place(x, name)
    return found


def operands_of(case: Case) -> tuple[str, ...]:
    return ("q", "k", "v") if case.operator == "softmax" else OPERATORS[case.operator].operands


def _carry(case: Case, tensors: dict[str, Tensor]) -> Tensor | None:
    if "carry_in" not in tensors or case.operator == "unmasked":
        return None
    return tensors["carry_in"].detach().requires_grad_()


def differentiate(case: Case, tensors: dict[str, Tensor], function: Any) -> dict[str, Tensor]:
    """o, carry_out and all gradients; function(operands, carry_in) → o, carry_out."""
    names = operands_of(case)
    leaves = {name: tensors[name].detach().requires_grad_(name != "log_decay") for name in names}
    o, carry_out = function(list(leaves.values()), carry := _carry(case, tensors))
    outputs, grads = [o], [tensors["do"].to(o.dtype)]
    wanted = [x for x in leaves.values() if x.requires_grad]
    results = {"o": o.detach()}
    stateful = carry is not None
    if carry is not None:
        outputs.append(carry_out)
        grads.append(tensors["dcarry_out"].to(carry_out.dtype))
        wanted.append(carry)
        results["carry_out"] = carry_out.detach()
    # what a document's start cuts off has no gradient
    found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    found = tuple(torch.zeros_like(x) if grad is None else grad for x, grad in zip(wanted, found, strict=True))
    of = [f"d{name}" for name, x in leaves.items() if x.requires_grad] + (["dcarry_in"] if stateful else [])
    return results | dict(zip(of, found, strict=True))


@contextlib.contextmanager
def one_segment(case: Case) -> Iterator[None]:
    """Have the kernels walk all chunks in one segment, where `case.walk` says so."""
    if (
        case.walk != "one"
        or DEVICE.type != "cuda"
        or case.operator not in ("gla", "gsa", "scalar_decay", "fixed_decay", *DELTA)
    ):
        yield
        return
    from zeco_train.kernels import replay
    from zeco_train.ops.delta.kernels import launch as of_delta
    from zeco_train.ops.gla.kernels import launch as of_gla
    from zeco_train.ops.gsa import kernels as of_gsa
    from zeco_train.ops.scalar_decay.kernels import launch as of_scalar

    module, changes = (
        (of_gla if case.operator == "gla" else of_gsa, {"programs": 1})
        if case.operator in ("gla", "gsa")
        else (of_delta, {"joining": 1e9})
        if case.operator in DELTA
        else (of_scalar, {"programs": 1})
    )
    plain = module.options_for
    replay.forget()
    with mock.patch.object(module, "options_for", lambda *x: dataclasses.replace(plain(*x), **changes)):
        yield
    replay.forget()


def _position(case: Case) -> SequencePosition:
    """With tokens of the first document before these."""
    start, stop = case.before, case.before + case.T
    documents = [[0, *(start + border for border in case.documents[1:])]] if case.documents else None
    return SequencePosition((start, stop), documents=documents, exchange=local_exchange())


def found_by(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    position = _position(case)
    if case.operator == "softmax":
        scale = case.K**-0.5
        return differentiate(case, tensors, lambda operands, carry: (_attended(operands, scale, position), None))
    return differentiate(case, tensors, lambda operands, carry: _mixed(case, operands, position, carry))


def _attended(operands: list[Tensor], scale: float, position: SequencePosition) -> Tensor:
    q, k, v = operands
    return attend_at(q, k, v, scale, position, [StateInput()] * 2)[0]


def _mixed(case: Case, operands: list[Tensor], position: SequencePosition, carry: Tensor | None) -> tuple[Tensor, Any]:
    scale = 1.0 if case.operator == "short_conv" else None
    want = case.operator != "unmasked"
    return mix(case.operator, operands, position, scale=scale, carry_in=carry, want_carry=want)


def expected_of(case: Case, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The exact results, in fp64."""
    operands, do = {name: values[name].double() for name in operands_of(case)}, values["do"].double()
    borders = torch.tensor(case.documents) if case.documents else None
    if case.operator == "softmax":
        q, k, v = operands.values()
        return exact_softmax(q, k, v, do, borders=borders)
    # With tokens before these, the first document began there, and no state restarts at the first border.
    starts = sorted({start for start in case.documents[bool(case.before) :] if start < case.T})
    tokens = ExactTokens(OPERATORS[case.operator], operands, do, starts)
    carry = _carry(case, values)
    after = tokens.forward(tokens.zero_state() if carry is None else carry.double())
    before = tokens.backward(torch.zeros_like(after) if carry is None else values["dcarry_out"].double())
    return tokens.results | ({} if carry is None else {"carry_out": after, "dcarry_in": before})


def errors_of(case: Case) -> dict[str, float]:
    """Error of each result; infinite where it is not finite. A broken band is an error of its own."""
    guards = Guards()
    values = inputs(case)
    tensors = laid_out(case, values, guards)
    with guards.around_fresh_buffers(), one_segment(case):
        found = found_by(case, tensors)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    errors = {f"written outside {name}": math.inf for name in guards.broken()}
    expected = expected_of(case, values)
    sizes = sizes_of(case, values, expected)
    for name, right in expected.items():
        x = found[name]
        is_right = x.shape == right.shape and bool(x.isfinite().all())
        errors[name] = (x.double() - right).norm().item() / sizes[name] if is_right else math.inf
    if case.operator in DELTA and any(case.limit(name) < error < math.inf for name, error in errors.items()):
        # Strong writes of similar keys: what a rounding of the inputs does to the exact result. The kernels round five
        # times in a row: the products for the inverses (in tf32 before, which the interpreter does not round), the
        # inverses, the new values, the states, the weights.
        moved = expected_of(case, _rounded_once_more(case, values))
        for name, right in expected.items():
            change = (moved[name] - right).norm().item() / sizes[name]
            errors[name] *= min(1.0, case.limit(name) / max(5 * change, 1e-30))
    return errors


def sizes_of(case: Case, values: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """What the error of each result is relative to: its norm, or where numbers cancel a part of theirs."""
    sizes = {name: max(x.norm().item(), FLOOR * math.sqrt(x.numel())) for name, x in expected.items()}
    if "dg" in expected:
        # What GLA calls q and dq, with the heads of dg; k ⊙ dk has what a carry's gradient adds to it.
        pairs = [(values["do"], expected["o"])] if case.operator == "gsa" else [(values["q"], expected["dq"])]
        if case.operator == "scalar_decay":
            pairs.append((values["k"], expected["dk"]))
        cancels = max((_like(x, expected["dg"]).double() * _like(dx, expected["dg"])).norm().item() for x, dx in pairs)
        sizes["dg"] = max(sizes["dg"], CANCELLING.get(case.operator, 1e-2) * cancels)
    if case.operator in DELTA:
        # transitions are I less a sum of products: what remains of a state is as exact as the state was
        for name, entering in (("carry_out", "carry_in"), ("dcarry_in", "dcarry_out")):
            sizes[name] = max(sizes[name], 0.05 * values[entering].norm().item())
    if case.operator == "softmax":
        # differences of numbers of size 1: with a single key there is nothing left
        for name in ("dq", "dk"):
            sizes[name] = max(sizes[name], 1e-2 * math.sqrt(expected[name].numel()))
    return sizes


def _like(x: Tensor, dg: Tensor) -> Tensor:
    return x.repeat_interleave(dg.shape[2] // x.shape[2], 2)


def _rounded_once_more(case: Case, values: dict[str, Tensor]) -> dict[str, Tensor]:
    unit = torch.finfo(DTYPES[case.dtype]).eps / 2
    generator = torch.Generator(DEVICE).manual_seed(1)
    moved = dict(values)
    for name in ("q", "k", "v", "do"):
        x = values[name].double()
        noise = torch.rand(x.shape, generator=generator, device=DEVICE, dtype=torch.float64)
        moved[name] = x * (1 + unit * (2 * noise - 1))
    return moved


# --- processes ---


def work(cases: list[tuple[int, Case]], out: Path, deadline: float) -> None:
    """Run cases one after another; the line of a case is written before it starts, and its errors after it."""
    with out.open("a") as file:
        for index, case in cases:
            if time.time() > deadline:
                return
            print(json.dumps({"start": index}), file=file, flush=True)
            try:
                errors = errors_of(case)
                row: dict[str, Any] = {"errors": errors}
            except Exception as error:
                row = {"crash": f"{type(error).__name__}: {error}"[:300]}
                if "CUDA" in str(error) and "out of memory" not in str(error):
                    # the process cannot use the GPU any more
                    print(json.dumps({"index": index, **row}), file=file, flush=True)
                    os._exit(3)
            print(json.dumps({"index": index, **row}), file=file, flush=True)


def _shared(case: Case) -> tuple[Any, ...]:
    return case.operator, case.K, case.V, case.dtype


def _read(out: Path) -> tuple[dict[int, dict[str, Any]], int | None]:
    rows, started = {}, None
    for line in out.read_text().splitlines() if out.exists() else []:
        row = json.loads(line)
        if "start" in row:
            started = row["start"]
        else:
            rows[row["index"]] = row
    return rows, started


def campaign(arguments: argparse.Namespace) -> int:
    cases = draw(arguments.seed, arguments.cases, arguments.only)
    deadline = time.time() + arguments.seconds
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[int, dict[str, Any]] = {}
    running: dict[int, subprocess.Popen[bytes]] = {}

    def start(number: int) -> None:
        command = [sys.executable, "-m", "lab.campaigns.operator_shapes", str(folder), "--worker", str(number)]
        command += ["--cases", str(arguments.cases), "--seed", str(arguments.seed), "--deadline", str(deadline)]
        command += ["--only", ",".join(arguments.only), "--processes", str(arguments.processes)]
        running[number] = subprocess.Popen(command, stderr=(folder / f"stderr_{number}").open("ab"))

    for number in range(arguments.processes):
        start(number)
    while running:
        time.sleep(0.2)
        for number, process in list(running.items()):
            hung = time.time() > deadline + 40
            if hung:
                process.kill()
            if process.poll() is None:
                continue
            del running[number]
            rows, started = _read(folder / f"worker_{number}.jsonl")
            if process.returncode != 0 and started is not None:
                if started not in rows:
                    row = {"index": started, "crash": "hung" if hung else f"process ended: {process.returncode}"}
                    with (folder / f"worker_{number}.jsonl").open("a") as file:
                        print(json.dumps(row), file=file)
                if time.time() < deadline - 15:
                    start(number)
    for number in range(arguments.processes):
        results |= _read(folder / f"worker_{number}.jsonl")[0]
    failed = report(cases, results, folder)
    return max(failed, min(1, check_compiled())) if arguments.code else failed


def report(cases: list[Case], results: dict[int, dict[str, Any]], folder: Path) -> int:
    worst: dict[tuple[str, str], dict[str, tuple[float, int]]] = defaultdict(dict)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    failed: list[str] = []
    with (folder / "cases.jsonl").open("w") as file:
        for index, row in sorted(results.items()):
            case = cases[index]
            key = case.operator, case.dtype
            counts[key] += 1
            errors = row.get("errors", {})
            off = {name: error for name, error in errors.items() if not error <= case.limit(name)}
            for name, error in errors.items():
                if name not in off and error >= worst[key].get(name, (0.0, 0))[0]:
                    worst[key][name] = error, index
            if off or "crash" in row:
                failed.append(f"{case}: {row.get('crash') or {name: f'{error:.1e}' for name, error in off.items()}}")
            print(json.dumps({"case": repr(case), **row}), file=file)
    for line in failed[:400]:
        print("FAILED", line)
    print(f"\n{'operator':<13}{'dtype':<6}{'cases':>6}  largest errors of those within their limits")
    for key in sorted(counts):
        errors_text = ", ".join(f"{name} {error:.1e}" for name, (error, _) in worst[key].items())
        print(f"{key[0]:<13}{key[1]:<6}{counts[key]:>6}  {errors_text}")
    print(f"{len(results)} of {len(cases)} cases, {len(failed)} failed")
    return 1 if failed or not results else 0


def _wrong_code(cubin: Path) -> list[str]:
    code = cubin.read_bytes()
    return wrong_descriptors(code) + wrong_addresses(cubin.with_suffix(".ptx").read_text(), code)


def check_compiled() -> int:
    """Look at the machine code of all kernels that this machine has compiled; the number of wrong ones."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton/cache"))
    cubins = sorted(cache.glob("*/*.cubin"))
    with Pool(os.cpu_count()) as pool:
        found = pool.map(_wrong_code, cubins)
    wrong = [(cubin, words) for cubin, words in zip(cubins, found, strict=True) if words]
    for cubin, words in wrong[:40]:
        print(f"WRONG CODE {cubin.stem} {cubin.parent.name[:12]}: {words[0]}")
    print(f"{len(cubins)} compiled kernels, {len(wrong)} with wrong descriptors or addresses")
    return len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--cases", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*ALL])
    parser.add_argument("--code", action="store_true", help="look at the machine code of all compiled kernels, too")
    parser.add_argument("--case", help="'Case(...)': one case, in this process")
    parser.add_argument("--worker", type=int)
    parser.add_argument("--deadline", type=float)
    arguments = parser.parse_args()
    # fp32 products of PyTorch's passes must not use tf32
    torch.set_float32_matmul_precision("highest")
    if arguments.case is not None:
        print(errors_of(eval(arguments.case, {"Case": Case})))
        return 0
    if arguments.worker is None:
        return campaign(arguments)
    cases = draw(arguments.seed, arguments.cases, arguments.only)
    out = Path(arguments.out, f"worker_{arguments.worker}.jsonl")
    done, _ = _read(out)
    # Whole groups, so that each kernel is compiled by one process; only the start of a group on a short run.
    groups = [list(group) for _, group in itertools.groupby(range(len(cases)), lambda i: _shared(cases[i]))]
    own = [i for group in groups[arguments.worker :: arguments.processes] for i in group if i not in done]
    work([(i, cases[i]) for i in own], out, arguments.deadline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
