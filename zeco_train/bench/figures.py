"""Plots of results, in the form of the ZeCO paper's Figures 3 and 4, next to the paper's own numbers.

    collectives.png      time by GPUs, as Figure 3, right; and by size of the state
    operator.png         time of forward + backward by GPUs, as Figure 4, top; below it relative to `dp`
    operator_tokens.png  time by tokens a GPU; operator_fixed_decay_none.png … for operators but the default
    attention.png        time of softmax attention by method, with exposed communication and balance
    decode.png           tokens per second and memory by context length, for each number of concurrent sequences
    gla_1b_h16.png …     training throughput per GPU by GPUs, as Figure 4, bottom; below it relative to `dp`
    mixers.png           training throughput per GPU by model, if there are several, relative to `dp` beside it

The paper's GPUs are a cluster of H100s, ours are named in results.json: compare scaling, not absolute speed.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeco_train.bench.session import Row
from zeco_train.bench.stored import load_results
from zeco_train.collectives.scan_registry import ALL_SCANS
from zeco_train.errors import ConfigError
from zeco_train.ops.operator_registry import DEFAULT
from zeco_train.sp.backend_registry import BACKENDS
from zeco_train.system.figures import GREY, finish_axes, label_axes, length_ticks, new_figure, plain, save_figure
from zeco_train.system.terminal import markdown_table

if TYPE_CHECKING:
    from zeco_train.system.figures import Axes, Figure

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
# Of methods of softmax attention.
_SOFTMAX = "#2563a8"
# All-Scan variants share a colour, and so do the peer's.
_LINES = {"no_optimizer": ":", **{scan.name: scan.line for scan in ALL_SCANS}}
# Variant for each column of the paper's table.
_PAPER_COLLECTIVES = {"all_gather": "all_gather", "all_scan": "zeco", "all_reduce": "all_reduce"}
_PAPER_BACKENDS = ("lasp1", "lasp2", "zeco", "dp")
_PAPER_TOKENS = (16_384, 32_768)
# The paper does not give the size in bytes; by its A.2 a head's K and V are D / H, so H 32, K 128 and V 128 in fp32.
_PAPER_MIB = 2.0
# Height of a bar, of 1 for all bars of a model.
_BARS = 0.8
Figures = Iterator[tuple[str, "Figure"]]
Points = Sequence[tuple[float, float]]


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
    """Plot results of one case, possibly of different numbers of GPUs; returns the paths of the figures."""
    rows = []
    for result in results:
        facts = {"gpus": result["world_size"], "graphs": result.get("config", {}).get("cuda_graphs", "off")}
        rows += [row | facts for row in result["rows"] if row.get("median_ms")]
    draw = _FIGURES.get(results[0]["case"])
    if not rows or draw is None:
        return []
    machines = sorted({str(result["environment"].get("device_name")) for result in results})
    machine = f"measured on {', '.join(machines)}"
    if all(result["environment"].get("device") == "cpu" for result in results):
        machine += ", CPU ranks in place of GPUs"
    return [save_figure(figure, folder / f"{name}.png") for name, figure in draw(rows, machine)]


def reference(name: str) -> list[dict[str, float]]:
    """A table of a paper, without its empty cells."""
    with (REFERENCE / f"{name}.csv").open(encoding="ascii", newline="") as file:
        return [{key: float(cell) for key, cell in row.items() if cell} for row in csv.DictReader(file)]


def _collectives(rows: list[Row], machine: str) -> Figures:
    mode = "graph" if any(row["mode"] == "graph" for row in rows) else "eager"
    rows = [row for row in rows if row["mode"] == mode]
    size = min((row["size_mb"] for row in rows), key=lambda mib: abs(math.log(mib / _PAPER_MIB)))
    most = max(row["gpus"] for row in rows)
    figure, ((left, right),) = _figure(f"Communication time of a state ({machine}, {mode})", 1, 2, 5.2)
    _draw_all(left, [row for row in rows if row["size_mb"] == size], "gpus")
    _draw_all(right, [row for row in rows if row["gpus"] == most], "size_mb")
    for column, variant in _PAPER_COLLECTIVES.items():
        points = [(row["gpus"], row[column]) for row in reference("zeco_collectives_ms")]
        _draw_paper(left, points, variant, column)
    label_axes(left, f"{size:g} MiB a rank", "GPUs", "ms")
    label_axes(right, f"{most} GPUs", "MiB a rank", "ms")
    yield "collectives", figure


def _operators(rows: list[Row], machine: str) -> Figures:
    rows = [row for row in rows if row["pass"] == "forward_backward"]
    for operator in dict.fromkeys(map(_operator_of, rows)):
        own, name = [row for row in rows if _operator_of(row) == operator], "_".join(("operator", *operator))
        # Launched eagerly; in graphs if there are no others.
        own = [row for row in own if row["mode"] == "eager"] or own
        yield name, _operator(own, machine)
        yield f"{name}_tokens", _operator_tokens(own, machine)


def _operator(rows: list[Row], machine: str) -> Figure:
    # The paper's shape, or the first.
    shapes = [_shape(row) for row in rows]
    shape = (16, 64, 128) if (16, 64, 128) in shapes else shapes[0]
    rows = [row for row in rows if _shape(row) == shape]
    tokens = [n for n in _PAPER_TOKENS if any(row["tokens"] == n for row in rows)]
    tokens = tokens or sorted({row["tokens"] for row in rows})[:2]
    figure, axes = _figure(f"{_titled(rows[0])}, {_named(shape)} ({machine})", 2, len(tokens), 8.5)
    for count, upper, lower in zip(tokens, *axes, strict=True):
        here = [row for row in rows if row["tokens"] == count]
        _draw_all(upper, here, "gpus")
        papers = [row for row in reference("zeco_operator_ms") if row["seq_len_per_gpu"] == count]
        # The paper measures gla only.
        for variant in _PAPER_BACKENDS if papers and not _operator_of(rows[0]) else ():
            _draw_paper(upper, [(row["gpus"], row[variant]) for row in papers if variant in row], variant, variant)
        label_axes(upper, f"{count:,} tokens a GPU", "GPUs", "ms")
        _draw_ratios(lower, here)
    return figure


def _draw_ratios(axes: Axes, rows: list[Row]) -> None:
    # Relative to `dp`, or to the first variant without it, on the most GPUs. A line per variant, since times within a
    # few per cent of each other lie on one spot of an axis of milliseconds.
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
        _annotate(axes, f"{ratio:.3f}", high, place, 9)
        right = max(right, high)
    axes.axvline(1.0, color=_COLOURS["dp"], linewidth=0.8)
    axes.set_yticks(range(len(latest)), [plain(variant) for variant in latest])
    axes.set_ylim(len(latest) - 0.4, -0.6)
    # Room for the last number, right of its point.
    axes.set_xlim(right=right + 0.12 * (right - axes.get_xlim()[0]))
    axes.set_xlabel(f"time / that of {base}, {most} GPUs (median, p10 to p90)")
    finish_axes(axes)


def _operator_tokens(rows: list[Row], machine: str) -> Figure:
    most = max(row["gpus"] for row in rows)
    rows = [row for row in rows if row["gpus"] == most]
    shapes = sorted({_shape(row) for row in rows})
    columns = min(2, len(shapes))
    lines = -(-len(shapes) // columns)
    figure, axes = _figure(f"{_titled(rows[0])}, {most} GPUs ({machine})", lines, columns, 4.6 * lines)
    for axis, shape in zip(axes.flat, shapes, strict=False):
        _draw_all(axis, [row for row in rows if _shape(row) == shape], "tokens")
        label_axes(axis, _named(shape), "tokens a GPU", "ms")
    return figure


def _attention(rows: list[Row], machine: str) -> Figures:
    # For each number of tokens milliseconds, of which exposed communication is hatched; and, where it was profiled, the
    # slowest rank's work over the mean.
    if not (rows := [row for row in rows if row["pass"] == "forward_backward"]):
        return None
    counts = sorted({row["tokens"] for row in rows})
    variants, first = _variants(rows), rows[0]
    window = "" if first.get("window") is None else f", window {first['window']:,}"
    shape = f"H {first['heads']}, G {first['key_heads']}, D {first['head_dim']}{window}, {first.get('gpus', 1)} ranks"
    size = 13.0, 1.4 + len(counts) * (0.6 + 0.27 * len(variants))
    figure = new_figure(f"Attention of one layer, {shape} ({machine})", size, dpi=120, title_size=11)
    profiled = any(row.get("slowest") for row in rows)
    panels = figure.subplots(len(counts), 1 + profiled, squeeze=False, sharey="row")
    for count, (left, *rest) in zip(counts, panels, strict=True):
        for name, row in {row["variant"]: row for row in rows if row["tokens"] == count}.items():
            place, colour = variants.index(name), _attention_colour(name)
            left.barh(place, row["median_ms"], 0.7, color=colour)
            if exposed := row.get("exposed_us"):
                left.barh(place, exposed / 1e3, 0.7, color="none", edgecolor="white", hatch="////", linewidth=0)
            _annotate(left, f"{row['median_ms']:.2f}", row["median_ms"], place, 8)
            if rest and (slowest := row.get("slowest")):
                rest[0].plot([slowest], [place], "o", color=colour, markersize=6)
        left.set_yticks(range(len(variants)), [plain(name) for name in variants])
        left.invert_yaxis()
        left.set_xlabel(f"ms, {count:,} tokens a rank; hatched: exposed communication")
        finish_axes(left, "x")
        for right in rest:
            right.axvline(1.0, color=GREY, linewidth=0.8)
            right.set_xlabel("work of the slowest rank over the mean")
            finish_axes(right, "x")
    yield "attention", figure


def _attention_colour(variant: str) -> str:
    name = variant.rpartition(":")[2]
    if name in BACKENDS and ":" in variant:
        return BACKENDS[name].color
    return GREY if variant.partition(":")[0] == "dp" else _SOFTMAX


def _models(rows: list[Row], machine: str) -> Figures:
    models: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["model"], row["heads"])):
        models.setdefault(f"{row['model']}_h{row['heads']}", []).append(row)
    for name, own in models.items():
        yield name, _model(own, machine)
    if len({row["tokens"] for row in rows}) > 1:
        for name, own in models.items():
            yield f"{name}_tokens", _model_tokens(own, machine)
    if len(mixers := mixer_rows(rows)) > 1:
        yield "mixers", draw_mixers(mixers, machine)


def _model(rows: list[Row], machine: str) -> Figure:
    tokens = sorted({row["tokens"] for row in rows})
    figure, axes = _figure(_model_title(rows, machine), 2, len(tokens), 8.5)
    for count, upper, lower in zip(tokens, *axes, strict=True):
        here = [row for row in rows if row["tokens"] == count]
        _draw_all(upper, here, "gpus", "tokens_per_second_per_gpu")
        _draw_all(lower, [row for row in here if row.get("ratio") and row["variant"] != "dp"], "gpus", "ratio")
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


def _model_tokens(rows: list[Row], machine: str) -> Figure:
    # Beside it, if measured, the part of what matrix products alone reach on that GPU.
    limits = {row["tokens"]: row["tokens_per_second_per_gpu"] for row in rows if row["variant"] == "products"}
    names = ["tokens/s of a GPU", *(["of the products alone"] if limits else [])]
    figure, (panels,) = _figure(_model_title(rows, machine), 1, len(names), 4.6)
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


def _model_title(rows: list[Row], machine: str) -> str:
    return f"Training step of {rows[0]['model']}, H {rows[0]['heads']} ({machine})"


def mixer_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The measured rows of each model, if there are several; of two rows alike the later one counts."""
    measured = [row for row in rows if row.get("median_ms") and row.get("mixer")]
    if len({row["model"] for row in measured}) < 2:
        return {}
    found: dict[str, dict[tuple[str, int, int], Row]] = {}
    for row in measured:
        place = row["variant"], row["tokens"], row.get("gpus", 1)
        found.setdefault(f"{row['model']}, H {row['heads']}", {})[place] = row
    return {model: list(own.values()) for model, own in found.items()}


