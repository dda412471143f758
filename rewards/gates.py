"""Rewards of the two gates and of the format (GRU-Mem, arXiv 2602.10560): plain functions of recorded trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turngrpo.data_prep.corpus_format import is_integer

if TYPE_CHECKING:  # rewards run without torch and without the trainer
    from turngrpo.trainer.reading.rollout import Trajectory

EARLY_EXIT, LATE_EXIT = -0.75, -0.5  # GRU-Mem: leaving before the last evidence loses more than reading on


def update_reward(
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[Any],
    trajectories: list[Trajectory],
    **columns: Any,
) -> list[list[float | None]]:
    """Turn reward: +1 where check agrees with the chunk's evidence label, -1 where it does not or nothing parsed.

    None for a turn that is no chunk turn (the answer) and for a chunk without a label. Raises ValueError for a label
    that is neither True nor False: nothing would agree with it.

    >>> from turngrpo.trainer.reading.gates import GateDecision
    >>> from turngrpo.trainer.reading.rollout import Trajectory, Turn
    >>> wrote = GateDecision(check=True, candidate="x", exit=False)
    >>> turns = [Turn(1, [], [], [], "eos", "", wrote, evidence=True), Turn(2, [], [], [], "eos", "", wrote, False)]
    >>> turns += [Turn(3, [], [], [], "length", "", None, True), Turn(None, [], [], [], "eos", "")]
    >>> update_reward([], [], [], [Trajectory({}, 0, 0, turns)])
    [[1.0, -1.0, -1.0, None]]
    """
    rewards: list[list[float | None]] = []
    for trajectory in trajectories:
        row: list[float | None] = []
        for turn in trajectory.turns:
            if turn.step is None or turn.evidence is None:
                row.append(None)
            elif turn.evidence not in (True, False):
                raise ValueError(
                    f"the evidence label of step {turn.step} is {turn.evidence!r}: expected True, False or None (no "
                    "label); give the chunks of the row labels of that type"
                )
            else:
                row.append(1.0 if turn.decision is not None and turn.decision.check == turn.evidence else -1.0)
        rewards.append(row)
    return rewards


def exit_reward(
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[Any],
    trajectories: list[Trajectory],
    **columns: Any,
) -> list[float | None]:
    """Trajectory reward: 0 where the last chunk read is the last evidence T*, -0.75 before it, -0.5 after it.

    Where no exit step was recorded the last chunk turn counts; None where T* is not known or no chunk was read. Raises
    ValueError for a step that is no integer: NaN would pass for late.

    >>> from turngrpo.trainer.reading.rollout import Trajectory
    >>> exit_reward([], [], [], [Trajectory({}, 0, 0, exit_step=step, last_evidence=3) for step in (3, 2, 4)])
    [0.0, -0.75, -0.5]
    """
    rewards: list[float | None] = []
    for trajectory in trajectories:
        last_read = trajectory.exit_step
        if last_read is None:
            last_read = next((turn.step for turn in reversed(trajectory.turns) if turn.step is not None), None)
        if last_read is None or trajectory.last_evidence is None:
            rewards.append(None)
        elif not (is_integer(last_read) and is_integer(trajectory.last_evidence)):
            raise ValueError(
                f"exit_step is {last_read!r} and last_evidence {trajectory.last_evidence!r}: expected integers, the "
                "steps from 1, or None; the workflow's state sets them"
            )
        elif last_read == trajectory.last_evidence:
            rewards.append(0.0)
        else:
            rewards.append(EARLY_EXIT if last_read < trajectory.last_evidence else LATE_EXIT)
    return rewards


def format_reward(
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[Any],
    trajectories: list[Trajectory],
    **columns: Any,
) -> list[float]:
    """Trajectory reward: 1 where every turn parsed, else 0.

    >>> from turngrpo.trainer.reading.rollout import Trajectory
    >>> format_reward([], [], [], [Trajectory({}, 0, 0), Trajectory({}, 0, 1, parsed=False)])
    [1.0, 0.0]
    """
    return [1.0 if trajectory.parsed else 0.0 for trajectory in trajectories]
