"""The W&B dashboard: publishing with the real client to a local server, and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.campaigns.cases.wandb_server import WandbServer
from launch.wandb_dashboard import chart_spec, main
from tests.report.test_dashboard import panels, parsed
from tests.support.commands import REPOSITORY, Outcome, check_line
from tests.tracking.test_loggers import run_python

pytestmark = pytest.mark.campaign


COMMAND = str(REPOSITORY / "launch" / "wandb_dashboard.py")


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
        assert len(panels(parsed(sent))) == 18


@pytest.mark.processes
def test_invalid_arguments_give_one_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").mkdir()
    for arguments, code, part in (
        (["--offline", "x.json", "--update", "u"], 2, "--update=u: has no effect with --offline"),
        (["--nonsense"], 2, "--help lists all"),
        (["--offline", str(tmp_path / "x.json")], 3, "x.json: cannot be written"),
    ):
        outcome = main(arguments)
        check_line(Outcome(outcome, "", capsys.readouterr().err), code, part)
    # In a separate process, without the W&B account of the user.
    done = run_python([COMMAND], tmp_path)
    line = "error: wandb=login: W&B has no account here; wandb login, or --offline OUT.json\n"
    assert (done.returncode, done.stderr) == (2, line)