def mixer_table(models: dict[str, list[Row]]) -> str:
    """Tokens/s of a rank by model and variant, and relative to `dp`, as Markdown: a line per model and length."""
    variants = _variants(itertools.chain(*models.values()))
    heads = ["mixer", "model", "tokens a rank", *(f"{name}, tokens/s" for name in variants)]
    heads += [f"{name} / dp" for name in variants if name != "dp"]
    lines = []
    for model, rows in models.items():
        for tokens in sorted({row["tokens"] for row in rows}):
            here = {row["variant"]: row for row in rows if row["tokens"] == tokens}
            rates = [_cell(here.get(name), "tokens_per_second_per_gpu", ",.0f") for name in variants]
            ratios = [_cell(here.get(name), "ratio", ".3f") for name in variants if name != "dp"]
            lines.append([rows[0]["mixer"], model, f"{tokens:,}", *rates, *ratios])
    return markdown_table(heads, lines)


def _cell(row: Row | None, column: str, style: str) -> str:
    value = None if row is None else row.get(column)
    return "" if value is None else format(value, style)


def draw_mixers(models: dict[str, list[Row]], machine: str) -> Figure:
    """Throughput by model, and relative to `dp`, with the most tokens and GPUs of each variant."""
    variants, names = _variants(itertools.chain(*models.values())), list(models)
    figure = new_figure(f"Training step by model ({machine})", (13.0, 1.6 + 0.75 * len(names)), dpi=120, title_size=11)
    left, right = figure.subplots(1, 2, sharey=True)
    height = _BARS / len(variants)
    for index, variant in enumerate(variants):
        colour = BACKENDS[name].color if (name := variant.partition(":")[0]) in BACKENDS else GREY
        for place, rows in enumerate(models.values()):
            own = [row for row in rows if row["variant"] == variant]
            if not own:
                continue
            row, y = max(own, key=lambda each: (each["tokens"], each.get("gpus", 1))), place + index * height
            label = plain(variant) if variant not in left.get_legend_handles_labels()[1] else None
            left.barh(y, row["tokens_per_second_per_gpu"], height, color=colour, label=label)
            # The upper bound's ratio would push those of the scans together.
            if row.get("ratio") and variant not in ("dp", "products"):
                right.plot([row["ratio"]], [y], "o", color=colour, markersize=6)
                _annotate(right, f"{row['ratio']:.3f}", row["ratio"], y)
    left.set_yticks([place + (_BARS - height) / 2 for place in range(len(names))], [plain(name) for name in names])
    left.invert_yaxis()
    left.set_xlabel("tokens/s of a GPU")
    right.axvline(1.0, color=_COLOURS["dp"], linewidth=0.8)
    right.set_xlabel("tokens/s over that of dp")
    finish_axes(left, "x")
    finish_axes(right, "x")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return figure


