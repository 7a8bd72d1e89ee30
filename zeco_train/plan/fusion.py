"""When memory lives in a graph of `torch.compile`, whose elementwise chains are taken to be fused as Inductor does."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_map

from zeco_train.plan.allocations import Bytes, Peak, Setting, allocated_inside, is_elementwise, storage_of


# Work between two times at which memory is allocated and freed: a product or operator, or fused elementwise work, by
# the first node; what it reads and writes by storage.
@dataclass
class _Kernel:
    node: fx.Node
    is_fused: bool
    reads: dict[int, Bytes]
    writes: dict[int, Bytes]


class Schedule:
    """When memory lives in a graph whose elementwise chains are fused, up to the products and operators that read them.

    `saved` is what the forward pass keeps, parameters aside.
    """

    def __init__(self, graph: fx.Graph, setting: Setting, weights: set[int]) -> None:
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
        self.mlp_traffic = self._traffic(kernel for kernel in self._kernels if is_of_mlp(kernel.node))
        self.peak, self.attending = self._walk(live)
        self.widest = max(x for kernel in self._kernels for x in kernel.writes.values())

    def _amounts(self, values: Iterable[Tensor]) -> dict[int, Bytes]:
        return {storage_of(x): self._setting.amount(x.untyped_storage().nbytes()) for x in values}

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
        moving = (kernel for kernel in kernels if is_elementwise(kernel.node.target, kernel.node.args))
        return sum((x for kernel in moving for x in (*kernel.reads.values(), *kernel.writes.values())), Bytes())

    def _walk(self, live: dict[int, Bytes]) -> tuple[Peak, Peak]:
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


def _is_realised(node: fx.Node) -> bool:
    # Whether elementwise work is written to memory: sums, and what products, operators or the next pass read.
    if getattr(node.target, "overloadpacket", None) in _SUMS:
        return True
    return any(
        user.op == "output" or (_is_realised(user) if _is_view(user) else not _is_fused(user)) for user in node.users
    )


def is_of_mlp(node: fx.Node) -> bool:
    """Whether a node is of a block's MLP or its norm."""
    return any(path.split("'].")[-1].split(".")[0] in ("mlp", "mlp_norm") for path, _ in _modules(node))


def _modules(node: fx.Node) -> Iterable[tuple[str, Any]]:
    return node.meta.get("nn_module_stack", {}).values()
