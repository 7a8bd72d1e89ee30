"""The embedded corpus: its source files, and one prepared copy for all processes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from data.sources import corpora
from data.sources.corpora import Corpus, prepare_embedded, standard_library_documents
from data.store import TokenStore, is_store, shard_name
from tests.support.commands import check_line, run_here, snapshot
from tests.support.stores import verify
from zeco_train.errors import ConfigError, DataError


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small standard library, with files that must be excluded."""
    folder = tmp_path / "library"
    for name in ["os.py", "json/__init__.py", "site-packages/a.py", "dist-packages/b.py", "json/__pycache__/c.py"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")
    (folder / "bad.py").write_bytes(b"# -*- coding: latin-1 -*- \xe9")
    (folder / "empty.py").write_text("")
    (folder / "data.txt").write_text("no source")
    for index in range(60):
        (folder / f"module_{index:02}.py").write_text(f"value = {index}\n" * 20)
    return folder


def test_standard_library_documents_are_sorted_and_filtered(library: Path) -> None:
    corpus = standard_library_documents(library)
    names = [name for name, _ in corpus.documents]
    assert names == sorted(names)
    assert names == ["json/__init__.py", *(f"module_{index:02}.py" for index in range(60)), "os.py"]
    assert corpus.not_utf8 == 1
    assert corpus.documents[0][1] == "# json/__init__.py\n"
    assert standard_library_documents(library).manifest_sha256 == corpus.manifest_sha256
    (library / "os.py").write_text("# changed\n")
    assert standard_library_documents(library).manifest_sha256 != corpus.manifest_sha256
    with pytest.raises(DataError, match="no standard library sources"):
        standard_library_documents(library / "site-packages" / "none")


def test_standard_library_of_running_python_is_found() -> None:
    corpus = standard_library_documents()
    names = {name for name, _ in corpus.documents}
    assert "json/decoder.py" in names
    assert not any("site-packages" in name or "dist-packages" in name for name in names)
    assert sum(len(text) for _, text in corpus.documents) > 5_000_000


def test_embedded_corpus_is_split_and_reused(library: Path, tmp_path: Path) -> None:
    corpus = standard_library_documents(library)
    path = prepare_embedded(tmp_path / "cache", 0.25, corpus)
    main, held_out = TokenStore.open(path), TokenStore.open(path / "validation")
    assert main.meta.sources_sha256 == corpus.manifest_sha256
    assert main.meta.num_documents + held_out.meta.num_documents == len(corpus.documents)
    assert 5 <= held_out.meta.num_documents <= 26  # 62 files, each held out with probability 1/4: ± 3 deviations

    def documents(opened: TokenStore) -> list[str]:
        ids = [opened.read(start, stop) for start, stop in itertools.pairwise(opened.doc_offsets.tolist())]
        assert all(tokens[-1] == 1 for tokens in ids)
        return [bytes((tokens[:-1] - 3).astype(np.uint8)).decode() for tokens in ids]

    train_texts, held_out_texts = documents(main), documents(held_out)
    assert sorted(train_texts + held_out_texts) == sorted(text for _, text in corpus.documents)
    # Held-out files are spread over the library, not taken from its end.
    order = [text in set(held_out_texts) for _, text in corpus.documents]
    assert any(order[: len(order) // 2])
    assert any(order[len(order) // 2 :])

    before = (path / shard_name(0)).stat().st_ino
    assert prepare_embedded(tmp_path / "cache", 0.25, corpus) == path
    assert (path / shard_name(0)).stat().st_ino == before, "prepared a second time"
    assert prepare_embedded(tmp_path / "cache", 0.5, corpus) != path
    os.truncate(path / shard_name(0), 10)
    assert prepare_embedded(tmp_path / "cache", 0.25, corpus) == path
    verify(TokenStore.open(path))
    without = prepare_embedded(tmp_path / "cache", 0.0, corpus)
    assert not (without / "validation").exists()
    assert not [folder for folder in (tmp_path / "cache").iterdir() if not is_store(folder)]


def test_concurrent_processes_share_embedded_cache(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one finishes while this one writes."""
    corpus, write, others = standard_library_documents(library), corpora._write, []

    def write_late(folder: Path, corpus: Corpus, fraction: float) -> None:
        monkeypatch.setattr(corpora, "_write", write)
        others.append(prepare_embedded(tmp_path / "cache", 0.25, corpus))
        write(folder, corpus, fraction)

    monkeypatch.setattr(corpora, "_write", write_late)
    assert [prepare_embedded(tmp_path / "cache", 0.25, corpus)] == others == [*(tmp_path / "cache").iterdir()]
    verify(TokenStore.open(others[0]))


@pytest.mark.parametrize("is_link", [False, True])
def test_folders_of_other_kinds_and_links_are_not_replaced(is_link: bool, library: Path, tmp_path: Path) -> None:
    corpus = standard_library_documents(library)
    place = prepare_embedded(tmp_path / "cache", 0.25, corpus)
    victim = place.rename(tmp_path / "victim")
    os.truncate(victim / shard_name(0), 10)
    if is_link:
        place.symlink_to(victim)
    else:
        (victim / "thesis.txt").touch()
        victim.rename(place)
    before = snapshot(tmp_path)
    with pytest.raises(DataError, match=f"exists and is {'a link' if is_link else 'not a token store'}; choose"):
        prepare_embedded(tmp_path / "cache", 0.25, corpus)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_errors_of_the_command_are_one_line(
    arguments: list[str], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (library / "file").write_text("")
    monkeypatch.setenv("ZECO_CACHE", str(library / "file"))
    monkeypatch.setattr(corpora, "standard_library_documents", lambda: standard_library_documents(library))
    outcome = run_here(corpora.main, *arguments)
    check_line(outcome, *((ConfigError.exit_code,) if arguments else (DataError.exit_code, "cannot be", "ZECO_CACHE")))
    assert outcome.out == ""
