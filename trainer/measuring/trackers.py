"""A few read documents of every evaluation, for the trackers of `report_to`."""

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from turngrpo.trainer.objective.iteration import ScoredRollout
from turngrpo.trainer.reading.gates import GateDecision
from turngrpo.trainer.reading.rollout import Trajectory, Turn
from turngrpo.trainer.showing import visible

TABLE = "trajectories"  # as TRL's table of turns is "completions"


def transcript(trajectory: Trajectory) -> str:
    """Return a line per turn: what was read, what the gates said and the memory after it, or the turn's text."""
    return "\n".join(_line(number, turn) for number, turn in enumerate(trajectory.turns, 1))


def _line(number: int, turn: Turn) -> str:
    place = f"turn {number}" if turn.step is None else f"chunk {turn.step}"
    if isinstance(turn.evidence, bool):
        place += " (evidence)" if turn.evidence else " (no evidence)"
    if turn.fault:
        said = f"did not parse, {turn.fault}: {turn.text}"
    elif isinstance(turn.decision, GateDecision):
        written = "written" if turn.decision.check else "kept"
        said = f"{written}, {'end' if turn.decision.exit else 'continue'}; memory: {turn.memory}"
    else:
        said = turn.text
    return visible(f"{place}: {' '.join(said.split())}")


def trajectory_rows(rollouts: Sequence[ScoredRollout], count: int, update: int, split: str) -> list[dict[str, Any]]:
    """Return the first reading of each of this process's first `count` rows, the same at every evaluation."""
    rows: list[dict[str, Any]] = []
    for rollout in rollouts:
        for owner in rollout.own:
            trajectory: Any = rollout.trajectories[owner]
            if trajectory.member == 0 and len(rows) < count:
                rows.append(
                    {
                        "update": update,
                        "split": split,
                        "row": str(trajectory.row.get("id", trajectory.group)),
                        "question": visible(str(trajectory.row.get("question", ""))),
                        "gold": visible("; ".join(map(str, trajectory.row.get("answers") or []))),
                        "answer": visible(trajectory.answer or ""),
                        "reward": float(rollout.rewards[owner]),
                        "exit": trajectory.exit_step,
                        "last_evidence": trajectory.last_evidence,
                        "transcript": transcript(trajectory),
                    }
                )
    return rows


def log_trajectories(
    rows: Sequence[dict[str, Any]], report_to: Sequence[str], callbacks: Sequence[TrainerCallback]
) -> None:
    """Give rows to the trackers that run: a table to wandb and trackio, a text per row to tensorboard."""
    import pandas

    for backend in _backends(report_to):
        backend.log({TABLE: backend.Table(dataframe=pandas.DataFrame(rows))})
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            for row in rows:
                said = "\n".join(f"{name}: {value}" for name, value in row.items() if name != "transcript")
                text = "\n".join(f"    {line}" for line in f"{said}\n{row['transcript']}".splitlines())  # no markdown
                callback.tb_writer.add_text(f"{TABLE}/{row['split']}/{row['row']}", text, row["update"])


def _backends(report_to: Sequence[str]) -> Iterator[Any]:
    """Yield the trackers that take tables as TRL gives them, where a run is open (trl 1.16, GRPOTrainer.log)."""
    if "wandb" in report_to:
        import wandb

        if wandb.run is not None:
            yield wandb
    if "trackio" in report_to:
        import trackio

        if trackio.context_vars.current_run.get() is not None:
            yield trackio
