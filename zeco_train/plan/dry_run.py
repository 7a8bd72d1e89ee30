"""One rank of a planned run, built and stepped without its peers (`python -m zeco_train.plan … dry_run=true`).

torch's fake process group stands in for all others: its collectives return at once and leave what was in memory. So
mesh, shards and messages have the run's shapes, and values mean nothing. On a GPU the step has the run's tokens, and
its peak memory; on a CPU, where that would take hours, it has few tokens.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from data.loader.batches import Batch
from models.parameters import parameter_rules
from zeco_train.collectives.topology import Topology
from zeco_train.distributed.config import Strategy
from zeco_train.distributed.mesh import ProcessMesh, find_device, init_mesh
from zeco_train.distributed.owned_matrices import local
from zeco_train.errors import ConfigError
from zeco_train.lifecycle.join import Launch
from zeco_train.ops.seam import ScanRequest, StateScan
from zeco_train.plan.advice import Option
from zeco_train.plan.case import PlannedCase
from zeco_train.plan.memory import optimizer_bytes, parameter_bytes
from zeco_train.sp.all_scan_config import AllScanTransport
from zeco_train.sp.backend import TappedScan
from zeco_train.sp.exchange import connect_model
from zeco_train.training.build import build_model, build_step
from zeco_train.training.optim.optimizer_registry import build_optimizer

# Tokens of a segment on a rank of a CPU.
_TOKENS_ON_CPU = 64


@dataclass(frozen=True)
class DryRun:
    """What a rank without peers has after a step.

    Attributes:
        topology: nodes of the ranks of its sequence.
        tokens: of a pass on this rank.
        scans: launched in the step, forward and backward.
        parameters, gradients, optimizer: bytes of this rank's shards.
        planned: the plan's bytes of the same, of the rank with most.
        peak: bytes as torch reports them; None on a CPU.
    """

    rank: int
    world_size: int
    dp_rank: int
    sp_rank: int
    dp_size: int
    sp_size: int
    topology: str
    tokens: int
    scans: tuple[int, int]
    parameters: int
    gradients: int
    optimizer: int
    planned: dict[str, float]
    peak: int | None

    def as_text(self, option: Option) -> str:
        place, (forward, backward) = f"({self.dp_rank}, {self.sp_rank})", self.scans
        lines = [
            f"dry run: rank {self.rank} of {self.world_size}, without its peers",
            f"  mesh (dp × sp) {self.dp_size} × {self.sp_size}, this rank {place}; a sequence on {self.topology}",
            f"  one micro-batch, {self.tokens:,} tokens a pass: {forward} scans forward, {backward} backward",
            f"  {'MB of this rank':<17}{'built':>12}{'planned':>12}",
        ]
        for name, planned in self.planned.items():
            lines.append(f"  {name:<17}{getattr(self, name) / 1e6:>12.6g}{planned / 1e6:>12.6g}")
        if self.peak is None:
            lines.append("  no peak memory: on a CPU the step is short")
        else:
            lines.append(f"  {'peak':<17}{self.peak / 1e6:>12.6g}{option.memory.peak / 1e6:>12.6g}")
        return "\n".join(lines)


def dry_run(case: PlannedCase, rank: int) -> DryRun:
    """Build a rank of the case, and run an optimizer step of one micro-batch.

    Once in a process: caches of DTensor keep the names of groups.

    Raises:
        ConfigError: a rank that the run does not have, a start by torchrun, or a model too large for this machine.
    """
    if rank >= case.world_size:
        raise ConfigError("rank", rank, f"must be < {case.world_size}, the number of ranks")
    if case.config.parallel.strategy is Strategy.torch_ddp:
        raise ConfigError("dry_run", "true", "torch's own DDP needs its peers; take another parallel= than torch_ddp")
    if "RANK" in os.environ or dist.is_initialized():
        raise ConfigError("dry_run", "true", "needs no peers: start it without torchrun")
    device = find_device(case.config.train.device, Launch(0, 1, 0), "train.device")
    if device.type == "cpu":
        tokens = min(case.tokens // case.batch, _TOKENS_ON_CPU)
        case = case.with_changes(seq_len=tokens * case.sp_size * case.segments)
    # Registers the backend; it is torch's own means of tests, at the same place in all supported versions.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    first = rank // case.sp_size * case.sp_size
    hosts = [f"node {each // case.gpus_per_node}" for each in range(first, first + case.sp_size)]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world_size)
    try:
        timeout = timedelta(seconds=case.config.parallel.timeout_seconds)
        launch = Launch(rank, case.world_size, 0)
        return _step(case, init_mesh(launch, case.sp_size, device, timeout, Topology.of_hosts(hosts)))
    finally:
        dist.destroy_process_group()


def _step(case: PlannedCase, mesh: ProcessMesh) -> DryRun:
    config = case.config
    # Symmetric memory needs peers that map it.
    all_scan = replace(config.sp.all_scan, transport=AllScanTransport.p2p)
    config = replace(config, sp=replace(config.sp, all_scan=all_scan))
    if mesh.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    parallel = config.parallel
    model = build_model(config.model, config.train, parallel.strategy, mesh, config.seed, parallel.shard_size)
    optimizer = build_optimizer(parameter_rules(model), config.optim, config.train.dtype.compute)
    exchange = connect_model(config.sp, config.model, mesh, config.data.seq_len, config.train.dtype.compute)
    counted = _Counting(exchange.states)
    step = build_step(config, model, optimizer, exchange.replaced(states=counted), mesh)
    step.backward(_batches(case, mesh), last=True)
    step.update()
    exchange.drain()
    peak = None
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    states = (value for state in optimizer.state.values() for value in state.values())
    return DryRun(
        *(mesh.rank, mesh.world_size, mesh.dp_rank, mesh.sp_rank, mesh.dp_size, mesh.sp_size),
        topology=str(mesh.topology),
        tokens=case.tokens,
        scans=(counted.counts[False], counted.counts[True]),
        parameters=_local_bytes(model.parameters()),
        gradients=_local_bytes(gradients),
        optimizer=_local_bytes(states),
        planned={
            "parameters": parameter_bytes(case, case.master_bytes),
            "gradients": parameter_bytes(case, case.master_bytes),
            "optimizer": optimizer_bytes(case),
        },
        peak=peak,
    )


def _batches(case: PlannedCase, mesh: ProcessMesh) -> list[Batch]:
    # The segments of one micro-batch, of arbitrary tokens; with document resets of a single document.
    seq_len, has_documents = case.config.data.seq_len, case.config.data.reset_state_at_document
    split = mesh.split(seq_len, case.batch, documents=has_documents, segments=case.segments)
    documents = [torch.tensor([0, seq_len])] * case.batch if has_documents else None
    batches = []
    for segment in range(case.segments):
        position = split.position(segment, documents)
        ids = torch.arange(position.num_tokens).remainder(case.config.model.vocab_size)
        ids = ids.expand(case.batch, -1).contiguous()
        batches.append(Batch(ids, ids, position, list(range(case.batch))))
    return batches


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


# Counts launches by direction.
class _Counting(TappedScan):
    def __init__(self, scan: StateScan) -> None:
        super().__init__(scan)
        self.counts = Counter[bool]()

    def launched(self, request: ScanRequest) -> None:
        self.counts[request.reverse] += 1
