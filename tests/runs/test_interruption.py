"""A signal ends a run after its update with a checkpoint, from which it goes on to the same last bit."""

import os
import signal
import threading

import pytest
from datasets import Dataset
from test_resume import make
from transformers import TrainerCallback

from turngrpo.trainer.runs import interruption
from turngrpo.trainer.runs.compare import compare_states
from turngrpo.trainer.runs.interruption import Interruption

SIZES = {"max_steps": 4, "save_steps": 4}


class SignalAt(TrainerCallback):
    """Sends SIGTERM to its own process in the update after `step`, or in the evaluation after it."""

    def __init__(self, step, event="on_step_begin"):
        self.step, self.sent = step, False
        setattr(self, event, self.send)

    def send(self, args, state, control, **kwargs):
        if state.global_step == self.step and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


def interrupted(folder, sender, **options):
    came = Interruption()
    trainer = make(folder, **SIZES, **options)
    trainer.add_callback(sender)
    trainer.add_callback(came)
    with came.listening():
        trainer.train()
    return trainer, came


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    make(folder, **SIZES).train()
    return folder


@pytest.mark.parametrize("options", [{}, {"save_strategy": "no", "save_only_model": True}])
def test_the_checkpoint_of_an_interrupted_run_goes_on_exactly(straight, tmp_path, capfd, options):
    """Update 3 stands in the middle of a rollout that two updates are made of."""
    before = signal.getsignal(signal.SIGTERM)
    trainer, came = interrupted(tmp_path, SignalAt(2), **options)
    assert came.came and trainer.state.global_step == 3
    assert signal.getsignal(signal.SIGTERM) is before
    assert "SIGTERM: this update is finished and a checkpoint written; another one ends at" in capfd.readouterr().err
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    make(tmp_path, **SIZES).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert compare_states(straight / "checkpoint-4", tmp_path / "checkpoint-4") == []


def test_an_interruption_is_no_end_of_an_epoch(tmp_path):
    trainer, _ = interrupted(tmp_path, SignalAt(0), logging_strategy="epoch", save_strategy="epoch")
    assert trainer.state.global_step == 1 and (tmp_path / "checkpoint-1").is_dir()
    assert [log for log in trainer.state.log_history if "epoch" in log and "loss" in log] == []


def test_a_signal_in_an_evaluation_is_heard_before_the_next_update(tmp_path):
    sets = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": Dataset.from_dict({"prompt": ["blue"] * 2})}
    sizes = {"per_device_eval_batch_size": 4, "num_generations_eval": 2}
    trainer, came = interrupted(tmp_path, SignalAt(2, "on_prediction_step"), **sets, **sizes)
    assert came.came and trainer.state.global_step == 2
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.fixture
def interrupts():
    """Ctrl-C as a terminal's program has it, whoever started the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_signal_ends_at_once(monkeypatch, interrupts):
    came = Interruption()
    with came.listening():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # what a launcher passes on within a second is the same request
        monkeypatch.setattr(interruption, "SAME_REQUEST", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        came.came = True
    with pytest.raises(KeyboardInterrupt):  # nobody listens any longer
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_no_update_heard_is_not_lost(interrupts):
    with pytest.raises(KeyboardInterrupt), Interruption().listening():
        signal.raise_signal(signal.SIGINT)


def test_what_is_ignored_stays_ignored(interrupts):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interruption().listening():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def test_an_interruption_before_the_first_update_saves_nothing(tmp_path):
    """Two training steps an update: stopped before the first, half an update would be left, and no checkpoint."""
    sets = {"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True, "gradient_accumulation_steps": 2}
    sets |= {"eval_dataset": Dataset.from_dict({"prompt": ["blue"] * 2}), "per_device_train_batch_size": 4}
    sizes = {"per_device_eval_batch_size": 4, "num_generations_eval": 2}
    trainer, came = interrupted(tmp_path, SignalAt(0, "on_prediction_step"), **sets, **sizes)
    assert came.came and trainer.state.global_step == 1 and came.ended(1).endswith("its checkpoint is written")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_in_another_thread_no_signal_is_taken_over():
    found = []

    def look():
        with Interruption().listening():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
