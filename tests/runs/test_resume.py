"""Interrupt, resume, compare with the uninterrupted run: identical to the last bit, and nothing may be left out."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import compare_states as compare_script
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import tiny_model, word_tokenizer
from training import PROMPTS, make_trainer, token_reward
from transformers import EarlyStoppingCallback, TrainerCallback

from turngrpo.trainer import TurnGRPOTrainer
from turngrpo.trainer.runs.compare import compare_states
from turngrpo.trainer.runs.ledger import Ledger
from turngrpo.trainer.runs.proof import ResumeError, write_proof
from turngrpo.trainer.runs.resume import EpochSampler

ROOT = Path(__file__).parents[2]


def drawing_reward(completion_ids, trajectories, **columns):
    """A reward that draws from every global random generator, so that a lost RNG state shows."""
    noise = [random.random() + float(np.random.rand()) + float(torch.rand(())) for _ in trajectories]
    base = token_reward(completion_ids, trajectories)
    return [reward + 0.1 * extra for reward, extra in zip(base, noise, strict=True)]


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def make(folder, stop=None, lora=False, **options):
    """Return a trainer of 8 updates (6 an epoch where num_iterations is 2) that stops after `stop`."""
    defaults = {
        "max_steps": 8, "save_strategy": "steps", "save_steps": 1, "beta": 0.1, "num_iterations": 2,
        "logging_steps": 3,
        "reward_funcs": drawing_reward, "lr_scheduler_type": "cosine", "weight_decay": 0.1, "log_completions": True,
        "num_completions_to_print": 0,
    }  # fmt: skip
    peft_config = LoraConfig(r=4, target_modules="all-linear") if lora else None
    return make_trainer(
        folder, callbacks=[StopAt(stop)] if stop else None, peft_config=peft_config, **(defaults | options)
    )


def run(folder, stop=None, resume=None, **options):
    """Train, stop after `stop`, or go on from checkpoint `resume`."""
    trainer = make(folder, stop, **options)
    trainer.train(resume_from_checkpoint=None if resume is None else str(Path(folder) / f"checkpoint-{resume}"))
    return trainer


ACCUMULATION = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
CASES = {
    # 6 prompts, 2 a rollout: 3 rollouts and 6 updates an epoch; update 3 is in mid-buffer, 6 ends the epoch.
    "full, mid-buffer": ({}, 3),
    "full, at a boundary": ({}, 4),
    "full, after an epoch": ({}, 6),
    "full, in the second epoch": ({}, 7),
    "lora, mid-buffer": ({"lora": True}, 1),
    "one iteration": ({"num_iterations": 1}, 4),
    "accumulation, two updates a rollout": (ACCUMULATION, 1),
    "accumulation, lora, later": (ACCUMULATION | {"lora": True}, 5),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Uninterrupted runs, one per set of options."""
    kept = {}

    def get(options):
        key = json.dumps(options, sort_keys=True)
        if key not in kept:
            kept[key] = tmp_path_factory.mktemp("straight")
            run(kept[key], **options)
        return kept[key]

    return get


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_identical_to_the_straight_one(case, straight, tmp_path):
    options, stop = CASES[case]
    run(tmp_path, stop=stop, **options)
    assert not (tmp_path / f"checkpoint-{stop + 1}").exists()
    run(tmp_path, resume=stop, **options)
    for step in (stop + 1, 8):
        assert compare_states(straight(options) / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}") == []


@pytest.mark.parametrize("workflow", ["gated", "memagent", "single"])
def test_every_workflow_resumes(workflow, tmp_path):
    from turngrpo.trainer import GatedMemory, MemAgent, SingleTurn

    made = {"gated": lambda: GatedMemory(strict_format=False), "memagent": MemAgent, "single": SingleTurn}[workflow]
    rows = [
        {"id": f"r{i}", "question": "code of red", "answers": ["1"],
         "chunks": [{"text": "red is 1", "evidence": True}, {"text": "no", "evidence": False}]}
        for i in range(6)
    ]  # fmt: skip
    dataset = None if workflow == "single" else Dataset.from_list(rows)
    options = {"dataset": dataset, "max_steps": 3}
    whole = run(tmp_path / "a", workflow=made(), **options)
    run(tmp_path / "b", stop=1, workflow=made(), **options)
    resumed = run(tmp_path / "b", resume=1, workflow=made(), **options)
    losses = [trainer.state.log_history[-1]["train_loss"] for trainer in (whole, resumed)]
    assert losses[0] == losses[1]  # transformers would divide the sum by the two updates since the resume
    assert compare_states(tmp_path / "a" / "checkpoint-3", tmp_path / "b" / "checkpoint-3") == []


