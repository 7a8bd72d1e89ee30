"""Makes what connects the ranks of a sequence, an `Exchange`, from the settings and what the layers of a model need.

Every backend's own scan could carry a halo, the last inputs of the shard before (`Operator.state_is_halo`), as well,
with its transitions, and in rounds that it does not need. So a model with such states has one more scan, over groups of
its own: on CPUs a worker runs one scan after another, and a halo would wait until the state before it has passed all
ranks. With every backend it takes the transport of ZeCO's scans.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeco_train.collectives import ScanWorker
from zeco_train.collectives.halo import HALO
from zeco_train.collectives.topology import Topology, find_topology
from zeco_train.distributed.mesh import ProcessMesh, attention_group, halo_groups, twin_groups
from zeco_train.errors import ConfigError
from zeco_train.ops import accumulation_dtype
from zeco_train.ops.seam import AttentionMethod, Exchange
from zeco_train.sp.attention.method import AttentionLoad, LocalAttention
from zeco_train.sp.attention.method_registry import build_attention, check_heads, choose_method
from zeco_train.sp.backend import LocalScan
from zeco_train.sp.backend_registry import SPConfig
from zeco_train.sp.zeco import AllScan

# Imported where it is used: `zeco_train.functional` connects ranks in programs that have a `models` of their own.
if TYPE_CHECKING:
    from models.config import LanguageModelConfig

Groups = tuple[ProcessGroup, ProcessGroup]
# Length for `sp.attention=auto` where lengths vary, as in generation: with a window, the choice depends on it.
LONG = 1 << 20


def local_exchange() -> Exchange:
    """Of a rank that has whole sequences: nothing is communicated."""
    scan = LocalScan()
    return Exchange(scan, scan, LocalAttention(), is_first=True, is_last=True)


def build_exchange(
    config: SPConfig,
    mesh: ProcessMesh,
    *,
    needs_halo: bool = False,
    softmax: AttentionLoad | None = None,
    deterministic: bool = False,
) -> Exchange:
    """What connects the ranks of a mesh that share a sequence, ready for its tensors. Collective.

    `needs_halo`: the model has states that cross one border only; `softmax`: size of its softmax layers, if any.
    Raises ConfigError if the ranks do not support the configuration, or cannot share the softmax layers' heads.
    """
    halo = halo_groups(mesh) if needs_halo else None
    exchange = connect(config, mesh.scan_groups, mesh.timeout, mesh.device, halo, mesh.topology)
    if softmax is None:
        return exchange
    return exchange.replaced(attention=build_softmax(config, mesh, softmax, deterministic=deterministic))


def connect_model(
    config: SPConfig,
    model: LanguageModelConfig,
    mesh: ProcessMesh,
    seq_len: int = LONG,
    dtype: torch.dtype = torch.bfloat16,
    *,
    deterministic: bool = False,
    replayed: bool = False,
) -> Exchange:
    """`build_exchange` for a model: its size decides what is needed; `replayed` as of `AttentionLoad`. Collective."""
    from models.spec import spec_of

    softmax = softmax_load(model, mesh.sp_size, seq_len, dtype, replayed)
    needs_halo = spec_of(model).needs_halo
    return build_exchange(config, mesh, needs_halo=needs_halo, softmax=softmax, deterministic=deterministic)


def softmax_load(
    model: LanguageModelConfig,
    ranks: int,
    seq_len: int = LONG,
    dtype: torch.dtype = torch.bfloat16,
    replayed: bool = False,
) -> AttentionLoad | None:
    """The size of the model's softmax layers on `ranks` that share a sequence of `seq_len`; None if it has none."""
    from models.attn import AttnShape

    if not model.attn.chosen(model.num_layers):
        return None
    shape = AttnShape.of(model.attn, model.num_heads, model.hidden_size)
    return AttentionLoad(
        heads=shape.heads,
        key_heads=shape.key_heads,
        head_dim=shape.head_dim,
        tokens=seq_len // ranks,
        ranks=ranks,
        window=model.attn.window,
        itemsize=dtype.itemsize,
        wide=accumulation_dtype(dtype).itemsize,
        replayed=replayed,
    )


def check_softmax(config: SPConfig, model: LanguageModelConfig, ranks: int) -> None:
    """Raise `ConfigError` if the method of the model's softmax layers cannot spread their heads over the ranks."""
    if (load := softmax_load(model, ranks)) is not None:
        check_heads(config.attention, load.heads, load.key_heads, ranks)


