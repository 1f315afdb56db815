"""The picture of a run: six panels from rows of metrics, one line a run.

matplotlib comes with the extra `plot` and is imported when a figure is drawn. Where the rows come from: `run.py`.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Panel(NamedTuple):
    """One axes: the metrics drawn there, each with the name that the legend gives it (empty: only the run's)."""

    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    log: bool = False
    share: bool = False  # the value lies in [0, 1]


PANELS = (
    Panel("Training reward", "mean reward", (("reward", ""),), share=True),
    Panel(
        "Held-out accuracy",
        "share right",
        (("eval/test/pass@1", "pass@1"), ("eval/test/greedy_accuracy", "greedy")),
        share=True,
    ),
    Panel("Held-out pass@8", "share right", (("eval/test/pass@8", ""),), share=True),
    Panel("Completion length", "tokens", (("completions/mean_length", ""),)),
    Panel("Entropy", "nats per token", (("entropy", ""),)),
    Panel(
        "Sampler against scorer",
        "log-prob difference, nats",
        (("sampling/logp_difference/max", "max"), ("sampling/logp_difference/mean", "mean")),
        log=True,
    ),
)
_COLOURS = ("#0b559f", "#c8501e", "#3a7d44", "#7b4b94")  # one a run
_DASHES = ("-", "--", "-.", ":")  # one a run
_FADED = 0.45  # the second metric of a panel


def curves(
    path_png: str | Path,
    series: Mapping[str, Sequence[Row]],
    *,
    time_key: str = "time",
    title: str | None = None,
    panels: Sequence[Panel] = PANELS,
) -> Path:
    """The path of the PNG that was written: every metric against wall time, the first run solid, the second dashed.

    `series` maps the name of a run to its rows of metrics in order. A row without a panel's metric, or with a value
    that is not finite, is left out of that panel; a panel that no row has a value for says so. `time_key` names the
    column of seconds, by default the one of `metrics.jsonl`; each run's first row is put at 0.

    Raises ModuleNotFoundError without matplotlib, ValueError with no run or more than four, KeyError when a row
    has no time.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("drawing curves needs matplotlib: pip install 'jaxrl-lm[plot]'") from error
    if not 1 <= len(series) <= len(_COLOURS):
        raise ValueError(f"series holds {len(series)} runs: a figure shows 1 to {len(_COLOURS)}")
    for name, run in series.items():
        for index, row in enumerate(run):
            if time_key not in row:
                raise KeyError(f"row {index} of {name!r} has no {time_key!r}: name its column of seconds by time_key")
    # A figure of its own instead of pyplot: nothing global is changed and no display is needed.
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(-(-len(panels) // 3), 3, squeeze=False, sharex=True)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw(axes, panel, series, time_key)
    for axes in grid[-1]:
        axes.set_xlabel("wall time, seconds")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    _legend(figure, series)
    if title:
        figure.suptitle(title, fontsize=12)
    path = Path(path_png)
    figure.savefig(path, dpi=150)
    return path


def _draw(axes: Any, panel: Panel, series: Mapping[str, Sequence[Row]], time_key: str) -> None:
    drawn = False
    for (_, run), colour, dash in zip(series.items(), _COLOURS, _DASHES, strict=False):
        for rank, (metric, _) in enumerate(panel.metrics):
            points = [
                (row[time_key] - run[0][time_key], row[metric]) for row in run if _finite(row.get(metric), panel.log)
            ]
            if not points:
                continue
            drawn = True
            marker = "o" if len(points) <= 12 else ""
            look = {"color": colour, "linestyle": dash, "marker": marker, "alpha": _FADED if rank else 1.0}
            axes.plot(*zip(*points, strict=True), linewidth=1.7, markersize=3.5, **look)
    axes.set_title(panel.title, fontsize=10.5, loc="left")
    axes.set_ylabel(panel.unit, fontsize=9)
    axes.tick_params(labelsize=8.5, labelbottom=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    if not drawn:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color="#808080")
        return
    if panel.log:
        axes.set_yscale("log")
    if panel.share:
        axes.set_ylim(-0.02, 1.02)
    if len(panel.metrics) > 1:
        _metric_legend(axes, panel)


def _finite(value: Any, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not log)


def _metric_legend(axes: Any, panel: Panel) -> None:
    """Full and faded strokes in grey: a panel's metrics, whatever the run."""
    from matplotlib.lines import Line2D

    strokes = [
        Line2D([], [], color="#303030", alpha=_FADED if rank else 1.0, linewidth=1.7, label=label)
        for rank, (_, label) in enumerate(panel.metrics)
    ]
    axes.legend(handles=strokes, fontsize=8.5, frameon=False, loc="best")


def _legend(figure: Any, series: Mapping[str, Sequence[Row]]) -> None:
    from matplotlib.lines import Line2D

    strokes = [
        Line2D([], [], color=colour, linestyle=dash, linewidth=1.9, label=name)
        for name, colour, dash in zip(series, _COLOURS, _DASHES, strict=False)
    ]
    figure.legend(handles=strokes, loc="outside lower center", ncols=len(strokes), frameon=False, fontsize=9.5)
