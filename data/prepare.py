"""Tokenise text into a token store: `python -m data.prepare SOURCE... --out STORE`.

SOURCE are files and folders. `--dataset NAME` takes a data set of the Hugging Face hub, or a local one, and `--recipe
NAME` one of the well-known corpora (configs/recipes). After an interruption, the same command resumes the preparation.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("data.prepare")

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import FrameType
from typing import Any, NoReturn

from data.preparation import Prepared, PrepareOptions, describe_left_out, prepare_store
from data.preparation.work_folder import kept_tokens
from data.sources import SUFFIXES
from data.sources.hugging_face import DatasetSpec, load_recipe, recipe_names
from data.store import VALIDATION_FOLDER, StoreMeta
from zeco_train.errors import ConfigError, ZecoError
from zeco_train.system.command import Parser, user_path
from zeco_train.system.numbers import compact
from zeco_train.system.terminal import visible

__all__ = ["PrepareOptions", "Prepared", "main", "prepare_store"]

# Options that select the data set.
_DATASET_OPTIONS = ("config", "split", "data_dir", "data_files", "revision", "streaming")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status; problems are one line on stderr."""
    out = None
    try:
        options = _parse(arguments)
        out = options.out
        with _signals_interrupt():
            prepared = prepare_store(options)
    except ZecoError as error:
        notes = getattr(error, "__notes__", None) or getattr(error.__cause__, "__notes__", [])
        print("; ".join([error.line, *map(visible, notes)]), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        tokens = kept_tokens(out.resolve()) if out is not None else 0
        kept = f"{tokens:,} tokens are kept, the same command goes on from there"
        # The terminal may be closed.
        with suppress(OSError):
            print(f"interrupted: {kept if tokens else 'nothing was written'}", file=sys.stderr)
        return 128 + next(iter(interrupt.args), signal.SIGINT)
    _report(options, prepared)
    return 0


def _report(options: PrepareOptions, prepared: Prepared) -> None:
    meta, validation = prepared.meta, prepared.validation
    if prepared.skipped_files.total():
        kinds = visible(", ".join(f"{kind} {count}" for kind, count in prepared.skipped_files.most_common(8) if count))
        print(f"skipped {prepared.skipped_files.total()} files of other kinds: {kinds}")
    if left_out := describe_left_out(prepared.left_out, options):
        print(left_out)
    if prepared.control_ids:
        print(f"stored {prepared.control_ids:,} control ids inside documents")
    if prepared.earlier_tokens:
        print(f"went on from {prepared.earlier_tokens:,} tokens of an interrupted preparation")
    if prepared.tokens and prepared.seconds > 0:
        rate = prepared.tokens / prepared.seconds
        each = f"{compact(rate / prepared.workers)} a process ({prepared.workers})"
        print(f"{prepared.tokens:,} tokens in {prepared.seconds:.1f} s: {compact(rate)} tokens/s, {each}")
    if validation:
        print(f"{options.out / VALIDATION_FOLDER}: {_counts(validation)}")
    files = "" if prepared.num_files is None else f" from {prepared.num_files} files"
    shards = f" in {len(meta.shards)} shards" if len(meta.shards) > 1 else ""
    print(f"{options.out}: {_counts(meta)} of {meta.dtype}{files}{shards}, vocabulary {meta.vocab_size}")


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt(number)

    # As Ctrl-C does, but nohup ignores SIGHUP.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Options by group: name, type, what its value is called, and help.
_OPTIONS: dict[str, list[tuple[str, Callable[[str], Any], str, str]]] = {
    "a data set in place of SOURCE, loaded by the `datasets` library": [
        ("--recipe", str, "NAME", f"{', '.join(recipe_names())}, or a .yaml file"),
        ("--dataset", str, "NAME", "a name of the hub, or a local folder"),
        ("--config", str, "NAME", "its configuration"),
        ("--split", str, "NAME", "its split (default: train)"),
        ("--data-dir", str, "FOLDER", "a folder in it"),
        ("--data-files", str, "PATTERN", "files in it"),
        ("--revision", str, "COMMIT", "its version; the newest is looked up once and recorded"),
    ],
    "text and tokens": [
        ("--text-field", str, "NAME", "field of .jsonl, column of tables (default: text)"),
        (
            "--tokenizer",
            str,
            "NAME",
            "bytes (default), a folder with a tokenizer.json, that file, or a name on the Hugging Face hub",
        ),
        ("--eos", str, "TOKEN", "its token that ends a document, where no settings do"),
        ("--control-strings", str, "RULE", "what </s> and the like in a document become: text (default), or ids"),
        ("--min-tokens", int, "N", "leave out documents shorter than this (default: 1)"),
        ("--max-document-bytes", int, "N", "leave out larger documents, and longer lines (default: 2^29)"),
        ("--max-tokens", int, "N", "stop with the document that reaches so many"),
        (
            "--validation-fraction",
            float,
            "F",
            "hold out the last documents, up to this part of all tokens, in STORE/validation (default: 0)",
        ),
    ],
    "the work": [
        ("--workers", int, "N", "processes (default: one a CPU; the same result)"),
        ("--shard-tokens", int, "N", "tokens of a file of STORE (default: 2^28)"),
        ("--save-seconds", float, "S", "how often to save for going on (default: 10)"),
    ],
}


def _parser() -> argparse.ArgumentParser:
    """The parser; options not given on the command line are absent, so that a recipe's values apply."""
    about = "Tokenise text into a token store. "
    about += "Started again with the same arguments after an interruption, it goes on where it was."
    parser = Parser(prog="python -m data.prepare", description=about, argument_default=argparse.SUPPRESS)
    kinds = f"files of {' '.join(SUFFIXES)}, folders of them, or one folder of datasets' save_to_disk"
    parser.add_argument("sources", nargs="*", type=user_path, metavar="SOURCE", help=kinds)
    parser.add_argument("--out", required=True, type=user_path, metavar="STORE", help="folder of the store")
    for title, options in _OPTIONS.items():
        group = parser.add_argument_group(title)
        for name, kind, value, text in options:
            group.add_argument(name, type=kind, metavar=value, help=text)
    flag, text = argparse.BooleanOptionalAction, "read a data set without copying it to the cache first"
    parser.add_argument("--streaming", action=flag, help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing store")
    return parser


def _parse(arguments: Sequence[str] | None) -> PrepareOptions:
    given: dict[str, Any] = vars(_parser().parse_args(arguments))
    sources = tuple(given.pop("sources", ()))
    if (recipe := given.pop("recipe", None)) is not None:
        values = asdict(load_recipe(recipe))
        about = (("recipe", recipe), ("licence", values.pop("licence")), ("homepage", values.pop("homepage")))
        del values["description"], values["size"]
        given = {**values, "about": about, **given}
    dataset = given.pop("dataset", None)
    chosen = {name: given.pop(name) for name in _DATASET_OPTIONS if name in given}
    if dataset is not None:
        return PrepareOptions(sources, dataset=DatasetSpec(dataset, **chosen), **given)
    split = chosen.pop("split", "train")
    if chosen:
        name, value = next(iter(chosen.items()))
        raise ConfigError(f"--{name.replace('_', '-')}", value, "goes with --dataset or --recipe only")
    return PrepareOptions(sources, split=split, **given)


def _counts(meta: StoreMeta) -> str:
    return f"{meta.num_documents:,} documents, {meta.num_tokens:,} tokens"
