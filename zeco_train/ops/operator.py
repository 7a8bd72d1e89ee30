"""What an operator is to the rest of the project, and which implementation of it serves a call.

The choice is a function of shapes, dtypes and a `Target`, so that it can be asked about a GPU that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeco_train.ops import accumulation_dtype
from zeco_train.ops.passes import Passes, check_state

# Operands of a number a token and head, or channel, whose dtype is their own; and why it may not be narrow.
WIDE = {
    "g": "log-decays are summed over chunks",
    "log_decay": "log-decays are summed over chunks",
    "beta": "writing strengths are solved for over chunks",
}


class Target(NamedTuple):
    """The device that a call runs on, which chooses its implementation: it need not be there."""

    kind: str  # as `torch.device.type`
    # Compute capability of a GPU, which chooses kernels' options; elsewhere Hopper's, which Triton's interpreter takes.
    architecture: tuple[int, int] = (9, 0)

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """The device of tensors, or the target that `assume` puts in its place."""
        return _of(device) if _assumed is None else _assumed


@cache
def _of(device: torch.device) -> Target:
    if device.type != "cuda":
        return Target(device.type)
    return Target(device.type, torch.cuda.get_device_capability(device))


_assumed: Target | None = None


@contextmanager
def assume(target: Target) -> Iterator[None]:
    """Choose by `target` whatever device tensors are on: for fake tensors, and for the interpreter."""
    global _assumed
    before, _assumed = _assumed, target
    try:
        yield
    finally:
        _assumed = before


# Compute capabilities of GPUs whose programs have at most 99 KB of shared memory.
SMALL = (8, 6), (8, 9), (12, 0), (12, 1)


@dataclass(frozen=True, eq=False)
class KernelRule:
    """The calls that kernels on GPUs serve."""

    # Of tokens; empty: there are no kernels. Decays and strengths are fp32.
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    largest: tuple[int, int | None] | None = None  # K and V; None: any
    row_bytes: int = 1  # rows of K and of V channels are multiples of it
    largest_fp32: int | None = None  # K and V of fp32 tokens, where PyTorch is faster beyond; None: as of others
    largest_small: int | None = None  # K on GPUs of `SMALL`; None: as on others
    # Target → why a GPU runs slower kernels than others of its kind; None: it does not.
    lesser: Callable[[Target], str | None] = lambda target: None

    def serves(self, tokens: Tensor, values: Tensor, *wide: Tensor, target: Target | None = None) -> bool:
        """Whether kernels serve tokens [..., K], values [..., V] and these decays and strengths, or PyTorch does."""
        # Sizes may be symbols of a compiler: only a rule that needs them reads them, as numbers, which can be cached.
        limits = self.largest, self.largest_fp32, self.largest_small
        is_limited = self.row_bytes > 1 or any(limit is not None for limit in limits)
        dims = (int(tokens.shape[-1]), int(values.shape[-1])) if is_limited else (0, 0)
        target = Target.of(tokens.device) if target is None else target
        return problem(self, target, *dims, tokens.dtype, *(x.dtype for x in wide)) is None


@cache
def problem(
    rule: KernelRule, target: Target, key_dim: int, value_dim: int, tokens: torch.dtype, *wide: torch.dtype
) -> str | None:
    """Why kernels do not serve a call; None: they do. K and V may be any number where the rule has no limit."""
    if target.kind != "cuda":
        return f"there are no kernels on {target.kind.upper()}s"
    if not rule.dtypes:
        return "there is no kernel for it"
    if tokens not in rule.dtypes:
        return f"{dtype_name(tokens)} has no kernels, only {', '.join(map(dtype_name, rule.dtypes))}"
    if any(dtype is not torch.float32 for dtype in wide):
        return "decays and strengths have kernels in fp32 only"
    dims = f"head dims K {key_dim}, V {value_dim} have no kernels"
    keys, values = rule.largest or (None, None)
    if (keys is not None and key_dim > keys) or (values is not None and value_dim > values):
        return f"{dims}, at most K {keys}" + ("" if values is None else f", V {values}")
    if rule.largest_small is not None and key_dim > rule.largest_small and target.architecture in SMALL:
        return f"{dims} on GPUs with 100 KB of shared memory, at most K {rule.largest_small}"
    if any(dim * tokens.itemsize % rule.row_bytes for dim in (key_dim, value_dim)):
        return f"{dims}, only multiples of {rule.row_bytes // tokens.itemsize}"
    if rule.largest_fp32 is not None and tokens is torch.float32 and max(key_dim, value_dim) > rule.largest_fp32:
        return f"{dims} in fp32, at most {rule.largest_fp32} each"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """As in settings: bf16, fp32 or fp64."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


