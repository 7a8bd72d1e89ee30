"""The command `python -m zeco_train.generate`: find the model, join the ranks, load it, generate, print."""

from __future__ import annotations

from zeco_train.system.signals import run_command

if __name__ == "__main__":
    run_command("zeco_train.generate.__main__")

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from models.spec import spec_of
from zeco_train.config.overrides import is_of
from zeco_train.distributed.config import resolve_sp_size
from zeco_train.distributed.mesh import ProcessMesh, agree, from_main
from zeco_train.errors import ConfigError, DataError
from zeco_train.generate.generator import Completion, Generator, Limits, Speed
from zeco_train.generate.sampling import Sampling
from zeco_train.hf.trained import Trained, find_trained, join_to_use, load_trained
from zeco_train.lifecycle.end import Advice, Job, run_job
from zeco_train.sp.exchange import connect_model
from zeco_train.system.command import Parser, user_path
from zeco_train.system.files import decode_text, jsonable, read_errors, write_result
from zeco_train.system.paths import check_output_file, warn_of_replacing
from zeco_train.system.signals import StopRequest
from zeco_train.system.terminal import is_reader_gone, visible

_ADVICE = Advice(
    lost_peer="generate again",
    memory="smaller --prefill-tokens or --batch, or more ranks, need less",
    timeout_key="parallel.timeout_seconds",
)

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
# Caches of softmax layers from this size on are mentioned before they are allocated.
_MENTIONED_BYTES = 10**9


def main(arguments: list[str]) -> int:
    """Generate; returns the process's exit code."""
    return run_job(partial(_generate, arguments), _ADVICE)


def _generate(arguments: list[str], job: Job) -> int:
    if {"-h", "--help"} & set(arguments) and job.launch.rank != 0:
        return 0
    options = parse(arguments)
    trained = find_trained(options.run)
    if not trained.model.causal:
        raise ConfigError("RUN", options.run, "reads in both directions (model.causal=false), so it cannot generate")
    config = trained.configure(options.overrides)
    spec, dtype = spec_of(config.model), config.train.dtype.compute
    # The prompts' passes, and a step for each token of the texts.
    calls = [*spec.calls(dtype), *spec.calls(dtype, steps=True)]
    sp_size = resolve_sp_size(config.sp.size, job.launch.world_size, config.sp.backend.value)
    # Prompts and results are rank 0's alone; a model's path may differ between nodes.
    own = {name: str(value) for name, value in vars(options).items() if name not in ("run", "prompts", "json")}
    mesh = join_to_use(config, job, sp_size, calls, own)
    if mesh.is_main:
        warn_of_replacing([] if options.json is None else [options.json])
    job.enter("loading the model")
    model = load_trained(trained, mesh, dtype=config.train.dtype, strategy=None)
    tokenizer = agree(mesh, lambda: trained.tokenizer)
    exchange = connect_model(config.sp, config.model, mesh)
    stop = StopRequest()
    printer = Printer(len(options.prompts) * options.samples, options.samples, sys.stdout, options.stream)
    generator = Generator(
        model,
        tokenizer,
        mesh,
        exchange,
        prefill_tokens=options.prefill_tokens,
        batch=options.batch,
        cuda_graph=options.cuda_graph,
        # A closed pipe, as after `| head`, ends all ranks like a signal.
        stop=lambda: signal.SIGPIPE if printer.is_closed else stop.signal or 0,
    )
    job.enter("reading the prompts")
    # Signals still end the process: stdin may be a terminal that a user leaves by Ctrl-C.
    texts, prompts = _share_prompts(options, generator, trained, mesh)
    cached = generator.cache_bytes(prompts, options.limits, options.samples)
    if mesh.is_main and cached >= _MENTIONED_BYTES:
        size = f"{cached / 1e9:.3g} GB of memory on each rank"
        print(f"keys and values of softmax layers take up to {size}; smaller --batch needs less", file=sys.stderr)
    job.enter("generating")
    with stop:
        completions = generator.generate(
            prompts,
            options.sampling,
            options.limits,
            samples=options.samples,
            # The texts of other ranks are printed at the end, by `finish`.
            on_text=printer.emit if mesh.is_main else None,
        )
    exchange.drain()
    if mesh.is_main:
        printer.finish(completions)
        if options.json is not None:
            write_json(options.json, texts, completions, _facts(options, trained, mesh, generator.speed))
        print(_summary(completions, generator.speed), file=sys.stderr, flush=True)
    # Shell convention for a process ended by a signal.
    return 128 + generator.stopped_by if generator.stopped_by else 0


def _share_prompts(
    options: argparse.Namespace, generator: Generator, trained: Trained, mesh: ProcessMesh
) -> tuple[list[str], list[Tensor]]:

    def read() -> tuple[list[str], list[Tensor]]:
        texts = read_prompts(options.prompts)
        prompts = [generator.encode(text, control=options.control_strings == "ids") for text in texts]
        trained.check_ids(prompts)
        return texts, prompts

    return from_main(mesh, read)


def _facts(options: argparse.Namespace, trained: Trained, mesh: ProcessMesh, speed: Speed) -> dict[str, object]:
    return {
        "model": str(trained.path),
        "step": trained.step,
        "ranks": mesh.world_size,
        "device": mesh.device.type,
        "sampling": asdict(options.sampling),
        "limits": asdict(options.limits),
        "speed": asdict(speed),
    }


# `Completion.ended_by`, for users.
_ENDS = {
    "length": "stopped at --max-tokens",
    "eos": "ended by the model",
    "stop": "stopped at --stop",
    "signal": "stopped by a signal",
}


