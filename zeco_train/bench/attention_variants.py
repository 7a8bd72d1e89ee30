"""The variants of case `attention`, by name.

dp                      each rank its own sequence, nothing crosses ranks
all_gather, ring, …     the methods of `sp.attention`
all_gather:contiguous   `all_gather` without pairs: each rank computes its own queries, and the last has the most work
all_gather:parts        `all_gather`, `ulysses` with the heads in parts, as between nodes: the messages of a part travel
ulysses:parts           while another is computed
megatron_sp             as Megatron-LM's sequence parallelism: the activations of all tokens are gathered, each rank has
                        some heads of them, and outputs are reduce-scattered. What is gathered here are queries, keys
                        and values, since projections are not part of the operator; there it is the layer's input.
torch                   PyTorch's own context parallelism (ring), a peer: causal, GPUs only. Its tokens lie in pairs of
                        pieces, one from the front and one from the back of the sequence.
dp:deterministic, …     `dp`, and each method, with `train.deterministic`: FlashAttention's backward pass adds up in one
                        order
gla:dp, gla:zeco, …     linear attention (gla) of as many heads, by backend
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zeco_train.bench.operands import Attention, Shape
from zeco_train.bench.operator import sharded_operator
from zeco_train.bench.session import Session
from zeco_train.bench.variants import Variant, parse_variants
from zeco_train.collectives.wire import Wire
from zeco_train.distributed.mesh import attention_group
from zeco_train.errors import ConfigError
from zeco_train.ops.attend import attend_at
from zeco_train.ops.layer_states import StateInput
from zeco_train.ops.operator_registry import DEFAULT
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.sp.attention.all_gather import AllGather
from zeco_train.sp.attention.method import LocalAttention, ShardedAttention
from zeco_train.sp.attention.method_registry import METHODS, build_attention
from zeco_train.sp.attention.pipelined import NUM_PARTS
from zeco_train.sp.attention.ulysses import Ulysses
from zeco_train.sp.backend_registry import SHARING
from zeco_train.sp.exchange import local_exchange

MEGATRON, TORCH, LINEAR = "megatron_sp", "torch", DEFAULT


@dataclass(frozen=True)
class AttentionVariant:
    """A way of attention over ranks.

    Attributes:
        name: as the user writes it, and as results have it.
        method: of `sp.attention`; `dp`, `megatron_sp` or `torch`; None for linear attention.
        backend: of linear attention.
        build: of the method with other settings than its own.
        deterministic: as `train.deterministic`.
    """

    name: str
    method: str | None = None
    backend: Variant | None = None
    build: Callable[[Wire], ShardedAttention] | None = None
    deterministic: bool = False

    @property
    def is_linear(self) -> bool:
        return self.backend is not None

    @property
    def is_alone(self) -> bool:
        """Whether each rank has its own sequence."""
        return self.method == "dp" if self.backend is None else self.backend.is_dp

    @property
    def reference(self) -> str:
        """The variant that does the same on one rank."""
        return f"{LINEAR}:dp" if self.is_linear else "dp"


# With default settings.
_PLAIN = tuple(AttentionVariant(name, name) for name in ("dp", *METHODS))
_BUILT = (
    AttentionVariant("all_gather:contiguous", "all_gather", build=partial(AllGather, paired=False)),
    AttentionVariant("all_gather:parts", "all_gather", build=partial(AllGather, num_parts=NUM_PARTS)),
    AttentionVariant("ulysses:parts", "ulysses", build=partial(Ulysses, num_parts=NUM_PARTS)),
    AttentionVariant(MEGATRON, MEGATRON),
    AttentionVariant(TORCH, TORCH),
)
_LINEAR = (
    AttentionVariant(f"{LINEAR}:{each.name}", backend=each) for each in parse_variants(["dp", *SHARING], "dp", *SHARING)
)
_ONE_ORDER = (replace(each, name=f"{each.name}:deterministic", deterministic=True) for each in _PLAIN)
DEFAULTS = {each.name: each for each in (*_PLAIN, *_BUILT, *_LINEAR)}
VARIANTS = DEFAULTS | {each.name: each for each in _ONE_ORDER}


@dataclass(frozen=True)
class OnRanks:
    """An operator over the ranks of a sequence.

    Attributes:
        attention: of a rank's operands.
        positions: [T] int64, of a rank's tokens in the sequence.
        within: a forward and its backward pass run inside of it.
    """

    attention: Attention
    positions: Tensor
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def build_variant(variant: AttentionVariant, shape: Shape, window: int | None, session: Session) -> OnRanks:
    """A variant for sequences of `shape.tokens` tokens per rank. Collective.

    Raises:
        ConfigError: these ranks do not support it.
    """
    tokens, rank, alone = shape.tokens, session.rank, variant.is_alone
    offset = 0 if alone else rank * tokens
    own = torch.arange(offset, offset + tokens, device=session.device)
    if variant.backend is not None:
        return OnRanks(sharded_operator(variant.backend, shape, session), own)
    if variant.method == TORCH:
        return _torch_rings(shape, window, session)
    scale, seq_len = shape.key_dim**-0.5, tokens * (1 if alone else session.world_size)
    if variant.method == MEGATRON:
        for heads in (shape.heads, shape.num_groups):
            if heads % session.world_size:
                problem = f"needs ranks that divide the {heads} heads, not {session.world_size}"
                raise ConfigError("variants", MEGATRON, problem)
        span = Span(0, seq_len, window=window)
        return OnRanks(lambda q, k, v: _MegatronSP.apply(q, k, v, span, scale), own)
    method = LocalAttention() if alone else _method(variant, shape, session)
    method.deterministic = variant.deterministic
    exchange = local_exchange().replaced(attention=method)
    position = session.position(exchange, tokens, alone=alone)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_at(q, k, v, scale, position, (StateInput(), StateInput()), window)[0]

    return OnRanks(attention, own)


def _method(variant: AttentionVariant, shape: Shape, session: Session) -> ShardedAttention | LocalAttention:
    assert variant.method is not None
    mesh, spec = session.mesh, METHODS[variant.method]
    if (problem := spec.heads_problem(shape.heads, shape.num_groups, session.world_size)) is not None:
        raise ConfigError("variants", variant.name, problem)
    spec = replace(spec, build=variant.build or spec.build)
    return build_attention(spec, attention_group(mesh), mesh.timeout, mesh.device, mesh.topology.nodes)


class _MegatronSP(torch.autograd.Function):
    # All ranks have the whole sequence of H / P heads, and keep it for the backward pass.
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, span: Span, scale: float) -> Tensor:
        gathered = _all_gather(torch.cat([q, k, v], 2))
        heads = [x.shape[2] for x in (q, k, v)]
        q, k, v = (_own_heads(x) for x in gathered.split(heads, 2))
        found = attend(q, k, v, span, 0, scale)
        ctx.save_for_backward(q, k, v, *found)
        ctx.span, ctx.scale = span, scale
        return _reduce_scatter(_all_heads(found.o))

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        of_o = _own_heads(_all_gather(do))
        grads = attend_backward(of_o, q, k, v, Attended(o, lse), ctx.span, 0, ctx.scale)
        whole = [_all_heads(grad.to(q.dtype)) for grad in grads]
        heads = [x.shape[2] for x in whole]
        return *_reduce_scatter(torch.cat(whole, 2)).split(heads, 2), None, None


def _all_gather(x: Tensor) -> Tensor:
    into = x.new_empty(dist.get_world_size() * x.shape[1], *x.shape[2:])
    dist.all_gather_into_tensor(into, x[0].contiguous())
    return into[None]


def _reduce_scatter(x: Tensor) -> Tensor:
    into = x.new_empty(x.shape[1] // dist.get_world_size(), *x.shape[2:])
    dist.reduce_scatter_tensor(into, x[0].contiguous())
    return into[None]


def _own_heads(x: Tensor) -> Tensor:
    return x.tensor_split(dist.get_world_size(), 2)[dist.get_rank()]


def _all_heads(x: Tensor) -> Tensor:
    # Other ranks' heads are 0: they are absent from the product of a rank's part of the output projection.
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return F.pad(x, (0, 0, rank * x.shape[2], (ranks - 1 - rank) * x.shape[2]))


def _torch_rings(shape: Shape, window: int | None, session: Session) -> OnRanks:
    if not session.on_cuda:
        raise ConfigError("variants", TORCH, "its rings of attention need CUDA")
    if window is not None or shape.num_groups != shape.heads:
        raise ConfigError("variants", TORCH, "is measured without window, and with key_heads=null")
    ranks, rank, half = session.world_size, session.rank, shape.tokens // 2
    first, last = (piece * half + torch.arange(half, device=session.device) for piece in (rank, 2 * ranks - 1 - rank))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    @contextmanager
    def within() -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel

        # It wants a tensor to shard; what attention reads is sharded already.
        buffer = torch.zeros(2 * ranks, device=session.device)
        sharded = context_parallel(
            session.mesh.devices["sp"], buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), sharded:
            yield

    return OnRanks(attention, torch.cat([first, last]), within)
