"""What a block keeps for its backward pass, what that pass takes beside it, and the elementwise work of both: measured.

The block runs once on the meta device, for a target that need not be there (`zeco_train.ops.operator.assume`): compiled
as in training, by the partitioner's graphs, whose elementwise chains are taken to be fused as the code generator does;
else under a mode that sees every allocation. The operators' passes run inside, with kernels that are not launched.

It runs with a prime number of chunks: memory whose size that number divides grows with the tokens, the rest does not.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import operator
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from models.config import SOFTMAX, LanguageModelConfig
from models.language_model import Block
from models.mixer_registry import LAYERS
from models.parameters import cast
from models.projections import set_matmul
from zeco_train.ops import CHUNK, accumulation_dtype
from zeco_train.ops.linear import Matmul
from zeco_train.ops.operator import Target, assume
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import Recompute
from zeco_train.sp.exchange import local_exchange

# Prime, and no factor of a model's widths: more chunks than kernels walk over at once, and few for PyTorch's loops.
_CHUNKS = {True: 1009, False: 37}


class Bytes(NamedTuple):
    """An amount of memory: a part for each token of a rank, and a fixed one."""

    by_token: float = 0.0
    fixed: float = 0.0

    def at(self, tokens: int) -> float:
        """Bytes for a number of tokens."""
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
        """Take one more amount into account."""
        if not any(amount.by_token <= other.by_token and amount.fixed <= other.fixed for other in self.amounts):
            self.amounts.add(amount)

    def at(self, tokens: int) -> float:
        """Largest bytes for a number of tokens."""
        return max(amount.at(tokens) for amount in self.amounts)

    def over(self, base: Bytes) -> Peak:
        """The amounts less `base`."""
        return Peak(amount - base for amount in self.amounts)


@dataclass(frozen=True)
class BlockMemory:
    """Memory and elementwise work of a block, in one recompute mode.

    Attributes:
        kept: for the backward pass, without states that cross ranks and have one size for all lengths.
        backward: beyond that in the backward pass, without gradients of parameters.
        forward_traffic, backward_traffic: bytes of elementwise work; recomputation is in the backward pass.
        widest: the largest tensor.
        attending: as `backward`, in softmax attention alone.
    """

    kept: Bytes
    backward: Peak
    forward_traffic: Bytes
    backward_traffic: Bytes
    widest: Bytes
    attending: Peak


# What the measurement of a block depends on, beside the model.
class _Setting(NamedTuple):
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


_MEASURED: dict[tuple[str, _Setting], dict[Recompute, BlockMemory]] = {}


def measure_block(
    config: LanguageModelConfig,
    layer: int,
    dtype: torch.dtype,
    recompute: Recompute,
    *,
    target: Target,
    compiled: bool,
    in_pytorch: bool,
    batch: int = 1,
    matmul: Matmul = Matmul.bf16,
) -> BlockMemory:
    """Measure the block of a layer; cached.

    Args:
        config: of the model.
        layer: its index.
        dtype: of compute.
        recompute: what the backward pass recomputes.
        target: device to run on, which need not be there.
        compiled: whether blocks are compiled.
        in_pytorch: whether its operator has no kernels there.
        batch: sequences of a pass.
        matmul: format of the linear layers' operands.
    """
    setting = _Setting(config.mixer_of(layer), layer, dtype, matmul, compiled, target, batch, in_pytorch)
    key = _shape_of(config, setting.mixer), setting._replace(layer=0)
    found = _MEASURED.setdefault(key, {})
    if recompute not in found:
        config = copy.deepcopy(config)
        with assume(target), _without_launches():
            found |= _compiled(config, setting) if compiled else {recompute: _eager(config, setting, recompute)}
    return found[recompute]


def _shape_of(config: LanguageModelConfig, mixer: str) -> str:
    # A block depends neither on the vocabulary, nor on which layers are of its kind.
    values = dict(vars(config), name="", vocab_size=0)
    attn = dict(vars(config.attn), every=0, layers=()) if mixer == SOFTMAX else None
    # A parameter of the whole model has a part for each layer.
    layers = config.num_layers if LAYERS[mixer].shared is not None else 0
    return repr(values | {"attn": attn, "num_layers": layers})


def _prepare(config: LanguageModelConfig, setting: _Setting, recompute: Recompute) -> tuple[Block, Tensor, Any]:
    """A block, its input, and a call of it."""
    with torch.device("meta"):
        block = Block(config, LAYERS[setting.mixer], setting.layer)
        cast(block, setting.dtype)
        set_matmul(block, setting.matmul)
        block.recompute = recompute
        wide, tokens = accumulation_dtype(setting.dtype), setting.tokens
        of_residual = wide if config.has_wide_residual else setting.dtype
        x = torch.empty(setting.batch, tokens, config.hidden_size, dtype=of_residual, requires_grad=True)
        position = SequencePosition((0, tokens), exchange=local_exchange())
        position = position.on(x, with_positions=block.attn.reads_positions)
        shared, own = block.attn.shared, block.attn.wide_parameters
        part = None if own is None else own()
        if shared is not None:
            whole = torch.empty(shared.shape(config), dtype=wide, requires_grad=True)
            part = shared.parts(whole)[setting.layer]
    return block, x, partial(block, x, position, (), part)


# --- modules that are not there, or take too long to import; kernels that are not launched ---


# In place of a kernel, or of anything that Triton offers at import.
class _NoKernel:
    def __getitem__(self, grid: Any) -> _NoKernel:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> _NoKernel:
        return self

    def __getattr__(self, name: str) -> _NoKernel:
        return self

    def __bool__(self) -> bool:
        return False


@contextlib.contextmanager
def _stand_ins(modules: Mapping[str, Any]) -> Iterator[None]:
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


@contextlib.contextmanager
def _without_launches() -> Iterator[None]:
    try:
        from triton.runtime.jit import KernelInterface
    except ImportError:
        _import_kernels()
        yield
        return
    launch = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda kernel, grid: _NoKernel()
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launch


def _import_kernels() -> None:
    """Import them where Triton is missing."""
    triton: Any = types.ModuleType("triton")
    language: Any = types.ModuleType("triton.language")
    triton.jit, triton.knobs, triton.language = _NoKernel(), _NoKernel(), language
    triton.cdiv, triton.next_power_of_2 = lambda n, d: -(-n // d), lambda n: 1 << (n - 1).bit_length()
    language.__getattr__ = lambda name: _NoKernel()
    with _stand_ins({"triton": triton, "triton.language": language}):
        for one in OPERATORS.values():
            if one.cuda is not None:
                one.cuda()
        for name in ("zeco_train.ops.gated_norm.kernels", "zeco_train.kernels.rows"):
            importlib.import_module(name)


@contextlib.contextmanager
def _without_code_generator() -> Iterator[None]:
    """The partitioner needs one module of Inductor's that imports all of its code generator, which takes a second."""
    of_partitioner, lowering = "torch._inductor.pattern_matcher", types.ModuleType("torch._inductor.lowering")
    if of_partitioner in sys.modules:
        yield
        return
    lowering.fallback_node_due_to_unsupported_type = None  # type: ignore[attr-defined]
    with _stand_ins({lowering.__name__: lowering}):
        importlib.import_module(of_partitioner)
    try:
        yield
    finally:
        # Another user imports it anew, with the code generator.
        del sys.modules[of_partitioner]


