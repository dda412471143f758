"""Every rollout on disk before it is trained on, and what each update made of it: Parquet, one row per turn."""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from turngrpo.trainer.files import sha256, sync
from turngrpo.trainer.reading.gates import GateDecision
from turngrpo.trainer.runs.columns import PLACE, ROLLOUT, TOKENS, UPDATE, Column, as_table

if TYPE_CHECKING:
    from turngrpo.trainer.objective.iteration import ScoredRollout

FILE, UPDATE_FILE = "iteration_{:05d}{}.parquet", "update_{:05d}{}.parquet"
# Small files of many columns: dictionaries, statistics and Arrow's own schema were half of their bytes (LOG.md).
ENCODING: dict[str, Any] = {"compression": "zstd", "compression_level": 9, "use_dictionary": False}
ENCODING |= {"write_statistics": False, "store_schema": False}
UPDATES = "updates"  # folder of the updates' files, inside the rollouts'


def rollout_rows(
    rollout: "ScoredRollout", reward_names: Sequence[str], turn_reward_names: Sequence[str], **columns: Any
) -> list[dict[str, Any]]:
    """Return one row per turn of this process with the values of `columns.ROLLOUT`; `columns` are those of all."""
    rows = []
    for index in rollout.own_turns:
        turn, owner = rollout.turns[index], int(rollout.trajectory_ids[index])
        trajectory: Any = rollout.trajectories[owner]
        decision = turn.decision if isinstance(turn.decision, GateDecision) else None
        by_function, by_turn = rollout.rewards_per_func[owner], rollout.turn_rewards_per_func[index]
        rows.append(
            {
                **place_columns(rollout, index),
                "row_id": str(trajectory.row.get("id", "")),
                "project": _text(trajectory.row.get("project")),
                "step": _whole(turn.step),
                "prompt_ids": turn.prompt_ids,
                "prompt_tokens": turn.prompt_tokens,
                "completion_ids": turn.completion_ids,
                "behavior_logprobs": turn.behavior_logprobs,
                "text": _text(turn.text),
                "finish_reason": turn.finish_reason,
                "evidence": turn.evidence if isinstance(turn.evidence, bool) else None,
                "check": decision and decision.check,
                "candidate": decision and _text(decision.candidate),
                "exit": decision and decision.exit,
                "fault": _text(turn.fault),
                "memory": _text(turn.memory),
                "memory_cut": bool(turn.memory_cut),
                "turn_rewards": _by_function(turn_reward_names, by_turn),
                "turn_reward": _number(rollout.turn_rewards[index]),
                "turn_advantage": float(rollout.turn_advantages[index]),
                "trajectory_advantage": float(rollout.trajectory_advantages[owner]),
                "advantage": float(rollout.advantages[index]),
                "last_evidence": _whole(trajectory.last_evidence),
                "exit_step": _whole(trajectory.exit_step),
                "parsed": bool(trajectory.parsed),
                "answer": _text(trajectory.answer),
                "gold": _texts(trajectory.row.get("answers")),
                "rewards": _by_function(reward_names, by_function),
                "reward": _number(rollout.rewards[owner]),
                "strict_zero": bool(rollout.strict_zero[owner]),
                **columns,
            }
        )
    return rows


def place_columns(rollout: "ScoredRollout", index: int) -> dict[str, Any]:
    """Return the columns that say which turn of a run it is."""
    place = (rollout.iteration, *rollout.places[index])
    names = [column.name for column in PLACE[1:]]
    return {"id": "-".join(map(str, place)), **dict(zip(names, place, strict=True))}


def _text(value: Any) -> str | None:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def _texts(values: Any) -> list[str | None] | None:
    return [_text(value) for value in values] if isinstance(values, list | tuple) else None


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, Integral) else None


def _by_function(names: Sequence[str], values: Any) -> dict[str, float | None] | None:
    return {name: _number(value) for name, value in zip(names, values.tolist(), strict=True)} or None


def _number(value: Any) -> float | None:
    return None if math.isnan(value) else float(value)


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path, columns: Sequence[Column] = ROLLOUT) -> Path:
    """Write rows as Parquet, atomically: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    table = as_table(rows, columns)
    try:
        with pq.ParquetWriter(partial, table.schema, **ENCODING) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata(table.schema.metadata)  # not kept without Arrow's schema
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)
    return path


class Ledger:
    """The rollouts of a run in order; `position` iterations are recorded, and none can be recorded twice.

    A fresh run moves a ledger that it finds aside, and so does a resume with whatever a killed run wrote after the
    checkpoint of update `updates`: nothing is deleted, and nothing of another history is counted. Every process writes
    files of its own; process 0 moves aside for all, before any of them records. `files` are the SHA-256 of this
    process's files by name. Without a folder nothing is written, and counted alike.
    """

    def __init__(
        self,
        folder: str | Path | None,
        position: int = 0,
        process: int = 0,
        files: Mapping[str, str] | None = None,
        updates: int = 0,
    ):
        self.files = dict(files or {})
        self.folder, self.position, self.process = None if folder is None else Path(folder), position, process
        if process or self.folder is None:
            return
        _move_aside(self.folder, "iteration_*.parquet", position)
        _move_aside(self.folder / UPDATES, "update_*.parquet", updates + 1)

    def record(self, iteration: int, rows: list[dict[str, Any]]) -> None:
        """Write an iteration's rows before its first update; ValueError for one that is recorded already."""
        if iteration != self.position:
            held = f"{self.folder or 'the run'} holds {self.position} iterations, so that {self.position} is next"
            raise ValueError(f"iteration {iteration} cannot be recorded: {held}; a rollout is optimised once")
        if self.folder is not None:
            self._write(rows, self.folder / FILE.format(iteration, process_suffix(self.process)), ROLLOUT)
        self.position += 1

    def record_update(self, update: int, rows: list[dict[str, Any]]) -> None:
        """Write what an update made of the turns that it trained."""
        if self.folder is not None and rows:
            name = UPDATE_FILE.format(update, process_suffix(self.process))
            self._write(rows, self.folder / UPDATES / name, (*UPDATE, *TOKENS))

    def _write(self, rows: list[dict[str, Any]], path: Path, columns: Sequence[Column]) -> None:
        self.files[path.name] = sha256(write_rows(rows, path, columns))


