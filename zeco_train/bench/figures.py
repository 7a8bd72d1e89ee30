"""Plots of results, in the form of the ZeCO paper's Figures 3 and 4, next to the paper's own numbers.

    collectives.png      time by GPUs, as Figure 3, right; and by size of the state
    operator.png         time of forward + backward by GPUs, as Figure 4, top; below it relative to `dp`
    operator_tokens.png  time by tokens a GPU; operator_fixed_decay_none.png … for operators but the default
    attention.png        time of softmax attention by method, with exposed communication and balance
    decode.png           tokens per second and memory by context length, for each number of concurrent sequences
    gla_1b_h16.png …     training throughput per GPU by GPUs, as Figure 4, bottom; below it relative to `dp`
    mixers.png           training throughput per GPU by model, if there are several, relative to `dp` beside it

The paper's GPUs are a cluster of H100s, ours are named in results.json: compare the scaling of the two series, not
their absolute speed.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeco_train.bench.attention_figure import draw_attention
from zeco_train.bench.mixers import draw_mixers, mixer_rows
from zeco_train.bench.samples import Row
from zeco_train.bench.stored import load_results
from zeco_train.collectives.registry import ALL_SCANS
from zeco_train.errors import ConfigError
from zeco_train.ops.registry import DEFAULT
from zeco_train.sp.registry import BACKENDS
from zeco_train.system.drawing import GREY, finish_axes, label_axes, new_figure, plain, save_figure
from zeco_train.system.numbers import length_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REFERENCE = Path(__file__).resolve().parent / "reference"
_PAPER = "ZeCO paper, H100 cluster"
_COLOURS = {
    "all_gather": "#c2410c",
    "all_reduce": GREY,
    **{name: spec.color for name, spec in BACKENDS.items()},
    "copy": "#9aa4ad",
    "fla": "#111111",
    "products": "#b0b7bd",
    "eager": GREY,
    "graph": "#c2410c",
}
# All-Scan variants share a colour, and so do the peer's.
_LINES = {"no_optimizer": ":", **{scan.name: scan.line for scan in ALL_SCANS}}
# Variant for each column of the paper's table.
_PAPER_COLLECTIVES = {"all_gather": "all_gather", "all_scan": "zeco", "all_reduce": "all_reduce"}
_PAPER_BACKENDS = ("lasp1", "lasp2", "zeco", "dp")
_PAPER_TOKENS = (16_384, 32_768)
# The paper does not give the size in bytes; by its A.2 a head's K and V are D / H, so H 32, K 128 and V 128 in fp32.
_PAPER_MIB = 2.0


def plot_files(arguments: Sequence[str]) -> list[Path]:
    """Plot several results.json together: `FILE … [out=FOLDER]`; the folder of the first file is the default.

    Raises:
        ConfigError: no files, or files of different cases.
        DataError: a file that is not a result.
    """
    files = [Path(text) for text in arguments if not text.startswith("out=")]
    out = [text.removeprefix("out=") for text in arguments if text.startswith("out=")]
    if not files:
        raise ConfigError("plot", "", "needs results.json of one or more runs")
    results = [load_results(path) for path in files]
    cases = {result["case"] for result in results}
    if len(cases) > 1:
        raise ConfigError("plot", " ".join(map(str, files)), f"one case at a time, not {' and '.join(sorted(cases))}")
    return plot(results, Path(out[-1]) if out else files[0].parent)


def plot(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Plot results of one case, possibly of different numbers of GPUs; returns the paths of the figures.

    Raises:
        DataError: a figure cannot be written.
    """
    rows = [
        {**row, "gpus": result["world_size"], "graphs": result.get("config", {}).get("cuda_graphs", "off")}
        for result in results
        for row in result["rows"]
    ]
    rows = [row for row in rows if row.get("median_ms")]
    if not rows:
        return []
    machines = sorted({str(result["environment"].get("device_name")) for result in results})
    machine = f"measured on {', '.join(machines)}"
    if all(result["environment"].get("device") == "cpu" for result in results):
        machine += ", CPU ranks in place of GPUs"
    if results[0]["case"] == "collectives":
        return [save_figure(_collectives(rows, machine), folder / "collectives.png")]
    if results[0]["case"] == "decode":
        return [save_figure(_decode(rows, machine), folder / "decode.png")]
    if results[0]["case"] == "attention":
        drawn = draw_attention(rows, machine)
        return [] if drawn is None else [save_figure(drawn, folder / "attention.png")]
    if results[0]["case"] == "model":
        models = sorted({(row["model"], row["heads"]) for row in rows})
        figures = {"{}_h{}".format(*model): _model(rows, *model, machine) for model in models}
        if len({row["tokens"] for row in rows}) > 1:
            figures |= {"{}_h{}_tokens".format(*model): _model_tokens(rows, *model, machine) for model in models}
        if len(mixers := mixer_rows(rows)) > 1:
            figures["mixers"] = draw_mixers(mixers, machine)
        return [save_figure(figure, folder / f"{name}.png") for name, figure in figures.items()]
    if results[0]["case"] != "operator":
        return []
    found: dict[str, Figure | None] = {}
    for operator in dict.fromkeys(map(_operator_of, rows)):
        own, name = [row for row in rows if _operator_of(row) == operator], "_".join(("operator", *operator))
        found |= {name: _operator(own, machine), f"{name}_tokens": _operator_tokens(own, machine)}
    return [save_figure(figure, folder / f"{name}.png") for name, figure in found.items() if figure is not None]


