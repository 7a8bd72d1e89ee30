"""Question: can Ulysses' heads go into peers' memory by strided stores, without packs and messages; is the order right?
Command: python -m lab.ulysses_stores; torchrun --nproc-per-node 2 -m lab.ulysses_stores --time;
    torchrun --nproc-per-node 2 -m lab.ulysses_stores --run zeco_train.bench model model=gla_1b every=[4] …
Date: 2026-11-27, 2 CPU cores; 2026-11-28, 2 × H200
Answer: the protocol is right in 200 orders and fails without each of its rules; the kernels are right in Triton's
    interpreter and on GPUs, but not fast enough for the product: 16,384 tokens of 16 heads of 128 go by heads and back
    in 179 + 200 µs, by messages in 188 + 170; 32,768 in 323 + 323, by messages in 352 + 346: 6 % slower, 7 % faster.

A rank's queries [T, H, D] become all ranks' [tokens, H / P, D] of its heads. `send_kernel` writes each peer's heads,
rows of H / P · D numbers, into the peer's slot, and its own part where it belongs; `receive_kernel` copies what has
arrived out of the slot, since a layer keeps it for its backward pass. Both are kernels of one stream.

- A slot has two buffers, chosen by the parity of the epoch, which is in device memory and advanced by `send_kernel`. A
  rank sends a slot's epoch e + 2 after it has received e + 1 from all, each of whom had received e before it sent that.
- CTA c of `receive_kernel` waits for CTAs c of all senders, and copies what these have written.
- Waits are bounded, failures recorded and seen by later kernels, as in `zeco_train.kernels.all_scan`.
"""

from __future__ import annotations

import argparse
import os
import random
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lab.all_scan_protocol import Memory, Model, ProtocolError, Steps
from zeco_train.collectives.arena import Allocate, allocate_symmetric

CTAS, WARPS, ROWS = 32, 8, 16
_WORD = 8  # bytes; two neighbours are one access of 16


@dataclass(frozen=True)
class _Kernel:
    # Of the model: of a slot, on every rank.
    name: str
    slot: int
    ctas: int


class Shuffles(Model):
    """The protocol above, in any order of ranks and CTAs: each rank runs these kernels one after another."""

    def __init__(self, ranks: int, kernels: list[Any], mutations: tuple[str, ...], seed: int) -> None:
        super().__init__(ranks, kernels, mutations, seed)
        slots = {kernel.slot for kernel in kernels}
        self.memory = {(rank, slot): Memory() for rank in range(ranks) for slot in slots}

    def kernel(self, rank: int, call: Any) -> list[Steps]:
        body = self.send if call.name == "send" else self.receive
        return [body(rank, call, cta) for cta in range(call.ctas)]

    def send(self, rank: int, call: Any, cta: int) -> Steps:
        own, epoch = self.memory[rank, call.slot], 0
        epoch = self.epoch_of(own)
        yield None
        for peer in range(self.ranks):
            there = self.memory[peer, call.slot]
            if peer != rank:
                there.cells[self._cell(epoch, rank, cta)] = epoch, rank
                yield None
                there.flags[rank, cta] = epoch
                yield None
        self.advance(own, epoch, call)

    def receive(self, rank: int, call: Any, cta: int) -> Steps:
        own = self.memory[rank, call.slot]
        epoch = own.epoch
        yield None
        for peer in range(self.ranks):
            if peer != rank:
                if "no wait" not in self.mutations:
                    yield self.reached(own, (peer, cta), epoch)
                found = own.cells.get(self._cell(epoch, peer, cta))
                if found != (epoch, peer):
                    raise ProtocolError(f"a slot holds {found}, not {(epoch, peer)}")
                yield None

    def _cell(self, epoch: int, sender: int, cta: int) -> tuple[int, int, int]:
        return 0 if "one buffer" in self.mutations else epoch % 2, sender, cta


