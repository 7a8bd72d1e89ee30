"""Opens a run's stores or task, and runs the checks that need open stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.config import DataConfig, DataKind, StoreConfig, check_seq_len, required_path, store_name
from data.loader.batches import TRAINING, VALIDATION, OpenedData
from data.loader.loader import as_integers
from data.loader.sequences import Source
from data.sources.corpora import prepare_embedded
from data.store import VALIDATION_FOLDER, TokenStore
from data.store.documents import Documents
from data.synthetic.tasks import open_synthetic
from data.tokenizer import comparable, same_tokenizer, tokenizer_files
from zeco_train.errors import ConfigError, DataError, names_field


@dataclass(frozen=True)
class OpenedStores(OpenedData):
    """Token stores. Validation stores have the weights of their training stores."""

    train: list[Source]
    validation: list[Source]

    def identity(self) -> dict[str, Any]:
        digests = [source.documents.store.meta.tokens_sha256 for source in self.train]
        shortest = [source.documents.min_tokens for source in self.train]
        is_one = len(self.train) == 1
        return {
            "data.tokens_sha256": digests[0] if is_one else digests,
            "data.tokenizer": self.train[0].documents.store.meta.tokenizer,
            "data.weights": [source.weight for source in self.train],
            "data.min_document_tokens": shortest[0] if is_one else shortest,
        }

    def tokenizer_files(self) -> Path | None:
        store = self.train[0].documents.store.path
        return tokenizer_files(store, store.parent)

    def stores(self) -> dict[str, TokenStore]:
        return {
            f"{use} store {number}": source.documents.store
            for use, sources in ((TRAINING, self.train), (VALIDATION, self.validation))
            for number, source in enumerate(sources)
        }


def open_data(
    config: DataConfig, *, vocab_size: int, sp_size: int = 1, segments: int = 1, validate: bool = True
) -> OpenedData:
    """Open the stores of a configuration, or its task; with `validate`, the validation stores, too.

    Raises:
        ConfigError: `seq_len` or a filter leaves no sequence, or a vocabulary exceeds the model's.
        DataError: unusable or incompatible stores.
    """
    if config.kind is DataKind.synthetic:
        return open_synthetic(config, vocab_size=vocab_size, validate=validate)
    located = locate_stores(config)
    weights = as_integers([paths.weight for paths in located])
    data = OpenedStores([], [], [])
    for paths, weight in zip(located, weights, strict=True):
        documents = _open(paths.train, paths, config, vocab_size, data.train)
        _check_filter(documents)
        check_seq_len(config.seq_len, sp_size, documents.num_tokens, segments, documents.description)
        data.train.append(Source(documents, weight=weight, name=paths.name))
        if not validate:
            continue
        if paths.validation is not None:
            held_out = _open(paths.validation, paths, config, vocab_size, data.train)
            # One token more than a sequence: the label of its last token.
            if held_out.num_tokens > config.seq_len:
                data.validation.append(Source(held_out, weight=weight, name=paths.name))
                continue
        data.unvalidated.append(paths.name)
    return data


def open_held_out(
    config: DataConfig, *, vocab_size: int, tokenizer: Mapping[str, str], folders: Sequence[Path] = ()
) -> list[Source]:
    """Open only the held-out stores of a configuration; the training stores may be missing.

    Args:
        tokenizer: of the model, as `StoreMeta.tokenizer`; empty if unknown.
        folders: the runs or stores that may hold its files.

    Raises:
        ConfigError: nothing is held out, a filter leaves nothing, or a vocabulary exceeds the model's.
        DataError: stores that are unusable, or incompatible with each other or with this model.
    """
    stores = locate_stores(config)
    located = [paths for paths in stores if paths.validation is not None]
    if not located:
        key, value = ("data.path", config.path) if config.path else ("data", config.kind.value)
        gone = next((paths.train for paths in stores if not paths.train.exists()), None)
        problem = "holds nothing out" if gone is None else f"there is no {gone}"
        remedy = "name a store with data=tokens data.path=STORE data.validation_path=STORE"
        raise ConfigError(key, value, f"{problem}; {remedy}")
    found: list[Source] = []
    for paths, weight in zip(located, as_integers([paths.weight for paths in located]), strict=True):
        assert paths.validation is not None
        documents = _open(paths.validation, paths, config, vocab_size, found)
        if tokenizer and not same_tokenizer(_tokenizer(documents.store), (tokenizer, folders)):
            own, expected = comparable(documents.store.meta.tokenizer), comparable(dict(tokenizer))
            problem = f"its tokenizer is {own}, the model's is {expected}"
            raise DataError(paths.validation, problem, "prepare it with the model's tokenizer")
        _check_filter(documents)
        found.append(Source(documents, weight=weight, name=paths.name))
    return found


@dataclass(frozen=True)
class StorePaths:
    """The folders of a training store and of its validation store, if any."""

    train: Path
    validation: Path | None
    name: str = ""  # label of the store's metrics; empty for a single store
    weight: float = 1.0
    min_document_tokens: int = 0
    section: str = "data"  # of the settings `path` and `validation_path` that name the folders


def locate_stores(config: DataConfig) -> list[StorePaths]:
    """Find the stores; prepare the embedded corpus on first use. Ranks may call this concurrently.

    Raises:
        ConfigError: `tokens` without a path.
        DataError: no corpus, or a cache folder that cannot be written.
    """
    stores = config.stores
    if config.kind is DataKind.embedded:
        cache_dir = Path(config.cache_dir) if config.cache_dir else None
        stores = [StoreConfig(str(prepare_embedded(cache_dir, validation_fraction=config.validation_fraction)))]
    elif config.kind is DataKind.tokens:
        stores = [StoreConfig(required_path(config), validation_path=config.validation_path)]
    is_mixture = config.kind is DataKind.mixture
    return [
        StorePaths(
            Path(store.path),
            _held_out(Path(store.path), store.validation_path),
            store_name(store) if is_mixture else "",
            store.weight,
            config.min_document_tokens if store.min_document_tokens is None else store.min_document_tokens,
            f"data.stores.{number}" if is_mixture else "data",
        )
        for number, store in enumerate(stores)
    ]


def _held_out(train: Path, validation_path: str | None) -> Path | None:
    if validation_path is not None:
        return Path(validation_path)
    folder = train / VALIDATION_FOLDER
    return folder if folder.is_dir() else None


def _open(folder: Path, paths: StorePaths, config: DataConfig, vocab_size: int, others: Sequence[Source]) -> Documents:
    with names_field(f"{paths.section}.{'path' if folder == paths.train else 'validation_path'}", folder):
        store = TokenStore.open(folder)
    if store.vocab_size > vocab_size:
        allowed = f"the token store {folder} has {store.vocab_size} ids; allowed: {store.vocab_size} or more"
        raise ConfigError("model.vocab_size", vocab_size, allowed)
    if others:
        _check_same_ids(store, others[0].documents.store)
    return Documents(store, paths.min_document_tokens, Path(config.cache_dir) if config.cache_dir else None)


def _check_filter(documents: Documents) -> None:
    if documents.num_documents == 0:
        store = documents.store
        problem = f"leaves none of the {store.meta.num_documents} documents of {store.path}"
        longest = f"the longest has {store.longest_document()}"
        raise ConfigError("data.min_document_tokens", documents.min_tokens, f"{problem}; {longest}")


def _check_same_ids(store: TokenStore, first: TokenStore) -> None:
    for what in ("tokenizer", "vocab_size", "eos_id"):
        own, expected = (comparable(getattr(one.meta, what)) for one in (store, first))
        if own != expected and not (what == "tokenizer" and same_tokenizer(_tokenizer(store), _tokenizer(first))):
            problem = f"its {what} is {own}, {first.path}'s is {expected}"
            raise DataError(store.path, problem, "prepare both with the same tokenizer")


def _tokenizer(store: TokenStore) -> tuple[Mapping[str, str], Sequence[Path]]:
    # The files of a validation store lie in its training store.
    return store.meta.tokenizer, (store.path, store.path.parent)