# --- memory that is allocated, and elementwise work ---


class _Allocations(TorchDispatchMode):
    """Sees every allocation, also inside the passes of the project's own ops.

    `live` is allocated since it was entered and not freed; `peak` and `traffic` count from `begin` on.
    """

    def __init__(self, setting: _Setting) -> None:
        super().__init__()
        # References keep the keys of storages from being used again.
        self._setting, self._seen = setting, dict[int, tuple[StorageWeakRef, Bytes]]()
        self._there = dict[int, StorageWeakRef]()
        self.live = self.widest = Bytes()
        self.begin()

    def begin(self, parameters: Iterable[Tensor] = ()) -> None:
        """Begin a pass. Gradients of the parameters, known by their size, are counted by FSDP's units."""
        self._free()
        self._uncounted = {parameter.nbytes for parameter in parameters}
        self.peak, self.attending, self.traffic = Peak([self.live]), Peak(), Bytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = _inside(func, args, self._setting)
        self._free()
        before = self.live
        read = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        for x in read:
            # What is read before it was written has been there.
            if _storage(x) not in self._seen:
                self._there.setdefault(_storage(x), StorageWeakRef(x.untyped_storage()))
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
        if _is_elementwise(func, args) and (is_new or func._schema.is_mutable):
            self.traffic += sum((self._setting.amount(x.nbytes) for x in (*read, *written)), Bytes())
        return found

    def _track(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        if storage._cdata in (self._there.keys() | self._seen.keys()) or storage.nbytes() in self._uncounted:
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


def _inside(func: Any, args: Any, setting: _Setting) -> Iterable[Bytes]:
    # What a backward pass of one of the project's ops allocates, its results among it.
    name = func.name() if isinstance(func, torch._ops.OpOverload) else ""
    if not (name.startswith("zeco::") and name.endswith("_backward")):
        return ()
    if name == "zeco::attend_backward":
        # Gradients are added up in the accumulation dtype: by blocks of keys, or inside FlashAttention.
        _, q, k, v, *_ = args
        return [sum((setting.amount(x.numel() * accumulation_dtype(x.dtype).itemsize) for x in (q, k, v)), Bytes())]
    with _Allocations(setting) as inner:
        if name == "zeco::mix_backward":
            operands, do, saved, _, incoming, _, of, scale, _, doc_ids, _ = args
            local = OPERATORS[of].select(operands).backward(operands, do, saved, incoming, scale, doc_ids)
            local.overlap()
            grads = local.operand_grads(local.state_grad.new_empty(local.state_grad.shape))
        else:
            grads = torch._library.custom_ops.OPDEFS[name]._init_fn(*args)
        del grads
    return inner.peak.amounts


_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "embedding_dense_backward"}


