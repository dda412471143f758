"""Progress of a rollout, and the time that optimizer steps take."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import TrainerCallback


@contextlib.contextmanager
def rollout_progress(label: str, rows: int, disabled: bool | None) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of trajectories that have ended in one rollout, on process 0; yields collect()'s `on_turn`."""
    disabled = bool(disabled) or not PartialState().is_main_process
    with tqdm(total=rows, desc=label, unit="trajectory", leave=False, disable=disabled) as bar:

        def on_turn(turn: int, active: int) -> None:
            bar.set_postfix_str(f"turn {turn + 1}, {active} reading")
            bar.update(rows - active - bar.n)

        yield on_turn


class OptimizerTimer(TrainerCallback):
    """Adds the seconds of every optimizer step to `time/optimisation`."""

    def __init__(self, add_cost: Callable[[str, float], None]):
        self.add_cost = add_cost

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.add_cost("time/optimisation", time.perf_counter() - self.started)