def _move_aside(folder: Path, pattern: str, first: int) -> None:
    """Move the files from number `first` on into a folder abandoned_*."""
    later = [path for path in sorted(folder.glob(pattern)) if _place(path) >= first]
    if later:
        aside = folder / f"abandoned_{len(list(folder.glob('abandoned_*')))}_from_{first:05d}"
        aside.mkdir()
        for path in later:
            os.replace(path, aside / path.name)


def ledger_faults(
    folder: Path, files: Mapping[str, str], position: int, process: int = 0, updates: int = 0
) -> list[str]:
    """Return a line for every file of a process's first iterations and updates that is not as it was recorded."""
    found = {
        path.name: path
        for place, pattern, limit in ((folder, "iteration_*", position), (folder / UPDATES, "update_*", updates + 1))
        for path in place.glob(f"{pattern}.parquet")
        if _process(path) == process and _place(path) < limit
    }
    lines = [f"{folder / name} is missing" for name in files if name not in found]
    lines += [f"{found[name]} is of another run" for name in sorted(found.keys() - files.keys())]
    changed = [name for name in files if name in found and sha256(found[name]) != files[name]]
    return lines + [f"{found[name]} was changed since it was recorded" for name in changed]


def read(run: str | Path, columns: Collection[str] | None = None, ids: Collection[str] | None = None) -> pa.Table:
    """Return a run's ledger as one table: every turn of every process, once for each update that trained it.

    Columns of `columns.ROLLOUT`, then those of `columns.UPDATE` (and `columns.TOKENS`), null for a turn that no update
    trained yet. `run` is the output folder; what a resume set aside is left out. `columns` and `ids` of turns leave
    out all others; where no column is of an update, every turn comes once. Raises FileNotFoundError where there is
    no ledger, ValueError for a file that is none.
    """
    folder = Path(run, "rollouts")
    turns = _read_all(folder, "iteration_*.parquet", columns, ids)
    if turns is None:
        raise FileNotFoundError(
            f"{folder} holds no iteration_*.parquet: expected the output folder of a run with a ledger"
        )
    of_updates = {column.name for column in (*UPDATE, *TOKENS)} - {column.name for column in PLACE}
    if columns is not None and of_updates.isdisjoint(columns):
        return turns
    updates = _read_all(folder / UPDATES, "update_*.parquet", columns, ids)
    if updates is None:
        return turns
    own = [name for name in updates.column_names if name not in turns.column_names]
    trained: dict[str, list[int]] = {}
    for place, name in enumerate(updates["id"].to_pylist()):
        trained.setdefault(name, []).append(place)
    pairs = [(i, j) for i, name in enumerate(turns["id"].to_pylist()) for j in trained.get(name, [None])]
    joined = turns.take(pa.array([i for i, _ in pairs], pa.int64()))
    taken = updates.select(own).take(pa.array([j for _, j in pairs], pa.int64()))
    for name in own:
        joined = joined.append_column(name, taken[name])
    return joined


def read_file(path: Path, columns: Collection[str] | None = None, ids: Collection[str] | None = None) -> pa.Table:
    """Return a file of turns, of these columns (those it has, and id) and turns alone; ValueError where it is none."""
    try:
        with pq.ParquetFile(path) as file:
            kept = None if columns is None else [name for name in file.schema_arrow.names if name in {*columns, "id"}]
            table = file.read(columns=kept)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no file of a ledger: expected Parquet ({error})") from error
    if "id" not in table.column_names:
        raise ValueError(f"{path} is no file of a ledger: it has no column id, only {', '.join(table.column_names)}")
    return table if ids is None else table.filter(pc.is_in(table["id"], pa.array(list(ids), pa.string())))


def _read_all(
    folder: Path, pattern: str, columns: Collection[str] | None, ids: Collection[str] | None
) -> pa.Table | None:
    paths = sorted(folder.glob(pattern), key=lambda path: (_place(path), _process(path)))
    tables = [read_file(path, columns, ids) for path in paths]
    return pa.concat_tables(tables, promote_options="permissive") if tables else None


def save_nonfinite(rows: list[dict[str, Any]], output_dir: str | Path, iteration: int, process: int = 0) -> Path:
    """Write a rollout whose numbers are not finite where an error message can point to it."""
    return write_rows(
        rows, Path(output_dir) / "nonfinite" / f"rollout_{iteration:05d}{process_suffix(process)}.parquet"
    )


def process_suffix(process: int) -> str:
    """Return what a process adds to its files' names: nothing for process 0."""
    return f"_process{process}" if process else ""


def _place(path: Path) -> int:
    return int(path.stem.split("_")[1])


def _process(path: Path) -> int:
    return int(path.stem.partition("_process")[2] or 0)
