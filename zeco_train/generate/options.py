"""The command line of `python -m zeco_train.generate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zeco_train.errors import ConfigError, DataError
from zeco_train.generate.generator import Limits
from zeco_train.generate.sampling import Sampling
from zeco_train.system.command import Parser, user_path
from zeco_train.system.files import decode_text, read_errors
from zeco_train.system.paths import check_output_file

_STDIN = "-"
# Settings of train.py that apply to generation, with all keys below them.
_SETTINGS = ("sp", "train.dtype", "train.device", "train.kernels", "parallel.timeout_seconds")
_DESCRIPTION = """Generate text with a trained model.

RUN is a run's folder (its newest checkpoint), one of its checkpoints, or an export. A prompt goes through the chunked
operator, in pieces, split over the ranks there are; what follows goes through one recurrent step a token, with constant
memory, in hybrids beside that of the keys and values of prompt and text. Text goes to stdout as it comes, all else to
stderr."""
_EPILOG = f"""KEY=VALUE are settings of train.py, on top of the run's own: {", ".join(_SETTINGS)}.
Ranks share each prompt and divide the texts; with sp=dp, or a smaller sp.size, they divide the prompts, too.

  python -m zeco_train.generate runs/quickstart --prompt 'def main(' --temperature 0.8 --seed 1
  torchrun --standalone --nproc-per-node 8 -m zeco_train.generate runs/gla_1b --prompt-file book.txt --greedy"""


@dataclass(frozen=True)
class Options:
    """Parsed command line; `prompts` are texts, or files not yet read."""

    run: str
    overrides: list[str]
    prompts: list[str | Path]
    control_strings: str
    samples: int
    sampling: Sampling
    limits: Limits
    stream: bool
    json: Path | None
    prefill_tokens: int
    batch: int
    cuda_graph: bool


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line: `ConfigError` for an invalid argument, `SystemExit` after printing --help."""
    # `parse_args` would refuse KEY=VALUE behind an option.
    given = _parser().parse_intermixed_args(arguments)
    if given.greedy and (given.temperature is not None or given.top_k or given.top_p != 1.0):
        raise ConfigError("--greedy", "true", "takes the likeliest token; leave out --temperature, --top-k and --top-p")
    temperature = 1.0 if given.temperature is None else given.temperature
    sampling = Sampling(0.0 if given.greedy else temperature, given.top_k, given.top_p, given.seed)
    limits = Limits(given.max_tokens, tuple(given.stop), not given.ignore_eos)
    sampling.validate()
    limits.validate()
    for name in ("samples", "prefill_tokens", "batch"):
        if getattr(given, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}", getattr(given, name), "must be ≥ 1")
    if not given.prompts:
        raise ConfigError("--prompt", "", 'give one, or --prompt-file; --prompt "" begins a document')
    for name, texts in (("--prompt", given.prompts), ("--stop", given.stop)):
        for text in texts:
            _check_text(name, text)
    if given.prompts.count(Path(_STDIN)) > 1:
        raise ConfigError("--prompt-file", _STDIN, "stdin can be read once")
    if given.json is not None:
        check_output_file("--json", given.json)
    for text in given.overrides:
        _check_setting(text)
    same = ("run", "overrides", "prompts", "control_strings", "samples", "stream", "json", "prefill_tokens", "batch")
    values = {name: getattr(given, name) for name in (*same, "cuda_graph")}
    return Options(sampling=sampling, limits=limits, **values)


def read_prompts(prompts: Sequence[str | Path]) -> list[str]:
    """The texts of prompts; reads files (UTF-8, without a byte-order mark) and stdin, or raises `DataError`."""
    return [_read(prompt) if isinstance(prompt, Path) else prompt for prompt in prompts]


def _read(path: Path) -> str:
    with read_errors(path):
        raw = sys.stdin.buffer.read() if str(path) == _STDIN else path.read_bytes()
    try:
        return decode_text(raw)
    except UnicodeDecodeError as error:
        raise DataError(path, f"is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _check_text(name: str, text: str | Path) -> None:
    try:
        str(text).encode()
    except UnicodeEncodeError as error:
        allowed = f"is not UTF-8 text (character {error.start + 1}); --prompt-file reads files"
        raise ConfigError(name, ascii(str(text)), allowed) from error


def _check_setting(text: str) -> None:
    key, is_setting, value = text.lstrip("+").partition("=")
    if is_setting and not any(key == name or key.startswith(f"{name}.") for name in _SETTINGS):
        allowed = f"would be ignored; of train.py's settings these count here: {', '.join(_SETTINGS)}"
        raise ConfigError(key, value, allowed)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m zeco_train.generate",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's folder, a checkpoint, or an export")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="see below")
    add("--prompt", action="append", dest="prompts", default=[], metavar="TEXT", help="may be given several times")
    add(
        "--prompt-file",
        action="append",
        type=user_path,
        dest="prompts",
        metavar="FILE",
        help="a file's whole text as prompt; - is stdin; may be given several times",
    )
    add(
        "--control-strings",
        choices=("text", "ids"),
        default="text",
        help="what </s> and the like in a prompt become (default text)",
    )
    add("--samples", type=int, default=1, metavar="N", help="texts for each prompt; the n-th has seed + n (default 1)")
    add("--max-tokens", type=int, default=256, metavar="N", help="tokens of a text at most (default 256)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this; may be given several times")
    add("--ignore-eos", action="store_true", help="go on after the end of a document")
    add("--greedy", action="store_true", help="the likeliest token each time")
    add("--temperature", type=float, metavar="X", help="divides the logits (default 1); 0 is --greedy")
    add("--top-k", type=int, default=0, metavar="N", help="only the N likeliest tokens (default 0: all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest that sum to P (default 1: all)")
    add("--seed", type=int, default=0, metavar="N", help="of the draws (default 0)")
    add("--no-stream", action="store_false", dest="stream", help="show texts once they are complete")
    add("--json", type=user_path, metavar="FILE", help="write texts, token ids and speed to FILE, too")
    add(
        "--prefill-tokens",
        type=int,
        default=16_384,
        metavar="N",
        help="of prompts at once on a rank, less take less memory (default 16384)",
    )
    add("--batch", type=int, default=32, metavar="N", help="texts at once on a rank (default 32)")
    add("--no-cuda-graph", action="store_false", dest="cuda_graph", help="launch a step's kernels one by one")
    return parser