def forget_counter(monkeypatch):
    restore = TurnGRPOTrainer._restore_run
    monkeypatch.setattr(TurnGRPOTrainer, "_restore_run", lambda self, c: (restore(self, c), setattr(self, "_step", 0)))


def forget_cursor(monkeypatch):
    monkeypatch.setattr(EpochSampler, "__iter__", lambda self: EpochSampler.__base__.__iter__(self))


def forget_buffer(monkeypatch):
    restore = TurnGRPOTrainer._restore_run
    monkeypatch.setattr(
        TurnGRPOTrainer, "_restore_run", lambda self, c: (restore(self, c), vars(self).update(_buffered_inputs=None))
    )


def forget_file(name):
    """Put the first checkpoint's file into another, proof and all: an optimizer, scheduler or RNG of another time."""

    def forget(monkeypatch, folder, stop):
        shutil.copy(folder / "checkpoint-1" / name, folder / f"checkpoint-{stop}" / name)
        write_proof(folder / f"checkpoint-{stop}", stop, 1)

    return forget


@pytest.mark.parametrize(
    ("component", "stop"),
    [
        ("iteration counter", 4),
        ("cursor", 6),
        ("buffer", 3),
        ("optimizer.pt", 4),
        ("scheduler.pt", 4),
        ("rng_state.pth", 4),
    ],
)
def test_leaving_out_any_one_component_shows(component, stop, straight, tmp_path, monkeypatch):
    run(tmp_path, stop=stop)
    forget = {"iteration counter": forget_counter, "cursor": forget_cursor, "buffer": forget_buffer}.get(component)
    if forget is None:
        forget_file(component)(monkeypatch, tmp_path, stop)
    else:
        forget(monkeypatch)
    if component in ("iteration counter", "buffer"):  # the count of rollouts alone notices, kept on disk or not
        for ledger in (True, False):
            with pytest.raises(ValueError, match="is next; a rollout is optimised once"):
                run(tmp_path, resume=stop, ledger=ledger)
        monkeypatch.setattr(Ledger, "record", lambda self, iteration, rows: None)
    run(tmp_path, resume=stop, ledger=False)
    differences = compare_states(straight({}) / "checkpoint-8", tmp_path / "checkpoint-8")
    assert any("model.safetensors" in line for line in differences), differences[:5]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learning_rate": 5e-3}, "learning_rate: the checkpoint's is 0.01, this run's 0.005"),
        ({"alpha": 0.5}, "alpha: the checkpoint's is 0.9, this run's 0.5"),
        ({"dataset": Dataset.from_dict({"prompt": PROMPTS[:-1] + ["red red"]})}, "corpus: other rows"),
        ({"model": "other"}, "initial_model: other initial weights"),
    ],
)
def test_a_changed_config_corpus_or_model_is_refused_by_name(change, named, tmp_path):
    run(tmp_path, stop=1)
    if "model" in change:
        change = {"model": tiny_model(len(word_tokenizer()), seed=9)}
    with pytest.raises(ValueError, match=named):
        run(tmp_path, resume=1, **change)


def test_whether_a_run_can_go_on_is_told_before_it_trains(tmp_path):
    run(tmp_path, stop=1)
    checkpoint = str(tmp_path / "checkpoint-1")
    make(tmp_path).check_resume(checkpoint)
    with pytest.raises(ResumeError, match="learning_rate: the checkpoint's is 0.01, this run's 0.005"):
        make(tmp_path, learning_rate=5e-3).check_resume(checkpoint)
    (tmp_path / "checkpoint-1" / "turngrpo_state_0.pt").unlink()
    with pytest.raises(ResumeError, match="turngrpo_state_0.pt is missing"):
        make(tmp_path).check_resume(checkpoint)