def reference(name: str) -> list[dict[str, float]]:
    """A table of a paper, without its empty cells."""
    with (REFERENCE / f"{name}.csv").open(encoding="ascii", newline="") as file:
        return [{key: float(cell) for key, cell in row.items() if cell} for row in csv.DictReader(file)]


def _collectives(rows: list[Row], machine: str) -> Figure:
    mode = "graph" if any(row["mode"] == "graph" for row in rows) else "eager"
    rows = [row for row in rows if row["mode"] == mode]
    size = min((row["size_mb"] for row in rows), key=lambda mib: abs(math.log(mib / _PAPER_MIB)))
    most = max(row["gpus"] for row in rows)
    figure, ((left, right),) = _figure(f"Communication time of a state ({machine}, {mode})", 1, 2, 5.2)
    for variant in _variants(rows):
        _draw(left, _points([r for r in rows if r["size_mb"] == size], variant, "gpus"), variant)
        _draw(right, _points([r for r in rows if r["gpus"] == most], variant, "size_mb"), variant)
    for column, variant in _PAPER_COLLECTIVES.items():
        points = [(row["gpus"], row[column]) for row in reference("zeco_collectives_ms")]
        _draw_paper(left, points, variant, column)
    label_axes(left, f"{size:g} MiB a rank", "GPUs", "ms")
    label_axes(right, f"{most} GPUs", "MiB a rank", "ms")
    return figure


def _operator(rows: list[Row], machine: str) -> Figure | None:
    rows, shape = _one_shape(rows)
    tokens = [n for n in _PAPER_TOKENS if any(row["tokens"] == n for row in rows)]
    tokens = tokens or sorted({row["tokens"] for row in rows})[:2]
    if not tokens:
        return None
    figure, axes = _figure(f"{_titled(rows[0])}, {shape} ({machine})", 2, len(tokens), 8.5)
    for count, upper, lower in zip(tokens, *axes, strict=True):
        here = [row for row in rows if row["tokens"] == count]
        for variant in _variants(here):
            _draw(upper, _points(here, variant, "gpus"), variant)
        papers = [row for row in reference("zeco_operator_ms") if row["seq_len_per_gpu"] == count]
        # The paper measures gla only.
        for variant in _PAPER_BACKENDS if papers and not _operator_of(rows[0]) else ():
            _draw_paper(upper, [(row["gpus"], row[variant]) for row in papers if variant in row], variant, variant)
        label_axes(upper, f"{count:,} tokens a GPU", "GPUs", "ms")
        _draw_ratios(lower, here)
    return figure


