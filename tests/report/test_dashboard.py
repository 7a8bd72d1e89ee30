"""The W&B dashboard: its contents offline, and publishing with the real client to a local server."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from zeco_train.errors import ConfigError, DataError
from zeco_train.report import dashboard
from zeco_train.report.dashboard import COMPARISONS, as_json, build, chart_name, chart_spec, check, create_chart
from zeco_train.tracking.logger_config import LoggerConfig
from zeco_train.tracking.loggers import WandbLogger
from zeco_train.tracking.metrics import StepMetrics
from zeco_train.tracking.starts import Layout


def panels(written: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        panel for section in written["spec"]["section"]["panelBankConfig"]["sections"] for panel in section["panels"]
    ]


def recorded(tmp_path: Path) -> set[str]:
    """Every key that a run on GPUs records in W&B, in its rows and its summary."""

    class Run:
        def log(self, row: dict[str, Any]) -> None:
            self.row = row

    run, layout = Run(), Layout("zeco", "gla_1b", 1 << 20, 4, 8)
    tracker = WandbLogger(LoggerConfig(), tmp_path)
    tracker._run = run
    values: dict[str, Any] = {column.name: 1.0 for column in fields(StepMetrics) if column.name != "extra"}
    tracker.log(1, StepMetrics(**values).as_dict())
    return {*run.row, *layout.as_dict()}


def test_every_panel_shows_recorded_metrics(tmp_path: Path) -> None:
    written = as_json(build("me", "p"))
    known = recorded(tmp_path)
    shown = set()
    for panel in panels(written):
        config = panel["config"]
        if panel["viewType"] == "Vega2":
            keys = {*config["fieldSettings"].values()}
            (summary,) = [f for f in config["userQuery"]["queryFields"][0]["fields"] if f["name"] == "summary"]
            # A chart queries exactly the keys that it draws.
            assert set(summary["args"][0]["value"]) == keys
        else:
            keys = {*config["metrics"]} | ({config["xAxis"]} if panel["viewType"] == "Run History Line Plot" else set())
        assert keys <= known, panel
        shown |= keys
    wanted = {"loss", "val_loss", "grad_norm", "memory_gb", "mfu", "hfu", "comm_exposed_share", "data_share"}
    assert wanted <= shown
    assert {chart.x for chart in COMPARISONS} == {"devices", "seq_len"}


def test_dashboard_is_read_back_as_written_or_refused() -> None:
    written = as_json(build("me", "p", model="gla_1b"))
    assert len(check(written)) == len(panels(written)) > 12
    assert "gla_1b" in json.dumps(written["spec"]["section"]["runSets"])
    damaged = copy.deepcopy(written)
    del panels(damaged)[0]["config"]["fieldSettings"]["kind"]
    with pytest.raises(DataError, match=r"chart Throughput over devices lacks \{'field:kind'\}"):
        check(damaged)
    damaged = copy.deepcopy(written)
    panels(damaged)[0]["viewType"] = "Run History Line Plot"
    with pytest.raises(DataError, match="read back"):
        check(damaged)
    del damaged["spec"]["section"]["panelBankConfig"]["sections"]
    with pytest.raises(DataError, match="is not read back"):
        check(damaged)


def test_dashboard_read_back_with_fewer_sections_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    written = as_json(build("me", "p"))
    fewer = copy.deepcopy(written)
    fewer["spec"]["section"]["panelBankConfig"]["sections"].pop()
    monkeypatch.setattr(dashboard, "as_json", lambda workspace: fewer)
    with pytest.raises(DataError, match="dashboard: is read back with 3 sections, 4 were written"):
        check(written)


def test_chart_layers_use_defined_fields() -> None:
    spec = chart_spec()
    # Each field is a placeholder or an output of the transform.
    made = {part["as"] for part in spec["transform"][1]["aggregate"]}
    for layer in spec["layer"]:
        for encoding in layer["encoding"].values():
            for channel in encoding if isinstance(encoding, list) else [encoding]:
                assert channel["field"].startswith("${field:") or channel["field"] in made


def test_changed_chart_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = chart_name()
    monkeypatch.setattr(dashboard, "chart_spec", lambda: {**chart_spec(), "title": "another"})
    assert chart_name() != name
    monkeypatch.undo()
    assert chart_name() == name


def test_existing_chart_is_accepted_and_refusal_is_an_error() -> None:
    class Api:
        def create_custom_chart(self, *arguments: object) -> None:
            raise RuntimeError(problem)

    problem = "a chart of this name already exists"
    create_chart(Api(), "me")
    problem = "no permission"
    with pytest.raises(ConfigError, match=r"W&B did not take it \(no permission\)"):
        create_chart(Api(), "me")
