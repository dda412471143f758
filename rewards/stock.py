"""Reward of the stock laboratory: the strict verifier applied to the only turn of a trajectory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from turngrpo.data_prep import stock_arithmetic

if TYPE_CHECKING:  # rewards run without torch and without the trainer
    from turngrpo.trainer.reading.rollout import Trajectory, Turn

_UNKNOWN_TOKEN = re.compile(r"<\|unknown_token:\d+\|>")  # as a rollout writes an id that the tokenizer does not know


def score_turn(turn: Turn, problem: Mapping[str, Any]) -> dict[str, Any]:
    """Verify a recorded turn: what `stock_arithmetic.score` says of its text, unknown token ids included."""
    known = _UNKNOWN_TOKEN.search(turn.text) is None
    return stock_arithmetic.score(turn.text, turn.finish_reason, problem, token_ids_valid=known)


def stock_reward(
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[Any],
    trajectories: list[Trajectory],
    problem: list[Mapping[str, Any]],
    **columns: Any,
) -> list[float]:
    """Trajectory reward: 1 where the last turn is a valid JSON answer with the final stock of its problem, else 0.

    >>> from turngrpo.trainer.reading.rollout import Trajectory, Turn
    >>> replies = [('{"final_stock": 37}', "eos"), ('{"final_stock": 36}', "eos"), ('{"final_stock": 37}', "length")]
    >>> turns = [Turn(None, [], [], [], finish_reason, text) for text, finish_reason in replies]
    >>> trajectories = [Trajectory({}, 0, member, [turn]) for member, turn in enumerate(turns)]
    >>> problem = {"initial": 20, "deliveries": [15, 5], "withdrawals": [2, 1]}
    >>> stock_reward([], [], [], trajectories, problem=[problem] * 3)
    [1.0, 0.0, 0.0]
    """
    pairs = zip(trajectories, problem, strict=True)
    return [score_turn(trajectory.turns[-1], structure)["reward"] for trajectory, structure in pairs]