def _draw_ratios(axes: Axes, rows: list[Row]) -> None:
    """Each variant's time relative to `dp`, or to the first variant without `dp`, on the most GPUs.

    A line per variant, since times within a few per cent of each other lie on one spot of an axis of milliseconds.
    """
    most = max(row["gpus"] for row in rows)
    latest = {row["variant"]: row for row in rows if row["gpus"] == most}
    base = "dp" if "dp" in latest else next(iter(latest))
    scale = 1 / latest[base]["median_ms"]
    right = 0.0
    for place, (variant, row) in enumerate(latest.items()):
        low, ratio, high = (scale * (row.get(name) or row["median_ms"]) for name in ("p10_ms", "median_ms", "p90_ms"))
        colour = _colour(variant)
        axes.plot([low, high], [place, place], color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt")
        axes.plot([ratio], [place], "o", color=colour, markersize=6)
        axes.annotate(f"{ratio:.3f}", (high, place), (9, 0), textcoords="offset points", va="center", fontsize=9)
        right = max(right, high)
    axes.axvline(1.0, color=_COLOURS["dp"], linewidth=0.8)
    axes.set_yticks(range(len(latest)), [plain(variant) for variant in latest])
    axes.set_ylim(len(latest) - 0.4, -0.6)
    # Room for the last number, right of its point.
    axes.set_xlim(right=right + 0.12 * (right - axes.get_xlim()[0]))
    axes.set_xlabel(f"time / that of {base}, {most} GPUs (median, p10 to p90)")
    finish_axes(axes)


def _operator_tokens(rows: list[Row], machine: str) -> Figure | None:
    rows = _forward_backward(rows)
    if not rows:
        return None
    most = max(row["gpus"] for row in rows)
    rows = [row for row in rows if row["gpus"] == most]
    shapes = sorted({_shape(row) for row in rows})
    title = f"{_titled(rows[0])}, {most} GPUs ({machine})"
    columns = min(2, len(shapes))
    lines = -(-len(shapes) // columns)
    figure, axes = _figure(title, lines, columns, 4.6 * lines)
    for axis, shape in zip(axes.flat, shapes, strict=False):
        here = [row for row in rows if _shape(row) == shape]
        for variant in _variants(here):
            _draw(axis, _points(here, variant, "tokens"), variant)
        label_axes(axis, _named(shape), "tokens a GPU", "ms")
    return figure


def _model(rows: list[Row], model: str, heads: int, machine: str) -> Figure:
    rows = [row for row in rows if (row["model"], row["heads"]) == (model, heads)]
    tokens = sorted({row["tokens"] for row in rows})
    figure, axes = _figure(f"Training step of {model}, H {heads} ({machine})", 2, len(tokens), 8.5)
    for count, upper, lower in zip(tokens, *axes, strict=True):
        here = [row for row in rows if row["tokens"] == count]
        for variant in _variants(here):
            _draw(upper, _points(here, variant, "gpus", "tokens_per_second_per_gpu"), variant)
            ratios = _points([row for row in here if row.get("ratio")], variant, "gpus", "ratio")
            if ratios and variant != "dp":
                _draw(lower, ratios, variant)
        papers = [row for row in reference("zeco_model_tokens_per_second_per_gpu") if row["seq_len_per_gpu"] == count]
        for variant in _PAPER_BACKENDS if papers and here[0].get("mixer", "gla") == "gla" else ():
            points = [(row["gpus"], row[variant], row[variant] / row["dp"]) for row in papers if variant in row]
            _draw_paper(upper, [(gpus, rate) for gpus, rate, _ in points], variant, f"{variant}, H 32")
            if variant != "dp":
                _draw_paper(lower, [(gpus, ratio) for gpus, _, ratio in points], variant, f"{variant}, H 32")
        label_axes(upper, f"{count:,} tokens a GPU", "GPUs", "tokens/s of a GPU", log=False)
        label_axes(lower, "", "GPUs", "tokens/s over that of dp", log=False)
        lower.axhline(1.0, color=_COLOURS["dp"], linewidth=0.8)
    return figure


def _model_tokens(rows: list[Row], model: str, heads: int, machine: str) -> Figure:
    """Throughput over tokens a GPU, and, if measured, the part of what matrix products alone reach on that GPU."""
    rows = [row for row in rows if (row["model"], row["heads"]) == (model, heads)]
    limits = {row["tokens"]: row["tokens_per_second_per_gpu"] for row in rows if row["variant"] == "products"}
    names = ["tokens/s of a GPU", *(["of the products alone"] if limits else [])]
    figure, (panels,) = _figure(f"Training step of {model}, H {heads} ({machine})", 1, len(names), 4.6)
    for graphs in sorted({row["graphs"] for row in rows}):
        for variant in _variants(rows):
            here = [row for row in rows if row["graphs"] == graphs and row["variant"] == variant]
            is_plain = graphs == "off" and variant not in ("products", "fla")
            named, style = (f"{variant}, no CUDA graphs", ":") if is_plain else (variant, "-")
            style = "--" if variant.endswith(":no_optimizer") else style
            points = _points(here, variant, "tokens", "tokens_per_second_per_gpu")
            shares = [(tokens, rate / limits[tokens]) for tokens, rate in points if tokens in limits]
            for axes, drawn in zip(panels, (points, shares if variant != "products" else []), strict=False):
                if drawn:
                    axes.plot(*_xy(drawn), style, marker="o", markersize=4, color=_colour(variant), label=named)
    for axes, name in zip(panels, names, strict=True):
        label_axes(axes, "", "tokens a GPU", name, log=False)
    return figure


def _decode(rows: list[Row], machine: str) -> Figure:
    batches = sorted({row["batch"] for row in rows})
    figure, axes = _figure(f"Decoding with {rows[0]['model']} ({machine})", len(batches), 2, 4.6 * len(batches))
    from matplotlib.ticker import FuncFormatter

    for (left, right), batch in zip(axes, batches, strict=True):
        here = [row for row in rows if row["batch"] == batch]
        for variant in _variants(here):
            _draw(left, _points(here, variant, "context", "tokens_per_second"), variant)
            _draw(right, _points(here, variant, "context", "memory_gb"), variant)
        at_once = f"{batch} sequence{'s' if batch > 1 else ''} at once"
        label_axes(left, at_once, "tokens before", "tokens/s of a rank", log=False)
        label_axes(right, at_once, "tokens before", "GB of a rank, weights included", log=False)
        for axis in (left, right):
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_name(round(value))))
            heights = (float(y) for line in axis.lines for y in line.get_ydata())
            axis.set_ylim(top=1.15 * max(filter(math.isfinite, heights), default=1.0))
    return figure


