"""What is planned: a configuration on a number of ranks of a device, and the counts derived from both."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from data.config import check_split
from models.spec import BlockSpec, ModelSpec, spec_of
from zeco_train.collectives.cost_model import Link, assumed_costs
from zeco_train.collectives.topology import Topology
from zeco_train.collectives.worker import ScanSpec
from zeco_train.config.schema import Config
from zeco_train.distributed.config import Strategy, count_shards, resolve_sp_size
from zeco_train.distributed.mesh import Device
from zeco_train.errors import ConfigError
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.linear import Matmul
from zeco_train.ops.recompute import Recompute
from zeco_train.ops.slow_paths import check_kernels, find_slow_paths
from zeco_train.plan.activations import BlockMemory, measure_block
from zeco_train.plan.allocations import Setting
from zeco_train.plan.config import Request
from zeco_train.plan.devices import Gpu, Machine, machine
from zeco_train.sp.attention.method import MethodSpec
from zeco_train.sp.backend import BackendSpec
from zeco_train.sp.exchange import check_softmax
from zeco_train.training.checks import kernel_calls
from zeco_train.training.config import CudaGraphs
from zeco_train.training.graphs import capture_problem


@dataclass(frozen=True)
class PlannedCase:
    """A configuration on `world_size` ranks, of which `sp_size` share a sequence, each a device `machine`.

    Attributes:
        other_backend, other_scan, other_method: see `by`.
    """

    config: Config
    world_size: int
    sp_size: int
    machine: Machine
    gpus_per_node: int
    other_backend: BackendSpec | None = None
    other_scan: ScanSpec | None = None
    other_method: MethodSpec | None = None

    def by(
        self, backend: BackendSpec | None = None, scan: ScanSpec | None = None, method: MethodSpec | None = None
    ) -> PlannedCase:
        """The same ranks and tokens by another backend, one of its algorithms, or another method of softmax attention.

        Without an algorithm a backend takes the configured one, or the fastest.
        """
        return replace(self, other_backend=backend, other_scan=scan, other_method=method)

    @property
    def backend(self) -> BackendSpec:
        return self.other_backend or self.config.sp.spec

    def with_changes(
        self,
        *,
        segments: int | None = None,
        recompute: Recompute | None = None,
        shard_size: int | None = None,
        strategy: Strategy | None = None,
        seq_len: int | None = None,
    ) -> PlannedCase:
        """A copy with other values; None leaves one unchanged."""
        train = replace(self.config.train, segments=segments or self.segments, recompute=recompute or self.recompute)
        parallel = replace(
            self.config.parallel,
            shard_size=shard_size or self.config.parallel.shard_size,
            strategy=strategy or self.config.parallel.strategy,
        )
        data = replace(self.config.data, seq_len=seq_len or self.config.data.seq_len)
        return replace(self, config=replace(self.config, train=train, parallel=parallel, data=data))

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
        """Most tokens of a rank in a pass: one segment of a micro-batch."""
        return self.batch * -(-self.config.data.seq_len // (self.segments * self.sp_size))

    @property
    def passes(self) -> int:
        """Forward and backward passes with gradients per step."""
        return self.micro_steps * self.segments

    @property
    def tokens_per_step(self) -> int:
        return self.config.data.global_batch * self.config.data.seq_len

    @property
    def compiled(self) -> bool:
        return self.config.train.compile.applies(self.config.parallel.strategy, on_cuda=not self.machine.is_cpu)

    @property
    def is_replayed(self) -> bool:
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
        """S: the largest state [B, H, K, V] of a layer."""
        return self.batch * math.prod(self.spec.state_shape) * self.wide_bytes

    @property
    def crosses_nodes(self) -> bool:
        """Whether ranks that share a sequence are on several nodes."""
        straddles = self.world_size > self.gpus_per_node and self.gpus_per_node % self.sp_size != 0
        return self.sp_size > self.gpus_per_node or straddles

    @property
    def topology(self) -> Topology:
        """Nodes of the ranks of a sequence, of the group that is on most of them; as configured, if it is."""
        found = Topology((self.sp_size,))
        if self.crosses_nodes:
            groups = (range(first, first + self.sp_size) for first in range(0, self.world_size, self.sp_size))
            hosts = ([str(rank // self.gpus_per_node) for rank in group] for group in groups)
            found = max(map(Topology.of_hosts, hosts), key=lambda topology: topology.nodes)
        return self.config.sp.topology(found)

    @property
    def link(self) -> Link:
        """Link of the ranks' messages; in symmetric memory there are scans and halos only."""
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
        return spec_of(self.config.model)

    def measured(self, name: str) -> BlockMemory:
        """Memory and elementwise work of the blocks of a kind."""
        config, train = self.config.model, self.config.train
        setting = Setting(
            mixer=name,
            layer=next(layer for layer in range(config.num_layers) if config.mixer_of(layer) == name),
            dtype=train.dtype.compute,
            matmul=train.matmul,
            compiled=self.compiled,
            target=self.machine.target,
            batch=self.batch,
            in_pytorch=self.in_pytorch(self.spec.blocks[name]),
        )
        return measure_block(config, setting, train.recompute)

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


