"""95% intervals over rows that were read several times: a row, with all its readings, is what chance draws.

Or a project, with all its rows: `Observations.clustered` adds up what is drawn together.

Means have the percentile interval of a bootstrap over rows. Shares (0 or 1 per observation) have Wilson's, which is no
single point where every observation is the same.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 1000
Z = 1.959964  # of a normal distribution, 95% lie within as many standard deviations
BALANCED = "update_accuracy/balanced"
SIDES = ("update_accuracy/evidence", "update_accuracy/evidence_free")  # whose mean it is


@dataclass(frozen=True)
class Observations:
    """Sums and counts (R rows, M metrics) of every observation of a metric, so that rows can be resampled."""

    names: list[str]
    sums: np.ndarray  # (R, M)
    counts: np.ndarray  # (R, M)

    def rows_with(self, name: str) -> int:
        """Return how many rows a metric was observed in; of balanced accuracy one side is enough."""
        columns = [self.names.index(side) for side in (SIDES if name == BALANCED else (name,)) if side in self.names]
        return int(self.counts[:, columns].any(axis=1).sum())

    def clustered(self, labels: Sequence[Any]) -> "Observations":
        """Return one row per label, in order of appearance, that holds all observations of the rows with it."""
        places = {label: place for place, label in enumerate(dict.fromkeys(labels))}
        member = np.zeros((len(places), len(self.sums)))  # (labels, R)
        member[[places[label] for label in labels], np.arange(len(self.sums))] = 1
        return Observations(self.names, member @ self.sums, member @ self.counts)

    def means(self, weights: np.ndarray) -> np.ndarray:
        """Return (S, M) means under row weights (S, R); NaN where nothing was observed."""
        counts = weights @ self.counts
        with np.errstate(invalid="ignore"):
            values = np.where(counts > 0, weights @ self.sums / np.maximum(counts, 1e-12), np.nan)
        return values


def observe(measures: Sequence[Mapping[str, Sequence[float]]], groups: Sequence[int]) -> Observations:
    """Return what was observed in every row; `measures` are those of every reading, `groups` say of which row."""
    names = list(dict.fromkeys(name for one in measures for name in one))
    place = {name: column for column, name in enumerate(names)}
    sums = np.zeros((max(groups) + 1, len(names)))  # (R, M)
    counts = np.zeros_like(sums)
    for one, group in zip(measures, groups, strict=True):
        for name, values in one.items():
            sums[group, place[name]] += sum(values)
            counts[group, place[name]] += len(values)
    return Observations(names, sums, counts)


def row_weights(rows: int, resamples: int, seed: int) -> np.ndarray:
    """Return (resamples, rows) how often the bootstrap draws each row; the same for the same arguments."""
    return np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), size=resamples).astype(float)


def wilson(share: float, observations: float) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share of independent observations (Wilson 1927).

    (p + z^2/2n +- z sqrt(p (1 - p) / n + z^2/4n^2)) / (1 + z^2/n), n > 0.

    >>> [round(bound, 3) for bound in wilson(1.0, 20)]
    [0.839, 1.0]
    """
    spread = Z * math.sqrt(share * (1 - share) / observations + Z**2 / (4 * observations**2))
    middle, scale = share + Z**2 / (2 * observations), 1 + Z**2 / observations
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def share_intervals(observations: Observations, shares: Collection[str]) -> dict[str, tuple[float, float]]:
    """Return Wilson's interval of every observed share, and of balanced accuracy, the mean of two.

    Observations of one row are not independent: n is the effective number, p (1 - p) / var(p), with the variance
    between rows, R / (R - 1) sum_r (s_r - p c_r)^2 / C^2; at most the observations, and R rows where all are the same.
    """
    place = {name: column for column, name in enumerate(observations.names)}
    sums, counts = observations.sums, observations.counts  # (R, M)
    found = {}
    for name in [*(name for name in place if name in shares), BALANCED]:
        columns = [place[side] for side in (SIDES if name == BALANCED else (name,)) if side in place]
        totals = counts[:, columns].sum(axis=0)  # (1,), or (2,) of balanced accuracy
        if len(columns) < (2 if name == BALANCED else 1) or not totals.all():
            continue
        means = sums[:, columns].sum(axis=0) / totals
        share = float(means.mean())
        influence = ((sums[:, columns] - means * counts[:, columns]) / totals).mean(axis=1)  # (R,)
        rows = observations.rows_with(name)
        variance = rows / max(rows - 1, 1) * float((influence**2).sum())
        number = min(share * (1 - share) / variance, float(totals.sum())) if variance > 0 else float(rows)
        found[name] = wilson(share, number)
    return found


def percentiles(samples: np.ndarray, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the 95% interval of every metric from its resampled means (S, M), balanced accuracy added."""
    columns = dict(zip(names, samples.T, strict=True))
    sides = [columns.get(name) for name in SIDES]
    if sides[0] is not None and sides[1] is not None:
        columns[BALANCED] = (sides[0] + sides[1]) / 2
    intervals = {}
    for name, column in columns.items():
        seen = column[~np.isnan(column)]
        if len(seen):
            low, high = np.percentile(seen, [2.5, 97.5])
            intervals[name] = (float(low), float(high))
    return intervals


def bootstrap_intervals(
    observations: Observations, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Return the 95% percentile interval of every metric's mean, resampling rows with all their members."""
    weights = row_weights(len(observations.sums), resamples, seed)
    return percentiles(observations.means(weights), observations.names)


def intervals(
    observations: Observations, shares: Collection[str], resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Return the 95% interval of every metric: Wilson's of `shares`, the bootstrap's of all other means."""
    return bootstrap_intervals(observations, resamples, seed) | share_intervals(observations, shares)
