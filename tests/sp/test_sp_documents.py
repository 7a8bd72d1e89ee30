"""Packed documents over several ranks, cut by the loader's `sequence_borders`, against each document alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.support.distributed import run_distributed
from tests.support.sp_reference import Case, Reference, build_scans, check_segments, ordinary_pass

pytestmark = pytest.mark.numeric

# Process groups by world size, including subgroups whose ranks differ from those of the world.
GROUPS = {2: ((1,), (0, 1)), 4: ((0,), (2, 3), (1, 2, 3), (0, 1, 2, 3))}
LENGTHS = {1: (120,), 2: (70, 65), 3: (40, 64, 33), 4: (40, 64, 20, 33)}
# Ranks of few tokens: covered by one document, or holding several.
SHORT = {1: (1,), 2: (1, 66), 3: (66, 1, 20), 4: (1, 2, 66, 3)}


def tiny(num_tokens: int) -> tuple[int, ...]:
    """Documents of 1 to 3 tokens."""
    sizes = random.Random(num_tokens)
    borders = [0]
    while borders[-1] < num_tokens:
        borders.append(min(num_tokens, borders[-1] + sizes.randint(1, 3)))
    return tuple(borders)


def layouts(size: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Name, tokens of each rank, borders of the documents."""
    for lengths in (LENGTHS[size], SHORT[size]):
        borders = tuple(itertools.accumulate(lengths, initial=0))
        yield "one document over all ranks", lengths, (0, borders[-1])
        yield "a document for each rank", lengths, borders
        yield "many tiny documents", lengths, tiny(borders[-1])
    lengths = LENGTHS[size]
    *starts, end = itertools.accumulate(lengths, initial=0)
    yield "restarts inside ranks only", lengths, (0, *(start + 5 for start in starts), *(end - 2, end))
    if size > 1:
        yield "each edge inside a document", lengths, (0, *(start - 5 for start in starts[1:]), end)
        yield "a document from the first edge on", lengths, (0, starts[1], end)
        yield "restart at the last edge only", lengths, (0, starts[-1], end)
    if size > 2:
        yield "a document over three ranks", lengths, (0, starts[-3] + 5, starts[-1] + 5, end)


def cases(size: int) -> Iterator[Case]:
    for name, lengths, documents in layouts(size):
        yield Case(name, (lengths,), carry=True, poison=True, documents=documents)
    lengths, start = LENGTHS[size], 17
    end = sum(lengths)
    inner = (3, end // 2, end - 3)
    documents = (0, *inner, end)
    stream = tuple(start + border for border in inner)
    yield Case(
        "a sequence that cuts documents at both of its ends",
        (lengths,),
        documents=documents,
        doc_offsets=(0, 5, *stream, start + end + 40),
        stream_start=start,
    )
    yield Case(
        "a sequence of whole documents out of a stream",
        (lengths,),
        documents=documents,
        doc_offsets=(0, 5, start, *stream, start + end, start + end + 40),
        stream_start=start,
    )


def two_segments(size: int) -> Iterator[Case]:
    lengths = (LENGTHS[size], SHORT[size])
    edge, end = sum(LENGTHS[size]), sum(LENGTHS[size]) + sum(SHORT[size])
    yield Case("one document over two segments", lengths, carry=True, documents=(0, edge - 5, end))
    yield Case("a document from the second segment on", lengths, carry=True, documents=(0, 7, edge, end))


def suite(rank: int, world_size: int, quick: bool) -> None:
    groups = {ranks: build_scans(ranks) for ranks in GROUPS[world_size]}
    for ranks, scans in groups.items():
        if rank not in ranks:
            continue
        member = ranks.index(rank)
        # Quick: one case with all backends, in two segments, and each other with two of them.
        for number, case in enumerate([*cases(len(ranks))][:: 4 - len(ranks) if quick else 1]):
            reference = Reference(case)
            for place, (name, scan) in enumerate(scans.items()):
                if not quick or (place + number) % 5 == 0:
                    reference.check(ordinary_pass(case, scan, member), member, name)
        for case in [*two_segments(len(ranks))][quick and len(ranks) == 1 :]:
            reference = Reference(case)
            for place, (name, scan) in enumerate(scans.items()):
                if not quick or "second" in case.name or place == 0:
                    check_segments(case, scan, member, reference, name)
    dist.barrier()  # keep ranks alive until their peers have received everything


@pytest.mark.parametrize(
    ("world_size", "quick"), [(2, True), *(pytest.param(n, False, marks=pytest.mark.campaign) for n in (2, 4))]
)
def test_documents_over_ranks_equal_documents_alone(world_size: int, quick: bool) -> None:
    run_distributed(suite, world_size, quick)