# (*operands, scale=K^-1/2, initial_state=0) → o, [B, T, H, V] in the dtype of v, and the state after the last token,
# [B, H, K, V] in fp64 or fp32; differentiable by autograd.
Recurrence = Callable[..., tuple[Tensor, Tensor]]


class Kind(Enum):
    """The kinds of transitions, see `zeco_train.ops.seam`."""

    diagonal = "diagonal"
    matrix = "matrix"


class OperatorTime(NamedTuple):
    """Measured seconds of an operator alone per token and head, forward + backward, for the planner."""

    operator: str
    seconds: float  # at these head dims; others are scaled by K + V
    forward: float  # share of the forward pass
    key_dim: int
    value_dim: int


class PeerFunction(NamedTuple):
    """Function of flash-linear-attention for the same operator, to which `bench` compares it."""

    module: str
    function: str  # takes the operands that have tokens, in the operator's order
    decay: str | None = None  # the constant decays that it is for, by their name in `bench`; None: it has none
    options: tuple[tuple[str, bool], ...] = ()  # keyword arguments
    takes_context: bool = False  # context parallelism, by the argument `cp_context`
    joins_heads: bool = False  # operands and outputs are [B, T, H·K]


_imported: Callable[[str], Passes] = cache(resolve_name)


def arguments_of(op: torch._ops.OpOverload, values: Sequence[Any]) -> dict[str, Any]:
    """The arguments of a call of a custom op by their names in its function, as `_mix_backward` in `ops/mix.py`."""
    return {argument.name: value for argument, value in zip(op._schema.arguments, values, strict=True)}


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator as the rest of the project sees it."""

    operands: tuple[str, ...]  # names, in call order; q, k, v first
    # Of each operand, a letter each: B, the first of all, T; H heads, of which consecutive ones may share one of G; K,
    # V; of a convolution C channels and W inputs; 1. An operand without T is the same for all tokens.
    dims: tuple[str, ...]
    kind: Kind
    portable: Passes  # in PyTorch, for any device and dtype
    oracle: Recurrence  # what `verify` and `bench` compare with, a formula of `zeco_train.ops.oracle`
    # (*operands of one token [B, 1, …], state updated in place, scale) → o, [B, 1, H, V], without gradients. `step`
    # checks the arguments before.
    one_token: Callable[..., Tensor]
    forward_flops: Callable[[int, int, int], float]  # (H, K, V) → FLOPs per token
    # The same, of what the backward pass recomputes: nothing, unless given.
    recomputed_flops: Callable[[int, int, int], float] = lambda *dims: 0.0
    about: str = ""  # for `help`: a line, and the formula
    output: int = 2  # position of the operand whose shape and dtype the outputs have
    keys: int = 0  # position of an operand of tokens [..., K], for `kernels`
    has_scale: bool = True  # outputs have a factor; otherwise the only scale is 1
    # A shard's state depends on its last tokens only: it takes the scan of halos (`Exchange.halo`).
    state_is_halo: bool = False
    # Outputs read the state of the whole sequence, not the one before each token: R, and D_in in reverse, is the scan's
    # `carry_out`, the same on every rank.
    reads_whole: bool = False
    # The implementation on kernels, as "module:name", whose import needs Triton, and the calls that it serves. None:
    # there is none, and PyTorch is as fast.
    cuda: str | None = None
    kernels: KernelRule | None = None
    step_kernels: KernelRule = KernelRule(dtypes=())  # of `one_token`
    # On an H200 in bf16, and on a CPU core in PyTorch and fp32; for None the planner takes the default operator's.
    time: OperatorTime | None = None
    cpu_time: OperatorTime | None = None
    peers: tuple[PeerFunction, ...] = ()  # none: `bench operator` measures it alone

    def select(self, operands: Sequence[Tensor], target: Target | None = None) -> Passes:
        """The implementation that serves a call: the only place that chooses by device, shapes and dtypes.

        The operands of a backward pass may be replaced (`Passes.replaced`). Without a `target` that of the operands'
        device.
        """
        if self.cuda is None or self.kernels is None:
            return self.portable
        wide = (x for name, x in zip(self.operands, operands, strict=True) if name in WIDE)
        is_served = self.kernels.serves(operands[self.keys], operands[self.output], *wide, target=target)
        return _imported(self.cuda) if is_served else self.portable

    def check(self, operands: Sequence[Tensor], doc_ids: Tensor | None, do: Tensor | None = None) -> None:
        """Check the operands of a call, the gradient of the outputs, and doc_ids [T] or [B, T], against each other.

        Raises:
            ValueError: naming the tensor, the expected shape or dtype, and the actual one.
        """
        dims, tensors = self.dims_of, dict(zip(self.operands, operands, strict=True))
        if do is not None:
            dims["do"], tensors["do"] = self.dims[self.output], do
        sizes, first, dtype = {"1": 1}, self.operands[0], operands[0].dtype
        for name, x in tensors.items():
            shape = f"[{', '.join(dims[name])}]"
            if x.dim() != len(dims[name]):
                raise ValueError(f"{name}: expected shape {shape}, got {list(x.shape)}")
            expected = [sizes.setdefault(dim, size) for dim, size in zip(dims[name], x.shape, strict=True)]
            if expected != list(x.shape):
                raise ValueError(f"{name}: expected shape {shape} = {expected}, got {list(x.shape)}")
            if 0 in x.shape:
                raise ValueError(f"{name}: no dimension may be 0, got shape {list(x.shape)}")
            # Those of heads or channels may have a dtype of their own.
            if name not in WIDE and not (x.is_floating_point() and ("T" not in dims[name] or x.dtype == dtype)):
                is_free = name == first or "T" not in dims[name]
                wanted = "a floating point dtype" if is_free else f"{dtype}, the dtype of {first}"
                raise ValueError(f"{name}: expected {wanted}; got {x.dtype}")
            if name in WIDE and x.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{name}: expected float32 or float64, for {WIDE[name]}; got {x.dtype}")
        if "G" in sizes and sizes["H"] % sizes["G"]:
            wanted = f"a number of groups that divides the {sizes['H']} heads of v"
            raise ValueError(f"q: expected {wanted}, got {sizes['G']}")
        of_rows = [sizes["B"], sizes["T"]][sizes["B"] == 1 :]
        if doc_ids is not None and list(doc_ids.shape) != of_rows:
            raise ValueError(f"documents: expected ids of shape {of_rows}, got {list(doc_ids.shape)}")

    @torch.no_grad()
    def step(self, *arguments: Any) -> Tensor:
        """The next token of each sequence: operands [B, 1, …], state, scale (`scale_of`) → outputs [B, 1, …].

        The state [B, H, K, V], in the accumulation dtype and contiguous, is updated in place.

        Raises:
            ValueError: naming the tensor that does not fit, or several tokens.
        """
        count = len(self.operands)
        operands, state, scale = arguments[:count], arguments[count], (*arguments[count + 1 :], None)[0]
        self.check(operands, None)
        check_state(state, "state", torch.Size(self.state_shape(operands)))
        if operands[0].shape[1] != 1:
            name = self.operands[0]
            raise ValueError(f"{name}: expected one token of each sequence, got {operands[0].shape[1]}")
        if state.dtype != (dtype := accumulation_dtype(operands[self.output].dtype)):
            raise ValueError(f"state: expected {dtype}, got {state.dtype}")
        if not state.is_contiguous():
            raise ValueError("state: expected a contiguous tensor, since it is updated in place")
        return self.one_token(*operands, state, self.scale_of(operands, scale))

    @property
    def dims_of(self) -> dict[str, str]:
        return dict(zip(self.operands, self.dims, strict=True))

    @property
    def is_grouped(self) -> bool:
        """Whether heads of values may share one of keys."""
        return any("G" in dims for dims in self.dims)

    def scale_of(self, operands: Sequence[Tensor], scale: float | None) -> float:
        """The factor of the outputs: `scale`; for None K^-1/2, or 1 for an operator that has none."""
        if not self.has_scale and scale not in (None, 1.0):
            raise ValueError(f"scale: the operator has none, expected 1; got {scale:g}")
        default = float(operands[0].shape[-1]) ** -0.5 if self.has_scale else 1.0
        return default if scale is None else scale

    def check_carries(self, carry_in: Tensor | None, want_carry: bool) -> None:
        """Refuse states of other segments for an operator that reads the whole sequence."""
        if self.reads_whole and (carry_in is not None or want_carry):
            name = "want_carry" if carry_in is None else "carry_in"
            raise ValueError(f"{name}: an unmasked operator reads the whole sequence at once, not by train.segments")

    def state_shape(self, operands: Sequence[Tensor]) -> tuple[int, int, int, int]:
        """(B, H, K, V)."""
        query, _, value, *_ = operands
        return value.shape[0], value.shape[2], query.shape[3], value.shape[3]

    def transition_shape(self, operands: Sequence[Tensor]) -> tuple[int, ...]:
        """(B, H, K) or (B, H, K, K)."""
        *outer, key_dim, _ = self.state_shape(operands)
        return (*outer, key_dim) if self.kind is Kind.diagonal else (*outer, key_dim, key_dim)

    def cuts(self, operands: Sequence[Tensor]) -> bool:
        """Whether shapes alone say that the transition is 0: the state after these tokens is theirs alone."""
        return False