def test_a_longer_run_is_a_warning_and_where_it_writes_is_free(tmp_path):
    run(tmp_path / "a", stop=2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.warns(UserWarning, match="another schedule: max_steps"):
        trainer = run(tmp_path / "b", resume=2, max_steps=3, save_total_limit=2)
    assert trainer.state.global_step == 3


def test_resuming_the_last_checkpoint_trains_nothing_more(tmp_path):
    done = run(tmp_path, max_steps=4)
    again = run(tmp_path, resume=4, max_steps=4)
    assert again.state.global_step == 4  # transformers alone would make a fifth update
    assert not (tmp_path / "checkpoint-5").exists()
    assert all(torch.equal(p, again.model.get_parameter(name)) for name, p in done.model.named_parameters())
    assert again._step == 4 and again.state.log_history[-2] == done.state.log_history[-2]
    assert again.state.log_history[-1]["train_loss"] == done.state.log_history[-1]["train_loss"] != 0
    with pytest.raises(ValueError, match="learning_rate: the checkpoint's is 0.01"):
        run(tmp_path, resume=4, max_steps=4, learning_rate=5e-3)


def test_a_warm_started_adapter_resumes_against_the_same_reference(tmp_path):
    def model():
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        return get_peft_model(tiny_model(len(word_tokenizer())), config)

    run(tmp_path / "a", model=model(), max_steps=4)
    run(tmp_path / "b", model=model(), max_steps=4, stop=3)
    run(tmp_path / "b", model=model(), max_steps=4, resume=3)
    assert compare_states(tmp_path / "a" / "checkpoint-4", tmp_path / "b" / "checkpoint-4") == []


def test_every_rollout_is_on_disk_before_it_is_trained_on_and_none_is_counted_twice(tmp_path):
    seen = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            seen.append(sorted(path.name for path in (tmp_path / "rollouts").glob("*.parquet")))

    options = {"num_iterations": 2, "max_steps": 5, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path, callbacks=[Look()], **options)
    trainer.train()
    names = [f"iteration_{i:05d}.parquet" for i in range(3)]
    assert seen == [names[:1], names[:1], names[:2], names[:2], names[:3]]
    rows = [row for name in names for row in pq.read_table(tmp_path / "rollouts" / name).to_pylist()]
    assert len({row["id"] for row in rows}) == len(rows)
    last, rollout = [row for row in rows if row["iteration"] == 2], trainer._buffered_inputs[0].rollout
    assert [row["completion_ids"] for row in last] == [turn.completion_ids for turn in rollout.turns]
    assert [row["behavior_logprobs"] for row in last] == [turn.behavior_logprobs for turn in rollout.turns]
    assert [row["advantage"] for row in last] == rollout.advantages.tolist()
    assert last[0]["rewards"].keys() == {"token_reward"} and last[0]["turn_rewards"].keys() == {"length_turn_reward"}
    assert len({row["policy_digest"] for row in rows}) == 3  # one policy sampled each iteration
    with pytest.raises(ValueError, match="iteration 2 cannot be recorded: .* holds 3 iterations, so that 3 is next"):
        trainer._write_down(rollout)
    # A resume at update 2 counts iteration 0 alone; what was written after that checkpoint is kept aside.
    resumed = make_trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sorted(p.name for p in (tmp_path / "rollouts").glob("*.parquet")) == names
    aside = tmp_path / "rollouts" / "abandoned_0_from_00001"
    for name in names[1:]:
        old, new = (pq.read_table(folder / name).drop(["seconds"]) for folder in (aside, tmp_path / "rollouts"))
        assert old.equals(new)  # sampled again, the same to the last bit
    fresh = make_trainer(tmp_path, max_steps=1)
    fresh.train()
    assert len(list((tmp_path / "rollouts" / "abandoned_1_from_00000").iterdir())) == 3


# ---- separate processes, and a kill in the middle of a save ----

SCRIPT = """
import sys, os, signal
sys.path[:0] = {tests!r}
import torch
torch.set_num_threads(1)
from test_resume import run
from pathlib import Path
folder, kill = sys.argv[1], sys.argv[2]
if kill != "no":
    save = torch.save
    def killing(value, path, *args, **kwargs):
        save(value, path, *args, **kwargs)
        if kill in str(path) and "checkpoint-3" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
    torch.save = killing
run(folder, resume=int(sys.argv[3]) if len(sys.argv) > 3 else None)
"""


def separate_process(folder, kill="no", resume=None):
    tests = [str(ROOT / folder) for folder in ("tests/runs", "tests/helpers", "scripts")]
    code = textwrap.dedent(SCRIPT).format(tests=tests)
    arguments = [sys.executable, "-c", code, str(folder), kill, *([str(resume)] if resume else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)


def test_a_kill_in_mid_save_leaves_no_half_checkpoint_and_another_process_goes_on_identically(
    tmp_path, monkeypatch, capsys
):
    killed = separate_process(tmp_path / "b", kill="turngrpo_state")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    left = sorted(path.name for path in (tmp_path / "b").iterdir() if "checkpoint" in path.name)
    assert left == ["checkpoint-1", "checkpoint-2", "partial-checkpoint-3"]
    straight = separate_process(tmp_path / "a")
    resumed = separate_process(tmp_path / "b", resume=2)
    assert straight.returncode == resumed.returncode == 0, resumed.stderr[-2000:]
    for name, status, said in (("checkpoint-8", 0, "identical"), ("checkpoint-7", 1, "model.safetensors")):
        monkeypatch.setattr(sys, "argv", ["compare_states.py", f"{tmp_path}/a/{name}", f"{tmp_path}/b/checkpoint-8"])
        assert compare_script.main() == status and said in capsys.readouterr().out
    assert not list((tmp_path / "b").glob("partial-*"))


def test_load_best_and_rotation_see_only_whole_checkpoints(tmp_path):
    options = {
        "eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:2]}), "eval_strategy": "steps", "eval_steps": 1,
        "per_device_eval_batch_size": 8, "load_best_model_at_end": True, "metric_for_best_model": "eval_reward",
        "save_total_limit": 2, "max_steps": 4, "reward_funcs": token_reward,
    }  # fmt: skip
    trainer = run(tmp_path, **options)
    names = sorted(path.name for path in tmp_path.iterdir() if "checkpoint" in path.name)
    best = Path(trainer.state.best_model_checkpoint)
    assert set(names) == {"checkpoint-4", best.name} and best.name != "checkpoint-4"
    assert trainer.weights_update == int(best.name.rpartition("-")[2])
    saved = load_file(best / "model.safetensors")  # beta is above 0, so that train() looked at the reference too
    assert all(torch.equal(saved[name], p) for name, p in trainer.model.named_parameters() if name in saved)


def test_early_stopping_goes_on_with_its_count_and_may_come_later(tmp_path):
    """Two callbacks of a kind keep a count each; a run whose checkpoint knows of none may be given one."""
    options = {
        "eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:2]}), "eval_strategy": "steps", "eval_steps": 1,
        "per_device_eval_batch_size": 8, "load_best_model_at_end": True, "metric_for_best_model": "eval_reward",
        "max_steps": 2, "reward_funcs": token_reward, "num_generations_eval": 1,
    }  # fmt: skip
    trainer = make(tmp_path, **options)
    stoppers = [EarlyStoppingCallback(9, threshold) for threshold in (0.0, 100.0)]  # no gain is as much as 100
    for stopper in stoppers:
        trainer.add_callback(stopper)
    trainer.train()
    counts = [stopper.early_stopping_patience_counter for stopper in stoppers]
    assert counts[1] == 1 and counts[0] in (0, 1)
    again = make(tmp_path, **options)
    fresh = [EarlyStoppingCallback(patience, 100.0) for patience in (7, 8)]
    for stopper in fresh:
        again.add_callback(stopper)
    again.checkpoints.begin(str(tmp_path / "checkpoint-2"))
    assert [stopper.early_stopping_patience_counter for stopper in fresh] == counts
    assert [stopper.early_stopping_patience for stopper in fresh] == [7, 8]  # as given now

    plain = make(tmp_path / "plain", **options)
    plain.train()
    later = make(tmp_path / "plain", **options | {"max_steps": 8})
    later.add_callback(EarlyStoppingCallback(2, 100.0))
    with pytest.warns(UserWarning, match="goes on with another schedule"):
        later.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    assert later.state.global_step == 4  # updates 3 and 4 spend the patience


@pytest.mark.parametrize("ledger", [True, False])
def test_no_rollout_is_optimised_twice_with_or_without_a_ledger(ledger, tmp_path):
    trainer = make_trainer(tmp_path, ledger=ledger, max_steps=2)
    trainer.train()
    rollout = trainer._buffered_inputs[0].rollout
    assert rollout.iteration == 1
    with pytest.raises(ValueError, match="iteration 1 cannot be recorded: .* holds 2 iterations, so that 2 is next"):
        trainer._write_down(rollout)
    assert (tmp_path / "rollouts").exists() == ledger
