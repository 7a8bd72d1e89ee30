"""The W&B dashboard: its contents offline, and publishing with the real client to a local server."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from wandb_workspaces import workspaces as ws
from wandb_workspaces.workspaces import internal

from launch import wandb_dashboard as dashboard
from launch.wandb_dashboard import COMPARISONS, as_json, build, chart_name, chart_spec, create_chart
from zeco_train.errors import ConfigError
from zeco_train.tracking.loggers import LoggerConfig, WandbLogger
from zeco_train.tracking.metrics import Layout, StepMetrics


def panels(written: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        panel for section in written["spec"]["section"]["panelBankConfig"]["sections"] for panel in section["panels"]
    ]


def queries(panel: dict[str, Any]) -> list[dict[str, Any]]:
    return panel["config"].get("userQuery", {}).get("queryFields", [])


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


def parsed(sent: dict[str, Any]) -> dict[str, Any]:
    """What W&B's own library makes of a view that was sent, as it parses a server's."""
    spec = internal.WorkspaceViewspec.model_validate_json(json.dumps(sent["spec"]))
    names = {"entity": sent["entity"], "project": sent["project"], "display_name": sent["name"]}
    return as_json(ws.Workspace._from_model(internal.View(**names, name="", id="", spec=spec)))


def test_dashboard_is_read_back_as_written() -> None:
    written = as_json(build("me", "p", model="gla_1b"))
    assert "gla_1b" in json.dumps(written["spec"]["section"]["runSets"])
    again = panels(parsed(written))
    assert len(again) == len(panels(written)) > 12
    wanted = {part.split("}")[0] for part in json.dumps(chart_spec()).split("${")[1:]}
    for panel, other in zip(panels(written), again, strict=True):
        config = panel["config"]
        for query in (*queries(panel), *queries(other)):
            # The library may reorder `id` and `name`.
            query["fields"].sort(key=lambda field: field["name"])
        assert (panel["viewType"], config) == (other["viewType"], other["config"])
        if panel["viewType"] == "Vega2":
            given = {f"field:{key}" for key in config["fieldSettings"]}
            assert given | {f"string:{key}" for key in config["stringSettings"]} == wanted


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
