"""Every rollout on disk before it is trained on: one Parquet file per iteration, one row per turn."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from turngrpo.trainer.files import sha256, sync
from turngrpo.trainer.objective.iteration import ScoredRollout

FILE = "iteration_{:05d}{}.parquet"


def rollout_rows(
    rollout: ScoredRollout, reward_names: list[str], turn_reward_names: list[str], **columns: Any
) -> list[dict[str, Any]]:
    """Return one row per turn of this process.

    Ids, tokens, BEHAVIOR log-probabilities, rewards by function, and the advantage trained.
    """
    rewards, advantages = rollout.rewards.tolist(), rollout.advantages.tolist()
    by_function, by_turn = rollout.rewards_per_func.tolist(), rollout.turn_rewards_per_func.tolist()
    rows = []
    for index in rollout.own_turns:
        turn, owner = rollout.turns[index], int(rollout.trajectory_ids[index])
        place = (rollout.iteration, *rollout.places[index])
        rows.append(
            {
                "id": "-".join(map(str, place)),
                **dict(zip(("iteration", "group", "member", "turn"), place, strict=True)),
                "row_id": str(rollout.trajectories[owner].row.get("id", "")),
                "step": turn.step,
                "prompt_ids": turn.prompt_ids,
                "completion_ids": turn.completion_ids,
                "behavior_logprobs": turn.behavior_logprobs,
                "text": turn.text.encode("utf-8", "replace").decode(),
                "finish_reason": turn.finish_reason,
                "rewards": dict(zip(reward_names, by_function[owner], strict=True)),
                "turn_rewards": dict(zip(turn_reward_names, by_turn[index], strict=True)) or None,
                "reward": rewards[owner],
                "advantage": advantages[index],
                **columns,
            }
        )
    return rows


def write_rows(rows: list[dict[str, Any]], path: Path) -> Path:
    """Write rows as Parquet, atomically: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist(rows), partial, compression="zstd")
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)
    return path


class Ledger:
    """The rollouts of a run in order; `position` iterations are recorded, and none can be recorded twice.

    A fresh run moves a ledger that it finds aside, and so does a resume with whatever a killed run wrote after the
    checkpoint: nothing is deleted, and nothing of another history is counted. Every process writes files of its own;
    process 0 moves aside for all, before any of them records. `files` are the SHA-256 of this process's files by name.
    Without a folder nothing is written, and counted alike.
    """

    def __init__(
        self, folder: str | Path | None, position: int = 0, process: int = 0, files: Mapping[str, str] | None = None
    ):
        self.files = dict(files or {})
        self.folder, self.position, self.process = None if folder is None else Path(folder), position, process
        if process or self.folder is None:
            return
        later = [path for path in sorted(self.folder.glob("iteration_*.parquet")) if _iteration(path) >= position]
        if later:
            taken = len(list(self.folder.glob("abandoned_*")))
            aside = self.folder / f"abandoned_{taken}_from_{position:05d}"
            aside.mkdir()
            for path in later:
                os.replace(path, aside / path.name)

    def record(self, iteration: int, rows: list[dict[str, Any]]) -> None:
        """Write an iteration's rows before its first update; ValueError for one that is recorded already."""
        if iteration != self.position:
            held = f"{self.folder or 'the run'} holds {self.position} iterations, so that {self.position} is next"
            raise ValueError(f"iteration {iteration} cannot be recorded: {held}; a rollout is optimised once")
        if self.folder is not None:
            path = write_rows(rows, self.folder / FILE.format(iteration, process_suffix(self.process)))
            self.files[path.name] = sha256(path)
        self.position += 1


def ledger_faults(folder: Path, files: Mapping[str, str], position: int, process: int = 0) -> list[str]:
    """Return a line for every file of a process's first `position` iterations that is not as it was recorded."""
    own = [path for path in folder.glob("iteration_*.parquet") if _process(path) == process]
    earlier = {path.name for path in own if _iteration(path) < position}
    lines = [f"{folder / name} is missing" for name in files if name not in earlier]
    lines += [f"{folder / name} is of another run" for name in sorted(earlier - files.keys())]
    changed = [name for name in files if name in earlier and sha256(folder / name) != files[name]]
    return lines + [f"{folder / name} was changed since it was recorded" for name in changed]


def save_nonfinite(rows: list[dict[str, Any]], output_dir: str | Path, iteration: int, process: int = 0) -> Path:
    """Write a rollout whose numbers are not finite where an error message can point to it."""
    return write_rows(
        rows, Path(output_dir) / "nonfinite" / f"rollout_{iteration:05d}{process_suffix(process)}.parquet"
    )


def process_suffix(process: int) -> str:
    """Return what a process adds to its files' names: nothing for process 0."""
    return f"_process{process}" if process else ""


def _iteration(path: Path) -> int:
    return int(path.stem.split("_")[1])


def _process(path: Path) -> int:
    return int(path.stem.partition("_process")[2] or 0)
