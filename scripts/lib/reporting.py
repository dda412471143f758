"""What a run shows and keeps: one line per update, metrics.jsonl, and the table of policies."""

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from lib.curves import COLUMNS
from lib.output import write_text
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

from turngrpo.trainer.evaluation.evaluate import Evaluation
from turngrpo.trainer.writing import going_on, writing

WIDTH = 150  # where the output is no terminal


def make_console() -> Console:
    """Return a console that leaves tables whole in a log file."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


class RunLog(TrainerCallback):
    """Writes every log to `path` as it comes, where there is one, and prints a line at every `every`-th update.

    A resumed run keeps the logs up to its checkpoint; those of the updates after it come again, and so does
    the sum at the end.
    """

    def __init__(self, path: Path | None, console: Console, columns: Mapping[str, str] = COLUMNS, every: int = 1):
        self.path, self.console, self.columns, self.every = path, console, columns, every
        self.history: list[dict[str, float]] = []
        self.started = self.last = (0, time.perf_counter())  # update and time: of the beginning, and of the last line

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = self.last = (state.global_step, time.perf_counter())
        if self.path is None or not state.is_world_process_zero or not self.path.exists():
            return
        whole = [line for line in self.path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]  # a kill
        kept = [log for log in map(json.loads, whole) if log["update"] <= state.global_step]
        self.history = [log for log in kept if "train_runtime" not in log]
        with writing(str(self.path), going_on(self.path.parent)):
            write_text(self.path, "".join(json.dumps(log) + "\n" for log in self.history))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        record = {"update": state.global_step, **logs}
        self.history.append(record)
        if self.path is not None:
            with writing(str(self.path), going_on(self.path.parent)), open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, default=float) + "\n")
        start = f"{time.strftime('%H:%M:%S')} update {state.global_step}/{state.max_steps}"
        if validated := self.numbers(logs, "eval_"):
            self.console.print("  ".join([start, "validation", *validated]), highlight=False)
        shown = self.numbers(logs)
        if shown and (state.global_step % self.every == 0 or state.global_step == state.max_steps):
            shown += self.pace(state.global_step, state.max_steps)
            self.console.print("  ".join([start, *shown]), highlight=False)

    def numbers(self, logs: Mapping[str, float], prefix: str = "") -> list[str]:
        """Return what a line says of a log."""
        shown = [f"{text} {logs[prefix + name]:.2f}" for name, text in self.columns.items() if prefix + name in logs]
        return shown + ([f"kl {logs[f'{prefix}kl']:.4f}"] if f"{prefix}kl" in logs else [])

    def pace(self, update: int, updates: int) -> list[str]:
        """Return the seconds per update since the last line, and the time left at the pace since the beginning.

        Evaluations and checkpoints in between count; nothing is said where no update lies in between.
        """
        now = time.perf_counter()
        (first, started), (before, last) = self.started, self.last
        if update <= before:
            return []
        self.last = update, now
        left = timedelta(seconds=round((now - started) / (update - first) * (updates - update)))
        return [f"{(now - last) / (update - before):.2f} s/update", f"{left} left"]


def policies_table(
    policies: Mapping[str, Evaluation],
    title: str,
    name: str = "",
    gains: Mapping[str, Mapping[str, Any]] | None = None,
) -> Table:
    """Return one line per policy: the main metrics with half the width of their 95% intervals.

    Below each stands, where `gains` has it, what the policy `name` is better by, paired row by row.
    """
    table = Table(title=title)
    table.add_column("policy", no_wrap=True)
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for label, evaluation in policies.items():
        table.add_row(label, *(cell(evaluation, metric) for metric in COLUMNS))
        if gains and label in gains:
            gained = [gain(gains[label].get(metric)) for metric in COLUMNS]
            table.add_row(f"  {name} minus {label}", *gained, style="dim")
    return table


def gain(found: Mapping[str, Any] | None) -> str:
    """Return a paired difference as "+0.120 ±0.03", or nothing where it was not observed."""
    if found is None:
        return ""
    low, high = found["interval"]
    return f"{found['difference']:+.3f} ±{(high - low) / 2:.2f}"


def cell(evaluation: Evaluation, name: str) -> str:
    """Return a metric as "0.812 ±0.020", or nothing where it was not observed."""
    if name not in evaluation.metrics:
        return ""
    value = f"{evaluation.metrics[name]:.3f}"
    if name not in evaluation.intervals:
        return value
    low, high = evaluation.intervals[name]
    return f"{value} ±{(high - low) / 2:.2f}"


def metrics_table(evaluations: Mapping[str, Evaluation], differences: Mapping[str, Any] | None = None) -> Table:
    """Return one line per metric with its 95% interval, a column per policy, and the paired difference if given."""
    table = Table("metric")
    for label in evaluations:
        table.add_column(label, justify="right")
    if differences is not None:
        table.add_column("difference", justify="right")
    for name in sorted({name for evaluation in evaluations.values() for name in evaluation.metrics}):
        cells = []
        for evaluation in evaluations.values():
            bounds = evaluation.intervals.get(name)
            value = f"{evaluation.metrics[name]:.4g}" if name in evaluation.metrics else ""
            cells.append(value if bounds is None else f"{value} [{bounds[0]:.4g}, {bounds[1]:.4g}]")
        if differences is not None:
            found = differences.get(name)
            bounds = found["interval"] if found else (0.0, 0.0)
            cells.append(f"{found['difference']:+.4g} [{bounds[0]:+.4g}, {bounds[1]:+.4g}]" if found else "")
        table.add_row(name, *cells)
    return table
