"""Question: how many bytes does a rank send, and what more does it compute? (Table 1 of ZeCO and of LASP-1)
Command: python -m lab.paper.table_1
Date: 2026-11-27; 2, 4 and 8 ranks of gloo on CPUs: bytes and operations are counted, not timed
Answer: lab/results/paper_table_1.json, docs/papers.md.

One layer, forward and backward, 16 heads of 16 × 16, 128 tokens a rank, fp32. Bytes are those that the busiest rank
gives to `torch.distributed` for others, of an all-gather its part for each of the P − 1 others. FLOPs are of matrix
products; multiplications those of elementwise operations, folds of states in the worker's thread included. Both are of
the rank with the most; `dp` is the same layer on a rank alone, with the same number of tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lab import forked_ranks
from lab.paper import store
from zeco_train.bench import attention
from zeco_train.bench.attention import AttentionConfig, build_variant
from zeco_train.bench.operator import Shape
from zeco_train.bench.session import Session
from zeco_train.collectives import all_gather, chain, wire
from zeco_train.lifecycle.end import Advice, Job, run_job
from zeco_train.ops import attend, mix, seam
from zeco_train.system.command import Parser, docstring, errors_in_a_line

# By the names of `bench attention`; Megatron-SP and Ulysses compute softmax attention, as in the papers.
VARIANTS = (
    "dp",
    "ulysses",
    "megatron_sp",
    "all_gather:contiguous",
    "ring",
    "gla:dp",
    "gla:lasp1",
    "gla:lasp2",
    "gla:zeco",
)
HEADS, DIM, TOKENS = 16, 16, 128
# What torch's own counter leaves out; of causal attention too it counts the whole square.
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_PRODUCTS = {torch.ops.aten.mul, torch.ops.aten.mul_, torch.ops.aten.addcmul, torch.ops.aten.addcmul_}


class Counter(TorchDispatchMode):
    """Counts FLOPs of matrix products, and multiplications of elementwise operations, inside the project's ops, too."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.multiplications = 0
        # A dispatcher does not look into them.
        zeco = torch.ops.zeco
        self._inside: dict[Any, Callable[..., Any]] = {
            zeco.mix.default: mix._mix,
            zeco.mix_backward.default: mix._mix_backward,
        }
        self._inside[zeco.attend.default] = attend._attend._init_fn
        self._inside[zeco.attend_backward.default] = attend._attend_backward._init_fn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (inside := self._inside.get(func)) is not None:
            with self:
                return inside(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is _ATTENTION:
            self.flops += sdpa_flop_count(*(x.shape for x in args[:3]))
        elif packet is _ATTENTION_BACKWARD:
            self.flops += sdpa_backward_flop_count(*(x.shape for x in args[:4]))
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif packet in _PRODUCTS:
            self.multiplications += out.numel()
        return out


class Wires:
    """Counts what this rank gives to `torch.distributed` for other ranks."""

    def __init__(self) -> None:
        self.sent = 0.0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Of calls inside."""
        rank, others = dist.get_rank(), dist.get_world_size() - 1
        share = others / (others + 1)
        sizes: dict[tuple[Any, str], Callable[..., float]] = {
            (wire.Wire, "send"): lambda _, tensor, *__: tensor.nbytes,
            (wire.Wire, "send_and_receive"): lambda _, sent, __: sum(message.tensor.nbytes for message in sent),
            (dist, "broadcast"): lambda tensor, *_, group_src=None, **__: tensor.nbytes * (group_src == rank),
            (dist, "all_gather_into_tensor"): lambda _, part, *__, **___: part.nbytes * others,
            (wire, "all_gather_single"): lambda _, part, *__, **___: part.nbytes * others,
            (dist, "reduce_scatter_tensor"): lambda _, whole, *__, **___: whole.nbytes * share,
            (dist, "all_to_all_single"): _to_others,
        }
        with contextlib.ExitStack() as stack:
            for (module, name), size in sizes.items():
                original = getattr(module, name)
                stack.enter_context(mock.patch.object(module, name, self._counted(original, size)))
            yield

    def _counted(self, original: Callable[..., Any], size: Callable[..., float]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:  # a function, so that a method of a class stays one
            self.sent += size(*args, **kwargs)
            return original(*args, **kwargs)

        return call


def _to_others(_: Tensor, parts: Tensor, received: Any = None, sent: Any = None, **__: Any) -> float:
    if sent is None:
        return parts.nbytes * (1 - 1 / dist.get_world_size())
    return (sum(sent) - sent[dist.get_rank()]) * parts.element_size()


@contextlib.contextmanager
def _folds(found: list[int]) -> Iterator[None]:
    # Of states in the worker's thread, which a dispatch mode of the caller's does not see.
    caller = threading.get_ident()

    def counted(state: Tensor, transition: Tensor, incoming: Tensor) -> Tensor:
        if threading.get_ident() != caller:
            found.append(state.numel())
        return seam.fold(state, transition, incoming)

    with mock.patch.object(all_gather, "fold", counted), mock.patch.object(chain, "fold", counted):
        yield


def counts(name: str, session: Session) -> dict[str, float]:
    """What this rank sends and computes, forward, and forward and backward."""
    variant = attention.VARIANTS[name]
    is_linear = variant.backend is not None
    shape = Shape(HEADS, DIM, DIM, TOKENS, operator="gla" if is_linear else "softmax")
    operator = build_variant(variant, shape, None, session)
    generator = torch.Generator().manual_seed(session.rank)
    sizes = (1, TOKENS, HEADS, DIM)
    leaves = [torch.randn(sizes, generator=generator).requires_grad_() for _ in range(3)]
    if is_linear:
        leaves.append((-torch.rand(sizes, generator=generator)).requires_grad_())
    operator.attention(*leaves).sum().backward()
    session.settle()
    wires, counter, folds, row = Wires(), Counter(), list[int](), dict[str, float]()

    def add(name: str) -> None:
        session.settle()
        row.update({f"bytes_{name}": wires.sent, f"flops_{name}": float(counter.flops)})
        row[f"multiplications_{name}"] = float(counter.multiplications + sum(folds))

    with wires.counting(), _folds(folds):
        with counter:
            o = operator.attention(*leaves)
        add("forward")
        with counter:
            o.sum().backward()
        add("both")
    return row


def _measure(out: Path, job: Job) -> int:
    config = AttentionConfig(heads=HEADS, head_dim=DIM, tokens=[TOKENS])
    session = Session.open(config, job.launch, job)
    rows = []
    for name in VARIANTS:
        of_ranks = session.gather(counts(name, session))
        rows.append({"variant": name, "ranks": session.world_size} | _most(of_ranks))
    session.drain()
    if session.mesh.is_main:
        out.write_text(json.dumps(rows))
    return 0


def _most(of_ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: max(row[key] for row in of_ranks) for key in of_ranks[0]}


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = Parser(
        prog="python -m lab.paper.table_1",
        description=docstring(sys.modules[__name__]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--out", type=Path, default=store.RESULTS / "paper_table_1.json")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="zeco-table-") as name:
        for ranks in options.ranks:
            found = Path(name) / f"{ranks}.json"
            run = partial(_measure, found)
            started = forked_ranks.start(ranks, lambda rank: run_job(run, Advice("", "", "")), Path(name))  # noqa: B023
            codes = started.wait(300.0)
            if any(code != 0 for code in codes):
                raise SystemExit(f"{ranks} ranks: exit codes {codes}: {started.errors()}")
            rows += json.loads(found.read_text())
    command = f"python -m lab.paper.table_1 --ranks {' '.join(map(str, options.ranks))}"
    shape = {"heads": HEADS, "dim": DIM, "tokens": TOKENS}
    store.write(options.out, command, "gloo on CPU ranks, counted", rows, **shape)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