def _decode(rows: list[Row], machine: str) -> Figures:
    batches = sorted({row["batch"] for row in rows})
    figure, axes = _figure(f"Decoding with {rows[0]['model']} ({machine})", len(batches), 2, 4.6 * len(batches))
    for panels, batch in zip(axes, batches, strict=True):
        here = [row for row in rows if row["batch"] == batch]
        columns = {"tokens_per_second": "tokens/s of a rank", "memory_gb": "GB of a rank, weights included"}
        for axis, (column, unit) in zip(panels, columns.items(), strict=True):
            _draw_all(axis, here, "context", column)
            label_axes(axis, f"{batch} sequence{'s' if batch > 1 else ''} at once", "tokens before", unit, log=False)
            length_ticks(axis.xaxis)
            heights = (float(y) for line in axis.lines for y in line.get_ydata())
            axis.set_ylim(top=1.15 * max(filter(math.isfinite, heights), default=1.0))
    yield "decode", figure


# By case.
_FIGURES = {"collectives": _collectives, "operator": _operators, "attention": _attention}
_FIGURES |= {"decode": _decode, "model": _models}


def _operator_of(row: Row) -> tuple[str, ...]:
    # Parts of the names of its figures; none of the default's, also of rows without an operator.
    if row.get("operator", DEFAULT) == DEFAULT:
        return ()
    groups, decay = row.get("groups"), row.get("decay")
    return row["operator"], *([] if decay is None else [decay]), *([] if groups is None else [f"g{groups}"])


