"""A checkpoint carries its own proof: damage of any of its files, or of its ledger's, is named before it is loaded."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from training import make_trainer
from transformers import TrainerCallback

from turngrpo.trainer.runs.proof import PROOF, ResumeError, faults, newest_whole, write_proof

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
FILES = (
    "README.md adapter_config.json adapter_model.safetensors chat_template.jinja optimizer.pt rng_state.pth "
    "scheduler.pt tokenizer.json tokenizer_config.json trainer_state.json training_args.bin turngrpo_checkpoint.json "
    "turngrpo_run.json turngrpo_state_0.pt"
).split()


def make(folder, **options):
    defaults = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "peft_config": LoraConfig(**LORA)}
    return make_trainer(folder, **(defaults | options))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with two checkpoints and their rollouts, and a trainer that could go on."""
    folder = tmp_path_factory.mktemp("run")
    make(folder).train()
    return folder, make(folder)


@pytest.fixture
def copies(run, tmp_path):
    for step in (1, 2):
        shutil.copytree(run[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    return tmp_path / "checkpoint-2"


def delete(path, other):
    path.unlink()


def truncate(path, other):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path, other):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(path, other):
    shutil.copyfile(other, path)


@pytest.mark.parametrize("damage", [delete, truncate, flip, swap])
@pytest.mark.parametrize("name", FILES)
def test_damage_of_any_file_is_named_with_a_remedy(name, damage, run, copies):
    run[1].check_resume(str(copies))
    whole = (copies / name).read_bytes()
    damage(copies / name, copies.parent / "checkpoint-1" / name)
    if (copies / name).is_file() and (copies / name).read_bytes() == whole:
        assert damage is swap and name not in ("optimizer.pt", "trainer_state.json", PROOF)  # of both checkpoints
        return
    with pytest.raises(ResumeError) as caught:
        run[1].check_resume(str(copies))
    assert str(caught.value).startswith(f"{copies} is not as it was saved:\n  ")
    assert name in str(caught.value)
    assert f"go on from {copies.parent / 'checkpoint-1'}, the newest one that is whole" in str(caught.value)


def test_the_files_of_a_checkpoint_are_those_above(run):
    assert sorted(path.name for path in (run[0] / "checkpoint-2").iterdir()) == FILES
    content = json.loads((run[0] / "checkpoint-2" / PROOF).read_text())
    assert sorted(content["files"]) == [name for name in FILES if name != PROOF]
    assert (content["step"], content["processes"]) == (2, 1)


def test_a_damaged_checkpoint_is_refused_before_anything_is_loaded(run, copies):
    flip(copies / "adapter_model.safetensors", None)
    trainer = make(run[0])
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    with pytest.raises(ResumeError, match="adapter_model.safetensors has SHA-256"):
        trainer.train(str(copies))
    assert all(torch.equal(parameter, before[name]) for name, parameter in trainer.model.named_parameters())


def test_an_edited_step_and_a_renamed_folder_are_named(run, copies):
    state = copies / "trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 2', '"global_step": 1'))
    with pytest.raises(ResumeError, match="trainer_state.json has SHA-256"):
        run[1].check_resume(str(copies))
    other = (copies.parent / "checkpoint-1").rename(copies.parent / "checkpoint-7")
    with pytest.raises(ResumeError, match="says that it was saved after update 1, its name says 7"):
        run[1].check_resume(str(other))


def test_a_foreign_file_is_named_and_no_remedy_is_invented(run, copies):
    (copies / "adapter_model.bin").write_bytes(b"x")
    shutil.rmtree(copies.parent / "checkpoint-1")
    with pytest.raises(ResumeError, match="adapter_model.bin was not saved with it: .*no other of its run is whole"):
        try:
            run[1].check_resume(str(copies))
        except ResumeError as error:
            raise ResumeError(str(error).replace("\n", " ")) from error


def test_the_newest_whole_checkpoint_is_found_by_its_number(tmp_path):
    for step in (9, 10, 11):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "weights").write_text(str(step))
        write_proof(folder, step, 1)
    assert faults(tmp_path / "checkpoint-10") == []
    assert newest_whole(tmp_path / "checkpoint-11") == tmp_path / "checkpoint-10"  # not 9, the last by name
    (tmp_path / "checkpoint-10" / "weights").write_text("11")
    assert newest_whole(tmp_path / "checkpoint-11") == tmp_path / "checkpoint-9"


