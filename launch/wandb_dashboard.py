"""Make the throughput dashboard of a W&B project: backends × lengths × devices, losses, communication, memory, MFU.

python launch/wandb_dashboard.py --project zeco-train                   publishes it and prints its address
python launch/wandb_dashboard.py --offline dashboard.json               writes it to a file, without a network

Its panels show backends × lengths × devices as the ZeCO paper's Figure 4 does, then losses, step time lost to
communication and data loading, memory and utilisation. They are objects of W&B's `wandb-workspaces` library. W&B's line
plots are over steps; lines over devices or lengths, one point per run, are custom Vega-Lite charts over the layout
fields of each run's summary.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zeco_train.errors import ConfigError
from zeco_train.sp.backend_registry import BACKENDS
from zeco_train.system.command import Parser, docstring, errors_in_a_line
from zeco_train.system.files import write_json_result
from zeco_train.system.terminal import show_any_text
from zeco_train.tracking.loggers import DATA_SHARE, EXPOSED_SHARE, MEDIAN_RATE, MEDIAN_TOTAL_RATE, RATE

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace
# `length_name` as a Vega expression.
_LENGTH = (
    "datum.value % 1048576 == 0 ? datum.value / 1048576 + 'M' : "
    "datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : datum.value"
)


def chart_spec() -> dict[str, Any]:
    """The Vega-Lite preset of the comparisons; `${field:…}` and `${string:…}` are W&B's placeholders."""
    x, y, kind, series = (f"${{field:{name}}}" for name in ("x", "y", "kind", "series"))

    def channel(field: str, type_: str, title: str, **more: Any) -> dict[str, Any]:
        return {"field": field, "type": type_, "title": title, **more}

    def up(field: str) -> dict[str, Any]:
        return channel(field, "quantitative", "${string:yname}", scale={"zero": True})

    colors = {"domain": [*BACKENDS], "range": [spec.color for spec in BACKENDS.values()]}
    color, shape = channel(series, "nominal", "sp", scale=colors), channel(kind, "ordinal", "${string:kindname}")
    # Each length and number of devices has its own position, as on a log2 axis.
    across = channel(x, "ordinal", "${string:xname}", axis={"labelAngle": 0, "labelExpr": _LENGTH})
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": "${string:title}",
        "data": {"name": "wandb"},
        "autosize": "fit",
        "width": "container",
        "height": "container",
        "transform": [
            {"filter": f"isValid(datum['{y}']) && isValid(datum['{x}'])"},
            {
                "aggregate": [
                    {"op": "median", "field": y, "as": "middle"},
                    {"op": "min", "field": y, "as": "low"},
                    {"op": "max", "field": y, "as": "high"},
                    {"op": "count", "as": "runs"},
                ],
                "groupby": [x, series, kind],
            },
        ],
        "encoding": {"x": across, "color": color},
        "layer": [
            {
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1},
                "encoding": {
                    "y": up("middle"),
                    "shape": shape,
                    "tooltip": [{"field": name} for name in (series, kind, x, "middle", "low", "high", "runs")],
                },
            },
            {"mark": "line", "encoding": {"y": up("middle"), "strokeDash": {**shape, "legend": None}}},
            # The slowest and the fastest of several runs at one x.
            {"mark": {"type": "rule"}, "encoding": {"y": up("low"), "y2": {"field": "high"}}},
        ],
    }


def chart_name() -> str:
    """The preset's name in W&B, which includes a digest of the spec: a preset cannot be updated under its name."""
    return f"zeco-comparison-{hashlib.sha256(json.dumps(chart_spec()).encode()).hexdigest()[:8]}"


NAME = "ZeCO-Train throughput"


@dataclass(frozen=True)
class ComparisonChart:
    """A line per backend and `kind`, a point per run; x, y and kind are keys of the runs' summaries."""

    title: str
    x: str
    y: str
    kind: str
    x_name: str
    y_name: str


_RATE_NAME = "tokens/s of a device, median"
COMPARISONS = (
    ComparisonChart("Throughput over devices", "devices", MEDIAN_RATE, "tokens_per_device", "devices", _RATE_NAME),
    ComparisonChart("Throughput over length", "seq_len", MEDIAN_RATE, "devices", "tokens of a sequence", _RATE_NAME),
    ComparisonChart(
        "Scaling: all devices", "devices", MEDIAN_TOTAL_RATE, "tokens_per_device", "devices", "tokens/s, median"
    ),
    ComparisonChart(
        "Exposed communication over devices", "devices", EXPOSED_SHARE, "tokens_per_device", "devices", "of a step"
    ),
    ComparisonChart("Memory over length", "seq_len", "memory_gb", "devices", "tokens of a sequence", "GB"),
    ComparisonChart("MFU over length", "seq_len", "mfu", "devices", "tokens of a sequence", "of the device's peak"),
)
# By section: title, x axis, and metrics.
_HISTORIES: dict[str, tuple[tuple[str, ...], ...]] = {
    "Loss": (
        ("Loss over tokens", "tokens", "loss"),
        ("Loss over steps", "step", "loss"),
        ("Validation loss over tokens", "tokens", "val_loss"),
        ("Gradient norm", "step", "grad_norm"),
        ("Learning rate", "step", "lr"),
    ),
    "What a step loses": (
        ("Tokens per second and device", "step", RATE),
        ("Exposed communication, of a step", "step", EXPOSED_SHARE),
        ("Waiting for data, of a step", "step", DATA_SHARE),
        ("Seconds of a step", "step", "step_seconds"),
    ),
    "Memory and utilisation": (
        ("Memory of the fullest device, GB", "step", "memory_gb"),
        ("MFU and HFU", "step", "mfu", "hfu"),
    ),
}
_LOGARITHMIC = ["grad_norm"]


