"""How much memory the activations of a block take: measured, on a machine that need not have the planned device.

The way, from `PlannedCase.measured`:

1. One block of the model is built on the meta device: its tensors have shapes, and no memory. Its operators choose what
   they would on the planned device (`assume`), and their kernels launch nothing (`without_launches`).
2. A block that training compiles is traced by torch's compiler up to the partitioner, which cuts the graph in two: what
   the forward graph hands to the backward graph is kept. What each of them has in memory meanwhile, fused as by
   Inductor, is in `graph_memory.py`. A block that is not compiled runs, and `allocations.py` sees each of its tensors.
3. `train.recompute` of a compiled block follows from the same trace: `selective` keeps all but what the MLP and its
   norm keep, `full` the block's input and the states from other ranks. What is not kept exists again when the backward
   pass begins. A block that is not compiled runs in the mode itself.

It runs with a prime number of chunks: memory whose size that number divides grows with the tokens, the rest is fixed.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from models.config import SOFTMAX, LanguageModelConfig
from models.language_model import Block
from models.mixer_registry import LAYERS
from models.parameters import cast
from models.projections import set_matmul
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.operator import assume
from zeco_train.ops.operator_registry import OPERATORS
from zeco_train.ops.position import SequencePosition
from zeco_train.ops.recompute import Recompute
from zeco_train.plan.allocations import Allocations, Bytes, Peak, Setting, amounts_of, stored
from zeco_train.plan.graph_memory import GraphMemory, is_of_mlp
from zeco_train.sp.exchange import local_exchange


@dataclass(frozen=True)
class BlockMemory:
    """Memory and elementwise work of a block, in one recompute mode.

    Attributes:
        kept: for the backward pass, without states that cross ranks and have one size for all lengths.
        backward: beyond that in the backward pass, with the gradients of its parameters as computed.
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


_MEASURED: dict[tuple[str, Setting], dict[Recompute, BlockMemory]] = {}


def measure_block(config: LanguageModelConfig, setting: Setting, recompute: Recompute) -> BlockMemory:
    """Measure a block of a model, once in a process."""
    key = _shape_of(config, setting.mixer), setting._replace(layer=0)
    found = _MEASURED.setdefault(key, {})
    if recompute not in found:
        config = copy.deepcopy(config)
        with assume(setting.target), without_launches():
            found |= _compiled(config, setting) if setting.compiled else {recompute: _eager(config, setting, recompute)}
    return found[recompute]


def _compiled(config: LanguageModelConfig, setting: Setting) -> dict[Recompute, BlockMemory]:
    # One trace without recomputation: recomputed parts begin the backward pass with what was not kept.
    block, of_x, run = _prepare(config, setting, Recompute.none)
    (_, *crossings), graphs = _partitioned(block, run)
    weights = {parameter.nbytes for parameter in block.parameters()}
    forward, backward = (GraphMemory(graph, setting, weights) for graph in graphs)
    whole = stored((node.meta["val"] for node in backward.saved), setting)
    in_mlp = stored((node.meta["val"] for node in backward.saved if is_of_mlp(node)), setting)
    x, nothing = setting.amount(of_x.nbytes), Bytes()
    # Received states; what does not grow with the tokens is counted by the step's segments.
    received = Bytes(stored(crossings[::2], setting).by_token)
    found = {}
    for mode, kept, again, output in (
        (Recompute.none, whole, nothing, nothing),
        (Recompute.selective, whole - in_mlp, forward.mlp_traffic, nothing),
        # The output of a recomputed block exists again.
        (Recompute.full, x + received, forward.traffic, x),
    ):
        found[mode] = BlockMemory(
            kept,
            backward.peak.over(kept - output),
            forward.traffic,
            backward.traffic + again,
            backward.widest,
            backward.attending.over(kept - output),
        )
    return found


def _partitioned(block: Block, run: Any) -> tuple[tuple[Tensor, ...], list[fx.Graph]]:
    """The results of a compiled block, and its forward and backward graph, as `torch.compile` partitions them."""
    # Late, since they take seconds. torch's own `aot_autograd` imports the code generator, too, to log.
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs = list[fx.Graph]()

    def partition(*arguments: Any, **options: Any) -> Any:
        with without_code_generator():
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


def _eager(config: LanguageModelConfig, setting: Setting, recompute: Recompute) -> BlockMemory:
    _, x, run = _prepare(config, setting, recompute)
    with Allocations(setting) as seen:
        y, *crossings = run()
        forward = seen.traffic
        seen.begin()
        # States are counted by the step's segments, since they have one size for all lengths.
        states = sum((amount for amount in amounts_of(crossings, setting).values() if amount.fixed), Bytes())
        of_y = setting.amount(y.nbytes)
        kept = seen.live - of_y - states
        dy = torch.empty_like(y)
        # The output is the next block's input, so it lives on, and is not this one's.
        torch.autograd.backward(y, dy)
    backward, attending = (peak.over(kept + of_y + states) for peak in (seen.peak, seen.attending))
    return BlockMemory(kept + setting.amount(x.nbytes), backward, forward, seen.traffic, seen.widest, attending)


def _prepare(config: LanguageModelConfig, setting: Setting, recompute: Recompute) -> tuple[Block, Tensor, Any]:
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


def _shape_of(config: LanguageModelConfig, mixer: str) -> str:
    # A block depends neither on the vocabulary, nor on which layers are of its kind.
    values = dict(vars(config), name="", vocab_size=0)
    attn = dict(vars(config.attn), every=0, layers=()) if mixer == SOFTMAX else None
    # A parameter of the whole model has a part for each layer.
    layers = config.num_layers if LAYERS[mixer].shared is not None else 0
    return repr(values | {"attn": attn, "num_layers": layers})


# --- stand-ins for modules that are not there, or take too long to import, and for kernels ---


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
def without_launches() -> Iterator[None]:
    """Kernels launch nothing; without Triton they are imported all the same."""
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
    triton: Any = types.ModuleType("triton")
    language: Any = types.ModuleType("triton.language")
    triton.jit, triton.knobs, triton.language = _NoKernel(), _NoKernel(), language
    runtime = types.SimpleNamespace(JITFunction=type("_NoFunction", (), {}), driver=None, _async_compile=None)
    language.__getattr__ = lambda name: _NoKernel()
    with _stand_ins({"triton": triton, "triton.language": language, "triton.runtime": runtime}):
        for one in OPERATORS.values():
            if one.cuda is not None:
                importlib.import_module(one.cuda.partition(":")[0])
        for name in ("ops.gated_norm.kernels", "ops.mamba2.kernels", "kernels.rows"):
            importlib.import_module(f"zeco_train.{name}")


@contextlib.contextmanager
def without_code_generator() -> Iterator[None]:
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
