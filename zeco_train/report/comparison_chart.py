"""Custom chart for the W&B dashboard: a line per backend, a point per run, in Vega-Lite."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from zeco_train.sp.registry import BACKENDS

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
