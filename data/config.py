"""The configuration of data, and the checks of everything in it that a user can get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from data.corpora import prepare_embedded
from data.store import PREPARE_HINT, VALIDATION_FOLDER
from zeco_train.errors import ConfigError

# Of steps, and of sequences in one: keeps all that is derived from them, as times and token counts, within 64 bits.
LARGEST_COUNT = 10**9


class DataKind(Enum):
    """Where tokens come from: the corpus that every machine has, or a prepared token store."""

    embedded = "embedded"
    tokens = "tokens"


@dataclass
class DataConfig:
    """What to read, and how it is cut into batches.

    Attributes:
        kind: `embedded` (the running Python's standard library, as bytes) or `tokens` (a store at `path`).
        path: folder of the token store; for `tokens` only.
        validation_path: store to validate on; for `tokens` only; None takes `path`/validation where that exists.
        seq_len: tokens of a whole sequence, over all ranks that share it and all segments in time.
        global_batch: sequences of an optimizer step, over all ranks.
        micro_batch: sequences of a data-parallel rank in one forward and backward.
        reset_state_at_document: start every document with a zero state; needs micro_batch 1.
        validation_fraction: part of the files held out; for `embedded` only; 0 for none.
        cache_dir: folder for the prepared corpus; for `embedded` only; None for the user's cache.
    """

    kind: DataKind = DataKind.embedded
    path: str | None = None
    validation_path: str | None = None
    seq_len: int = 4096
    global_batch: int = 8
    micro_batch: int = 1
    reset_state_at_document: bool = False
    validation_fraction: float = 0.05
    cache_dir: str | None = None


@dataclass(frozen=True)
class StorePaths:
    """The folders of the training store and, where there is one, of the validation store."""

    train: Path
    validation: Path | None


def locate_stores(config: DataConfig) -> StorePaths:
    """Find the stores, preparing the embedded corpus on its first use. Ranks may do this at the same time.

    Raises:
        ConfigError: `tokens` without a path.
        DataError: no corpus, or a cache folder that cannot be written.
    """
    if config.kind is DataKind.tokens:
        train = Path(_required_path(config))
        if config.validation_path is not None:
            return StorePaths(train, Path(config.validation_path))
    else:
        cache_dir = Path(config.cache_dir) if config.cache_dir else None
        train = prepare_embedded(cache_dir, validation_fraction=config.validation_fraction)
    held_out = train / VALIDATION_FOLDER
    return StorePaths(train, held_out if held_out.is_dir() else None)


def check_config(config: DataConfig) -> None:
    """Check all that can be judged without the ranks and without the corpus. Raises ConfigError."""
    if config.kind is DataKind.tokens:
        _required_path(config)
    else:
        for field, value in (("data.path", config.path), ("data.validation_path", config.validation_path)):
            if value is not None:
                raise ConfigError(field, value, "data=embedded takes none; use data=tokens")
    if not 0 <= config.validation_fraction <= 0.5:
        raise ConfigError("data.validation_fraction", config.validation_fraction, "allowed: 0 (none) to 0.5")
    check_seq_len(config.seq_len)
    check_batch(config.global_batch, config.micro_batch)
    check_reset(config.reset_state_at_document, config.micro_batch)


def check_seq_len(seq_len: int, sp_size: int = 1, num_tokens: int | None = None, segments: int = 1) -> None:
    """Check the length of a sequence against its shards and, where given, the size of the corpus.

    Args:
        sp_size: ranks that share the sequence.
        num_tokens: tokens of the corpus; a sequence needs one more than its length, the label of its last token.
        segments: parts of the sequence in time, each shared by all those ranks.

    Raises:
        ConfigError: names the nearest legal values.
    """
    unit = sp_size * segments
    shards = f"sp.size={sp_size}" if segments == 1 else f"sp.size × train.segments = {sp_size} × {segments} = {unit}"
    largest = (num_tokens - 1) // unit * unit if num_tokens is not None else None
    if largest is not None and largest < unit:
        allowed = f"the corpus has only {num_tokens} tokens, too few for any sequence with {shards}"
        raise ConfigError("data.seq_len", seq_len, allowed)
    if seq_len <= 0:
        raise ConfigError("data.seq_len", seq_len, f"must be positive; nearest legal value: {unit}")
    if largest is not None and num_tokens is not None and seq_len > num_tokens - 1:
        allowed = f"longer than the corpus of {num_tokens} tokens; largest legal value: {largest}"
        raise ConfigError("data.seq_len", seq_len, f"{allowed}; for longer sequences {PREPARE_HINT}")
    if seq_len % unit != 0:
        nearest = _nearest_multiples(seq_len, unit, largest)
        raise ConfigError("data.seq_len", seq_len, f"must divide by {shards}; nearest legal values: {nearest}")


def check_batch(global_batch: int, micro_batch: int, dp_size: int = 1) -> None:
    """Check that every data-parallel rank gets whole micro-batches. Raises ConfigError with nearest legal values."""
    if micro_batch <= 0:
        raise ConfigError("data.micro_batch", micro_batch, "must be positive; nearest legal value: 1")
    unit = dp_size * micro_batch
    if global_batch <= 0:
        raise ConfigError("data.global_batch", global_batch, f"must be positive; nearest legal value: {unit}")
    if global_batch > LARGEST_COUNT:
        raise ConfigError("data.global_batch", global_batch, f"must be ≤ {LARGEST_COUNT}")
    if global_batch % unit != 0:
        nearest = _nearest_multiples(global_batch, unit)
        allowed = f"must be a multiple of dp × data.micro_batch = {dp_size} × {micro_batch} = {unit}"
        raise ConfigError("data.global_batch", global_batch, f"{allowed}; nearest legal values: {nearest}")


def check_reset(reset_state_at_document: bool, micro_batch: int) -> None:
    """Check that documents are fed one sequence at a time: their borders differ from sequence to sequence."""
    if reset_state_at_document and micro_batch > 1:
        raise ConfigError("data.micro_batch", micro_batch, "must be 1 with data.reset_state_at_document=true")


def _required_path(config: DataConfig) -> str:
    if not config.path:
        raise ConfigError("data.path", config.path, f"data=tokens needs the folder of a token store; {PREPARE_HINT}")
    return config.path


def _nearest_multiples(value: int, multiple: int, largest: int | None = None) -> str:
    below = value // multiple * multiple
    legal = [number for number in (below, below + multiple) if number > 0 and (largest is None or number <= largest)]
    return ", ".join(str(number) for number in legal)