def test_a_checkpoint_of_an_older_version_resumes_with_a_warning(run, copies):
    path = copies / "turngrpo_state_0.pt"
    with torch.serialization.safe_globals([range]):
        state = torch.load(path, weights_only=True)
    for name in ("proof", "changes", "stream", "ledger_files"):
        del state[name]
    for name in ("rewards", "turn_rewards", "workflow", "tokenizer", "adapter", "versions"):
        del state["fingerprint"][name]
    torch.save(state, path)
    (copies / PROOF).unlink()
    with pytest.warns(UserWarning) as caught:
        run[1].check_resume(str(copies))
    said = " ".join(str(one.message) for one in caught)
    assert f"holds no {PROOF}, so that nothing of it can be proved to be whole" in said
    assert "not compared: adapter; tokenizer; rewards; turn_rewards; workflow" in said


def test_a_proof_is_written_last_and_all_is_on_disk_before_and_after_the_rename(tmp_path, monkeypatch):
    events, replace, fsync = [], os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(("rename", str(b))), replace(a, b))[1])
    synced = lambda fd: (events.append(("sync", os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))[1]  # noqa: E731
    monkeypatch.setattr(os, "fsync", synced)
    make(tmp_path, max_steps=1).train()
    final, apart = str(tmp_path / "checkpoint-1"), str(tmp_path / "partial-checkpoint-1" / "checkpoint-1")
    renamed = events.index(("rename", final))
    before, after = events[:renamed], events[renamed + 1 :]
    assert {("sync", f"{apart}/{name}") for name in FILES} | {("sync", apart)} <= set(before)
    assert ("sync", os.path.dirname(apart)) in before and ("sync", str(tmp_path)) in after
    stamps = {path.name: path.stat().st_mtime_ns for path in Path(final).iterdir()}
    assert max(stamps, key=stamps.__getitem__) == PROOF


# ---- the ledger ----


def remove_rollout(folder):
    (folder / "iteration_00000.parquet").unlink()
    return "iteration_00000.parquet is missing"


def change_rollout(folder):
    flip(folder / "iteration_00001.parquet", None)
    return "iteration_00001.parquet was changed since it was recorded"


def other_rollout(folder):
    shutil.copyfile(folder / "iteration_00000.parquet", folder / "iteration_00001.parquet")
    return "iteration_00001.parquet was changed since it was recorded"


@pytest.mark.parametrize("damage", [remove_rollout, change_rollout, other_rollout])
def test_a_rollout_that_is_not_the_runs_is_named(damage, run, tmp_path):
    shutil.copytree(run[0], tmp_path / "run")
    trainer = make(tmp_path / "run")
    trainer.check_resume(str(tmp_path / "run" / "checkpoint-2"))
    named = damage(tmp_path / "run" / "rollouts")
    with pytest.raises(ResumeError, match=named):
        trainer.check_resume(str(tmp_path / "run" / "checkpoint-2"))
    make(tmp_path / "run", ledger=False).check_resume(str(tmp_path / "run" / "checkpoint-2"))


def test_a_rollout_of_another_history_is_named(run, tmp_path):
    shutil.copytree(run[0], tmp_path / "run")
    first = make(tmp_path / "run", ledger=False, max_steps=1)  # records nothing of its own
    first.train()
    with pytest.raises(ResumeError, match="iteration_00000.parquet is of another run"):
        make(tmp_path / "run").check_resume(str(tmp_path / "run" / "checkpoint-1"))


# ---- a run that has ended ----


class Logs(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(logs)


def test_a_finished_run_that_ended_with_an_epoch_is_checked_and_rewrites_nothing(tmp_path):
    options = {"max_steps": 3, "log_completions": True, "num_completions_to_print": 0}  # an epoch has 3 updates
    done = make(tmp_path, **options)
    done.train()
    table, checkpoint = tmp_path / "completions" / "completions_00003.parquet", tmp_path / "checkpoint-3"
    written = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (table, *checkpoint.iterdir())}
    time.sleep(0.01)
    again = make(tmp_path, callbacks=[seen := Logs()], **options)
    again.train(str(checkpoint))
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in written} == written
    assert (again._step, again.state.global_step) == (3, 3)  # TRL's _step alone would be 0
    assert [sorted(logs) for logs in seen.seen if "loss" in logs] == [] and "train_runtime" in seen.seen[-1]
    assert all(torch.equal(p, again.model.get_parameter(name)) for name, p in done.model.named_parameters())
    assert again.log_completions is True
    with pytest.raises(ResumeError, match="alpha: the checkpoint's is 0.9, this run's 0.5"):
        make(tmp_path, alpha=0.5, **options).train(str(checkpoint))
    flip(checkpoint / "optimizer.pt", None)
    with pytest.raises(ResumeError, match="optimizer.pt has SHA-256"):
        make(tmp_path, **options).train(str(checkpoint))
