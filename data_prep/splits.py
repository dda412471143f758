"""Train and validation projects, chosen by a seeded hash of the project's name."""

import hashlib
from collections.abc import Iterable

from .corpus_format import shortened

DEFAULT_VALIDATION_FRACTION = 0.1


def check_fraction(validation_fraction: float) -> None:
    """Raise ValueError unless the fraction is a number strictly between 0 and 1."""
    is_number = isinstance(validation_fraction, int | float) and not isinstance(validation_fraction, bool)
    if not is_number or not 0 < validation_fraction < 1:
        raise ValueError(
            f"validation_fraction is {validation_fraction!r}: expected a number between 0 and 1, both excluded"
        )


def project_position(project: str, seed: int) -> float:
    """Where the project lies in [0, 1]: the same number on every machine, uniform over projects."""
    digest = hashlib.sha256(f"{seed}\n{project}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_by_project(
    projects: Iterable[str], validation_fraction: float = DEFAULT_VALIDATION_FRACTION, seed: int = 0
) -> set[str]:
    """The projects that go to validation: those whose position lies under the fraction.

    A project's side depends on its name, the seed and the fraction alone, so that more rows or more projects move
    none. When one side would be empty, the project nearest to the fraction goes there.
    Raises ValueError for fewer than two different projects and for a fraction outside (0, 1).
    """
    check_fraction(validation_fraction)
    positions = {project: project_position(project, seed) for project in projects}
    if len(positions) < 2:
        found = shortened(repr(next(iter(positions)))) if positions else "none"
        raise ValueError(f"found {len(positions)} project ({found}): a split by project needs at least two")
    validation = {project for project, position in positions.items() if position < validation_fraction}
    if not validation:
        return {min(positions, key=lambda project: (positions[project], project))}
    if len(validation) == len(positions):
        return validation - {max(positions, key=lambda project: (positions[project], project))}
    return validation
