"""Loads one rank's shards of sequences: `loader.py` makes the batches, `sequences.py` reads a store."""

from data.loader.batches import Batch, DataSplit
from data.loader.loader import Mixture, PrefetchingLoader, SequenceLoader, validation_batches
from data.loader.sequences import SequenceReader, Source, for_task

__all__ = [
    "Batch",
    "DataSplit",
    "Mixture",
    "PrefetchingLoader",
    "SequenceLoader",
    "SequenceReader",
    "Source",
    "for_task",
    "validation_batches",
]
