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
from zeco_train.collectives.wire import Wire
from zeco_train.distributed.mesh import attention_group
from zeco_train.errors import ConfigError
from zeco_train.ops.attend import attend_at
from zeco_train.ops.registry import DEFAULT
from zeco_train.ops.seam import StateInput
from zeco_train.ops.softmax.attention import attend, attend_backward
from zeco_train.ops.softmax.span import Attended, Span
from zeco_train.sp.attention.all_gather import AllGather
from zeco_train.sp.attention.method import LocalAttention, ShardedAttention
from zeco_train.sp.attention.pipelined import NUM_PARTS
from zeco_train.sp.attention.registry import METHODS, build_attention
from zeco_train.sp.attention.ulysses import Ulysses
from zeco_train.sp.exchange import local_exchange
from zeco_train.sp.registry import SHARING

CONTIGUOUS, MEGATRON, TORCH, LINEAR = "all_gather:contiguous", "megatron_sp", "torch", DEFAULT
_ONE_ORDER = ":deterministic"
# Methods with other settings.
_BUILT: dict[str, Callable[[Wire], ShardedAttention]] = {
    CONTIGUOUS: partial(AllGather, paired=False),
    "all_gather:parts": partial(AllGather, num_parts=NUM_PARTS),
    "ulysses:parts": partial(Ulysses, num_parts=NUM_PARTS),
}
_ALONE = ("dp", f"{LINEAR}:dp")
VARIANTS = ("dp", *METHODS, *_BUILT, MEGATRON, TORCH, *(f"{LINEAR}:{name}" for name in ("dp", *SHARING)))
DETERMINISTIC = tuple(f"{name}{_ONE_ORDER}" for name in ("dp", *METHODS))


@dataclass(frozen=True)
class Variant:
    """An operator over the ranks of a sequence.

    Attributes:
        attention: of a rank's operands.
        positions: [T] int64, of a rank's tokens in the sequence.
        within: a forward and its backward pass run inside of it.
    """

    attention: Attention
    positions: Tensor
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def is_linear(name: str) -> bool:
    """Whether a variant is of linear attention."""
    return name.startswith(f"{LINEAR}:")


def is_alone(name: str) -> bool:
    """Whether each rank has its own sequence."""
    return name.removesuffix(_ONE_ORDER) in _ALONE


def reference_of(name: str) -> str:
    """The variant that does the same on one rank."""
    return _ALONE[is_linear(name)]


def build_variant(name: str, shape: Shape, window: int | None, session: Session) -> Variant:
    """A variant for sequences of `shape.tokens` tokens per rank. Collective.

    Raises:
        ConfigError: these ranks do not support it.
    """
    tokens, rank = shape.tokens, session.rank
    offset = 0 if is_alone(name) else rank * tokens
    own = torch.arange(offset, offset + tokens, device=session.device)
    if is_linear(name):
        return Variant(sharded_operator(name.partition(":")[2], shape, session), own)
    if name == TORCH:
        return _torch_variant(shape, window, session)
    scale, seq_len = shape.key_dim**-0.5, tokens * (1 if is_alone(name) else session.world_size)
    if name == MEGATRON:
        check_heads(name, shape, session.world_size)
        span = Span(0, seq_len, window=window)
        return Variant(lambda q, k, v: _MegatronSP.apply(q, k, v, span, scale), own)
    method = LocalAttention() if is_alone(name) else _method(name, shape, session)
    method.deterministic = name.endswith(_ONE_ORDER)
    exchange = local_exchange().replaced(attention=method)
    position = session.position(exchange, tokens, alone=is_alone(name))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_at(q, k, v, scale, position, (StateInput(), StateInput()), window)[0]

    return Variant(attention, own)


def check_heads(name: str, shape: Shape, ranks: int) -> None:
    """Raise `ConfigError` if ranks cannot have equally many heads of queries, and of keys."""
    for heads in (shape.heads, shape.num_groups):
        if heads % ranks:
            raise ConfigError("variants", name, f"needs ranks that divide the {heads} heads, not {ranks}")


def _method(name: str, shape: Shape, session: Session) -> ShardedAttention | LocalAttention:
    mesh, spec = session.mesh, METHODS[name.partition(":")[0]]
    if (problem := spec.heads_problem(shape.heads, shape.num_groups, session.world_size)) is not None:
        raise ConfigError("variants", name, problem)
    spec = replace(spec, build=_BUILT.get(name, spec.build))
    return build_attention(spec, attention_group(mesh), mesh.timeout, mesh.device, mesh.topology.nodes)


class _MegatronSP(torch.autograd.Function):
    """Gathered tokens, split heads: all ranks have the whole sequence of H / P heads, and keep it for the backward."""

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
    """[1, T, H, D] → [1, P · T, H, D]."""
    into = x.new_empty(dist.get_world_size() * x.shape[1], *x.shape[2:])
    dist.all_gather_into_tensor(into, x[0].contiguous())
    return into[None]


def _reduce_scatter(x: Tensor) -> Tensor:
    """[1, P · T, H, D] → the sum of this rank's tokens, [1, T, H, D]."""
    into = x.new_empty(x.shape[1] // dist.get_world_size(), *x.shape[2:])
    dist.reduce_scatter_tensor(into, x[0].contiguous())
    return into[None]


def _own_heads(x: Tensor) -> Tensor:
    return x.tensor_split(dist.get_world_size(), 2)[dist.get_rank()]


def _all_heads(x: Tensor) -> Tensor:
    """Those of other ranks are 0, as in the product of a rank's part of the output projection they are absent."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return F.pad(x, (0, 0, rank * x.shape[2], (ranks - 1 - rank) * x.shape[2]))


def _torch_variant(shape: Shape, window: int | None, session: Session) -> Variant:
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

    return Variant(attention, torch.cat([first, last]), within)


def whole_sequence(shape: Shape, ranks: int) -> Shape:
    """The shape of a sequence's tokens on one rank."""
    return replace(shape, tokens=ranks * shape.tokens)
