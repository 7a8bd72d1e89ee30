"""`zeco_train.report`: grouping of measurements, and a self-contained page."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import Outcome, check_line
from zeco_train.report import panels
from zeco_train.report.__main__ import main
from zeco_train.report.measurements import Spread, read
from zeco_train.sp.backend_registry import BACKENDS
from zeco_train.system.figures import new_figure
from zeco_train.system.paths import check_outputs
from zeco_train.tracking.metrics import Layout, Start, append_start

RESULTS = Path(__file__).resolve().parents[2] / "lab" / "results"
DP = Layout("dp", "gla_tiny", 2048, 1, 2, "zero2", 1, "fp32", "a CPU")
ZECO = Layout("zeco", "gla_tiny", 2048, 2, 2, "zero2", 1, "fp32", "a CPU")


def write_run(
    folder: Path,
    rates: dict[int, float],
    starts: list[tuple[int, Layout]],
    losses: dict[int, float | None] | None = None,
    identity: dict[str, Any] | None = None,
) -> Path:
    folder.mkdir(parents=True)
    rows = [
        {
            "step": step,
            "loss": (losses or {}).get(step, 5.0 / step),
            "grad_norm": 1.0,
            "tokens": 4096 * step,
            "tokens_per_second": 2 * rate,
            "tokens_per_second_per_device": rate,
            "step_seconds": 4096 / (2 * rate),
            "data_seconds": 0.001,
            "comm_exposed_seconds": 0.002,
        }
        for step, rate in rates.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "identity.json").write_text(json.dumps(identity or {"seed": 0}))
    for step, layout in starts:
        append_start(folder, Start(step, layout, {"commit": "abc"}))
    return folder


class Page(HTMLParser):
    """The tables, images and loaded resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.images: list[dict[str, str]] = []
        self.loaded: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attributes}
        if tag not in ("meta", "img", "source", "br"):
            self._open.append(tag)
        self.loaded += [found[key] for key in ("src", "href", "action") if key in found]
        if tag == "img":
            self.images.append(found)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self._open or "script" in self._open:
            assert not re.search(r"https?:|url\(|@import|src", data)
            return
        self.text += data
        if {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += data


def report(tmp_path: Path, *paths: Path) -> Page:
    from matplotlib.image import imread

    assert main([*map(str, paths), "--out", str(tmp_path / "out")]) == 0
    picture = tmp_path / "out" / "report.png"
    assert imread(picture).std() > 0.01
    page = Page((tmp_path / "out" / "report.html").read_text())
    for source in page.loaded:
        assert source.startswith("data:image/png;base64,"), source[:60]
        assert imread(io.BytesIO(base64.b64decode(source.partition(",")[2]))).std() > 0.01
    assert all(image["alt"] for image in page.images)
    for table in page.tables:
        assert {len(row) for row in table} == {len(table[0])}
    return page


def test_run_has_one_measurement_per_split(tmp_path: Path) -> None:
    # Steps 1 to 4 with dp; a resume from the checkpoint of step 3 repeats step 4 with zeco.
    rates = {1: 1.0, 2: 100.0, 3: 110.0, 4: 7.0, 5: 200.0, 6: 220.0, 7: 300.0}
    resumed = write_run(tmp_path / "runs" / "resumed", rates, [(0, DP), (3, ZECO)])
    alone = write_run(tmp_path / "runs" / "alone", {1: 1.0, 2: 50.0}, [(0, DP)])
    found = read([alone, resumed])
    by_name = {(m.name, m.layout.backend): m for m in found.measurements}
    assert by_name["resumed", "dp"].rate == Spread(105.0, 101.0, 109.0, 2)
    zeco = by_name["resumed", "zeco"]
    # The first row of a start is excluded, since it includes compilation.
    assert (zeco.rate.median, zeco.rate.count, zeco.layout.tokens_per_device) == (220.0, 3, 1024)
    # Relative to the first dp run.
    assert zeco.ratio == pytest.approx(220 / 50)
    assert zeco.step_seconds == pytest.approx(4096 / 440)
    assert [[run.name for run in family] for family in found.families] == [["alone", "resumed"]]
    assert "resumed was split in 2 ways" in " ".join(found.notes)
    assert [m.name for m in read([tmp_path / "runs"]).measurements] == ["alone", "resumed", "resumed"]


def test_runs_of_other_identity_give_no_ratio(tmp_path: Path) -> None:
    dp = write_run(tmp_path / "dp", {1: 1.0, 2: 50.0}, [(0, DP)], identity={"seed": 1})
    zeco = write_run(tmp_path / "zeco", {1: 1.0, 2: 90.0}, [(0, ZECO)], identity={"seed": 2})
    found = read([dp, zeco])
    assert [m.ratio for m in found.measurements] == [1.0, None]
    assert (len(found.families), found.notes) == (2, [])


def test_losses_of_other_data_are_marked_as_not_comparable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identities = {
        "one": {"model.vocab_size": 256},
        "two": {"model.vocab_size": 256, "seed": 1},
        "own": {"model.vocab_size": 9},
    }
    for name, identity in identities.items():
        write_run(tmp_path / "runs" / name, {1: 1.0, 2: 50.0}, [(0, DP)], identity=identity)
    page = report(tmp_path, *(tmp_path / "runs" / name for name in identities))
    note = "losses of different data or vocabularies cannot be compared: one, two | own"
    assert note in page.text
    assert note in capsys.readouterr().err
    assert "Not comparable, of different data: Loss (one, two, own)" in page.text


HOSTILE = "<script>alert('$x_{$')</script> & \"zeco\"".replace("/", "\N{DIVISION SLASH}")


def three_runs(folder: Path) -> list[Path]:
    return [
        write_run(folder / "dp", dict.fromkeys(range(1, 9), 100.0), [(0, DP)]),
        write_run(folder / HOSTILE, dict.fromkeys(range(1, 9), 200.0), [(0, ZECO)]),
        write_run(
            folder / "longer",
            {1: 3.0, 2: 90.0},
            [(0, Layout("dp", "gla_tiny", 8192, 1, 4, "zero2", device_name="a CPU"))],
            losses={1: 5.0, 2: None},
            identity={"seq_len": 8192},
        ),
    ]


def test_page_is_complete_and_self_contained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = report(tmp_path, *three_runs(tmp_path))
    throughput, losses = page.tables
    assert [row[0] for row in throughput[1:]] == ["dp", HOSTILE, "longer"]
    row = dict(zip(throughput[0], throughput[2], strict=True))
    assert (row["backend"], row["length"], row["tokens/s/device"], row["of dp"]) == ("zeco", "2k", "200", "200.0%")
    assert losses[2][-2] == "0.0e+00, relative 0.0e+00 at step 1"
    # Throughput by length, scaling, exposed communication, data; losses, their differences, and the longer run's loss.
    titles = [
        "Throughput by length",
        "Scaling",
        "Exposed communication",
        "Waiting for data",
        "Difference of the losses",
    ]
    assert all(title in page.text for title in titles)
    results = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [m["rate"]["median"] for m in results["measurements"]] == [100.0, 200.0, 90.0]
    check_outputs("--out", tmp_path / "out", ["report.html", "none.json"])
    line = f"warning: {tmp_path / 'out' / 'report.html'} exists and is replaced in the end\n"
    assert capsys.readouterr().err.endswith(line)


@pytest.mark.slow
def test_benchmark_results_are_read(tmp_path: Path) -> None:
    file = RESULTS / "model_4xh200_16k.json"
    rows = {row["variant"]: row for row in json.loads(file.read_text())["rows"]}
    found = read([file]).measurements
    assert [m.layout.backend for m in found] == ["dp", "lasp1", "lasp2", "zeco"]
    for measurement in found:
        row = rows[measurement.layout.backend]
        assert measurement.rate.median == row["tokens_per_second_per_gpu"]
        assert measurement.rate.p10 <= measurement.rate.median <= measurement.rate.p90
        assert (measurement.mfu, measurement.ratio) == (row["mfu"], row["ratio"])
        assert (measurement.layout.tokens_per_device, measurement.layout.devices) == (16384, 4)
    page = report(tmp_path, file, RESULTS / "operator_4xh200.json")
    assert [len(table) for table in page.tables] == [5]
    assert sum("ZeCO paper" in image["alt"] for image in page.images) == 3


def test_benchmarks_with_micro_batches_and_one_length_are_read() -> None:
    found = {
        name: read([RESULTS / f"{name}.json"]).measurements
        for name in ("model_1xh200_four", "model_2xh200_hybrid_4_equal")
    }
    (four,) = (m for m in found["model_1xh200_four"] if m.layout.backend == "dp")
    assert four.rate.p10 <= four.rate.median <= four.rate.p90
    assert {m.layout.seq_len for m in found["model_2xh200_hybrid_4_equal"]} == {32_768}


def test_benchmarks_of_same_file_name_are_distinguished(tmp_path: Path) -> None:
    """Each benchmark writes `results.json` in its own folder."""
    first, second = (json.loads((RESULTS / f"model_4xh200_16k{heads}.json").read_text()) for heads in ("", "_h32"))
    both = {**first, "rows": [row for row in first["rows"] + second["rows"] if row["variant"] in ("dp", "zeco")]}
    files = [tmp_path / name / "results.json" for name in ("one", "both")]
    for file, content in zip(files, (first, both), strict=True):
        file.parent.mkdir()
        file.write_text(json.dumps(content))
    found = read(files)
    assert [*found.benchmarks] == ["one-results", "both-results"]
    told = [(m.name, m.layout.model, m.layout.backend) for m in found.measurements]
    assert len(told) == len(set(told)) == 8
    assert {model for name, model, _ in told if name == "both-results"} == {"gla_1b_h16", "gla_1b_h32"}


def test_run_without_rows_is_noted_and_skipped(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "run", {1: 1.0}, [(0, DP)])
    write_run(tmp_path / "runs" / "begun", {}, [(0, DP)])
    found = read([tmp_path / "runs"])
    assert [m.name for m in found.measurements] == ["run"]
    assert found.notes == ["begun has no rows yet"]


def test_results_of_other_kinds_are_left_out_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "case.json").write_text('{"case": "delays", "rows": [], "world_size": 2, "environment": {}}')
    found = read([tmp_path / "other.json", tmp_path / "case.json", RESULTS / "operator_4xh200.json"])
    assert [*found.benchmarks] == ["operator_4xh200"]
    assert [note.partition(": ")[0] for note in found.notes].count("left out") == 2


