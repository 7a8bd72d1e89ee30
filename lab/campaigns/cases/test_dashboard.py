"""The W&B dashboard: publishing with the real client to a local server, and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.campaigns.cases.wandb_server import WandbServer
from launch.wandb_dashboard import main
from tests.support.commands import REPOSITORY, Outcome, check_line
from tests.tracking.test_loggers import history, run_python, run_record
from zeco_train.report.dashboard import chart_name, chart_spec, check

pytestmark = pytest.mark.campaign


COMMAND = str(REPOSITORY / "launch" / "wandb_dashboard.py")


MODEL_RESULTS = REPOSITORY / "lab" / "results" / "model_4xh200_16k.json"


OPERATOR_RESULTS = MODEL_RESULTS.with_name("operator_4xh200.json")


@pytest.mark.processes
def test_offline_dashboard_with_benchmarks(tmp_path: Path) -> None:
    out, folder = tmp_path / "dashboard.json", tmp_path / "bench"
    results = json.loads(MODEL_RESULTS.read_text())
    (tmp_path / MODEL_RESULTS.name).write_text(json.dumps(results | {"rows": results["rows"][-2:]}))
    arguments = ["--offline", str(out), "--bench", str(tmp_path / MODEL_RESULTS.name), "--bench-dir", str(folder)]
    done = run_python([COMMAND, *arguments], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.startswith("2 measurements as runs")
    assert "18 panels, read back as they were written: Throughput over devices" in second
    written = json.loads(out.read_text())
    assert check(written)
    assert [*written["charts"]] == [chart_name()]

    row = next(row for row in results["rows"] if row["variant"] == "zeco")
    (log,) = folder.glob("model_4xh200_16k-gla_1b-zeco-65536/wandb/offline-run-*/run-*.wandb")
    run = run_record(log)
    assert (run.job_type, run.run_group) == ("bench", "gla_1b-64k")
    assert {"bench", "sp=zeco", "sp.size=4", "seq_len=64k"} <= {*run.tags}
    (shown,) = history(log)
    assert shown["tokens_per_second_per_device_median"] == row["tokens_per_second_per_gpu"]
    assert shown["comm_exposed_share"] == pytest.approx(row["exposed_ms"] / row["median_ms"])


@pytest.mark.processes
def test_dashboard_is_published_to_server(tmp_path: Path) -> None:
    with WandbServer() as server:
        done = run_python([COMMAND, "--project", "p", "--entity", "me"], tmp_path, **server.environment(tmp_path))
        assert done.returncode == 0, done.stderr
        (view,) = server.views
        (chart,) = server.charts
        assert done.stdout.startswith(f"{server.url}/me/p?nw=")
        assert (view["entityName"], view["projectName"]) == ("me", "p")
        assert (chart["entity"], json.loads(chart["spec"])) == ("me", chart_spec())
        sent = {"entity": "me", "project": "p", "name": "n", "spec": json.loads(view["spec"])}
        assert check({**sent, "charts": {chart_name(): chart_spec()}})


@pytest.mark.processes
def test_invalid_arguments_give_one_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").mkdir()
    for arguments, code, part in (
        (["--offline", "x.json", "--update", "u"], 2, "--update=u: has no effect with --offline"),
        (["--nonsense"], 2, "--help lists all"),
        (["--offline", str(tmp_path / "x.json")], 3, "x.json: cannot be written"),
        (["--offline", "x.json", "--bench", str(tmp_path / "none.json")], 3, "none.json: is not a file"),
        (["--offline", "x.json", "--bench", str(OPERATOR_RESULTS)], 3, "operator_4xh200: has no measured step"),
    ):
        outcome = main(arguments)
        check_line(Outcome(outcome, "", capsys.readouterr().err), code, part)
    # In a separate process, without the W&B account of the user.
    done = run_python([COMMAND], tmp_path)
    line = "error: wandb=login: W&B knows no account here; wandb login, or --offline OUT.json\n"
    assert (done.returncode, done.stderr) == (2, line)
