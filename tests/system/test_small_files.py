"""Reading small untrusted files: regular files only, bounded size and depth, never blocking."""

import os
from pathlib import Path

import pytest

from zeco_train.system.small_files import parse_json, read_json, read_small


def test_json_is_read_through_symlink(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"step": [1, {"x": null}]}')
    (tmp_path / "b.json").symlink_to("a.json")
    assert read_json(tmp_path / "b.json") == {"step": [1, {"x": None}]}


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/null", "fifo", "socket"])
def test_non_regular_files_are_refused_without_blocking(tmp_path: Path, target: str) -> None:
    if target == "fifo":
        os.mkfifo(tmp_path / "fifo")
    if target == "socket":
        os.mknod(tmp_path / "socket", 0o140644)
    (tmp_path / "meta.json").symlink_to(target)
    with pytest.raises(OSError, match="not a regular file"):
        read_small(tmp_path / "meta.json")


def test_folders_missing_files_and_loops_raise_os_errors(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name, kind in ((".", IsADirectoryError), ("missing", FileNotFoundError), ("loop", OSError)):
        with pytest.raises(kind):
            read_small(tmp_path / name)


def test_file_size_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    assert len(read_small(tmp_path / "a", largest=100)) == 100
    with pytest.raises(OSError, match="larger than 99 bytes"):
        read_small(tmp_path / "a", largest=99)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="larger than 67,108,864 bytes"):
        read_small(tmp_path / "sparse")


@pytest.mark.parametrize("depth", [33, 900, 100_000, 10_000_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_raises_value_error(depth: int, opening: str, closing: str) -> None:
    text = opening * depth + "1" + closing * depth
    with pytest.raises(ValueError, match="nested deeper than 32 levels"):
        parse_json(text)


def test_nesting_of_32_levels_is_read() -> None:
    assert parse_json("[" * 31 + "[]" + "]" * 31) is not None
    assert parse_json('"text"') == "text"
