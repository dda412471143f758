"""Convergence of a validation reward: the slope of its last five evaluations and what may be said of it."""

import pytest

from turngrpo.trainer.measuring.convergence import convergence, convergence_of

UPDATES = [10, 20, 30, 40, 50]


def test_slope_and_interval_by_hand():
    """Around the means 30 and 0.52: S = 1000, sum (u - 30)(r - 0.52) = 20 * 0.08 + 10 * 0.02 - 10 * 0.02 + 20 * 0.02.

    Slope 2.0 / 1000 = 0.002. Residuals -0.04 + 0.08 - 0.04 ... : fitted 0.48, 0.50, 0.52, 0.54, 0.56, residuals
    -0.04, 0.04, 0.02, 0, -0.02, squares 0.004; error 3.182446 sqrt(0.004 / 3 / 1000) = 0.0036748.
    """
    found = convergence(
        [0, *UPDATES], [9.0, 0.44, 0.54, 0.54, 0.54, 0.54], 0.1
    )  # the one before the last five is not read
    assert found.evaluations == 5
    assert found.slope == pytest.approx(0.002)
    assert found.interval == pytest.approx((0.002 - 0.0036748, 0.002 + 0.0036748), abs=1e-7)


@pytest.mark.parametrize(
    ("rewards", "half_width", "verdict"),
    [
        ([0.5, 0.6, 0.7, 0.8], 0.1, "too few evaluations"),
        ([0.5, 0.6, 0.7, 0.8, 0.9], 0.1, "rising"),
        ([0.9, 0.8, 0.7, 0.6, 0.5], 0.1, "falling"),
        ([0.1] * 5, 0.0, "converged"),  # the mean of five 0.1 is not 0.1, and yet the slope is 0
        # Slope 0, residuals 0.02, -0.02, 0, -0.02, 0.02: error 3.182446 sqrt(0.0016 / 3 / 1000) = 0.0023241 per
        # update, which is 0.09297 over 40 updates.
        ([0.52, 0.48, 0.5, 0.48, 0.52], 0.0930, "converged"),
        ([0.52, 0.48, 0.5, 0.48, 0.52], 0.0929, "cannot tell"),
        ([0.52, 0.48, 0.5, 0.48, 0.52], None, "cannot tell"),
        ([0.9, 0.1, 0.5, 0.1, 0.9], 0.1, "cannot tell"),  # contains 0 too, and says nothing
    ],
)
def test_verdicts(rewards, half_width, verdict):
    assert convergence(UPDATES[: len(rewards)], rewards, half_width).verdict == verdict


def test_of_a_log_the_last_evaluation_of_an_update_counts_with_its_interval():
    log = [{"step": step, "eval_reward": 0.5, "eval_interval/reward/low": 0.4, "eval_interval/reward/high": 0.6}
           for step in UPDATES]  # fmt: skip
    log.insert(0, {"step": 10, "eval_reward": 7.0})
    log.append({"step": 50, "reward": 3.0})
    found = convergence_of(log)
    assert (found.verdict, found.slope, found.evaluations) == ("converged", 0.0, 5)
    assert found.resolution == pytest.approx(0.1 / 40)  # per update, over the 40 between the first and the last
    assert convergence_of([]).verdict == "too few evaluations"
