"""Amounts of memory, and a mode that sees every allocation of a pass and the bytes of its elementwise work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from zeco_train.ops import CHUNK, accumulation_dtype
from zeco_train.ops.linear import Matmul
from zeco_train.ops.operator import Target, arguments_of
from zeco_train.ops.operator_registry import OPERATORS

# Prime, and no factor of a model's widths: more chunks than kernels walk over at once, and few for PyTorch's loops.
_CHUNKS = {True: 1009, False: 37}


class Bytes(NamedTuple):
    """An amount of memory: a part for each token of a rank, and a fixed one."""

    by_token: float = 0.0
    fixed: float = 0.0

    def at(self, tokens: int) -> float:
        return self.by_token * tokens + self.fixed

    def __add__(self, other: Bytes) -> Bytes:  # type: ignore[override]
        return Bytes(self.by_token + other.by_token, self.fixed + other.fixed)

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(self.by_token - other.by_token, self.fixed - other.fixed)


class Peak:
    """The largest of several amounts; which one depends on the number of tokens."""

    def __init__(self, amounts: Iterable[Bytes] = ()) -> None:
        self.amounts = {Bytes(), *amounts}

    def add(self, amount: Bytes) -> None:
        if not any(amount.by_token <= other.by_token and amount.fixed <= other.fixed for other in self.amounts):
            self.amounts.add(amount)

    def at(self, tokens: int) -> float:
        """Largest bytes for a number of tokens."""
        return max(amount.at(tokens) for amount in self.amounts)

    def over(self, base: Bytes) -> Peak:
        """The amounts less `base`."""
        return Peak(amount - base for amount in self.amounts)


class Setting(NamedTuple):
    """What the memory of a block depends on, beside the model.

    Attributes:
        mixer, layer: of the block.
        dtype, matmul: of compute, and of the linear layers' operands.
        compiled: whether blocks are compiled.
        target: device to run on, which need not be there.
        batch: sequences of a pass.
        in_pytorch: whether its operator has no kernels there.
    """

    mixer: str
    layer: int
    dtype: torch.dtype
    matmul: Matmul
    compiled: bool
    target: Target
    batch: int
    in_pytorch: bool

    @property
    def tokens(self) -> int:
        return CHUNK * _CHUNKS[not self.in_pytorch]

    def amount(self, nbytes: int) -> Bytes:
        if nbytes % _CHUNKS[not self.in_pytorch]:
            return Bytes(0.0, nbytes)
        return Bytes(nbytes / (self.batch * self.tokens), 0.0)


class Allocations(TorchDispatchMode):
    """Sees every allocation, also inside the passes of the project's own ops.

    `live` is allocated since it was entered and not freed; `peak` and `traffic` count from `begin` on.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        # References keep the keys of storages from being used again.
        self._setting, self._seen = setting, dict[int, tuple[StorageWeakRef, Bytes]]()
        self._there = dict[int, StorageWeakRef]()
        self.live = self.widest = Bytes()
        self.begin()

    def begin(self) -> None:
        """Begin a pass."""
        self._free()
        self.peak, self.attending, self.traffic = Peak([self.live]), Peak(), Bytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = allocated_inside(func, args, self._setting)
        self._free()
        before = self.live
        read = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        for x in read:
            # What is read before it was written has been there.
            if storage_of(x) not in self._seen:
                self._there.setdefault(storage_of(x), StorageWeakRef(x.untyped_storage()))
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.log_sigmoid_forward.default and self._setting.target.kind == "cuda":
            # On GPUs its second result, kept for the backward pass, is empty.
            found = found[0], found[1].new_empty(0)
        for amount in inside:
            self.peak.add(before + amount)
            if func is torch.ops.zeco.attend_backward.default:
                self.attending.add(before + amount)
        written = [x for x in tree_flatten(found)[0] if isinstance(x, Tensor)]
        is_new = sum(map(self._track, written)) > 0
        self.peak.add(self.live)
        if is_elementwise(func, args) and (is_new or func._schema.is_mutable):
            self.traffic += sum((self._setting.amount(x.nbytes) for x in (*read, *written)), Bytes())
        return found

    def _track(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        if storage._cdata in self._there.keys() | self._seen.keys():
            return False
        amount = self._setting.amount(storage.nbytes())
        self._seen[storage._cdata] = StorageWeakRef(storage), amount
        self.live += amount
        self.widest = max(self.widest, amount)
        return True

    def _free(self) -> None:
        for key, (storage, amount) in [*self._seen.items()]:
            if storage.expired():
                del self._seen[key]
                self.live -= amount


def allocated_inside(func: Any, args: Any, setting: Setting) -> Iterable[Bytes]:
    """What a backward pass of one of the project's ops allocates, its results among it."""
    name = func.name() if isinstance(func, torch._ops.OpOverload) else ""
    if not (name.startswith("zeco::") and name.endswith("_backward")):
        return ()
    if name == "zeco::attend_backward":
        q, k, v = (arguments_of(func, args)[operand] for operand in "qkv")
        results = sum((setting.amount(x.nbytes) for x in (q, k, v)), Bytes())
        # Those of queries are added up in the accumulation dtype. Shared keys and values have gradients of each head
        # first, which are added up then.
        sums = setting.amount(q.numel() * accumulation_dtype(q.dtype).itemsize)
        shared = q.shape[2] // k.shape[2]
        of_heads = sum((setting.amount(shared * x.nbytes) for x in (k, v)), Bytes()) if shared > 1 else Bytes()
        return [results + sums + of_heads]
    with Allocations(setting) as inner:
        if name == "zeco::mix_backward":
            given = arguments_of(func, args)
            passes = OPERATORS[given["operator"]].select(given["operands"])
            read = ("operands", "do", "saved", "incoming_state", "scale", "doc_ids")
            local = passes.backward(*(given[name] for name in read))
            local.overlap()
            grads = local.operand_grads(local.state_grad.new_empty(local.state_grad.shape))
        else:
            grads = torch._library.custom_ops.OPDEFS[name]._init_fn(*args)
        del grads
    return inner.peak.amounts


_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "embedding_dense_backward"}


def is_elementwise(func: Any, args: Any) -> bool:
    """Whether an op's time is that of memory."""
    if func.namespace != "zeco":
        return func._schema.name.split("::")[1].rstrip("_") not in _PRODUCTS
    if func.name() in ("zeco::mix", "zeco::mix_backward"):
        return OPERATORS[arguments_of(func, args)["operator"]].state_is_halo
    return func.name().startswith(("zeco::gated_norm", "zeco::mamba2"))


def storage_of(x: Tensor) -> int:
    """A key of the tensor's memory."""
    return x.untyped_storage()._cdata


def amounts_of(tensors: Iterable[Tensor], setting: Setting) -> dict[int, Bytes]:
    """The memory of tensors that may share it, by its key."""
    return {storage_of(x): setting.amount(x.untyped_storage().nbytes()) for x in tensors}


def stored(tensors: Iterable[Tensor], setting: Setting) -> Bytes:
    """The memory of tensors that may share it, in all."""
    return sum(amounts_of(tensors, setting).values(), Bytes())
