"""The data configuration and its validation."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from data.store import PREPARE_HINT
from data.synthetic import SyntheticConfig
from zeco_train.errors import ConfigError
from zeco_train.system.numbers import check_least
from zeco_train.system.paths import check_path

# Limit on steps and on sequences per step: keeps derived values, such as times and token counts, within 64 bits.
LARGEST_COUNT = 10**9
# Metadata of the settings that cannot change during the life of a run's folder: always, or where they are read.
FIXED, FIXED_IF_READ = {"fixed": "always"}, {"fixed": "if read"}


class DataKind(Enum):
    """Source of the tokens: the embedded corpus, a token store, a mixture of stores, or a synthetic task."""

    embedded = "embedded"
    tokens = "tokens"
    mixture = "mixture"
    synthetic = "synthetic"


class Shuffle(Enum):
    """Granularity of the shuffle of each epoch, see `DataConfig.shuffle`."""

    none = "none"
    sequences = "sequences"
    documents = "documents"


@dataclass
class StoreConfig:
    """One store of a mixture.

    Attributes:
        path: folder of the token store.
        weight: its share of the sequences, and so of the tokens; relative to the other stores' weights.
        name: label of its metrics; null for the folder's name.
        validation_path: store to validate on; null takes `path`/validation where that exists.
        min_document_tokens: overrides `data.min_document_tokens`; null to use that.
    """

    path: str = ""
    weight: float = 1.0
    name: str | None = None
    validation_path: str | None = None
    min_document_tokens: int | None = None


@dataclass
class DataConfig:
    """Data to read, and its division into batches.

    Attributes:
        kind: source of the tokens. `embedded` (the running Python's standard library, as bytes), `tokens` (a store at
            `path`), `mixture` (`stores`) or `synthetic` (questions about earlier parts of the sequence; only answers
            count in the loss).
        path: folder of the token store; for `tokens` only.
        validation_path: store to validate on; for `tokens` only; null takes `path`/validation where that exists.
        stores: the stores to mix; for `mixture` only.
        seq_len: tokens of a whole sequence; over all ranks that share it and all segments in time.
        global_batch: sequences per optimizer step, over all ranks.
        micro_batch: sequences per data-parallel rank in one forward and backward.
        shuffle: granularity of the shuffle, which is new in every epoch. `none`: stored order; `sequences`: documents
            are packed in stored order; `documents`: in random order.
        min_document_tokens: drop documents with fewer tokens, end of sequence included; 0 keeps all.
        reset_state_at_document: start every document with a zero state.
        labels_across_documents: whether the last token of a document has a label; it is the first token of the next
            document. null: the rule that the run began with, for a new run unless states reset there.
        validation_fraction: fraction of the files held out; for `embedded` only; 0 for none.
        cache_dir: folder for the embedded corpus and the indices of large stores; null for the user's cache.
        verify: read all token files at the start and compare their digests; with those recorded at preparation. Needed
            once after size or time of one changed since the run's last start.
        synthetic: the task; for `synthetic` only.
    """

    kind: DataKind = DataKind.embedded
    path: str | None = None
    validation_path: str | None = None
    stores: list[StoreConfig] = field(default_factory=list)
    seq_len: int = field(default=4096, metadata=FIXED)
    global_batch: int = field(default=8, metadata=FIXED)
    micro_batch: int = 1
    shuffle: Shuffle = field(default=Shuffle.sequences, metadata=FIXED)
    min_document_tokens: int = 0
    reset_state_at_document: bool = field(default=False, metadata=FIXED)
    labels_across_documents: bool | None = field(default=None, metadata=FIXED)
    validation_fraction: float = 0.05
    cache_dir: str | None = None
    verify: bool = False
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)

    def needs(self) -> Iterator[tuple[str, str, bool]]:
        is_embedded, is_synthetic = self.kind is DataKind.embedded, self.kind is DataKind.synthetic
        yield "validation_fraction", "data=embedded", is_embedded
        # Shuffled or filtered documents need an index. Each document has at least its end-of-sequence token, so a
        # minimum of 1 filters nothing.
        shortest = [self.min_document_tokens, *(store.min_document_tokens or 0 for store in self.stores)]
        has_index = self.shuffle is Shuffle.documents or max(shortest) > 1
        index = "data=embedded, data.shuffle=documents or data.min_document_tokens"
        yield "cache_dir", index, is_embedded or has_index
        yield "synthetic", "data=synthetic", is_synthetic
        of_documents = ("shuffle", "min_document_tokens", "reset_state_at_document", "labels_across_documents")
        for name in (*of_documents, "verify", "cache_dir"):
            yield name, "data=embedded, tokens or mixture", not is_synthetic

    @property
    def has_labels_across(self) -> bool:
        """`labels_across_documents` of a new run."""
        own = self.labels_across_documents
        return not self.reset_state_at_document if own is None else own


def store_name(store: StoreConfig) -> str:
    """Metric label of a store in a mixture."""
    return store.name if store.name is not None else Path(store.path).name


def default_cache_dir() -> Path:
    """$ZECO_CACHE, else zeco-train in $XDG_CACHE_HOME, else ~/.cache/zeco-train."""
    if cache := os.environ.get("ZECO_CACHE"):
        return Path(cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeco-train"


def check_config(config: DataConfig) -> None:
    """Run the checks that need neither the ranks nor the corpus. Raises ConfigError."""
    if config.kind is DataKind.tokens:
        required_path(config)
    else:
        for name, value in (("data.path", config.path), ("data.validation_path", config.validation_path)):
            if value is not None:
                raise ConfigError(name, value, f"data={config.kind.value} takes none; use data=tokens")
    if config.kind is DataKind.mixture:
        _check_stores(config.stores)
    elif config.stores:
        given = ", ".join(store.path for store in config.stores)
        raise ConfigError("data.stores", given, f"data={config.kind.value} takes none; use data=mixture")
    paths: list[tuple[str, str | None]] = [
        ("path", config.path),
        ("validation_path", config.validation_path),
        ("cache_dir", config.cache_dir),
        ("synthetic.tokenizer", config.synthetic.tokenizer),
    ]
    for number, store in enumerate(config.stores):
        paths += [(f"stores.{number}.path", store.path), (f"stores.{number}.validation_path", store.validation_path)]
    for name, path in paths:
        if path:
            check_path(f"data.{name}", path)
    check_least(config, "data", min_document_tokens=0)
    if not 0 <= config.validation_fraction <= 0.5:
        raise ConfigError("data.validation_fraction", config.validation_fraction, "allowed: 0 (none) to 0.5")
    config.synthetic.validate()
    check_split(config)


def check_split(config: DataConfig, sp_size: int = 1, dp_size: int = 1, segments: int = 1) -> None:
    """Check that there is a token for each rank and segment, and whole micro-batches for each data-parallel rank.

    Raises ConfigError.
    """
    check_seq_len(config.seq_len, sp_size, segments=segments)
    check_batch(config.global_batch, config.micro_batch, dp_size)


def check_seq_len(
    seq_len: int,
    sp_size: int = 1,
    num_tokens: int | None = None,
    segments: int = 1,
    corpus: str = "the corpus",
    field: str = "data.seq_len",
    remedy: str = f"for longer sequences {PREPARE_HINT}",
) -> None:
    """Check the length of a sequence against its shards and, where given, the size of the corpus.

    Args:
        seq_len: tokens of the whole sequence.
        sp_size: ranks that share each of its `segments`.
        num_tokens: tokens of the corpus; a sequence needs one more than its length, the label of its last token.
        segments: parts of the sequence in time.
        corpus: its name in messages.
        field: the setting's name in messages.
        remedy: in the message of a corpus that is shorter than a sequence.

    Raises:
        ConfigError: names the nearest legal value.
    """
    least = sp_size * segments
    shards = f"sp.size={sp_size}" if segments == 1 else f"sp.size × train.segments = {sp_size} × {segments} = {least}"
    largest = num_tokens - 1 if num_tokens is not None else None
    if largest is not None and largest < least:
        allowed = f"{corpus} has only {num_tokens} tokens, too few for any sequence with {shards}"
        raise ConfigError(field, seq_len, allowed)
    if seq_len <= 0:
        raise ConfigError(field, seq_len, f"must be positive; nearest legal value: {least}")
    if largest is not None and seq_len > largest:
        allowed = f"longer than {corpus} of {num_tokens} tokens; largest legal value: {largest}"
        raise ConfigError(field, seq_len, f"{allowed}; {remedy}")
    if seq_len < least:
        raise ConfigError(field, seq_len, f"must be ≥ {least}: a token of each sequence for each of {shards}")


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
        below = global_batch // unit * unit
        nearest = ", ".join(str(number) for number in (below, below + unit) if number > 0)
        allowed = f"must be a multiple of dp × data.micro_batch = {dp_size} × {micro_batch} = {unit}"
        raise ConfigError("data.global_batch", global_batch, f"{allowed}; nearest legal values: {nearest}")


def _check_stores(stores: list[StoreConfig]) -> None:
    if not stores:
        example = "'data.stores=[{path:STORE,weight:2},{path:OTHER,weight:1}]'"
        raise ConfigError("data.stores", "[]", f"data=mixture needs token stores, as in {example}")
    names: dict[str, int] = {}
    for number, store in enumerate(stores):
        field = f"data.stores.{number}"
        if not store.path:
            raise ConfigError(f"{field}.path", store.path, f"needs the folder of a token store; {PREPARE_HINT}")
        if not (store.weight > 0 and math.isfinite(store.weight)):
            raise ConfigError(f"{field}.weight", store.weight, "must be > 0; leave out a store that nothing is read of")
        if store.min_document_tokens is not None:
            check_least(store, field, min_document_tokens=0)
        name = store_name(store)
        if not name:
            raise ConfigError(f"{field}.name", name, "must not be empty")
        if name in names:
            raise ConfigError(f"{field}.name", name, f"store {names[name]} has it, too; give each a name of its own")
        names[name] = number


def required_path(config: DataConfig) -> str:
    """`data.path` of `tokens`. Raises ConfigError if it is missing."""
    if not config.path:
        raise ConfigError("data.path", config.path, f"data=tokens needs the folder of a token store; {PREPARE_HINT}")
    return config.path