def build_case(request: Request) -> tuple[PlannedCase, list[str]]:
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
    if 0 < config.sp.size < world_size and "sp.size" not in request.given:
        notes.append(
            f"sp.size={sp_size} is the experiment's; sp.size={world_size} spreads each sequence over all ranks"
        )
    if "data.global_batch" not in request.given and config.data.global_batch % unit:
        # The experiments' batch is that of one SP group.
        batch = -(-config.data.global_batch // unit) * unit
        notes.append(
            f"data.global_batch={batch}, not {config.data.global_batch}: {world_size // sp_size} groups of ranks take "
            "different sequences; train.py has to be told, too"
        )
        config = replace(config, data=replace(config.data, global_batch=batch))
    count_shards(config.parallel.strategy, config.parallel.shard_size, world_size, sp_size)
    device = _machine(request, gpu)
    if config.train.matmul is Matmul.fp8 and not device.has_fp8:
        raise ConfigError("train.matmul", "fp8", f"{device.name} has no products in fp8; take bf16")
    check_split(config.data, sp_size, world_size // sp_size, config.train.segments)
    check_softmax(config.sp, config.model, sp_size)
    # CPU ranks always share a machine.
    per_node = world_size if gpu is Gpu.cpu else settings.gpus_per_node
    case = PlannedCase(config, world_size, sp_size, device, per_node)
    config.sp.scans_over(case.topology)
    for path in check_kernels("train.kernels", config.train.kernels, kernel_calls(config), device.target, case.tokens):
        times = "the times below count that" if path.slow_down else "the times below are of kernels, and too short"
        notes.append(f"{path}; {times}")
    return case, notes


def _machine(request: Request, gpu: Gpu) -> Machine:
    """The device, with the overrides of the command line."""
    settings, known = request.settings, machine(gpu)
    gigabytes = {"memory": settings.memory_gb, "bandwidth": settings.bandwidth_gbps}
    gigabytes |= {"link": settings.link_gbps, "node_link": settings.node_gbps}
    overrides: dict[str, Any] = {field: given * 1e9 for field, given in gigabytes.items() if given is not None}
    if settings.matmul_tflops is not None:
        overrides["flops"] = dict.fromkeys(known.flops, settings.matmul_tflops * 1e12)
    alphas = settings.scan_alpha_us, settings.scan_node_alpha_us
    alpha, node_alpha = (None if given is None else given * 1e-6 for given in alphas)
    beta, node_beta = (
        None if given is None else 1e-9 / given for given in (settings.scan_gbps, settings.scan_node_gbps)
    )
    return replace(known, scans=assumed_costs(alpha, beta, node_alpha, node_beta), **overrides)
