"""`python -m zeco_train.generate` as a user runs it: on a run trained here, on one rank and on two."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from data.tokenizer import ByteTokenizer, load_tokenizer
from tests.data.test_prepare import QUOTING, control_tokens
from tests.support.commands import TORCHRUN, Command, Outcome, check_line, run_here, train_here
from zeco_train import export
from zeco_train.generate import __main__ as command
from zeco_train.generate import generator
from zeco_train.generate.__main__ import Printer, parse, read_prompts
from zeco_train.hf.folder import ORIGIN_FILE

__all__ = ["control_tokens"]

pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate") / "run"
    outcome = train_here("name=run", f"run_dir='{folder}'", "train.steps=2", "train.dtype=fp64", "data.seq_len=128")
    assert outcome.code == 0, outcome
    return folder


def generate(*arguments: str | Path) -> Outcome:
    return run_here(command.main, *map(str, arguments))


def launcher(ranks: int, *arguments: str | Path) -> list[str]:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [*command, "zeco_train.generate", *map(str, arguments)]


def texts(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["completions"]


def test_text_goes_to_stdout_and_summary_to_stderr(run: Path, tmp_path: Path) -> None:
    arguments = [run, "--prompt", "def ", "--max-tokens", "12", "--ignore-eos", "--seed", "5"]
    found = generate(*arguments, "--json", tmp_path / "found.json")
    assert found.code == 0, found
    (text,) = texts(tmp_path / "found.json")
    assert found.out == text["text"] + ("" if text["text"].endswith("\n") else "\n")
    assert (text["prompt"], text["seed"], text["ended_by"]) == ("def ", 5, "length")
    assert text["text"] == ByteTokenizer().decode(np.asarray(text["tokens"]))
    assert found.err.startswith("prompts: 4 tokens in ")
    assert found.err.endswith("tokens/s; stopped at --max-tokens\n")
    # The same seed gives the same text, also without streaming and from a checkpoint's path.
    checkpoint = run / "checkpoints" / "step_00000002"
    assert generate(checkpoint, *arguments[1:], "--no-stream").out == found.out
    assert generate(*arguments[:-1], "6").out != found.out


@pytest.mark.slow
def test_export_generates_same_text_as_its_run(run: Path, tmp_path: Path) -> None:
    """Also an export without a record of its run, which is computed in fp32."""
    arguments = ["--prompt", "def ", "--max-tokens", "30", "--ignore-eos"]
    expected = generate(run, *arguments).out
    outcome = run_here(export.main, str(run), str(tmp_path / "export"))
    assert outcome.code == 0, outcome
    assert generate(tmp_path / "export", *arguments).out == expected
    (tmp_path / "export" / ORIGIN_FILE).unlink()
    assert generate(tmp_path / "export", *arguments, "--json", tmp_path / "found.json").code == 0
    assert json.loads((tmp_path / "found.json").read_text())["step"] is None


def test_headings_number_prompts_and_samples(run: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("é\n", encoding="utf-8")
    found = generate(run, "--prompt", "a", "--prompt-file", prompt, "--samples", "2", "--greedy", "--max-tokens", "3")
    headings = [line for line in found.out.splitlines() if line.startswith("== ")]
    assert headings == [f"== prompt {p}, sample {s}" for p in (1, 2) for s in (1, 2)]
    texts = [text.strip("\n") for text in re.split(r"^== .*$", found.out, flags=re.M)[1:]]
    # Greedy, so samples of a prompt are equal.
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    # One token of "a", two of "é", one of the line's end.
    assert found.err.startswith("prompts: 4 tokens in ")


@pytest.mark.processes
@pytest.mark.slow
def test_two_ranks_generate_same_texts_as_one(run: Path, tmp_path: Path) -> None:
    """In fp64: a prompt over both ranks, texts on both, and a batch in which one rank has none."""
    long = tmp_path / "long.txt"
    long.write_text("import os\n" * 40)
    options = ["--prompt", "x = ", "--prompt", "", "--max-tokens", "20", "--ignore-eos", "--seed", "1"]
    arguments = [run, "--prompt-file", long, *options]
    alone = generate(*arguments, "--json", tmp_path / "one.json")
    assert alone.code == 0, alone
    with Command(launcher(2, *arguments, "--json", tmp_path / "two.json", "--batch", "1"), tmp_path) as two:
        outcome = two.wait()
    assert outcome.code == 0, outcome
    assert texts(tmp_path / "two.json") == texts(tmp_path / "one.json")
    assert outcome.out == alone.out
    assert len(texts(tmp_path / "two.json")) == 3


@pytest.mark.slow
def test_size_of_caches_is_told_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = ["model.num_layers=1", "model.attn.every=1", "train.steps=1", f"run_dir='{tmp_path / 'run'}'"]
    assert (outcome := train_here("name=run", *hybrid)).code == 0, outcome
    arguments = [tmp_path / "run", "--prompt", "x = ", "--max-tokens", "2"]
    monkeypatch.setattr(command, "_MENTIONED_BYTES", 1)
    assert generate(*arguments).err.startswith("keys and values of softmax layers take up to ")
    monkeypatch.setattr(generator, "total_memory", lambda device: (1, "this toy"))
    check_line(generate(*arguments), 2, "keys and values of softmax layers take ")


@pytest.mark.slow
@pytest.mark.processes
def test_sigint_ends_generation_with_summary(run: Path, tmp_path: Path) -> None:
    arguments = [run, "--prompt", "a", "--max-tokens", "10000000", "--ignore-eos"]
    program = [sys.executable, "-m", "zeco_train.generate", *map(str, arguments)]
    with Command(program, tmp_path) as command:
        command.wait_until(lambda: len(command.out) > 20, "text")
        command.signal(signal.SIGINT)
        outcome = command.wait()
    assert outcome.code == 130, outcome
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("; stopped by a signal\n")


def test_signals_end_reading_of_prompts(run: Path) -> None:
    """They were only remembered, and nothing but the end of stdin ended `--prompt-file -`."""
    found: list[object] = []

    def read(prompts: Sequence[str | Path]) -> list[str]:
        found.append(signal.getsignal(signal.SIGTERM))
        signal.raise_signal(signal.SIGINT)
        found.append("read on")
        return ["a"]

    # A shell ignores SIGINT in its background jobs, and this process inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with mock.patch.object(command, "read_prompts", read):
            outcome = generate(run, "--prompt-file", "-")
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome == Outcome(130, "", "")
    assert found == [signal.SIG_DFL]


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["--prompt", "x", "--top-p", "0"], 2, ["top_p=0.0", "> 0"]),
        (["--prompt", "x", "--temperature", "1e-39"], 2, ["temperature=1e-39", "or 0"]),
        (["--prompt", "x", "--greedy", "--top-k", "3"], 2, ["--greedy", "leave out"]),
        (["--prompt", "x", "--max-tokens", "0"], 2, ["max_tokens=0", "≥ 1"]),
        (["--prompt", "x", "--loud"], 2, ["argument=--loud: unknown option; --help lists all"]),
        (["--prompt", "x", "optim.lr=1"], 2, ["optim.lr=1", "would be ignored", "train.dtype"]),
        (["--prompt", "x", "train.dtype=fp8"], 2, ["train.dtype=fp8", "bf16, fp32, fp64"]),
        (["--prompt", "x", "sp.size=3"], 2, ["sp.size=3", "must divide the world size 1"]),
        ([], 2, ["--prompt", "--prompt-file"]),
        (["--prompt-file", "-", "--prompt-file", "-"], 2, ["--prompt-file=-", "once"]),
    ],
)
def test_invalid_arguments_print_one_error_line(run: Path, arguments: list[str], code: int, parts: list[str]) -> None:
    check_line(generate(run, *arguments), code, *parts)


def test_unusable_run_or_prompt_file_is_reported(run: Path, tmp_path: Path) -> None:
    check_line(generate("nowhere", "--prompt", "x"), 2, "RUN=nowhere", "no such folder")
    binary = tmp_path / "binary"
    binary.write_bytes(b"ok \xff")
    check_line(generate(run, "--prompt-file", binary), 3, "binary", "not UTF-8", "byte 3")
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    weights = next((damaged / "checkpoints" / "step_00000002").glob("*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-1])
    check_line(generate(damaged, "--prompt", "x"), 4, "damaged")


def test_byte_order_mark_of_prompt_file_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfab\xef\xbb\xbf")
    assert read_prompts([tmp_path / "prompt.txt", "\ufeffas given"]) == ["ab\ufeff", "\ufeffas given"]


@pytest.mark.slow
def test_control_strings_of_prompts_are_text_unless_allowed(control_tokens: Path) -> None:
    own = mock.Mock(_tokenizer=load_tokenizer(str(control_tokens)))
    for flags, found in (([], 0), (["--control-strings", "text"], 0), (["--control-strings", "ids"], 2)):
        control = parse(["run", "--prompt", "x", *flags]).control_strings == "ids"
        ids = generator.Generator.encode(own, QUOTING, control=control).tolist()
        assert ids.count(0) == found


def test_printer_keeps_prompt_order() -> None:
    """Texts arrive in any order, those of other ranks at the end; the first unfinished one is streamed."""
    from zeco_train.generate.generator import Completion

    out = io.StringIO()
    printer = Printer(3, 1, out)
    printer.emit(1, 0, "two", False)
    assert out.getvalue() == ""
    printer.emit(0, 0, "o", False)
    assert out.getvalue() == "== prompt 1\no"
    printer.emit(0, 0, "ne", True)
    assert out.getvalue() == "== prompt 1\none\n== prompt 2\ntwo"
    printer.emit(1, 0, "\n", True)
    rest = [Completion(0, 0, "one", [], "eos"), Completion(1, 0, "two\n", [], "eos"), Completion(2, 0, "3", [], "eos")]
    printer.finish(rest)
    assert out.getvalue() == "== prompt 1\none\n== prompt 2\ntwo\n== prompt 3\n3\n"
