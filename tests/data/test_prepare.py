"""`python -m data.prepare`: stores from files of every kind, and interruption at any time."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pyarrow
import pytest
from pyarrow import parquet

from data.prepare import PrepareOptions, main, prepare_store
from data.sources.readers import read_lines
from data.store import TokenStore, is_store
from data.tokenizer import ByteTokenizer, load_tokenizer
from tests.support.stores import documents, write_lines, write_word_tokenizer
from tests.support.waiting import ENOUGH

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, list[str]]:
    """A folder with every kind of file, and its documents in order."""
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / "B.md").write_text("# Überschrift\n", encoding="utf-8")
    (folder / "a.txt").write_text("first\r\nsecond 𝄞\n", encoding="utf-8", newline="")
    (folder / "b" / "code.py").write_text("print('x')\n")
    (folder / "b" / "empty.txt").write_text("")
    lines = [{"text": f"line {index} " + "é" * (index % 40), "id": index} for index in range(200)]
    write_lines(folder / "c.jsonl", lines)
    (folder / "c.jsonl").write_bytes((folder / "c.jsonl").read_bytes().replace(b"\n", b"\n\n  \n", 3).rstrip(b"\n"))
    rows = [f"row {index}" if index % 7 else None for index in range(50)]
    parquet.write_table(pyarrow.table({"n": range(50), "text": rows}), folder / "d.parquet", row_group_size=20)
    for name in ["e.csv", "f.csv", "README", ".hidden.txt", ".git/config.txt"]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not to be read")
    expected = ["# Überschrift\n", "first\r\nsecond 𝄞\n", "print('x')\n"]
    expected += [line["text"] for line in lines] + [row for row in rows if row]  # type: ignore[misc]
    return folder, expected


@pytest.mark.slow
def test_byte_tokenizer_ids_equal_byt5() -> None:
    from transformers import ByT5Tokenizer

    reference = ByT5Tokenizer(extra_ids=0)
    text = "".join(map(chr, range(300))) + "𝄞 and </s> as text"
    tokenizer = ByteTokenizer()
    plain = text.replace("</s>", "")
    assert tokenizer.encode([plain])[0].tolist() == reference(plain, add_special_tokens=False)["input_ids"]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (len(reference), reference.eos_token_id)
    assert tokenizer.decode(tokenizer.encode([text])[0]) == text


def test_folder_with_all_file_kinds(
    corpus: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected = corpus
    assert main([str(folder), "--out", str(tmp_path / "store")]) == 0
    assert documents(tmp_path / "store") == expected
    captured = capsys.readouterr()
    # 3 of other suffixes, .hidden.txt and .git
    assert "skipped 5 files of other kinds: hidden 2, .csv 2, no suffix 1" in captured.out
    assert "left out 8 documents that are null, 1 documents without text\n" in captured.out
    total = sum(len(text.encode()) + 1 for text in expected)
    assert f"store: {len(expected)} documents, {total:,} tokens of uint16 from 6 files, vocabulary 259" in captured.out
    assert captured.err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "store"]
    meta = TokenStore.open(tmp_path / "store").meta
    assert (meta.tokenizer, meta.eos_id, meta.vocab_size) == ({"kind": "bytes"}, 1, 259)


# A null, a byte-order mark at the start of the file where a text format can have one, and at the start of documents.
MARKED = ["\ufeffa", None, "b\ufeffc", "\ufeff"]


def write_marked(folder: Path, kind: str) -> Path:
    """MARKED in one file of this kind; the null only in kinds that can have one."""
    folder.mkdir()
    path = folder / f"marked.{kind}"
    table = pyarrow.table({"text": MARKED})
    lines = "".join(json.dumps({"text": text}) + "\n" for text in MARKED).encode()
    match kind:
        case "parquet":
            parquet.write_table(table, path)
        case "arrow":
            with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + lines))
        case "jsonl":
            path.write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\n\xef\xbb\xbf\n\xef\xbb\xbf", 1))
        case "txt":
            for number, text in enumerate(MARKED):
                (folder / f"{number}.txt").write_text(text or "", encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl.gz", "jsonl", "txt"])
def test_nulls_are_no_documents_and_byte_order_marks_no_text(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write_marked(tmp_path / "corpus", kind)), "--out", str(tmp_path / "store")]) == 0
    assert documents(tmp_path / "store") == ["a", "b\ufeffc"]
    left_out = "2 documents without text" if kind == "txt" else "1 documents that are null, 1 documents without text"
    assert f"left out {left_out}\n" in capsys.readouterr().out


def test_column_of_nulls_has_no_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet.write_table(pyarrow.table({"text": pyarrow.nulls(2)}), tmp_path / "a.parquet")
    assert main([str(tmp_path / "a.parquet"), "--out", str(tmp_path / "store")]) == 3
    assert "no text in 1 files; left out 2 documents that are null\n" in capsys.readouterr().err
    parquet.write_table(pyarrow.table({"text": ["b"]}), tmp_path / "b.parquet")
    sources = [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]
    assert main([*sources, "--out", str(tmp_path / "store")]) == 0
    assert documents(tmp_path / "store") == ["b"]


@pytest.mark.parametrize(
    ("kind", "unit_bytes"), [("parquet", 1 << 21), ("jsonl.gz", 50), ("jsonl", 1 << 21), ("txt", 50)]
)
def test_documents_of_too_many_bytes_are_left_out(kind: str, unit_bytes: int, tmp_path: Path) -> None:
    texts, path = ["é" * 50, "é" * 51, "a", "a" * 5000, "b"], tmp_path / f"a.{kind}"
    # Just short enough and one byte too long, also as lines.
    most = 100 if kind in ("parquet", "txt") else len(json.dumps({"text": texts[0]}, ensure_ascii=False).encode())
    lines = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts).encode()
    match kind:
        case "parquet":
            parquet.write_table(pyarrow.table({"text": texts}), path)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case "jsonl":
            path.write_bytes(lines)
        case "txt":
            for number, text in enumerate(texts):
                path.with_name(f"{number}.txt").write_text(text, encoding="utf-8")
    options = PrepareOptions((tmp_path,), tmp_path / "store", unit_bytes=unit_bytes, max_document_bytes=most)
    assert prepare_store(options).left_out == {"large": 2}
    assert documents(tmp_path / "store") == [texts[0], "a", "b"]


@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_long_line_is_read_once_by_all_units_together(ending: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 100_000 + b'"}' + ending)
    read = 0

    class Counting(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            nonlocal read
            line = super().readline(size)
            read += len(line)
            return line

    contents, found = path.read_bytes(), []
    for start in range(0, len(contents), 100):
        opened = mock.Mock(open=lambda mode: Counting(contents))
        found += list(read_lines(opened, start, min(start + 100, len(contents)), "text", 1 << 20))
    assert found == ["x" * 100_000]
    assert read <= 3 * len(contents)


def test_links_within_a_folder_by_name_and_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "datasets--name" / "snapshots" / "1"
    (snapshot.parents[1] / "blobs").mkdir(parents=True)
    (snapshot.parents[1] / "blobs" / "b").write_text("blob")
    snapshot.mkdir(parents=True)
    (snapshot / "a.txt").symlink_to("../../blobs/b")
    (snapshot / "b.txt").symlink_to("a.txt")
    (tmp_path / "named.txt").symlink_to(snapshot / "a.txt")
    (tmp_path / "folder").symlink_to(snapshot)
    assert main([str(tmp_path / "folder"), str(tmp_path / "named.txt"), "--out", str(tmp_path / "store")]) == 0
    assert documents(tmp_path / "store") == ["blob"] * 3


def test_named_files_with_min_tokens_into_nested_out(corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, expected = corpus
    sources = [str(folder / name) for name in ["b/code.py", "a.txt", "B.md"]]
    assert main([*sources, "--out", str(tmp_path / "deep" / "er" / "store"), "--min-tokens", "12"]) == 0
    # In the given order, which is not that of names; code.py has 11 tokens.
    assert documents(tmp_path / "deep" / "er" / "store") == [expected[1], expected[0]]


def test_unit_size_does_not_change_the_result(corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, expected = corpus
    prepare_store(PrepareOptions((folder,), tmp_path / "store", unit_bytes=97))
    assert documents(tmp_path / "store") == expected


def test_validation_part_is_the_last_documents(corpus: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, expected = corpus
    assert main([str(folder), "--out", str(tmp_path / "store"), "--validation-fraction", "0.25"]) == 0
    main_part, held_out = documents(tmp_path / "store"), documents(tmp_path / "store" / "validation")
    assert main_part + held_out == expected
    sizes = [len(text.encode()) + 1 for text in expected]
    assert sum(sizes[len(main_part) :]) <= 0.25 * sum(sizes) < sum(sizes[len(main_part) - 1 :])


@pytest.fixture(scope="session")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of few words with ids up to 70,002, and one without an end-of-sequence token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_word_tokenizer(folder / "whole", [*range(10), 9999, 70_000], eos_token="</s>")
    write_word_tokenizer(folder / "endless")
    return folder


def test_prepare_with_hugging_face_tokenizer(hugging_face: Path, tmp_path: Path) -> None:
    records = [{"body": "w0 w70000 w5"}, {"body": ""}, {"body": "other w1"}]
    source = write_lines(tmp_path / "text.jsonl", records)
    options = ["--tokenizer", str(hugging_face / "whole"), "--text-field", "body", "--workers", "1"]
    assert main([str(source), "--out", str(tmp_path / "store"), *options]) == 0
    opened = TokenStore.open(tmp_path / "store")
    assert opened.read(0, opened.num_tokens).tolist() == [2, 70_002, 7, 1, 0, 3, 1]
    assert opened.doc_offsets.tolist() == [0, 4, 7]
    assert (opened.vocab_size, opened.meta.dtype, opened.meta.eos_id) == (70_003, "uint32", 1)
    assert opened.meta.tokenizer["kind"] == "huggingface"
    assert opened.meta.tokenizer["path"] == str(hugging_face / "whole")
    assert len(opened.meta.tokenizer["sha256"]) == 64


@pytest.fixture(scope="session")
def control_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of single bytes with control tokens, 0 and 1, and another added token, 2."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["</s>", "<pad>", "<tab>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<tab>", normalized=False)])
    folder = tmp_path_factory.mktemp("control")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(folder)
    return folder


QUOTING = "<s>struck</s> out, <pad><tab></s>"


@pytest.mark.parametrize(("rule", "inside"), [("text", []), ("ids", [0, 1, 0])])
def test_control_strings_are_text_unless_allowed(
    rule: str, inside: list[int], control_tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "text.jsonl", [{"text": QUOTING}, {"text": "plain"}])
    options = ["--tokenizer", str(control_tokens), *(["--control-strings", "ids"] if rule == "ids" else [])]
    assert main([str(source), "--out", str(tmp_path / "store"), *options]) == 0
    assert ("stored 3 control ids inside documents\n" in capsys.readouterr().out) == (rule == "ids")
    opened = TokenStore.open(tmp_path / "store")
    ids = opened.read(0, int(opened.doc_offsets[1]))
    assert ids[ids < 2].tolist() == [*inside, 0]
    assert 2 in ids.tolist()
    assert load_tokenizer(str(control_tokens)).decode(ids[:-1]) == QUOTING
    assert opened.meta.control_strings == rule


def test_control_ids_that_the_model_itself_gives_are_refused_unless_allowed(
    hugging_face: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "text.jsonl", [{"text": "w0 unknown </s> w1"}])
    arguments = [str(source), "--tokenizer", str(hugging_face / "whole"), "--out", str(tmp_path / "store")]
    assert main(arguments) == 3
    problem = "gives control id 1 for the text '</s>' of a document; --control-strings ids allows and counts such ids"
    assert f"{hugging_face / 'whole'}: {problem}\n" in capsys.readouterr().err
    assert main([*arguments, "--control-strings", "ids"]) == 0
    assert TokenStore.open(tmp_path / "store").read(0, 5).tolist() == [2, 0, 1, 3, 1]


def test_existing_store_is_replaced_only_with_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "a.txt", tmp_path / "store"
    source.write_text("old")
    out.mkdir()  # an empty folder is no obstacle
    assert main([str(source), "--out", str(out)]) == 0
    source.write_text("new")
    assert main([str(source), "--out", str(out)]) == 3
    assert "store: exists already; give --overwrite to replace it; nothing was changed" in capsys.readouterr().err
    assert documents(out) == ["old"]
    source.write_bytes(b"\xff")
    assert main([str(source), "--out", str(out), "--overwrite"]) == 3
    assert documents(out) == ["old"]
    source.write_text("new")
    assert main([str(source), "--out", str(out), "--overwrite"]) == 0
    assert documents(out) == ["new"]
    (out / "notes").write_text("what a user keeps in it")
    assert main([str(source), "--out", str(out), "--overwrite"]) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "store"]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_interrupted_preparation_leaves_no_loadable_store(tmp_path: Path, number: signal.Signals) -> None:
    line = json.dumps({"text": "some words of text " * 100}) + "\n"
    source, out = tmp_path / "text.jsonl", tmp_path / "place" / "store"
    source.write_text('{"text": "old"}')
    assert main([str(source), "--out", str(out)]) == 0
    source.write_text(line * 20_000)  # 38 MB: about a second of work
    command = [sys.executable, "-m", "data.prepare", str(source), "--out", str(out), "--workers", "2", "--overwrite"]
    # SIGINT is ignored if the tests run in the background, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with subprocess.Popen(
        command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + ENOUGH
        while not any(path.stat().st_size for path in out.parent.glob(".store.preparing/store/tokens-*.bin")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "nothing was written"
            time.sleep(0.002)
        # So that it cannot finish before the signal.
        process.send_signal(signal.SIGSTOP)
        listed = Path(f"/proc/{process.pid}/task").glob("*/children")
        workers = [Path("/proc", child) for path in listed for child in path.read_text().split()]
        assert len(workers) >= 2
        # As a terminal does, to all of its processes.
        (os.killpg if number in (signal.SIGINT, signal.SIGHUP) else os.kill)(process.pid, number)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=ENOUGH)
    is_killed = number is signal.SIGKILL
    assert process.returncode == (-number if is_killed else 128 + number)
    while any(path.exists() for path in workers):
        assert time.monotonic() < deadline + ENOUGH, f"{workers} are still there"
        time.sleep(0.002)
    # After SIGKILL only Python's resource tracker may write to stderr.
    assert is_killed or errors == "interrupted: nothing was written\n"
    assert "Traceback" not in errors
    assert documents(out) == ["old"]
    assert not [path for path in out.parent.rglob("*") if path.is_dir() and path != out and is_store(path)]
    assert is_killed or [path.name for path in out.parent.iterdir()] == ["store"]
    # The next run succeeds and removes leftovers.
    source.write_text(line)
    assert main([str(source), "--out", str(out), "--overwrite"]) == 0
    assert documents(out) == ["some words of text " * 100]
    assert [path.name for path in out.parent.iterdir()] == ["store"]


def test_help_goes_to_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    out, err = capsys.readouterr()
    assert (end.value.code, err) == (0, "")
    assert out.startswith("usage: ")


@pytest.mark.slow
@pytest.mark.processes
def test_import_does_not_load_torch_or_transformers() -> None:
    code = "import sys, data.prepare; print({'torch', 'transformers', 'pyarrow'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert output.stdout == "set()\n"