def _is_elementwise(func: Any, args: Any) -> bool:
    # Whether an op's time is that of memory.
    if func.namespace != "zeco":
        return func._schema.name.split("::")[1].rstrip("_") not in _PRODUCTS
    if func.name() in ("zeco::mix", "zeco::mix_backward"):
        return OPERATORS[args[1 if func.name() == "zeco::mix" else 6]].state_is_halo
    return func.name().startswith("zeco::gated_norm")


# --- without a compiler ---


def _eager(config: LanguageModelConfig, setting: _Setting, recompute: Recompute) -> BlockMemory:
    block, x, run = _prepare(config, setting, recompute)
    with _Allocations(setting) as seen:
        y, *crossings = run()
        forward = seen.traffic
        seen.begin(block.parameters())
        crossing = {x.untyped_storage()._cdata: setting.amount(x.untyped_storage().nbytes()) for x in crossings}
        # States are counted by the step's segments, since they have one size for all lengths.
        states = sum((x for x in crossing.values() if x.fixed), Bytes())
        of_y = setting.amount(y.nbytes)
        kept = seen.live - of_y - states
        dy = torch.empty_like(y)
        # The output is the next block's input, so it lives on, and is not this one's.
        torch.autograd.backward(y, dy)
    backward, attending = (peak.over(kept + of_y + states) for peak in (seen.peak, seen.attending))
    return BlockMemory(kept + setting.amount(x.nbytes), backward, forward, seen.traffic, seen.widest, attending)


# --- with a compiler ---


def _compiled(config: LanguageModelConfig, setting: _Setting) -> Mapping[Recompute, BlockMemory]:
    # One trace without recomputation: recomputed parts begin the backward pass with what was not kept.
    block, of_x, run = _prepare(config, setting, Recompute.none)
    (_, *crossings), (forward, backward) = _partitioned(block, run)
    weights = {parameter.nbytes for parameter in block.parameters()}
    first, second = (_Schedule(graph, setting, weights) for graph in (forward, backward))
    whole = _stored((node.meta["val"] for node in second.saved), setting)
    in_mlp = _stored((node.meta["val"] for node in second.saved if _is_of_mlp(node)), setting)
    x = setting.amount(of_x.nbytes)
    # States have a size for all lengths, and are counted by the step's segments.
    replayed = Bytes(_stored(crossings[::2], setting).by_token)
    kept = {Recompute.none: whole, Recompute.selective: whole - in_mlp, Recompute.full: x + replayed}
    # The output of a recomputed block exists again.
    output = {Recompute.none: Bytes(), Recompute.selective: Bytes(), Recompute.full: x}
    again = {Recompute.none: Bytes(), Recompute.selective: first.mlp_traffic, Recompute.full: first.traffic}
    return {
        mode: BlockMemory(
            kept[mode],
            second.peak.over(kept[mode] - output[mode]),
            first.traffic,
            second.traffic + again[mode],
            second.widest,
            second.attending.over(kept[mode] - output[mode]),
        )
        for mode in Recompute
    }


