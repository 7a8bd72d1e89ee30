"""Memory and elementwise work of a graph of `torch.compile`: which results are in memory, and when.

Inductor joins elementwise operations into kernels, so most results never get to memory. Its rules, as they matter here:

- A matrix product, or an operator of this project, is a kernel of its own. All other work is elementwise (`_is_fused`).
- An elementwise result is in memory if it is a sum, or if a product, an operator or the other pass reads it
  (`_is_in_memory`). Any other is computed inside of each kernel that reads it.
- Elementwise work joins the last elementwise kernel with which it shares a tensor, if what it reads exists by then
  (`_kernel_to_join`).

Then the kernels run in order: a result lives from its kernel to the last one that reads it (`_peaks`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_map

from zeco_train.plan.allocations import Bytes, Peak, Setting, allocated_inside, amounts_of, is_elementwise, storage_of


# A product or operator, or joined elementwise work, by its first node; bytes that it reads and writes by storage.
@dataclass
class _Kernel:
    node: fx.Node
    is_fused: bool
    reads: dict[int, Bytes]
    writes: dict[int, Bytes]


class GraphMemory:
    """Memory and work of a forward or backward graph.

    Attributes:
        saved: nodes that the forward pass keeps for this one, parameters aside.
        traffic, mlp_traffic: bytes of elementwise work, and its part in the MLP and its norm.
        peak, attending: bytes at the most; `attending` in the backward pass of softmax attention.
        widest: the largest tensor.
    """

    def __init__(self, graph: fx.Graph, setting: Setting, weights: set[int]) -> None:
        self._setting, self._kernels = setting, list[_Kernel]()
        # The kernel that writes a storage.
        self._written_by: dict[int, int] = {}
        # By node: what a kernel that needs it reads, its own sources if it is not in memory.
        self._reads: dict[fx.Node, dict[int, Bytes]] = {}
        self._outputs = dict[int, Bytes]()
        self.saved, live = list[fx.Node](), dict[int, Bytes]()
        for node in graph.nodes:
            value, self._reads[node] = node.meta.get("val"), {}
            if node.op == "placeholder" and isinstance(value, Tensor):
                amount = amounts_of([value], setting)
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
        self.mlp_traffic = self._traffic(kernel for kernel in self._kernels if is_of_mlp(kernel.node))
        self.peak, self.attending = self._peaks(live)
        self.widest = max(x for kernel in self._kernels for x in kernel.writes.values())

    def _add(self, node: fx.Node) -> None:
        sources = {key: x for each in node.all_input_nodes for key, x in self._reads[each].items()}
        made = amounts_of(_tensors(node), self._setting)
        if _is_view(node):
            # A part of several results, or what its source is computed from.
            of = self._reads[node.all_input_nodes[0]]
            self._reads[node] = made if made.keys() <= of.keys() else of
        elif (is_fused := _is_fused(node)) and not _is_in_memory(node):
            self._reads[node] = sources
        else:
            self._reads[node] = made
            at = self._kernel_to_join(sources) if is_fused else None
            if at is None:
                at = len(self._kernels)
                self._kernels.append(_Kernel(node, is_fused, {}, {}))
            kernel = self._kernels[at]
            kernel.reads |= {key: x for key, x in sources.items() if key not in kernel.writes}
            kernel.writes |= made
            self._written_by |= dict.fromkeys(made, at)

    def _kernel_to_join(self, sources: dict[int, Bytes]) -> int | None:
        first = max((self._written_by.get(key, 0) for key in sources), default=0)
        for at in reversed(range(first, len(self._kernels))):
            kernel = self._kernels[at]
            if kernel.is_fused and sources.keys() & (kernel.reads.keys() | kernel.writes.keys()):
                return at
        return None

    def _traffic(self, kernels: Iterable[_Kernel]) -> Bytes:
        moving = (kernel for kernel in kernels if is_elementwise(kernel.node.target, kernel.node.args))
        return sum((x for kernel in moving for x in (*kernel.reads.values(), *kernel.writes.values())), Bytes())

    def _peaks(self, live: dict[int, Bytes]) -> tuple[Peak, Peak]:
        last = {key: at for at, kernel in enumerate(self._kernels) for key in (*kernel.writes, *kernel.reads)}
        now = sum(live.values(), Bytes())
        peak, attending = Peak([now]), Peak()
        for at, kernel in enumerate(self._kernels):
            new = [*kernel.writes.values()]
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
            unread = [x for key, x in kernel.writes.items() if last[key] == at and key not in self._outputs]
            now = now + sum(new, Bytes()) - sum(dying, Bytes()) - sum(unread, Bytes())
        return peak, attending

    def _inside(self, node: fx.Node) -> Iterable[Bytes]:
        def empty(x: Any) -> Any:
            value = x.meta["val"] if isinstance(x, fx.Node) else x
            if not isinstance(value, Tensor):
                return value
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")

        return allocated_inside(node.target, tree_map(empty, node.args), self._setting)


def _is_fused(node: fx.Node) -> bool:
    func: Any = node.target
    return func.namespace != "zeco" and is_elementwise(func, node.args)


def _is_view(node: fx.Node) -> bool:
    # Whether it is part of its first input, or all of it.
    if node.target is operator.getitem:
        return True
    of, whole = (
        {storage_of(x) for each in nodes for x in _tensors(each)} for nodes in ([node], node.all_input_nodes[:1])
    )
    return bool(of) and of <= whole


def _tensors(node: fx.Node) -> list[Tensor]:
    return [x for x in tree_flatten(node.meta.get("val"))[0] if isinstance(x, Tensor)]


_SUMS = (torch.ops.aten.sum, torch.ops.aten.mean, torch.ops.aten.amax, torch.ops.aten.cumsum)


def _is_in_memory(node: fx.Node) -> bool:
    if getattr(node.target, "overloadpacket", None) in _SUMS:
        return True
    return any(
        user.op == "output" or (_is_in_memory(user) if _is_view(user) else not _is_fused(user)) for user in node.users
    )


def is_of_mlp(node: fx.Node) -> bool:
    """Whether a node is of a block's MLP or its norm."""
    modules = node.meta.get("nn_module_stack", {}).values()
    return any(path.split("'].")[-1].split(".")[0] in ("mlp", "mlp_norm") for path, _ in modules)
