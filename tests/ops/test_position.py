"""The record of where a rank's tokens lie: ranges of all ranks, documents of each sequence of a batch."""

from __future__ import annotations

import itertools

import pytest
import torch

from zeco_train.ops.position import SequencePosition, even_bounds
from zeco_train.sp.exchange import local_exchange


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.empty(batch, length)


@pytest.mark.parametrize(("seq_len", "parts"), [(12, 4), (13, 4), (7, 7), (100, 9), (2**33 + 5, 3)])
def test_parts_differ_by_at_most_one_token(seq_len: int, parts: int) -> None:
    bounds = even_bounds(seq_len, parts)
    lengths = {stop - start for start, stop in itertools.pairwise(bounds)}
    assert (bounds[0], bounds[-1], len(bounds)) == (0, seq_len, parts + 1)
    assert lengths <= {seq_len // parts, -(-seq_len // parts)}
    assert [even_bounds(seq_len, parts, part, part + 1) for part in range(parts)] == [
        list(pair) for pair in itertools.pairwise(bounds)
    ]


def test_position_of_a_rank_in_a_segment() -> None:
    position = SequencePosition((10, 11, 15, 30), 1, seq_len=40, segment=1, num_segments=3)
    assert (position.start, position.stop, position.num_tokens, position.before()) == (11, 15, 4, 11)
    found = position.on(tokens(3, 4), with_positions=True)
    assert found.positions is not None
    assert found.positions.tolist() == [11, 12, 13, 14]
    assert (found.doc_ids, position.positions, position.cu_seqlens()) == (None, None, None)


def test_exchange_is_found_by_the_number_of_the_record() -> None:
    exchange, position = local_exchange(), SequencePosition((0, 3))
    assert position.handle is None
    assert position.over(exchange).handle is exchange.handle(torch.device("cpu"))
    with pytest.raises(AttributeError, match="frozen"):
        position.rank = 1


def test_pieces_of_each_sequence_of_a_batch() -> None:
    """Cut anywhere, the ranks' doc_ids are those of the whole sequence; a document may be empty."""
    documents, bounds = [[0, 2, 5, 5, 9], [0, 9], [0, 1, 8, 9]], (0, 1, 5, 7, 9)
    whole = SequencePosition((0, 9), documents=documents).on(tokens(3, 9)).doc_ids
    assert whole is not None
    assert whole.dtype == torch.int32
    assert whole.tolist() == [[1, 1, 2, 2, 2, 3, 3, 3, 3], [1] * 9, [1, 2, 2, 2, 2, 2, 2, 2, 3]]
    for rank, (start, stop) in enumerate(itertools.pairwise(bounds)):
        position = SequencePosition(bounds, rank, documents=documents)
        found = position.on(tokens(3, stop - start)).doc_ids
        assert found is not None
        for row in range(3):
            expected = whole[row, start:stop] - (whole[row, start - 1] if start else 0)
            assert found[row].equal(expected), (rank, row)
            alone = SequencePosition(bounds, rank, documents=[documents[row]]).on(tokens(1, stop - start)).doc_ids
            assert alone is not None
            assert alone.equal(found[row]), "[T] of a single sequence"
    last = SequencePosition(bounds, 3, documents=documents)
    assert [last.before(row) for row in range(3)] == [2, 7, 6]
    assert [last.cu_seqlens(row).tolist() for row in range(3)] == [[0, 2], [0, 2], [0, 1, 2]]  # type: ignore[union-attr]


def test_tensors_at_fixed_addresses_take_the_place_of_documents() -> None:
    doc_ids, positions = torch.ones(4, dtype=torch.int32), torch.arange(4)
    found = SequencePosition((0, 4), documents=[[0, 4]]).with_tensors(doc_ids, positions).on(tokens(1, 4))
    assert found.documents is None
    assert found.doc_ids is doc_ids
    assert found.positions is positions


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"bounds": (0, 5, 4)}, "bounds: rank 0 of"),
        ({"bounds": (-1, 4)}, "bounds: rank 0 of"),
        ({"bounds": (0, 4), "rank": 1}, "bounds: rank 1 of"),
        ({"bounds": (0, 4), "seq_len": 3}, "must rise within 0 to 3"),
        ({"bounds": (0, 4), "documents": [[0, 3]]}, "documents: expected borders that rise from 0 to 4"),
        ({"bounds": (0, 4), "documents": [[0, 3, 2, 4]]}, "documents: expected borders"),
        ({"bounds": (0, 4), "documents": [[0.0, 4.0]]}, "documents: expected a list of at least two integers"),
    ],
)
def test_impossible_positions_are_refused(arguments: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        SequencePosition(**arguments)  # type: ignore[arg-type]


def test_position_of_other_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="position: of 4 tokens, 0 to 4, not 5"):
        SequencePosition((0, 4)).on(tokens(1, 5))
    with pytest.raises(ValueError, match="position: has the documents of 2 sequences, not of 1"):
        SequencePosition((0, 4), documents=[[0, 4], [0, 4]]).on(tokens(1, 4))