def _partitioned(block: Block, run: Any) -> tuple[tuple[Tensor, ...], list[fx.Graph]]:
    """The results of a compiled block, and its forward and backward graph, as `torch.compile` partitions them."""
    # Late, since they take seconds. torch's own `aot_autograd` imports the code generator, too, to log.
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs = list[fx.Graph]()

    def partition(*arguments: Any, **options: Any) -> Any:
        with _without_code_generator():
            modules = min_cut_rematerialization_partition(*arguments, **options)
        graphs.extend(module.graph for module in modules)
        return modules

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        return aot_module_simplified(
            module,
            inputs,
            fw_compiler=lambda module, _: module.forward,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )

    # All blocks have one code, of which a compiler takes few forms.
    torch._dynamo.reset()
    block.compile_compute(backend=backend)
    return run(), graphs


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _stored(tensors: Iterable[Tensor], setting: _Setting) -> Bytes:
    storages = {_storage(x): setting.amount(x.untyped_storage().nbytes()) for x in tensors}
    return sum(storages.values(), Bytes())


def _is_of_mlp(node: fx.Node) -> bool:
    return any(path.split("'].")[-1].split(".")[0] in ("mlp", "mlp_norm") for path, _ in _modules(node))


def _modules(node: fx.Node) -> Iterable[tuple[str, Any]]:
    return node.meta.get("nn_module_stack", {}).values()


# Work between two times at which memory is allocated and freed: a product or operator, or fused elementwise work, by
# the first node; what it reads and writes by storage.
@dataclass
class _Kernel:
    node: fx.Node
    is_fused: bool
    reads: dict[int, Bytes]
    writes: dict[int, Bytes]


