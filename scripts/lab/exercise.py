"""The exercise: what was fixed before it, whether its branches saw the same problems, and groups made by hand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lib.output import write_json

from turngrpo.trainer.files import digests, sha256
from turngrpo.trainer.objective.advantages import trajectory_advantages
from turngrpo.trainer.objective.losses import clipped_surrogate, token_weights
from turngrpo.trainer.runs import ledger

from .config import LabConfig

MAIN, CHECKS = "main.json", "exercise.json"
SEEN = "_seen"  # ends the name of a branch's ledger among the inputs


def protect(folder: Path, config: LabConfig, **artefacts: Path) -> None:
    """Write down what the main experiment left (models, responses, scores) before the exercise begins."""
    write_json(folder / MAIN, fingerprints(artefacts))


def fingerprints(artefacts: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 of every file of some artefacts, by the artefact's name and the file's."""
    found: dict[str, str] = {}
    for name, path in artefacts.items():
        files = digests(path) if path.is_dir() else {path.name: sha256(path)}
        found |= {f"{name}/{file}": digest for file, digest in files.items()}
    return found


def check_exercise(folder: Path, config: LabConfig, *, main: Path, sizes: dict[str, int], **inputs: Path) -> None:
    """Check that the main artefacts are as before, count what every branch was given, and make groups by hand.

    `sizes` is the group size of every branch by name, the main one first; the inputs are their ledgers and the main
    artefacts. Raises ValueError where a branch saw other problems than the main one or spent another budget.
    """
    ledgers = {name: inputs.pop(f"{name}{SEEN}") for name in sizes}
    before, now = json.loads(main.read_text(encoding="utf-8")), fingerprints(inputs)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        raise ValueError(f"artefacts of the main experiment changed since the exercise began: {', '.join(changed)}")
    turns = {name: ledger.read(path.parent).to_pylist() for name, path in ledgers.items()}
    (chief, *others) = sizes
    lengths = dict.fromkeys(others, config.exercise_iterations) | {chief: config.grpo_iterations}
    budgets = {name: budget(turns[name], config, size, lengths[name]) for name, size in sizes.items()}
    iterations = min(lengths.values())
    asked = {name: problems(turns[name], iterations) for name in sizes}
    if different := [name for name in others if asked[name] != asked[chief]]:
        raise ValueError(f"{', '.join(different)} saw other problems than {chief} in the first {iterations} rollouts")
    made = {name: constructed(turns[chief], rewards) for name, rewards in patterns(config.generations).items()}
    result = {"protected": len(before), "budgets": budgets, "same_problems": len(asked[chief]), "constructed": made}
    write_json(folder / CHECKS, result)


def problems(turns: list[dict[str, Any]], iterations: int) -> list[str]:
    """Return the ids of the problems that were asked in the first iterations, in order."""
    asked = {(turn["iteration"], turn["group"]): turn["row_id"] for turn in turns if turn["iteration"] < iterations}
    return [asked[place] for place in sorted(asked)]


def budget(turns: list[dict[str, Any]], config: LabConfig, size: int, iterations: int) -> dict[str, int]:
    """Return how many problems, responses and updates a branch had; ValueError where the config says otherwise."""
    found = {
        "problems": len({(turn["iteration"], turn["group"]) for turn in turns}),
        "responses": len({turn["id"] for turn in turns}),
        "updates": len({turn["update"] for turn in turns}),
    }
    asked = iterations * config.prompts
    expected = {"problems": asked, "responses": asked * size, "updates": iterations * config.updates_per_rollout}
    if found != expected:
        raise ValueError(f"the branch of {size} responses had {found}, expected {expected}")
    return found


def patterns(size: int) -> dict[str, list[float]]:
    """Return the rewards of groups made by hand: two constant ones, and one with a single right response."""
    return {"all wrong": [0.0] * size, "all right": [1.0] * size, "one right": [1.0] + [0.0] * (size - 1)}


def constructed(turns: list[dict[str, Any]], rewards: list[float]) -> dict[str, Any]:
    """Return what a first update would make of the main branch's first group, were these its rewards.

    Advantages as trained (over the standard deviation of the group), the surrogate, and its gradient with respect to
    the log-probability of every token, which is minus weight times advantage where the ratio is 1.
    """
    group = [turn for turn in turns if (turn["iteration"], turn["group"], turn["update"]) == (0, 0, 1)]
    group.sort(key=lambda turn: turn["member"])
    longest = max(len(turn["behavior_logprobs"]) for turn in group)
    recorded = torch.zeros(len(group), longest, dtype=torch.float64)
    mask = torch.zeros(len(group), longest, dtype=torch.bool)
    for row, turn in enumerate(group):
        recorded[row, : len(turn["behavior_logprobs"])] = torch.tensor(turn["behavior_logprobs"], dtype=torch.float64)
        mask[row, : len(turn["behavior_logprobs"])] = True
    one_group, members = torch.zeros(len(group), dtype=torch.long), torch.arange(len(group))
    advantages = trajectory_advantages(torch.tensor(rewards, dtype=torch.float64), one_group, "group")
    current = recorded.clone().requires_grad_()
    loss, _ = clipped_surrogate(current, recorded, advantages, mask)
    surrogate = (token_weights(mask, members, one_group, "grpo", torch.float64) * loss).sum()
    (gradient,) = torch.autograd.grad(surrogate, current)
    return {
        "rewards": rewards,
        "advantages": advantages.tolist(),
        "surrogate": float(surrogate.detach()),
        "token_gradients": [row[own].tolist() for row, own in zip(gradient, mask, strict=True)],
    }
