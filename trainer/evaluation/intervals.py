"""Intervals of means over rows that were read several times: the bootstrap draws rows, with all their readings."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000


@dataclass(frozen=True)
class Observations:
    """Sums and counts (R rows, M metrics) of every observation of a metric, so that rows can be resampled."""

    names: list[str]
    sums: np.ndarray  # (R, M)
    counts: np.ndarray  # (R, M)

    def means(self, weights: np.ndarray) -> np.ndarray:
        """Return (S, M) means under row weights (S, R); NaN where nothing was observed."""
        counts = weights @ self.counts
        with np.errstate(invalid="ignore"):
            values = np.where(counts > 0, weights @ self.sums / np.maximum(counts, 1e-12), np.nan)
        return values


def row_weights(rows: int, resamples: int, seed: int) -> np.ndarray:
    """Return (resamples, rows) how often the bootstrap draws each row; the same for the same arguments."""
    return np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), size=resamples).astype(float)


def percentiles(samples: np.ndarray, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the 95% interval of every metric from its resampled means (S, M), balanced accuracy added."""
    columns = dict(zip(names, samples.T, strict=True))
    sides = [columns.get(f"update_accuracy/{side}") for side in ("evidence", "evidence_free")]
    if sides[0] is not None and sides[1] is not None:
        columns["update_accuracy/balanced"] = (sides[0] + sides[1]) / 2
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