def _operator_of(row: Row) -> tuple[str, ...]:
    """Parts of the names of an operator's figures; none of the default's, which is that of rows without an operator."""
    if row.get("operator", DEFAULT) == DEFAULT:
        return ()
    groups, decay = row.get("groups"), row.get("decay")
    return row["operator"], *([] if decay is None else [decay]), *([] if groups is None else [f"g{groups}"])


def _titled(row: Row) -> str:
    return f"Operator {' '.join(_operator_of(row))}".rstrip() + ", forward + backward"


def _forward_backward(rows: list[Row]) -> list[Row]:
    """The rows of whole steps, launched eagerly; those of graphs if there are no others."""
    rows = [row for row in rows if row["pass"] == "forward_backward"]
    return [row for row in rows if row["mode"] == "eager"] or rows


def _one_shape(rows: list[Row]) -> tuple[list[Row], str]:
    """The rows of the paper's H 16, K 64 and V 128, or of the first shape if that is missing."""
    rows = _forward_backward(rows)
    shapes = [_shape(row) for row in rows]
    if not shapes:
        return [], ""
    shape = (16, 64, 128) if (16, 64, 128) in shapes else shapes[0]
    return [row for row in rows if _shape(row) == shape], _named(shape)


def _shape(row: Row) -> tuple[int, int, int]:
    return row["heads"], row["key_dim"], row["value_dim"]


def _named(shape: tuple[int, int, int]) -> str:
    return "H {}, K {}, V {}".format(*shape)


def _variants(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["variant"] for row in rows))


def _points(rows: list[Row], variant: str, x: str, y: str = "median_ms") -> list[tuple[float, float]]:
    """(x, y) points; of two runs with the same x the later one counts."""
    return sorted({row[x]: row[y] for row in rows if row["variant"] == variant}.items())


def _colour(variant: str) -> str:
    # A file may name variants of another version.
    return _COLOURS.get(variant.partition(":")[0], GREY)


def _draw(axes: Axes, points: Sequence[tuple[float, float]], variant: str) -> None:
    _, *settings = variant.split(":")
    style = _LINES.get(settings[0] if settings else "", "-")
    marker = {"p2p": "s", "symmetric": "^"}.get(settings[1] if len(settings) > 1 else "", "o")
    axes.plot(*_xy(points), color=_colour(variant), linestyle=style, marker=marker, markersize=5, label=plain(variant))


def _draw_paper(axes: Axes, points: Sequence[tuple[float, float]], variant: str, label: str) -> None:
    (line,) = axes.plot(*_xy(points), "x--", color=_COLOURS[variant], label=f"{label} ({_PAPER})")
    line.set(markersize=4, linewidth=1, alpha=0.6)


def _xy(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _figure(title: str, rows: int, columns: int, height: float) -> tuple[Figure, Any]:
    figure = new_figure(title, (max(9.0, 7.5 * columns), height), dpi=120, title_size=11)
    return figure, figure.subplots(rows, columns, squeeze=False)
