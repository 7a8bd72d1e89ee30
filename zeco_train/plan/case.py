"""One case to plan: a configuration on a number of ranks of a device, and the counts derived from both."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from data.config import check_split
from models.spec import BlockSpec, ModelSpec, spec_of
from zeco_train.collectives.cost_model import Link, assumed_costs
from zeco_train.collectives.topology import Topology
from zeco_train.config.schema import Config
from zeco_train.distributed.device import Device
from zeco_train.distributed.mesh import resolve_sp_size
from zeco_train.distributed.parallelize import count_shards
from zeco_train.errors import ConfigError
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.linear import Matmul
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.slow_paths import SlowPath, check_kernels, find_slow_paths
from zeco_train.plan.activations import BlockMemory, measure_block
from zeco_train.plan.config import Request
from zeco_train.plan.devices import Gpu, Machine, machine
from zeco_train.training.checks import kernel_calls
from zeco_train.training.config import Compile, CudaGraphs
from zeco_train.training.forward import check_softmax
from zeco_train.training.graphs import capture_problem


@dataclass(frozen=True)
class Case:
    """A configuration on a number of ranks of a device.

    Attributes:
        config: of the run.
        world_size, sp_size: all ranks, and those that share a sequence.
        machine: the device of a rank.
        gpus_per_node: ranks per node.
    """

    config: Config
    world_size: int
    sp_size: int
    machine: Machine
    gpus_per_node: int

    def with_changes(
        self, *, segments: int | None = None, recompute: Recompute | None = None, shard_size: int | None = None
    ) -> Case:
        """A copy with other values of `train` and `parallel`; None leaves a value unchanged."""
        train = dataclasses.replace(
            self.config.train, segments=segments or self.segments, recompute=recompute or self.recompute
        )
        parallel = dataclasses.replace(self.config.parallel, shard_size=shard_size or self.config.parallel.shard_size)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, train=train, parallel=parallel))

    @property
    def dp_size(self) -> int:
        """Groups of ranks that train on different sequences."""
        return self.world_size // self.sp_size

    @property
    def segments(self) -> int:
        """M."""
        return self.config.train.segments

    @property
    def recompute(self) -> Recompute:
        """What the backward pass recomputes."""
        return self.config.train.recompute

    @property
    def micro_steps(self) -> int:
        """Micro-batches per step and dp rank."""
        return self.config.data.global_batch // (self.config.data.micro_batch * self.dp_size)

    @property
    def batch(self) -> int:
        """B."""
        return self.config.data.micro_batch

    @property
    def tokens(self) -> int:
        """Tokens of a rank per pass, of the one with the most: one segment of a micro-batch."""
        return self.batch * -(-self.config.data.seq_len // (self.segments * self.sp_size))

    @property
    def passes(self) -> int:
        """Forward and backward passes with gradients per step: segments of micro-batches."""
        return self.micro_steps * self.segments

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.config.data.global_batch * self.config.data.seq_len

    @property
    def compiled(self) -> bool:
        """Whether blocks are compiled by `torch.compile`."""
        wanted = self.config.train.compile
        return wanted is Compile.always or (wanted is Compile.auto and not self.machine.is_cpu)

    @property
    def is_replayed(self) -> bool:
        """Whether steps are replayed as CUDA graphs."""
        wanted = self.config.train.cuda_graphs is CudaGraphs.auto and not self.machine.is_cpu
        return wanted and capture_problem(self.config) is None

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of weights and activations in compute."""
        return self.config.train.dtype.compute.itemsize

    @property
    def wide_bytes(self) -> int:
        """Bytes per element of accumulated tensors: fp32, fp64 for fp64."""
        return accumulation_dtype(self.config.train.dtype.compute).itemsize

    @property
    def master_bytes(self) -> int:
        """Bytes per element of master weights and their reduced gradients."""
        return self.config.train.dtype.master.itemsize

    @property
    def state_bytes(self) -> int:
        """S: a state [B, H, K, V] of a layer, the largest if they differ."""
        return self.batch * math.prod(self.spec.state_shape) * self.wide_bytes

    @property
    def nodes(self) -> int:
        """Machines that hold the ranks."""
        return -(-self.world_size // self.gpus_per_node)

    @property
    def crosses_nodes(self) -> bool:
        """Whether ranks that share a sequence are on several nodes."""
        straddles = self.nodes > 1 and self.gpus_per_node % self.sp_size != 0
        return self.sp_size > self.gpus_per_node or straddles

    @property
    def topology(self) -> Topology:
        """Nodes of the ranks of a sequence, of the group that is on most of them; as configured, if it is.

        Raises:
            ConfigError: the ranks do not fill the configured nodes.
        """
        found = Topology((self.sp_size,))
        if self.crosses_nodes:
            groups = (range(first, first + self.sp_size) for first in range(0, self.world_size, self.sp_size))
            hosts = ([str(rank // self.gpus_per_node) for rank in group] for group in groups)
            found = max(map(Topology.of_hosts, hosts), key=lambda topology: topology.nodes)
        return self.config.sp.topology(found)

    @property
    def link(self) -> Link:
        """The link of messages between the processes of a sequence; symmetric memory is All-Scan's alone."""
        if self.machine.is_cpu:
            return Link.gloo
        return Link.nccl if self.topology.nodes == 1 else Link.nccl_across_nodes

    @property
    def shards(self) -> int:
        """Ranks over which a parameter is sharded."""
        parallel = self.config.parallel
        return count_shards(parallel.strategy, parallel.shard_size, self.world_size, self.sp_size)

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return spec_of(self.config.model)

    def measured(self, name: str) -> BlockMemory:
        """Memory and elementwise work of the blocks of a kind."""
        config, train = self.config.model, self.config.train
        layer = next(layer for layer in range(config.num_layers) if config.mixer_of(layer) == name)
        found = measure_block(
            config,
            layer,
            train.dtype.compute,
            target=self.machine.target,
            compiled=self.compiled,
            in_pytorch=self.in_pytorch(self.spec.blocks[name]),
            batch=self.batch,
            matmul=train.matmul,
        )
        return found[self.recompute]

    def in_pytorch(self, block: BlockSpec) -> bool:
        """Whether the block's operator runs in PyTorch: on CPUs, and where it has no kernels for these operands."""
        calls = block.calls(self.config.train.dtype.compute)
        served = [call.operator for call in calls if call.problem(self.machine.target) is None]
        return self.machine.is_cpu or (bool(block.operators) and block.operators[-1] not in served)

    def slow_down(self, block: BlockSpec) -> float:
        """Time of the block's operator, or softmax attention, over that of kernels; 1 where it is not measured."""
        calls = [("", call) for call in block.calls(self.config.train.dtype.compute)]
        found = {path.call.operator: path for path in find_slow_paths(calls, self.machine.target, self.tokens)}
        path = found.get(block.operators[-1] if block.operators else "softmax")
        return 1.0 if path is None or path.slow_down is None else path.slow_down

    @property
    def slow_paths(self) -> list[SlowPath]:
        """What runs in PyTorch on GPUs.

        Raises:
            ConfigError: `train.kernels=require` refuses it, or CPUs.
        """
        config, target = self.config, self.machine.target
        return check_kernels("train.kernels", config.train.kernels, kernel_calls(config), target, self.tokens)

    @property
    def last_layers(self) -> dict[str, int]:
        """The last layer of each kind of block, by its name; that of the very last layer comes first."""
        found: dict[str, int] = {}
        for layer in reversed(range(self.config.model.num_layers)):
            found.setdefault(self.config.model.mixer_of(layer), layer)
            if len(found) == len(self.spec.blocks):
                break
        return found

    def block(self, layer: int) -> BlockSpec:
        """Block of a layer; negative numbers count from the last one."""
        return self.spec.blocks[self.config.model.mixer_of(layer % self.config.model.num_layers)]


def build_case(request: Request) -> tuple[Case, list[str]]:
    """The requested case, and the assumptions made for it, one per line.

    Raises:
        ConfigError: an invalid split of the ranks, a scan that cannot run over their nodes, fp8 on a device without, or
            calls that `train.kernels=require` refuses.
    """
    settings, config, notes = request.settings, request.config, []
    gpu = settings.gpu or (Gpu.cpu if config.train.device is Device.cpu else Gpu.h200)
    world_size = settings.world_size or max(1, config.sp.size)
    sp_size = resolve_sp_size(config.sp.size, world_size, config.sp.backend.value)
    unit = world_size // sp_size * config.data.micro_batch
    if "data.global_batch" not in request.given and config.data.global_batch % unit:
        # The experiments' batch is that of one SP group.
        batch = -(-config.data.global_batch // unit) * unit
        notes.append(
            f"data.global_batch={batch}, not {config.data.global_batch}: {world_size // sp_size} groups of ranks take "
            "different sequences; train.py has to be told, too"
        )
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, global_batch=batch))
    count_shards(config.parallel.strategy, config.parallel.shard_size, world_size, sp_size)
    device = _machine(request, gpu)
    if config.train.matmul is Matmul.fp8 and not device.has_fp8:
        raise ConfigError("train.matmul", "fp8", f"{device.name} has no products in fp8; take bf16")
    check_split(config.data, sp_size, world_size // sp_size, config.train.segments)
    check_softmax(config.sp, config.model, sp_size)
    # CPU ranks always share a machine.
    per_node = world_size if gpu is Gpu.cpu else settings.gpus_per_node
    case = Case(config, world_size, sp_size, device, per_node)
    config.sp.scans_over(case.topology)
    for path in case.slow_paths:
        times = "the times above count that" if path.slow_down else "the times above are of kernels, and too short"
        notes.append(f"{path}; {times}")
    return case, notes


def _machine(request: Request, gpu: Gpu) -> Machine:
    """The device, with the overrides of the command line."""
    settings, known = request.settings, machine(gpu)
    flops = known.flops
    if settings.matmul_tflops is not None:
        flops = dict.fromkeys(flops, settings.matmul_tflops * 1e12)

    def given(gigabytes: float | None, otherwise: float) -> float:
        return otherwise if gigabytes is None else gigabytes * 1e9

    return Machine(
        known.name,
        memory=given(settings.memory_gb, known.memory),
        flops=flops,
        bandwidth=given(settings.bandwidth_gbps, known.bandwidth),
        link=given(settings.link_gbps, known.link),
        node_link=given(settings.node_gbps, known.node_link),
        scans=assumed_costs(
            *_alpha_and_beta(settings.scan_alpha_us, settings.scan_gbps),
            *_alpha_and_beta(settings.scan_node_alpha_us, settings.scan_node_gbps),
        ),
    )


def _alpha_and_beta(microseconds: float | None, gigabytes: float | None) -> tuple[float | None, float | None]:
    """Seconds a message, and seconds a byte."""
    return None if microseconds is None else microseconds * 1e-6, None if gigabytes is None else 1e-9 / gigabytes
