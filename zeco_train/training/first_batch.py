"""A check of the first batch: whether the ranks that share sequences read the same ones."""

from __future__ import annotations

from data.loader import SequenceLoader
from zeco_train.distributed.mesh import ProcessMesh, agree
from zeco_train.errors import DataError
from zeco_train.lifecycle.join import gather
from zeco_train.system.numbers import IGNORE_INDEX


def check_shards_fit(loader: SequenceLoader, consumed: int, mesh: ProcessMesh) -> None:
    """Check on the first batch that the ranks of an SP group have the same sequences, and that their shards fit.

    A shard's last label must equal the first token of the next shard, which another node may read from its own copy.

    Raises:
        DataError: on every rank; names the first two ranks that differ.
    """
    batch = agree(mesh, lambda: loader.batch(consumed, 0))
    own = batch.sequence_ids, batch.input_ids[:, 0].tolist(), batch.labels[:, -1].tolist()
    everyone = gather(own, mesh.world_size)
    for rank in range(1, mesh.world_size):
        if rank % mesh.sp_size == 0:
            continue
        (before_ids, _, labels), (ids, tokens, _) = everyone[rank - 1], everyone[rank]
        pair = f"ranks {rank - 1} and {rank}, which share sequences,"
        if before_ids != ids:
            problem = f"{pair} have different ones in their first batch, {before_ids} and {ids}"
            raise DataError("data", problem, "start all ranks with the same command line")
        if any(label not in (token, IGNORE_INDEX) for label, token in zip(labels, tokens, strict=True)):
            problem = f"{pair} have different tokens where their shards of {ids} meet, {labels} and {tokens}"
            raise DataError(loader.reader_of(ids[0]).description, problem, "copy the token store to all nodes again")
