"""Inspect and verify a token store: `python -m data.inspect STORE`.

Prints counts, document lengths and a decoded sample, and verifies the digest of every shard. With `--png FILE` it draws
a histogram of the lengths. A problem ends it with a one-line message and a status ≠ 0.
"""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("data.inspect")

import argparse
import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.store import COPY_AGAIN, VALIDATION_FOLDER, TokenStore, token_dtype
from data.tokenizer import Tokenizer, load_tokenizer, tokenizer_name
from zeco_train.errors import ConfigError, DataError
from zeco_train.system.command import Parser, errors_in_a_line, user_path
from zeco_train.system.figures import BLUE, ORANGE, finish_axes, new_figure, render
from zeco_train.system.files import read_errors
from zeco_train.system.numbers import clock, compact, length_name
from zeco_train.system.paths import check_output_file, warn_of_replacing
from zeco_train.system.terminal import visible

_BLOCK_BYTES = 1 << 24
_QUANTILES = (0.5, 0.9, 0.99)


@errors_in_a_line
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status; problems are one line on stderr."""
    parser = Parser(prog="python -m data.inspect", description="What is in a token store.")
    parser.add_argument("store", type=user_path, metavar="STORE")
    drawn = "draw a histogram of the documents' lengths there"
    parser.add_argument("--png", type=user_path, metavar="FILE", help=drawn)
    parser.add_argument("--document", type=int, metavar="N", help="which document to show (default: the middle one)")
    parser.add_argument("--sample-tokens", type=int, default=200, metavar="N", help="how much of it (default: 200)")
    parser.add_argument("--quick", action="store_true", help="do not read the shards whole")
    _inspect(parser.parse_args(arguments))
    return 0


def check_shard(store: TokenStore, index: int, control_ids: Sequence[int]) -> tuple[int, Counter[int]]:
    """Read a whole shard and check its digest, its id range, and the end-of-sequence id of each document.

    Returns the number of bytes read, and how often each of `control_ids` occurs, the ends of documents included. Raises
    DataError.
    """
    shard = store.meta.shards[index]
    path = store.path / shard.name
    start, _ = store.shard_range(index)
    dtype = token_dtype(store.vocab_size)
    digest, position = hashlib.sha256(), start
    mistakes: list[str] = []
    counts: Counter[int] = Counter()
    with read_errors(path, COPY_AGAIN), path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            # A truncated shard may end within a token.
            tokens = np.frombuffer(block[: len(block) // dtype.itemsize * dtype.itemsize], dtype)
            mistakes += _mistakes(store, tokens, position)
            values, times = np.unique(tokens[np.isin(tokens, control_ids)], return_counts=True)
            counts.update(dict(zip(values.tolist(), times.tolist(), strict=True)))
            position += len(tokens)
    if digest.hexdigest() != shard.sha256:
        # Damage explains the other mistakes, and only the first one is reported.
        mistakes.insert(0, "its contents differ from what was prepared")
    if mistakes:
        raise DataError(path, mistakes[0], COPY_AGAIN)
    return shard.num_tokens * dtype.itemsize, counts


def _mistakes(store: TokenStore, tokens: NDArray[np.unsignedinteger], position: int) -> list[str]:
    # Ids beyond the vocabulary, and documents without an end-of-sequence id, in tokens at stream `position`.
    found = []
    if tokens.max(initial=0) >= store.vocab_size:
        wrong = int(np.argmax(tokens >= store.vocab_size))
        found.append(f"token {position + wrong} is {tokens[wrong]}, meta.json has ids below {store.vocab_size}")
    first, last = np.searchsorted(store.doc_offsets, [position + 1, position + len(tokens) + 1]).tolist()
    ends = store.doc_offsets[first:last] - 1 - position
    without = np.flatnonzero(tokens[ends] != store.meta.eos_id)
    if len(without):
        document = first + int(without[0]) - 1
        found.append(f"document {document} does not end with the end-of-sequence id {store.meta.eos_id}")
    return found


def _inspect(options: argparse.Namespace) -> None:
    store = TokenStore.open(options.store)
    if options.png is not None:
        check_output_file("--png", options.png)
        warn_of_replacing([options.png])
    lengths = np.diff(store.doc_offsets)
    _print_counts(store, lengths)
    tokenizer: Tokenizer | DataError
    try:
        tokenizer = load_tokenizer(tokenizer_name(store.meta.tokenizer, store.path, store.path.parent))
    except DataError as error:
        tokenizer = error
    _print_sample(store, options, tokenizer)
    if options.png is not None:
        draw_lengths(lengths, options.png, str(options.store))
        _show(f"histogram    {options.png}")
    parts = [store]
    if (options.store / VALIDATION_FOLDER).exists():
        parts.append(TokenStore.open(options.store / VALIDATION_FOLDER))
        meta = parts[1].meta
        _show(f"validation   {meta.num_documents:,} documents, {meta.num_tokens:,} tokens")
    if options.quick:
        _show("integrity    sizes and offsets fit; the shards were not read (--quick)")
        return
    start, size = time.monotonic(), 0
    known = {} if isinstance(tokenizer, DataError) else tokenizer.control_ids
    control_ids = {store.meta.eos_id: "end of sequence", **known}
    inside: Counter[int] = Counter()
    for part in parts:
        for index in range(part.num_shards):
            read, counts = check_shard(part, index, list(control_ids))
            size += read
            inside += counts
        inside[part.meta.eos_id] -= part.meta.num_documents
    seconds = time.monotonic() - start
    found = ", ".join(f"{name} {inside[number]:,}" for number, name in control_ids.items() if inside[number])
    unknown = " (not counted: others, since its tokenizer cannot be loaded)" if isinstance(tokenizer, DataError) else ""
    _show(f"control ids  inside documents: {found or 'none'}{unknown}; control strings: {store.meta.control_strings}")
    shards = sum(part.num_shards for part in parts)
    speed = f"{compact(size, 'B')} in {clock(seconds)} ({compact(size / max(seconds, 1e-9), 'B/s')})"
    _show(f"integrity    {shards} shards, offsets and ends of documents are as prepared: {speed}")


def _show(text: str) -> None:
    print(visible(text))  # it may include a stranger's text


def _print_counts(store: TokenStore, lengths: NDArray[np.int64]) -> None:
    meta = store.meta
    _show(f"{store.path}: {meta.num_documents:,} documents, {meta.num_tokens:,} tokens of {meta.dtype}")
    largest = max(shard.num_tokens for shard in meta.shards)
    _show(f"shards       {len(meta.shards)}, of up to {largest:,} tokens")
    tokenizer = " ".join(f"{key}={value}" for key, value in meta.tokenizer.items())
    _show(f"tokenizer    {tokenizer}, vocabulary {meta.vocab_size:,}, end of sequence {meta.eos_id}")
    for name, value in meta.preparation.items():
        if value is not None:
            _show(f"made with    {name}={' '.join(map(str, value)) if isinstance(value, list) else value}")
    middle = ", ".join(f"{quantile:.0%} ≤ {int(np.quantile(lengths, quantile)):,}" for quantile in _QUANTILES)
    _show(f"lengths      {lengths.min():,} to {lengths.max():,} tokens, mean {lengths.mean():,.0f}; {middle}")
    for length in (1 << 14, 1 << 17, 1 << 20):
        long = lengths[lengths >= length]
        if len(long):
            share = long.sum() / meta.num_tokens
            _show(f"             {len(long):,} documents of {length:,} tokens or more have {share:.1%} of all tokens")


def _print_sample(store: TokenStore, options: argparse.Namespace, tokenizer: Tokenizer | DataError) -> None:
    document = store.meta.num_documents // 2 if options.document is None else options.document
    if not 0 <= document < store.meta.num_documents:
        raise ConfigError("--document", document, f"allowed: 0 to {store.meta.num_documents - 1}")
    start, stop = store.doc_offsets[document : document + 2].tolist()
    ids = store.read(start, min(stop, start + max(1, options.sample_tokens)))
    rest = f", the first {len(ids)}" if start + len(ids) < stop else ""
    _show(f"document     {document:,}, {stop - start:,} tokens{rest}:")
    try:
        if isinstance(tokenizer, DataError):
            raise tokenizer
        text = tokenizer.decode(ids)
    except DataError as error:
        text = f"{ids[:40].tolist()} … (not decoded: {error})"
    _show("\n".join(f"             | {line}" for line in visible(text).splitlines()))


def draw_lengths(lengths: NDArray[np.int64], png: Path, title: str) -> None:
    """Draw histograms of document lengths [documents] int64: number of documents, and share of all tokens.

    Raises DataError if the picture cannot be written.
    """
    low, high = np.floor(np.log2(lengths.min())), np.floor(np.log2(lengths.max())) + 1
    width = 0.5 if high - low > 4 else 0.25
    bins = 2.0 ** np.arange(low, high + width, width)
    mean, median = lengths.mean(), np.median(lengths)
    counts = f"{len(lengths):,} documents, {lengths.sum():,} tokens (median {median:,.0f}, mean {mean:,.0f})"
    shown = title if len(title) < 70 else f"…{title[-69:]}"
    figure = new_figure(f"{shown}\n{counts}", (8, 5.5), dpi=130, title_size=10)
    from matplotlib.ticker import FuncFormatter

    documents, tokens = figure.subplots(2, 1, sharex=True)
    documents.hist(lengths, bins=bins, color=BLUE)
    documents.set_ylabel("documents")
    share = np.histogram(lengths, bins=bins, weights=lengths)[0] / lengths.sum() * 100
    tokens.stairs(share, bins, fill=True, color=ORANGE)
    tokens.set_ylabel("% of all tokens")
    tokens.set_xlabel("tokens of a document")
    tokens.set_xscale("log", base=2)
    tokens.set_xlim(bins[0], bins[-1])
    for axes in (documents, tokens):
        finish_axes(axes, "y")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_name(round(value))))
    try:
        render(figure, png, png.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise DataError(png, f"cannot be written ({error})", "choose another --png") from error