def run_orders(orders: int) -> None:
    """AssertionError: an order is wrong, or none is wrong without a rule."""

    def run(seed: int, *mutations: str) -> None:
        rng = random.Random(seed)
        kernels = [
            _Kernel(name, slot, rng.choice((1, 2, 3)))
            for _ in range(6)
            for name in (("send", "receive") if "receive a step later" not in mutations else ("receive", "send"))
            for slot in range(2)
        ]
        # Both kernels of a slot have the same CTAs.
        kernels = [_Kernel(each.name, each.slot, 1 + each.slot) for each in kernels]
        Shuffles(rng.choice((2, 3, 4)), kernels, mutations, seed).run()

    for seed in range(orders):
        run(seed)
    for rule in ("one buffer", "no wait", "wait for equality"):
        for seed in range(200):
            try:
                run(seed, rule)
            except ProtocolError:
                break
        else:
            raise AssertionError(f"no order needs a rule: {rule}")
        print(f"{rule}: fails")
    print(f"right in {orders} orders")


def _kernels() -> tuple[Any, Any]:
    # Late: whether Triton interprets them is decided when it is imported.
    from lab import ulysses_kernels

    return ulysses_kernels.send_kernel, ulysses_kernels.receive_kernel


class Slot:
    """Messages of up to so many bytes from each rank to each other, over symmetric memory. Collective."""

    def __init__(self, size: int, group: Any, device: torch.device, allocate: Allocate = allocate_symmetric) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        # Flags of each sender's CTAs; then two buffers of a part from each rank.
        self._part = -(-size // 512) * 512
        self._flags = -(-self.ranks * CTAS * 4 // 512) * 512
        self._memory, addresses = allocate(self._flags + 2 * self.ranks * self._part, group, device)
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.is_free, self._tables = True, dict[Any, Tensor]()
        self._control = torch.zeros(3, dtype=torch.int32, device=device)
        self._failure, self._status = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        if device.type == "cuda":
            self._status = self._status.cpu().pin_memory()

    def send(self, source: Tensor, into: Tensor, parts: list[list[int]]) -> None:
        """Begin: the other ranks' parts of `source` to them, this rank's own part into `into`.

        `parts`, by rank: rows, their width, and the first row's place and the distance of rows, in `source` and then in
        `into`; all but the number of rows in words of 8 bytes.
        """
        self._launch(_kernels()[0], source, into, parts)

    def receive(self, source: Tensor, into: Tensor, parts: list[list[int]]) -> None:
        """End: what the other ranks have sent, into `into`; `parts` by sender."""
        self._launch(_kernels()[1], source, into, parts)

    def _launch(self, kernel: Any, source: Tensor, into: Tensor, parts: list[list[int]]) -> None:
        key = kernel.__name__, str(parts)
        if key not in self._tables:
            self._tables[key] = torch.tensor(parts, dtype=torch.int64).to(source.device)
        widest = 1 << (max(part[1] for part in parts) - 1).bit_length()
        kernel[(CTAS,)](
            _as_words(source), _as_words(into),
            self._tables[key], self._peers, self._control, self._failure, self._status.data_ptr(), int(20e9),
            self._flags, self._part, self.rank, self.ranks, CTAS, ROWS, widest, 32 * WARPS, not _interpreted(),
            num_warps=WARPS,
        )  # fmt: skip


# All of its memory from its first element on, whatever its strides.
def _as_words(x: Tensor) -> Tensor:
    count = (x.untyped_storage().nbytes() - x.storage_offset() * x.itemsize) // _WORD
    return x.as_strided((count * _WORD // x.itemsize,), (1,)).view(torch.int64)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


class _UnderWay:
    def __init__(self, slots: list[Slot], x: Tensor, into: Tensor, received: list[list[int]]) -> None:
        self._slots, self._x, self._into, self._received = slots, x, into, received

    def wait(self) -> Tensor:
        for slot, source, into in zip(self._slots, self._x, self._into, strict=True):
            slot.receive(source, into, self._received)
            slot.is_free = True
        return self._into


class Stores:
    """In place of the messages of `Ulysses`: `patched` lets its `_by_heads` and `_by_tokens` go through slots."""

    def __init__(self, allocate: Allocate = allocate_symmetric) -> None:
        self._allocate, self._slots = allocate, dict[Any, list[Slot]]()

    def by_heads(self, ulysses: Any, x: Tensor, spans: list[Any], what: str) -> Any:
        (batch, own, heads, dim), size, rank = x.shape, ulysses.wire.size, ulysses.wire.rank
        lengths = [span.stop - span.start for span in spans]
        into = x.new_empty(batch, sum(lengths), heads // size, dim)
        if x.stride()[2:] != (dim, 1):
            x = x.contiguous()
        width, starts = _words(heads // size * dim, x), [sum(lengths[:p]) for p in range(size)]
        sent = [[own, width, p * width, _words(x.stride(1), x), starts[p] * width, width] for p in range(size)]
        received = [[lengths[p], width, 0, 0, starts[p] * width, width] for p in range(size)]
        sent[rank][4] = starts[rank] * width
        return self._start(ulysses, x, into, sent, received, max(lengths) * width)

    def by_tokens(self, ulysses: Any, x: Tensor, spans: list[Any], what: str) -> Any:
        size, lengths = ulysses.wire.size, [span.stop - span.start for span in spans]
        own, x = lengths[ulysses.wire.rank], x.contiguous()
        into = x.new_empty(x.shape[0], own, size * x.shape[2], x.shape[3])
        width, starts = _words(x.shape[2] * x.shape[3], x), [sum(lengths[:p]) for p in range(size)]
        sent = [[lengths[p], width, starts[p] * width, width, p * width, size * width] for p in range(size)]
        received = [[own, width, 0, 0, p * width, size * width] for p in range(size)]
        return self._start(ulysses, x, into, sent, received, max(lengths) * width)

    def _start(self, ulysses: Any, x: Tensor, into: Tensor, sent: Any, received: Any, words: int) -> _UnderWay:
        group, slots = ulysses.wire._group, []
        for source, target in zip(x, into, strict=True):
            # The same ones on all ranks, since all send the same in the same order.
            known = self._slots.setdefault((id(group), words), [])
            slot = next((slot for slot in known if slot.is_free), None)
            if slot is None:
                slot = Slot(words * _WORD, group, x.device, self._allocate)
                known.append(slot)
            slot.is_free = False
            slot.send(source, target, sent)
            slots.append(slot)
        return _UnderWay(slots, x, into, received)


def _words(elements: int, like: Tensor) -> int:
    assert elements * like.itemsize % 16 == 0, "rows are of accesses of 16 bytes"
    return elements * like.itemsize // _WORD


@contextmanager
def patched(stores: Stores) -> Iterator[None]:
    """Inside, Ulysses stores into peers' memory."""
    from zeco_train.sp.attention.ulysses import Ulysses

    def by_heads(self: Any, x: Tensor, spans: list[Any], what: str) -> Any:
        return stores.by_heads(self, x, spans, what)

    def by_tokens(self: Any, x: Tensor, spans: list[Any], what: str) -> Any:
        return stores.by_tokens(self, x, spans, what)

    with mock.patch.multiple(Ulysses, _by_heads=by_heads, _by_tokens=by_tokens):
        yield


def _results(ranks: int, rank: int, device: torch.device, seed: int, lengths: list[int], heads: int) -> list[Tensor]:
    from zeco_train.ops.softmax.span import Attended, Span
    from zeco_train.sp.attention.method_registry import METHODS, build_attention

    method = build_attention(METHODS["ulysses"], dist.group.WORLD, timedelta(seconds=30), device)  # type: ignore[arg-type]
    bounds, generator = [sum(lengths[:p]) for p in range(ranks + 1)], torch.Generator().manual_seed(seed)

    def tensor() -> Tensor:
        x = torch.randn(2, bounds[-1], heads, 16, generator=generator).to(device, torch.bfloat16)
        return x[:, bounds[rank] : bounds[rank + 1]]

    span, found = Span(bounds[rank], bounds[rank + 1], None, None), []
    for _ in range(3):
        q, k, v, do = (tensor() for _ in range(4))
        own_o, lse, *kept = method.forward(q, k, v, span, bounds, 1.0)
        q, k, v, o = kept or (q, k, v, own_o)
        found += [own_o, *method.backward(do, q, k, v, Attended(o, lse), span, bounds, 1.0)]
    return found


def _check(rank: int, ranks: int, device: torch.device, allocate: Allocate, lengths: list[int]) -> None:
    # The bits of messages, forward and backward, three times.
    wanted = _results(ranks, rank, device, 0, lengths, 2 * ranks)
    with patched(Stores(allocate)):
        found = _results(ranks, rank, device, 0, lengths, 2 * ranks)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True)), [
        float((x - y).abs().max()) for x, y in zip(found, wanted, strict=True)
    ]


def in_interpreter(rank: int, ranks: int) -> None:
    """On this rank; `TRITON_INTERPRET=1`."""
    from tests.collectives.test_all_scan import start_interpreter
    from tests.support.all_scan_emulation import allocate_shared

    global CTAS, ROWS
    start_interpreter()
    CTAS, ROWS = 2, 4
    _check(rank, ranks, torch.device("cpu"), allocate_shared, [11, 6, 9][:ranks])


def _time() -> None:
    from zeco_train.ops.softmax.span import Span
    from zeco_train.sp.attention.method_registry import METHODS, build_attention

    rank, ranks, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    _check(rank, ranks, device, allocate_symmetric, [512] * ranks)
    method = build_attention(METHODS["ulysses"], dist.group.WORLD, timedelta(seconds=20), device)  # type: ignore[arg-type]
    ways: dict[str, Any] = {"messages": nullcontext, "stores": partial(patched, Stores())}
    for tokens in (1 << 14, 1 << 15):
        x = torch.randn(1, tokens, 16, 128, device=device, dtype=torch.bfloat16)
        spans = [Span(p * tokens, (p + 1) * tokens, None, None) for p in range(ranks)]
        for name, way in ways.items():
            for what in ("_by_heads", "_by_tokens"):
                times, given = [], x if what == "_by_heads" else x.view(1, ranks * tokens, 16 // ranks, 128)
                for _ in range(30):
                    torch.cuda.synchronize()
                    dist.barrier()
                    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                    with way():
                        torch.cuda._sleep(2_000_000)  # so that the host is ahead
                        marks[0].record()
                        getattr(method, what)(given, spans, "q").wait()
                        marks[1].record()
                    torch.cuda.synchronize()
                    times.append(1e3 * marks[0].elapsed_time(marks[1]))
                if rank == 0:
                    print(
                        f"{tokens} tokens, {x.nbytes / 1e6:.0f} MB, {what} by {name}: {sorted(times)[15]:.0f} µs",
                        flush=True,
                    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", type=int, default=200)
    parser.add_argument("--time", action="store_true", help="on GPUs, by torchrun")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="a module with its arguments, with stores")
    options = parser.parse_args()
    if options.run:
        sys.argv = options.run
        with patched(Stores()):
            runpy.run_module(options.run[0], run_name="__main__", alter_sys=True)
        return
    if options.time:
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=40))
        _time()
        dist.destroy_process_group()
        return
    run_orders(options.orders)
    from tests.support.distributed import run_distributed

    os.environ["TRITON_INTERPRET"] = "1"
    for ranks in (2, 3):
        run_distributed(in_interpreter, ranks)
        print(f"right in the interpreter over {ranks} ranks", flush=True)


if __name__ == "__main__":
    main()
