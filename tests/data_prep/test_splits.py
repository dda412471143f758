"""Projects on either side of the split.

Positions with seed 0, from `printf '0\\nalpha' | sha256sum` (first two hex digits / 256): alpha 59 .351, beta 38 .221,
gamma 27 .153, delta 17 .091, epsilon 3e .244, zeta e6 .901, eta b9 .725.
"""

import pytest

from turngrpo.data_prep.splits import split_by_project

ALL = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta"]


def test_projects_under_the_fraction_go_to_validation():
    assert split_by_project(ALL, 0.2, 0) == {"gamma", "delta"}
    assert split_by_project(ALL, 0.1, 0) == {"delta"}
    assert split_by_project(reversed(ALL), 0.23, 0) == {"beta", "gamma", "delta"}  # order does not matter


def test_the_seed_changes_the_positions():
    # seed 7: alpha 51 .318, beta 4e .306, gamma f4 .956, delta fd .992; with seed 0 it would be beta, gamma, delta
    assert split_by_project(["alpha", "beta", "gamma", "delta"], 0.31, 7) == {"beta"}


def test_adding_rows_or_projects_moves_none():
    assert split_by_project(ALL[:4], 0.2, 0) == {"gamma", "delta"}
    assert split_by_project([*ALL[:4], *ALL[:4], "alpha"], 0.2, 0) == {"gamma", "delta"}
    more = [f"project-{number}" for number in range(200)]
    assert split_by_project([*ALL, *more], 0.2, 0) & set(ALL) == {"gamma", "delta"}
    assert split_by_project([*ALL, *more], 0.2, 0) - set(ALL) < set(more)


def test_an_empty_side_receives_the_project_nearest_to_the_fraction():
    assert split_by_project(["alpha", "beta", "zeta"], 0.1, 0) == {"beta"}  # none lies under 0.1; not alpha, not zeta
    assert split_by_project(["beta", "gamma", "delta"], 0.5, 0) == {"gamma", "delta"}  # all do: beta .221 is nearest


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, True, float("nan"), "0.1"])
def test_a_fraction_outside_the_open_interval_is_refused(fraction):
    with pytest.raises(ValueError, match="validation_fraction is .*expected a number between 0 and 1"):
        split_by_project(ALL, fraction, 0)


def test_a_single_project_is_refused_by_name():
    with pytest.raises(ValueError, match="found 1 project .'alpha'.*at least two"):
        split_by_project(["alpha", "alpha"], 0.1, 0)
    with pytest.raises(ValueError, match="found 0 project"):
        split_by_project([], 0.1, 0)