class _Schedule:
    """When memory lives in a graph whose elementwise chains are fused, up to the products and operators that read them.

    `saved` is what the forward pass keeps, parameters aside.
    """

    def __init__(self, graph: fx.Graph, setting: _Setting, weights: set[int]) -> None:
        self._setting, self._kernels = setting, list[_Kernel]()
        self._made: dict[int, int] = {}
        # What is read in place of a node that is not in memory.
        self._reads: dict[fx.Node, dict[int, Bytes]] = {}
        self._outputs = dict[int, Bytes]()
        self.saved, live = list[fx.Node](), dict[int, Bytes]()
        for node in graph.nodes:
            value, self._reads[node] = node.meta.get("val"), {}
            if node.op == "placeholder" and isinstance(value, Tensor):
                amount = self._amounts([value])
                # Positions, and restarts at documents, are of all layers.
                is_weight = node.name.startswith("primals") and value.untyped_storage().nbytes() in weights
                is_weight |= not value.is_floating_point()
                self._reads[node] = {} if is_weight else amount
                if not is_weight:
                    live |= amount
                    self.saved += [] if node.name.startswith("tangents") else [node]
            elif node.op == "call_function":
                self._add(node)
            elif node.op == "output":
                self._outputs = {key: x for each in node.all_input_nodes for key, x in self._reads[each].items()}
        self.traffic = self._traffic(self._kernels)
        self.mlp_traffic = self._traffic(kernel for kernel in self._kernels if _is_of_mlp(kernel.node))
        self.peak, self.attending = self._walk(live)
        self.widest = max(x for kernel in self._kernels for x in kernel.writes.values())

    def _amounts(self, values: Iterable[Tensor]) -> dict[int, Bytes]:
        return {_storage(x): self._setting.amount(x.untyped_storage().nbytes()) for x in values}

    def _add(self, node: fx.Node) -> None:
        sources = {key: x for each in node.all_input_nodes for key, x in self._reads[each].items()}
        made = self._amounts(_tensors(node))
        if _is_view(node):
            # A part of several results, or what its source is computed from.
            of = self._reads[node.all_input_nodes[0]]
            self._reads[node] = made if made.keys() <= of.keys() else of
        elif (is_fused := _is_fused(node)) and not _is_realised(node):
            self._reads[node] = sources
        else:
            self._reads[node] = made
            at = self._joined(sources) if is_fused else None
            if at is None:
                at = len(self._kernels)
                self._kernels.append(_Kernel(node, is_fused, {}, {}))
            kernel = self._kernels[at]
            kernel.reads |= {key: x for key, x in sources.items() if key not in kernel.writes}
            kernel.writes |= made
            self._made |= dict.fromkeys(made, at)

    def _joined(self, sources: dict[int, Bytes]) -> int | None:
        # The last kernel that shares a tensor with elementwise work, when all that the work reads is there.
        first = max((self._made.get(key, 0) for key in sources), default=0)
        for at in reversed(range(first, len(self._kernels))):
            kernel = self._kernels[at]
            if kernel.is_fused and sources.keys() & (kernel.reads.keys() | kernel.writes.keys()):
                return at
        return None

    def _traffic(self, kernels: Iterable[_Kernel]) -> Bytes:
        moving = (kernel for kernel in kernels if _is_elementwise(kernel.node.target, kernel.node.args))
        return sum((x for kernel in moving for x in (*kernel.reads.values(), *kernel.writes.values())), Bytes())

    def _walk(self, live: dict[int, Bytes]) -> tuple[Peak, Peak]:
        last = {key: at for at, kernel in enumerate(self._kernels) for key in (*kernel.writes, *kernel.reads)}
        # Gradients of parameters are counted by the units of FSDP.
        uncounted = {key for key, x in self._outputs.items() if x.fixed}
        now = sum(live.values(), Bytes())
        peak, attending = Peak([now]), Peak()
        for at, kernel in enumerate(self._kernels):
            new = [x for key, x in kernel.writes.items() if key not in uncounted]
            dying = [x for key, x in kernel.reads.items() if last[key] == at and key not in self._outputs]
            if kernel.is_fused:
                # Results overwrite what is read for the last time.
                spare = list(dying)
                more = [x for x in new if x not in spare or spare.remove(x)]  # type: ignore[func-returns-value]
                peak.add(now + sum(more, Bytes()))
            else:
                inside = self._inside(kernel.node)
                for amount in (sum(new, Bytes()), *inside):
                    peak.add(now + amount)
                    if kernel.node.target is torch.ops.zeco.attend_backward.default:
                        attending.add(now + amount)
            unread = [
                x
                for key, x in kernel.writes.items()
                if last[key] == at and key not in self._outputs and key not in uncounted
            ]
            now = now + sum(new, Bytes()) - sum(dying, Bytes()) - sum(unread, Bytes())
        return peak, attending

    def _inside(self, node: fx.Node) -> Iterable[Bytes]:
        def empty(x: Any) -> Any:
            value = x.meta["val"] if isinstance(x, fx.Node) else x
            if not isinstance(value, Tensor):
                return value
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")

        return _inside(node.target, tree_map(empty, node.args), self._setting)


def _is_fused(node: fx.Node) -> bool:
    func: Any = node.target
    return func.namespace != "zeco" and _is_elementwise(func, node.args)


def _is_view(node: fx.Node) -> bool:
    # Whether it is part of its first input, or all of it.
    if node.target is operator.getitem:
        return True
    of, whole = (
        {_storage(x) for each in nodes for x in _tensors(each)} for nodes in ([node], node.all_input_nodes[:1])
    )
    return bool(of) and of <= whole


def _tensors(node: fx.Node) -> list[Tensor]:
    return [x for x in tree_flatten(node.meta.get("val"))[0] if isinstance(x, Tensor)]


_SUMS = (torch.ops.aten.sum, torch.ops.aten.mean, torch.ops.aten.amax, torch.ops.aten.cumsum)


def _is_realised(node: fx.Node) -> bool:
    # Whether elementwise work is written to memory: sums, and what products, operators or the next pass read.
    if getattr(node.target, "overloadpacket", None) in _SUMS:
        return True
    return any(
        user.op == "output" or (_is_realised(user) if _is_view(user) else not _is_fused(user)) for user in node.users
    )
