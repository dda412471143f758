"""Curves of training and validation as SVG text, one small plot per metric."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lib.curves import band, is_number, points

METRICS = (
    "reward",
    "update_accuracy/balanced",
    "update_accuracy/evidence",
    "update_accuracy/evidence_free",
    "exit/exact",
    "exit/early",
    "exit/late",
    "answer/accuracy",
    "format/parsed",
    "turns/mean",
    "memory_tokens/mean",
    "response_tokens/mean",
    "kl",
    "entropy",
    "clip/active",
    "loss",
    "grad_norm",
    "nll",
    "frac_reward_zero_std",
)
TRAINING, VALIDATION = "#0072B2", "#D55E00"
SIZE, FRAME = (3.5, 2.3), (0.15, 0.19, 0.82, 0.74)  # in inches; left, bottom, width and height in shares of it
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "turngrpo",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}


def names_of(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is drawn: the main metrics, then every reward function's mean, where they were logged."""
    logged = {name.removeprefix("eval_") for log in history for name, value in log.items() if is_number(value)}
    functions = sorted(name for name in logged if re.fullmatch(r"rewards/.*/mean", name))
    return [name for name in (*METRICS[:1], *functions, *METRICS[1:]) if name in logged]


def curves(history: Sequence[Mapping[str, Any]], policies: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the SVG text of every metric by name; `policies` before and after training are points with intervals."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawn = {}
    places = {"before": 0, "after": max((log["update"] for log in history), default=0)}
    for name in names_of(history):
        with rc_context(STYLE):
            figure = Figure(figsize=SIZE)
            axis = figure.add_axes(FRAME)
            _draw(axis, history, name, "", TRAINING, "")
            _draw(axis, history, name, "eval_", VALIDATION, "o")
            for label, place in places.items():
                one = (policies or {}).get(label) or {}
                value, bounds = one.get("metrics", {}).get(name), one.get("intervals", {}).get(name)
                if is_number(value):
                    error = [[max(0.0, value - bounds[0])], [max(0.0, bounds[1] - value)]] if bounds else None
                    axis.errorbar([place], [value], yerr=error, color=VALIDATION, marker="D", markersize=5, capsize=3)
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axis.yaxis.set_major_locator(MaxNLocator(5))
            axis.ticklabel_format(axis="y", scilimits=(-2, 4))
            axis.grid(alpha=0.25)
            axis.set_xlabel("update")
            drawn[name] = _svg(figure)
    return drawn


def _draw(axis: Any, history: Sequence[Mapping[str, Any]], name: str, prefix: str, color: str, marker: str) -> None:
    """Draw a metric of the logs, with the interval around it where that was logged; a single point as a dot."""
    if drawn := points(history, prefix + name):
        marker = marker or "o" * (len(drawn) == 1)
        axis.plot(*zip(*drawn, strict=True), color=color, marker=marker, markersize=4, linewidth=1.6)
    if bounds := band(history, prefix, name):
        axis.fill_between(*zip(*bounds, strict=True), color=color, alpha=0.15, linewidth=0)


def ends(history: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the first and the last values of a metric in words."""
    said = []
    for prefix, label in (("", "training"), ("eval_", "validation")):
        values = [value for _, value in points(history, prefix + name)]
        if values:
            said.append(f"{label} {values[0]:.4g} → {values[-1]:.4g}")
    return ", ".join(said)


def _svg(figure: Any) -> str:
    """Return a figure as an element of a page: without a prologue, and without ids that only repeat."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = re.sub(r' id="[A-Za-z0-9]+_\d+"', "", text[text.index("<svg") :])
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r' width="[^"]*pt" height="[^"]*pt"|\s*xmlns:xlink="[^"]*"', "", text, count=2)