def build_softmax(
    config: SPConfig, mesh: ProcessMesh, softmax: AttentionLoad, *, deterministic: bool = False
) -> AttentionMethod:
    """The method of softmax layers; arguments and errors as of `build_exchange`. Collective."""
    method = choose_method(config.attention, softmax)
    nodes = mesh.topology.nodes
    return build_attention(method, attention_group(mesh), mesh.timeout, mesh.device, nodes, deterministic=deterministic)


def connect(
    config: SPConfig,
    groups: Groups,
    timeout: timedelta,
    device: torch.device | None = None,
    halo: Groups | None = None,
    topology: Topology | None = None,
) -> Exchange:
    """An `Exchange` over the ranks of an SP group, in `groups` by direction; for softmax layers over one rank only.

    With `device` the groups are warmed up for its tensors, which is collective. `halo`: two more such groups, for a
    model with states that cross one border only. Without `topology`, or nodes in the settings, all ranks are on this
    machine.
    """
    rank, size = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
    topology = config.topology(topology or Topology.one_node(size))
    workers = [tuple(ScanWorker(group, timeout, topology) for group in pair) for pair in (groups, halo) if pair]
    states = config.spec.build(workers[0], config.settings)
    neighbours = states if halo is None else AllScan(workers[1], config.all_scan, (HALO,))
    if device is not None:
        for scan in dict.fromkeys((states, neighbours)):
            scan.prepare(device)
    attention = LocalAttention() if size == 1 else None
    return Exchange(states, neighbours, attention, is_first=rank == 0, is_last=rank == size - 1)


class GroupExchange:
    """An `Exchange` over a process group of a program that is not this project's trainer.

    Made collectively over the group. Methods of softmax attention are made when a layer first needs one.

    Args:
        config: which backend and method of attention.
        group: of torch.distributed, with this process in it; None is the default group.
        timeout: the longest wait for another rank.
        halo: states that cross one border only are sent in a scan of their own.

    Raises:
        ConfigError: torch.distributed is not initialised, or this process is not in the group.
    """

    def __init__(self, config: SPConfig, group: ProcessGroup | None, timeout: timedelta, *, halo: bool = False) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            remedy = "call torch.distributed.init_process_group first; one process alone needs no ranks"
            raise ConfigError("group", group, f"torch.distributed is not initialised: {remedy}")
        group = dist.group.WORLD if group is None else group
        if group is None or (rank := dist.get_rank(group)) < 0:
            raise ConfigError("group", "NON_GROUP_MEMBER", "this process is not a member of it")
        self.group, self.rank, self.size = group, rank, dist.get_world_size(group)
        has_gpus = "nccl" in str(dist.get_backend_config(group))
        self.device = torch.device("cuda", torch.cuda.current_device()) if has_gpus else torch.device("cpu")
        names = ["scan forward", "scan reverse", *(["halo forward", "halo reverse"] if halo else [])]
        forward, reverse, *neighbours = twin_groups(group, timeout, names, urgent=has_gpus)
        of_halo = (neighbours[0], neighbours[1]) if halo else None
        topology = find_topology(forward)
        self.exchange = connect(config, (forward, reverse), timeout, self.device, of_halo, topology)
        self.group_with_timeout = forward  # for messages of the caller's own, while no scan is under way
        self._attention, self._timeout = config.attention, timeout
        self._methods: dict[str, Exchange] = {}

    def for_softmax(self, q: Tensor, k: Tensor, window: int | None, tokens: int) -> Exchange:
        """The exchange with a method for q [B, T, H, D], k [B, T, G, D]; collective at the first that needs another.

        `tokens` of a rank, the same number on all ranks, so that they choose alike.
        """
        if self.size == 1:
            return self.exchange
        load = AttentionLoad(
            heads=q.shape[2],
            key_heads=k.shape[2],
            head_dim=q.shape[3],
            tokens=tokens,
            ranks=self.size,
            window=window,
            itemsize=q.element_size(),
            wide=accumulation_dtype(q.dtype).itemsize,
        )
        method = choose_method(self._attention, load)
        if method.name not in self._methods:
            (group,) = twin_groups(self.group, self._timeout, ["softmax attention"], urgent=self.device.type == "cuda")
            attention = build_attention(method, group, self._timeout, self.device)
            self._methods[method.name] = self.exchange.replaced(attention=attention)
        return self._methods[method.name]
