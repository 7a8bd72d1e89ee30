"""Data sets of the `datasets` library as sources: from the hub, from a local folder, or written by `save_to_disk`.

Without streaming the library writes an Arrow copy of the whole data set to its cache, and a unit is a range of its
rows. With streaming nothing is copied, and a unit is a `datasets` shard: a row group of a parquet file, else a file.
Only preparation uses this module; training never accesses the hub.

A recipe is a YAML file of values, in configs/recipes or anywhere; options of `data.prepare` override it.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.sources import UNIT_BYTES, DocumentSource, Unit
from data.sources.readers import ROWS_AT_ONCE, Document, check_column, texts_of_column
from data.tokenizer import announce_hub
from zeco_train.errors import ConfigError, DataError
from zeco_train.system.paths import check_path, is_within

_SAVED_DATASET = ("dataset_info.json", "state.json")
_SAVED_SPLITS = "dataset_dict.json"
# The library resolves a hub data set's files to hf://datasets/NAME@COMMIT/FILE.
_HUB_REVISION = re.compile(r"@([0-9a-f]{40})/")
_ROWS_OF_A_UNIT = 1 << 16
RECIPES = Path(__file__).resolve().parents[2] / "configs" / "recipes"


@dataclass(frozen=True)
class DatasetSpec:
    """A data set, specified as for `datasets.load_dataset`."""

    name: str  # a hub name, or a local folder
    config: str | None = None
    split: str = "train"
    data_dir: str | None = None
    data_files: str | None = None
    revision: str | None = None
    streaming: bool = False  # read without making a copy first


@dataclass
class Recipe:
    """Contents of a recipe file: data set, text field and amount; see `DatasetSpec` and `PrepareOptions`."""

    description: str
    homepage: str
    licence: str  # the terms in a few words; read them yourself
    size: str  # approximate amount of text
    dataset: str
    tokenizer: str
    text_field: str = "text"
    config: str | None = None
    split: str = "train"
    data_dir: str | None = None
    data_files: str | None = None
    revision: str | None = None
    streaming: bool = True
    min_tokens: int = 1
    validation_fraction: float = 0.0


def recipe_names() -> list[str]:
    """Names of the bundled recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(name: str) -> Recipe:
    """Read a recipe by its name or its file.

    Raises:
        ConfigError: no such recipe, or a file whose fields or types do not match `Recipe`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from zeco_train.system.stored_values import read_values

    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    check_path("--recipe", path)
    if not path.is_file():
        raise ConfigError("--recipe", name, f"allowed: {', '.join(recipe_names())}, or the path of a .yaml file")
    try:
        values: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Recipe), read_values(path)))
    except (OmegaConfBaseException, ValueError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError("--recipe", name, f"{path}: {reason}") from error
    assert isinstance(values, Recipe)
    return values


def is_saved_dataset(folder: Path) -> bool:
    """Whether this folder was written by `save_to_disk` of `datasets`."""
    return (folder / _SAVED_SPLITS).is_file() or all((folder / name).is_file() for name in _SAVED_DATASET)


def open_dataset(spec: DatasetSpec, text_field: str, unit_bytes: int = UNIT_BYTES) -> DocumentSource:
    """Open a local or hub data set as a source of text.

    Raises DataError if it cannot be found, reached or read, or has no such configuration, split or field.
    """
    library = _library()
    if is_saved_dataset(Path(spec.name)):
        return _open_saved(library, spec, text_field, unit_bytes)
    announce_hub(spec.name)
    named = {key: getattr(spec, key) for key in ("data_dir", "data_files", "revision")}
    options: dict[str, Any] = {"name": spec.config, **named}
    with _errors(spec.name, is_loading=True):
        builder = library.load_dataset_builder(spec.name, **options)
        files = {str(split): files for split, files in (builder.config.data_files or {}).items()}
        if spec.data_files is None:
            _check_places(spec, [path for each in files.values() for path in each])
        origin = [(split, list(each), getattr(each, "origin_metadata", None)) for split, each in files.items()]
        stamp = hashlib.sha256(repr((origin, builder.config.name, spec.split)).encode()).hexdigest()
        revision = _HUB_REVISION.search(repr(origin))
        commit = revision[1] if revision else None
        if spec.streaming:
            stream = builder.as_streaming_dataset(spec.split)
            if stream.features is not None:
                check_column(spec.name, stream.features.arrow_schema, text_field)
            if hasattr(builder.config, "columns"):  # parquet and similar formats can read just that column
                builder = library.load_dataset_builder(spec.name, **options, columns=[text_field])
                stream = builder.as_streaming_dataset(spec.split)
            return StreamSource(spec.name, stream, text_field, stamp, commit)
        builder.download_and_prepare()
        rows = builder.as_dataset(spec.split)
    check_column(spec.name, rows.features.arrow_schema, text_field)
    return RowSource(spec.name, rows, text_field, stamp, unit_bytes, commit)


class RowSource:
    """A data set with random access to rows; `revision` is the commit of one from the hub."""

    amount = "documents"

    def __init__(
        self, name: str, rows: Any, text_field: str, stamp: str, unit_bytes: int, revision: str | None = None
    ) -> None:
        self.name, self.manifest_sha256, self.revision = name, stamp, revision
        self._rows = rows.select_columns([text_field]).with_format("arrow")
        self._text_field = text_field
        self.total: float = len(rows)
        size = max(1, self._rows.data.nbytes // max(1, len(self._rows.data)))
        self._unit_rows = max(1, min(_ROWS_OF_A_UNIT, unit_bytes // size))

    def units(self) -> Iterator[Unit]:
        for start in range(0, int(self.total), self._unit_rows):
            stop = min(start + self._unit_rows, int(self.total))
            yield Unit((), start, stop, stop - start, f"{self.manifest_sha256} {start} {stop}")

    def read(self, unit: Unit, first: int) -> Iterator[Document]:
        # Workers are spawned, so each must silence the library's logging itself.
        _library()
        with _errors(self.name):
            for start in range(unit.start + first, unit.stop, ROWS_AT_ONCE):
                table = self._rows[start : min(start + ROWS_AT_ONCE, unit.stop)]
                yield from texts_of_column(table.column(0), f"{self.name}, row", start, self._text_field)


class StreamSource:
    """A data set streamed from its files; `revision` is the commit of one from the hub."""

    amount = "shards"

    def __init__(self, name: str, stream: Any, text_field: str, stamp: str, revision: str | None = None) -> None:
        self.name, self.manifest_sha256, self.revision = name, stamp, revision
        self._stream, self._text_field = stream, text_field
        self.total: float = stream.num_shards

    def units(self) -> Iterator[Unit]:
        """Parts of shards: `start` is the shard's number, `stop` the part's."""
        for shard in range(int(self.total)):
            with _errors(self.name):
                parts = _cut(self, shard).num_shards
            for part in range(parts):
                yield Unit((), shard, part, 1 / parts, f"{self.manifest_sha256} {shard} {part}")

    def read(self, unit: Unit, first: int) -> Iterator[Document]:
        _library()
        row, place = 0, f"{self.name}, shard {unit.start} part {unit.stop}, row"
        with _errors(self.name):
            parts = _cut(self, unit.start)
            stream = parts.shard(parts.num_shards, unit.stop).with_format("arrow")
            # A stream has no random access: rows before `first` are read and sliced off (`slice` clamps its offset).
            for table in stream.iter(batch_size=ROWS_AT_ONCE):
                check_column(self.name, table.schema, self._text_field)
                column = table.column(self._text_field)
                yield from texts_of_column(column.slice(max(0, first - row)), place, max(first, row), self._text_field)
                row += len(column)


# Cutting a parquet file opens it; the units of one file come one after another.
@functools.lru_cache(maxsize=64)
def _cut(source: StreamSource, shard: int) -> Any:
    return source._stream.shard(source._stream.num_shards, shard).reshard()


def _open_saved(library: Any, spec: DatasetSpec, text_field: str, unit_bytes: int) -> RowSource:
    # A folder of `save_to_disk`; read in place, so streaming makes no difference.
    with _errors(spec.name, is_loading=True):
        rows = library.load_from_disk(spec.name)
    if isinstance(rows, library.DatasetDict):
        if spec.split not in rows:
            raise DataError(spec.name, f"no split {spec.split!r}", f"its splits: {', '.join(rows)} (--split)")
        rows = rows[spec.split]
    check_column(spec.name, rows.features.arrow_schema, text_field)
    _check_places(spec, [file["filename"] for file in rows.cache_files])
    files = [Path(file["filename"]) for file in rows.cache_files]
    origin = repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files] + [len(rows)])
    return RowSource(spec.name, rows, text_field, hashlib.sha256(origin.encode()).hexdigest(), unit_bytes)


def _check_places(spec: DatasetSpec, paths: Iterable[str]) -> None:
    # No files of this machine outside of the data set's folder, which its links or its card may name.
    root = Path(spec.name, spec.data_dir or "").resolve()
    for path in paths:
        # Such as zip://FILE::PATH.
        place = path.rpartition("::")[2].removeprefix("file://")
        if "://" not in place and not is_within(Path(place).resolve(), root):
            raise DataError(place, f"is a file outside of the data set {spec.name}", "put the file itself there")


def _library() -> Any:
    try:
        import datasets
        import huggingface_hub.utils
    except ImportError as error:
        problem = f"the package `datasets` cannot be imported ({error})"
        raise DataError("data.prepare", problem, "install it: pip install 'datasets==5.2.*'") from error
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    huggingface_hub.utils.logging.set_verbosity(huggingface_hub.utils.logging.CRITICAL)
    return datasets


@contextmanager
def _errors(name: str, *, is_loading: bool = False) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # the library, its file systems and its readers raise almost anything
        # The root cause in one line; the library's outer errors rarely repeat it.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = " ".join(str(cause).split()) or type(cause).__name__
        reason = reason if len(reason) <= 240 else f"{reason[:240]}…"
        if not is_loading:
            raise DataError(name, f"cannot be read ({reason})") from error
        remedy = "check the name, --config, --split, --data-dir and --data-files"
        if isinstance(error, ConnectionError | TimeoutError) or "offline" in str(error).lower():
            remedy = "check the name and the network (HF_TOKEN for gated data sets), or give a local folder"
        raise DataError(name, f"cannot be loaded ({reason})", remedy) from error