def _titled(row: Row) -> str:
    return f"Operator {' '.join(_operator_of(row))}".rstrip() + ", forward + backward"


def _shape(row: Row) -> tuple[int, int, int]:
    return row["heads"], row["key_dim"], row["value_dim"]


def _named(shape: tuple[int, int, int]) -> str:
    return "H {}, K {}, V {}".format(*shape)


def _variants(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["variant"] for row in rows))


def _points(rows: list[Row], variant: str, x: str, y: str) -> list[tuple[float, float]]:
    # Of two runs with the same x the later one counts.
    return sorted({row[x]: row[y] for row in rows if row["variant"] == variant}.items())


def _colour(variant: str) -> str:
    # A file may name variants of another version.
    return _COLOURS.get(variant.partition(":")[0], GREY)


def _draw_all(axes: Axes, rows: list[Row], x: str, y: str = "median_ms") -> None:
    for variant in _variants(rows):
        _, *settings = variant.split(":")
        style = _LINES.get(settings[0] if settings else "", "-")
        marker = {"p2p": "s", "symmetric": "^"}.get(settings[1] if len(settings) > 1 else "", "o")
        look: dict[str, Any] = {"color": _colour(variant), "linestyle": style, "marker": marker, "markersize": 5}
        axes.plot(*_xy(_points(rows, variant, x, y)), label=plain(variant), **look)


def _draw_paper(axes: Axes, points: Points, variant: str, label: str) -> None:
    (line,) = axes.plot(*_xy(points), "x--", color=_COLOURS[variant], label=f"{label} ({_PAPER})")
    line.set(markersize=4, linewidth=1, alpha=0.6)


def _annotate(axes: Axes, text: str, x: float, y: float, size: float | None = None) -> None:
    axes.annotate(text, (x, y), (8, 0), textcoords="offset points", va="center", fontsize=size)


def _xy(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _figure(title: str, rows: int, columns: int, height: float) -> tuple[Figure, Any]:
    figure = new_figure(title, (max(9.0, 7.5 * columns), height), dpi=120, title_size=11)
    return figure, figure.subplots(rows, columns, squeeze=False)