def _summary(completions: Sequence[Completion], speed: Speed) -> str:
    tokens = sum(len(completion.tokens) for completion in completions)
    ends = [_ENDS[completion.ended_by] for completion in completions]
    reasons = ", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(ends)) if len(ends) != 1 else ends[0]
    read = f"prompts: {speed.prompt_tokens:,} tokens in {speed.prefill_seconds:.2f} s"
    rate = tokens / speed.decode_seconds if speed.decode_seconds else 0.0
    return f"{read}; texts: {tokens:,} tokens in {speed.decode_seconds:.2f} s, {rate:,.0f} tokens/s; {reasons}"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line: the options, checked, and of them `sampling` and `limits`; prompts are texts, or files.

    Raises ConfigError for an invalid argument, SystemExit after printing --help.
    """
    # `parse_args` would refuse KEY=VALUE behind an option.
    given = _parser().parse_intermixed_args(arguments)
    if given.greedy and (given.temperature is not None or given.top_k or given.top_p != 1.0):
        raise ConfigError("--greedy", "true", "takes the likeliest token; leave out --temperature, --top-k and --top-p")
    temperature = 1.0 if given.temperature is None else given.temperature
    given.sampling = Sampling(0.0 if given.greedy else temperature, given.top_k, given.top_p, given.seed)
    given.limits = Limits(given.max_tokens, tuple(given.stop), not given.ignore_eos)
    given.sampling.validate()
    given.limits.validate()
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
        key, is_setting, value = text.lstrip("+").partition("=")
        if is_setting and not is_of(key, *_SETTINGS):
            allowed = f"would be ignored; of train.py's settings these count here: {', '.join(_SETTINGS)}"
            raise ConfigError(key, value, allowed)
    return given


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
    whole = "a file's whole text as prompt; - is stdin; may be given several times"
    add("--prompt-file", action="append", type=user_path, dest="prompts", metavar="FILE", help=whole)
    control = "what </s> and the like in a prompt become (default text)"
    add("--control-strings", choices=("text", "ids"), default="text", help=control)
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
    at_once = "of prompts at once on a rank, less take less memory (default 16384)"
    add("--prefill-tokens", type=int, default=16_384, metavar="N", help=at_once)
    add("--batch", type=int, default=32, metavar="N", help="texts at once on a rank (default 32)")
    add("--no-cuda-graph", action="store_false", dest="cuda_graph", help="launch a step's kernels one by one")
    return parser


class Printer:
    """Prints texts in order of prompt and sample; the first unfinished text is streamed.

    Args:
        total: number of texts, several with a heading each.
        samples: per prompt.
        out: output stream. On a terminal, control characters in generated text are escaped; a file or a pipe gets the
            text unchanged.
    """

    def __init__(self, total: int, samples: int, out: TextIO, stream: bool = True) -> None:
        self._total, self._samples, self._out, self._stream = total, samples, out, stream
        self._is_terminal = out.isatty()
        self._waiting: dict[int, list[str]] = {}
        self._ended: set[int] = set()
        # The text being printed, and whether its heading has been printed.
        self._current, self._is_begun = 0, False
        self._last = "\n"
        self.is_closed = False  # the reader has closed the pipe, as after `| head`

    def emit(self, prompt: int, sample: int, piece: str, is_last: bool) -> None:
        number = prompt * self._samples + sample
        self._waiting.setdefault(number, []).append(piece)
        if is_last:
            self._ended.add(number)
        self._show()

    def finish(self, completions: Sequence[Completion]) -> None:
        """Print the remaining texts of all ranks."""
        texts = {completion.prompt * self._samples + completion.sample: completion.text for completion in completions}
        for number in range(self._current, self._total):
            if number not in self._ended:
                # Texts without a completion never began, because of a stop request.
                self._waiting[number] = [texts.get(number, "")]
                self._ended.add(number)
        self._show()

    def _show(self) -> None:
        while self._current < self._total:
            pieces, is_over = self._waiting.get(self._current), self._current in self._ended
            if pieces is None or not (is_over or self._stream):
                return
            text = "".join(pieces)
            pieces.clear()
            if not self._is_begun and self._total > 1:
                prompt, sample = divmod(self._current, self._samples)
                of = f", sample {sample + 1}" if self._samples > 1 else ""
                self._write(f"== prompt {prompt + 1}{of}\n")
            self._is_begun = True
            self._write(text)
            if not is_over:
                return
            self._write("" if self._last == "\n" and text else "\n")
            self._current, self._is_begun = self._current + 1, False

    def _write(self, text: str) -> None:
        if not text or self.is_closed:
            return
        try:
            self._out.write(visible(text) if self._is_terminal else text)
            self._out.flush()
        except OSError as error:
            # Python flushes stdout at exit, which would fail again.
            self.is_closed = is_reader_gone(error)
            if not self.is_closed:
                raise
        self._last = text[-1]


def write_json(path: Path, prompts: Sequence[str], completions: Sequence[Completion], facts: Mapping[str, Any]) -> None:
    """Write the results to a file, or raise `DataError`."""
    rows = [
        {
            "prompt": prompts[c.prompt],
            "sample": c.sample,
            "seed": facts["sampling"]["seed"] + c.sample,
            "text": c.text,
            "tokens": c.tokens,
            "ended_by": c.ended_by,
        }
        for c in completions
    ]
    text = json.dumps(jsonable({**facts, "completions": rows}), indent=1, ensure_ascii=False)
    write_result(path, text + "\n")