def check_installed() -> None:
    """Raise `ConfigError` if W&B's library is not installed."""
    for package in ("wandb", "wandb_workspaces"):
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            raise ConfigError("dashboard", name, "is not installed; pip install 'zeco-train[dashboard]'")


def build(entity: str, project: str, name: str = NAME, model: str | None = None) -> Workspace:
    """The saved view, of all runs of a project or of one model's."""
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.expr import And

    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=sections(entity),
        settings=ws.WorkspaceSettings(x_axis="step", max_runs=100),
        runset_settings=ws.RunsetSettings(
            filters=And(ws.Summary("model") == model) if model else "",
            pinned_columns=[
                "run:displayName",
                *(f"summary:{key}" for key in ("backend", "seq_len", "devices", "sp_size", MEDIAN_RATE)),
            ],
        ),
    )


def sections(entity: str) -> list[Section]:
    """The panels, by section."""
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports import v2 as wr

    first = [_comparison(chart, f"{entity}/{chart_name()}") for chart in COMPARISONS]
    bars = wr.BarPlot(
        title="Throughput by backend, all lengths and devices",
        metrics=[MEDIAN_RATE],
        groupby=wr.Config("layout.backend"),
        groupby_aggfunc="median",
        groupby_rangefunc="minmax",
        title_x=_RATE_NAME,
    )
    layout, heading = ws.SectionLayoutSettings(columns=2, rows=2), "Backends × lengths × devices"
    found = [ws.Section(name=heading, panels=[*first, bars], is_open=True, pinned=True, layout_settings=layout)]
    for section, plots in _HISTORIES.items():
        panels: list[Any] = [
            wr.LinePlot(title=title, x=x, y=[*y], log_y=y == _LOGARITHMIC or None, title_x=x) for title, x, *y in plots
        ]
        found.append(ws.Section(name=section, panels=panels, is_open=True, layout_settings=layout))
    return found


def _comparison(chart: ComparisonChart, preset: str) -> Any:
    from wandb_workspaces.reports import v2 as wr

    fields = {"x": chart.x, "y": chart.y, "series": "backend", "kind": chart.kind}
    kind = chart.kind.replace("_", " ")
    return wr.CustomChart(
        query={"summary": {"keys": list(dict.fromkeys(fields.values()))}},
        chart_name=preset,
        chart_fields=fields,
        chart_strings={"title": chart.title, "xname": chart.x_name, "yname": chart.y_name, "kindname": kind},
    )


def as_json(workspace: Workspace) -> dict[str, Any]:
    """The data sent to W&B: the view's spec, and our charts."""
    view = workspace._to_model()
    return {
        "entity": workspace.entity,
        "project": workspace.project,
        "name": workspace.name,
        "spec": json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True)),
        "charts": {chart_name(): chart_spec()},
    }


def publish(project: str, entity: str | None, name: str, model: str | None, update: str | None) -> str:
    """Save the charts and the view in W&B; returns its address.

    Only the runs of `model` are shown, if given; the saved view at the address `update` is overwritten, else a new one
    made.

    Raises:
        ConfigError: no W&B account is configured, or W&B refuses or cannot be reached.
    """
    import wandb
    from wandb_workspaces import workspaces as ws

    if not wandb.login(prompt=False, verify=False):
        raise ConfigError("wandb", "login", "W&B has no account here; wandb login, or --offline OUT.json")
    try:
        api = wandb.Api(timeout=30)
        entity = entity or api.default_entity
        if not entity:
            raise ConfigError("--entity", "", "this account has no default; name a user or a team")
        workspace = build(entity, project, name, model)
        create_chart(api, entity)
        if update is None:
            return workspace.save().url
        saved = ws.Workspace.from_url(update)
        saved.sections = workspace.sections
        return saved.save().url
    except (wandb.Error, OSError, ValueError) as error:
        # The client's request errors share no base class with its other errors.
        raise _refused(error) from error


def create_chart(api: Any, entity: str) -> None:
    """Save our chart as a preset of an account; `ConfigError` if W&B refuses."""
    try:
        api.create_custom_chart(entity, chart_name(), "ZeCO-Train comparison", "vega2", "private", chart_spec())
    except Exception as error:
        # Already created by an earlier call; the name includes the spec's digest, so it is identical.
        if "exist" not in str(error).lower() and "duplicate" not in str(error).lower():
            raise _refused(error) from error


def _refused(error: Exception) -> ConfigError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigError("wandb", "publish", f"W&B did not take it ({reason}); --offline OUT.json needs no server")


@errors_in_a_line
def main(arguments: Sequence[str]) -> int:
    """Publish or write; returns the process's exit code."""
    parser = Parser(prog="launch/wandb_dashboard.py", description=docstring(sys.modules[__name__]).partition("\n")[0])
    parser.add_argument("--project", default="zeco-train", help="default: zeco-train")
    parser.add_argument("--entity", help="a user or a team; default: the account's own")
    parser.add_argument("--name", default=NAME, help=f"of the saved view; default: {NAME}")
    parser.add_argument("--model", help="show the runs of this model only")
    parser.add_argument("--update", metavar="URL", help="a saved view that is to have these panels instead of its own")
    parser.add_argument("--offline", type=Path, metavar="OUT.json", help="write it there, publish nothing")
    given = parser.parse_args(arguments)
    if given.offline and given.update:
        raise ConfigError("--update", given.update, "has no effect with --offline")
    check_installed()
    if given.offline:
        view = build(given.entity or "entity", given.project, given.name, given.model)
        write_json_result(given.offline, as_json(view))
        print(given.offline)
    else:
        print(publish(given.project, given.entity, given.name, given.model, given.update))
    return 0


if __name__ == "__main__":
    show_any_text()
    sys.exit(main(sys.argv[1:]))
