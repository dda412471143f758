"""SIGTERM and Ctrl-C end a training after its update, with a checkpoint; a second one ends it at once."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A launcher passes on what the terminal has sent to its processes already: within this time it is the same request.
SAME_REQUEST = 1.0  # seconds


class Interruption(TrainerCallback):
    """Lets a trainer finish its update and write a whole checkpoint when a signal came to any of its processes.

    Add it to the trainer and train inside `listening`, on every process; `came` says afterwards whether it was so. The
    processes agree at the end of every update and evaluation.
    """

    def __init__(self) -> None:
        self.came = self.saved = False
        self._first: float | None = None  # when this process's signal came
        self._number = signal.SIGINT
        self._says = True
        self._start = 0

    @contextmanager
    def listening(self, says: bool = True) -> Iterator[None]:
        """Take the signals over, in the main thread alone, where Python handles them; `says`: tell so on stderr."""
        self.came, self.saved, self._first, self._says = False, False, None, says
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [
            number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
        ]  # as a shell's "&" does
        before = {number: signal.signal(number, self._handle) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._first is not None and not self.came:  # it came after the last update's end
            signal.raise_signal(self._number)

    def _handle(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._number = now, signal.Signals(number)
            if self._says:
                name = signal.Signals(number).name
                text = f"\n{name}: this update is finished and a checkpoint written; another one ends at once\n"
                os.write(2, text.encode())  # print is not for signal handlers
        elif now - self._first > SAME_REQUEST:
            raise KeyboardInterrupt

    def ended(self, update: int) -> str:
        """Say how the training ended."""
        return f"stopped after update {update}" + (": its checkpoint is written" if self.saved else "")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if any(gather_object([self._first is not None])):
            self.came = True
            args.save_only_model = False  # there is a state to go on from
            args.save_strategy = SaveStrategy.STEPS  # "best" would save after a better evaluation alone
            control.should_save = control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the checkpoint follow on the evaluation; before the first update there is nothing to keep."""
        if state.global_step > self._start:
            self.on_step_end(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the checkpoint stay the newest state: the end of a training would load the best, or keep that alone."""
        self.saved = self.came
        if self.came:
            args.load_best_model_at_end, args.save_total_limit = False, None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let nothing be logged, evaluated or saved as at the end of an epoch where that has not come."""
        if self.came and state.epoch != int(state.epoch):
            control.should_log = control.should_evaluate = control.should_save = False
