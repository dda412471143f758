"""The main metrics by their short names, what of a run's logs is drawn of each, and curves.png."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turngrpo.trainer.writing import going_on, writing

COLUMNS = {
    "reward": "reward",
    "update_accuracy/balanced": "balanced",
    "update_accuracy/evidence": "evidence",
    "update_accuracy/evidence_free": "evidence-free",
    "exit/exact": "exact exit",
    "answer/accuracy": "answer",
    "format/parsed": "parsed",
    "turns/mean": "turns",
}
CURVES = (*list(COLUMNS)[:6], "turns/mean", "kl")
VALIDATION = {"color": "C1", "marker": "."}

Logs = Sequence[Mapping[str, Any]]


def points(history: Logs, name: str) -> list[tuple[int, float]]:
    """Return the updates at which a metric was logged as a number, and its values."""
    return [(log["update"], log[name]) for log in history if is_number(log.get(name))]


def band(history: Logs, prefix: str, name: str) -> list[tuple[int, float, float]]:
    """Return the updates at which a metric's interval was logged, and its bounds; the prefix is eval_ or none."""
    bounds = [f"{prefix}interval/{name}/{side}" for side in ("low", "high")]
    return [(log["update"], *map(log.__getitem__, bounds)) for log in history if all(map(log.__contains__, bounds))]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def write_curves(history: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw reward, gates, answers, turns and KL over the updates, in training and on validation rows, in two rows.

    Validation has its 95% intervals where they were logged. The first and the last value of a curve stand above
    it. Nothing is drawn where nothing was logged.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in CURVES if any(name in log or f"eval_{name}" in log for log in history)]
    if not names:
        return
    width = -(-len(names) // 2)
    figure, axes = pyplot.subplots(2, width, figsize=(2.8 * width, 5.6), sharex=True, squeeze=False)
    kinds = (("", "training", 0.0, "left", {"color": "C0"}), ("eval_", "validation", 1.0, "right", VALIDATION))
    for axis, name in zip(axes.flat, names, strict=False):
        for prefix, label, place, side, look in kinds:
            drawn = points(history, prefix + name)
            if not drawn:
                continue
            axis.plot(*zip(*drawn, strict=True), label=label, **look)
            if bounds := band(history, prefix, name):
                axis.fill_between(*zip(*bounds, strict=True), color=look["color"], alpha=0.2, linewidth=0)
            ends = f"{drawn[0][1]:.3g} \N{RIGHTWARDS ARROW} {drawn[-1][1]:.3g}"
            axis.text(place, 1.03, ends, transform=axis.transAxes, ha=side, color=look["color"])
        axis.set_title(name, fontsize=11, pad=20)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis in axes[-1]:
        axis.set_xlabel("update")
    axes[0, 0].legend(fontsize=9)
    figure.tight_layout()
    with writing(str(path), going_on(path.parent)):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
