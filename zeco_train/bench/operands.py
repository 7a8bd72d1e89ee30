"""What case `operator` feeds each operator, and flash-linear-attention's (fla) function for the same operator.

g are decays of each token; log_decay are constants: `retention` are RetNet's, `none` is no decay. If transitions are
matrices, keys have norm 1 and strengths β lie between 0 and 1. Softmax attention, of case `attention`, has neither; its
q has H heads, and its k and v have G.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from models.mixers.retnet import log_decays
from zeco_train.bench.session import Session
from zeco_train.bench.variants import FLA_CP, gather_all
from zeco_train.distributed.mesh import attention_group
from zeco_train.errors import ConfigError
from zeco_train.ops.operator import Kind
from zeco_train.ops.operator_registry import DEFAULT, OPERATORS
from zeco_train.ops.slow_paths import Call
from zeco_train.ops.softmax import attention
from zeco_train.training.config import Dtype

# (operands in the operator's order) → o.
Attention = Callable[..., Tensor]
# fla's gates: logsigmoid / 16.
_GATE_NORMALIZER = 16.0
# What fla raises where it refuses. Lack of memory, and errors of the device, are other subclasses of RuntimeError.
_REFUSALS = (RuntimeError, NotImplementedError, ValueError, AssertionError)
# Operands that are neither cut by tokens nor differentiated.
_CONSTANTS = ("log_decay",)


@dataclass(frozen=True)
class Shape:
    """An operator's sizes.

    Attributes:
        heads, key_dim, value_dim: H, K, V.
        tokens: per rank.
        operator: one of `variants.BENCHED`, or softmax.
        groups: G, heads of q and k; of softmax, of k and v.
        decay: of an operator with constant decays, which of them (`Peer.decay`).
    """

    heads: int
    key_dim: int
    value_dim: int
    tokens: int
    operator: str = DEFAULT
    groups: int | None = None
    decay: str | None = None

    @property
    def num_groups(self) -> int:
        """G; as many as heads unless set."""
        return self.heads if self.groups is None else self.groups

    def sizes(self, dims: str) -> list[int]:
        """The shape of an operand of one sequence, of its dimensions, a letter each (`Operator.dims`)."""
        sizes = {"B": 1, "T": self.tokens, "G": self.num_groups, "H": self.heads}
        return [(sizes | {"K": self.key_dim, "V": self.value_dim})[dim] for dim in dims]

    @property
    def state_elements(self) -> int:
        operator = OPERATORS[self.operator]
        return math.prod(operator.state_shape([torch.empty(self.sizes(dims), device="meta") for dims in operator.dims]))

    def call(self, dtype: Dtype) -> Call:
        """What kernels on GPUs serve, or PyTorch."""
        rule = attention.KERNELS if self.operator == "softmax" else OPERATORS[self.operator].kernels
        assert rule is not None, "no operator here is without kernels"
        return Call(self.operator, rule, dtype.compute, self.key_dim, self.value_dim)

    def __str__(self) -> str:
        decay = "" if self.decay is None else f" ({self.decay})"
        groups = "" if self.groups is None else f", G {self.groups}"
        dims = f"H {self.heads}{groups}, K {self.key_dim}, V {self.value_dim}"
        return f"{self.operator}{decay}: {self.tokens:,} tokens a rank, {dims}"


@dataclass
class Inputs:
    """An operator's operands, and the gradient of its outputs, of one rank or of a whole sequence.

    Attributes:
        operands: by name, in the operator's order; all but constants are leaves, such as q [1, T, G, K].
        do: [1, T, H, V].
    """

    operands: Mapping[str, Tensor]
    do: Tensor = field(repr=False)

    @classmethod
    def random(cls, shape: Shape, dtype: Dtype, seed: int, device: torch.device) -> Inputs:
        """Normal tokens and do, decays and strengths as fla's gates give them, and fixed decays by `Shape.decay`."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(kind: torch.dtype, *dims: int) -> Tensor:
            return torch.randn((1, shape.tokens, *dims), device=device, dtype=kind, generator=generator)

        if shape.operator == "softmax":
            q, do = (normal(dtype.compute, shape.heads, shape.key_dim) for _ in range(2))
            k, v = (normal(dtype.compute, shape.num_groups, shape.key_dim) for _ in range(2))
            return cls.of({"q": q, "k": k, "v": v}, do)
        operator = OPERATORS[shape.operator]
        dims = {"g": "BTH", "beta": "BTH"} | operator.dims_of
        plain = [name for name in operator.operands if name not in ("g", "beta", *_CONSTANTS)]
        known = {name: normal(dtype.compute, *shape.sizes(dims[name])[2:]) for name in plain}
        do = normal(dtype.compute, *shape.sizes(operator.dims[operator.output])[2:])
        # Strengths are drawn after log-decays, also where there are none.
        known["g"] = logsigmoid(normal(dtype.master, *shape.sizes(dims["g"])[2:])) / _GATE_NORMALIZER
        known["beta"] = normal(dtype.master, *shape.sizes(dims["beta"])[2:]).sigmoid()
        if operator.kind is Kind.matrix:
            known["k"] = normalize(known["k"], dim=-1)
        decays = log_decays(shape.heads) if shape.decay == "retention" else torch.zeros(shape.heads)
        known["log_decay"] = decays.to(device, dtype.master)
        return cls.of({name: known[name] for name in operator.operands}, do)

    @classmethod
    def of(cls, operands: Mapping[str, Tensor], do: Tensor) -> Inputs:
        """Inputs as new leaves that share memory."""
        leaves = {name: x.detach().requires_grad_(name not in _CONSTANTS) for name, x in operands.items()}
        return cls(leaves, do.detach())

    @property
    def tokens(self) -> int:
        """T."""
        return self.do.shape[1]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The operands whose gradients are measured."""
        return {name: x for name, x in self.operands.items() if name not in _CONSTANTS}

    def gathered(self) -> Inputs:
        """The whole sequence, all-gathered. Collective."""
        cut = {name: torch.cat(gather_all(x.detach()), 1) for name, x in self.leaves.items()}
        return Inputs.of({**self.operands, **cut}, torch.cat(gather_all(self.do), 1))

    def at(self, positions: Tensor) -> Inputs:
        """Only some tokens, as new leaves."""
        cut = {name: x.detach()[:, positions] for name, x in self.leaves.items()}
        return Inputs.of({**self.operands, **cut}, self.do[:, positions])

    def forget_grads(self) -> None:
        """Drop the gradients: a step must not add to those of the step before."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def results(self, attention: Attention, *, backward: bool = True) -> dict[str, Tensor]:
        """Compute `o` and, with `backward`, all gradients: `dq`, and so on."""
        self.forget_grads()
        with torch.set_grad_enabled(backward):
            o = attention(*self.operands.values())
        found = {"o": o.detach()}
        if backward:
            o.backward(self.do)
            for name, leaf in self.leaves.items():
                assert leaf.grad is not None, name
                found[f"d{name}"] = leaf.grad
        self.forget_grads()
        return found


