"""Whether a validation reward has converged: the slope of its last evaluations, with an interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LAST = 5  # evaluations
T = 3.182446  # 97.5% quantile of Student's t with LAST - 2 degrees of freedom

FEW, CONVERGED, RISING, FALLING, UNKNOWN = "too few evaluations", "converged", "rising", "falling", "cannot tell"


@dataclass(frozen=True)
class Convergence:
    """The verdict on the last `evaluations` evaluations; slope, interval and resolution None for too few."""

    verdict: str
    evaluations: int
    slope: float | None = None  # per update
    interval: tuple[float, float] | None = None  # 95%
    resolution: float | None = None  # per update: a change that the validation rows could tell


def convergence(updates: Sequence[float], rewards: Sequence[float], half_width: float | None) -> Convergence:
    """Judge the last K = 5 evaluations (u_i, r_i) by their least-squares slope b and its 95% interval.

    b = sum (u_i - u)(r_i - r) / S, S = sum (u_i - u)^2, b +- t_{.975, K-2} sqrt(sum e_i^2 / (K - 2) / S), with the
    means u and r and the residuals e_i. The scatter around the line is the error of the slope: evaluations read the
    same rows on the same noise, so that what the sample of rows adds to all of them alike cancels.

    "rising" and "falling": the interval excludes 0. "converged": it contains 0, and neither end, over the updates from
    the first to the last of them, is a change above `half_width`, that of the last reward's own 95% interval: whatever
    trend is left is one that these rows could not tell. "cannot tell": it contains 0 and is wider, or `half_width` is
    None. "too few evaluations": fewer than K.

    >>> convergence([1, 2, 3, 4, 5], [0.5, 0.52, 0.5, 0.48, 0.5], 0.1).verdict
    'converged'
    """
    if len(updates) < LAST:
        return Convergence(FEW, len(updates))
    x, y = list(updates)[-LAST:], [reward - rewards[-1] for reward in rewards[-LAST:]]  # equal ones are exactly 0
    x_mean, y_mean = sum(x) / LAST, sum(y) / LAST
    spread = sum((u - x_mean) ** 2 for u in x)
    slope = sum((u - x_mean) * (r - y_mean) for u, r in zip(x, y, strict=True)) / spread
    residuals = [r - y_mean - slope * (u - x_mean) for u, r in zip(x, y, strict=True)]
    error = T * math.sqrt(sum(e**2 for e in residuals) / (LAST - 2) / spread)
    low, high = slope - error, slope + error
    resolution = None if half_width is None else half_width / (x[-1] - x[0])
    if low > 0 or high < 0:
        verdict = RISING if low > 0 else FALLING
    else:
        verdict = CONVERGED if resolution is not None and max(-low, high) <= resolution else UNKNOWN
    return Convergence(verdict, LAST, slope, (low, high), resolution)


def convergence_of(log_history: Sequence[Mapping[str, Any]], name: str = "reward") -> Convergence:
    """Judge the evaluations of a trainer's log by a metric, with the interval that was logged beside it."""
    found = {log["step"]: log for log in log_history if f"eval_{name}" in log}  # the last one of an update counts
    evaluations = [found[step] for step in sorted(found)]
    bounds = [evaluations[-1].get(f"eval_interval/{name}/{side}") for side in ("low", "high")] if evaluations else []
    half_width = (bounds[1] - bounds[0]) / 2 if bounds and None not in bounds else None  # type: ignore[operator]
    return convergence(sorted(found), [log[f"eval_{name}"] for log in evaluations], half_width)