def test_end_of_a_failed_run_is_marked_and_noted(tmp_path: Path) -> None:
    rates = dict.fromkeys(range(1, 9), 100.0)
    write_run(tmp_path / "dp", rates, [(0, DP)])
    write_run(tmp_path / "failed", dict.fromkeys(range(1, 5), 90.0), [(0, ZECO)], losses={4: None})
    found = read([tmp_path])
    assert found.notes == ["failed ends with step 4, whose loss is not finite"]
    (losses,) = (panel for panel in panels.panels(found) if panel.title.startswith("Loss ("))
    axes = new_figure("", (4, 3), dpi=60, title_size=8).subplots()
    losses.draw(axes)
    assert [(line.get_marker(), line.get_color()) for line in axes.lines] == [
        ("None", BACKENDS["dp"].color),
        ("None", BACKENDS["zeco"].color),
        ("x", BACKENDS["zeco"].color),
    ]
    assert np.ravel(axes.lines[-1].get_xdata())[0] == 3 * 4096


def test_invalid_arguments_give_one_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", {1: 1.0}, [(0, DP)])
    bare = write_run(tmp_path / "bare", {1: 1.0}, [])
    (tmp_path / "torn").mkdir()
    torn = write_run(tmp_path / "torn" / "run", {1: 1.0}, [])
    (torn / "starts.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "other.json").write_text("{}")
    # Where it warns of a page that it replaces, it does so after the errors.
    Path("runs/report").mkdir(parents=True)
    Path("runs/report/report.html").touch()
    for arguments, code, part in (
        ([], 2, "PATH"),
        ([tmp_path / "none"], 3, "has no metrics.jsonl, nor has a folder in it"),
        ([run, run], 2, "names a folder twice"),
        ([RESULTS / "operator_4xh200.json"] * 2, 2, "names a file twice"),
        ([bare], 3, "starts.jsonl: is not there"),
        ([torn], 3, "starts.jsonl: line 1: backend is None, not text"),
        ([tmp_path / "other.json"], 3, "is no results.json of a benchmark"),
        ([run, "--out", tmp_path / "other.json"], 2, "cannot be written ("),
    ):
        outcome = main([*map(str, arguments)])
        check_line(Outcome(outcome, "", capsys.readouterr().err), code, part)