def peer_attention(shape: Shape, session: Session) -> Attention:
    """The function of fla for the same operator, on a rank's tokens alone.

    Raises:
        ConfigError: fla, or a GPU, is missing; or fla's function does not take this shape.
    """
    if shape.num_groups != shape.heads:
        raise ConfigError("variants", "fla", f"has as many heads of q and k as of v; not groups={shape.groups}")
    operator = OPERATORS[shape.operator]
    peer = next(peer for peer in operator.peers if peer.decay == shape.decay)
    function = partial(getattr(session.import_fla(peer.module), peer.function), **dict(peer.options))
    has_tokens = ["T" in dims for dims in operator.dims]

    def attention(*operands: Tensor) -> Tensor:
        tokens = itertools.compress(operands, has_tokens)
        if not peer.joins_heads:
            return function(*tokens)[0]
        o: Tensor = function(*(x.flatten(2) for x in tokens))[0]
        return o.view(operands[operator.output].shape)

    return attention


def context_parallel(shape: Shape, session: Session) -> Attention:
    """Variant `fla_cp`: fla's own context parallelism for the same operator, over all ranks' tokens. Collective.

    fla 0.6.0 all-gathers a summary of every rank's tokens, [S | M], fp32 [H, K, V + K], and folds those of the ranks
    before; the backward pass does the same with those after. A rank sends (P − 1) · H · K · (V + K) · 4 bytes a pass.

    Raises:
        ConfigError: fla, or a GPU, is missing; or fla has none for this operator or shape.
    """
    peers = {name: peer for name, operator in OPERATORS.items() for peer in operator.peers if peer.takes_context}
    if shape.operator not in peers:
        allowed = f"fla has context parallelism for {' and '.join(peers)}, not {shape.operator}"
        raise ConfigError("variants", FLA_CP, allowed)
    if shape.num_groups != shape.heads:
        raise ConfigError("variants", FLA_CP, f"is measured with as many heads of q and k as of v; not {shape.groups}")
    peer = peers[shape.operator]
    function = getattr(session.import_fla(peer.module, FLA_CP), peer.function)
    build_context = session.import_fla("fla.ops.cp", FLA_CP).build_cp_context
    # Of the whole sequence: fla cuts it at the ranks' borders.
    borders = torch.tensor([0, session.world_size * shape.tokens])
    # On the host too, so that nothing is read from the device in each call.
    context = build_context(
        cu_seqlens=borders.to(session.device), group=attention_group(session.mesh), cu_seqlens_cpu=borders
    )

    def attention(*operands: Tensor) -> Tensor:
        o: Tensor = function(*operands, cp_context=context)[0]
        return o

    return attention


def peer_results(inputs: Inputs, attention: Attention, *, backward: bool, variant: str = "fla") -> dict[str, Tensor]:
    """`Inputs.results` by fla's function; `ConfigError`, for `variant`, if fla refuses it.

    It does some gradients for some GPUs and versions of Triton.
    """
    try:
        return inputs.results(attention, backward=backward)
    except Exception as error:
        if type(error) not in _REFUSALS and not type(error).__module__.startswith("triton."):
            raise
        text = " ".join(str(error).split())
        forward = "; passes=[forward] may be measured" if backward else ""
        raise ConfigError("variants", variant, f"is refused by fla itself ({text}){forward}") from error
