"""Scripts that read checkpoints: nothing planted in a file ever runs, and a run killed at its end ends once."""

import json
import os
import pickle
import shutil

import compare_states
import evaluate
import export_adapter
import pytest
import sft
import torch
import train
from lib import running
from test_scripts import LIMITS, PLAIN, READING, tiny, train_arguments  # noqa: F401  a fixture

from turngrpo.trainer.runs.proof import PROOF, ResumeError, write_proof

LORA = ["--use_peft", "--lora_r", "2", "--lora_target_modules", "q_proj", "v_proj"]
SAVING = ["--save_strategy", "steps", "--save_steps", "1", "--logging_steps", "1", "--disable_tqdm", "true"]


class Payload:
    """Runs a command wherever it is unpickled without care."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def plant(path, marker):
    """Put a payload into a file, as torch saves it or as pickle does, and make the proof say that it belongs there."""
    if path.suffix in (".pt", ".pth", ".bin"):
        torch.save(Payload(marker), path)
    else:
        path.write_bytes(pickle.dumps(Payload(marker)))
    if path.name != PROOF:
        write_proof(path.parent, int(path.parent.name.rpartition("-")[2]), 1)


def prompt_run(tiny, folder, *more):  # noqa: F811
    """Return the arguments of a short training on prompts, without evaluation."""
    (folder / "prompts.jsonl").write_text('{"prompt": "the code of lamp is"}\n{"prompt": "what is"}\n')
    (folder / "length_reward.py").write_text(
        "def score(completions, **c):\n    return [float(len(x)) for x in completions]\n"
    )
    group = ["--per_device_train_batch_size", "4", "--num_generations", "4", "--max_completion_length", "4"]
    source = ["--workflow", "single_turn", "--dataset_name", "prompts.jsonl", "--reward_funcs", "length_reward.score"]
    model = ["--model_name_or_path", str(tiny / "model"), "--output_dir", "out", "--max_steps", "2", "--alpha", "1"]
    return [*model, *source, *group, *SAVING, *PLAIN, *LORA, "--loss_type", "grpo", *more]


def sft_run(tiny, folder, *more):  # noqa: F811
    (folder / "targets.jsonl").write_text('{"prompt": "the code", "completion": "of lamp"}\n' * 4)
    source = ["--targets", "targets.jsonl", "--model_name_or_path", str(tiny / "model"), "--output_dir", "warm"]
    return [*source, "--max_steps", "2", *SAVING, *PLAIN, *LORA, *more]


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):  # noqa: F811
    """A folder with a trained `out` and a supervised `warm`, two checkpoints each."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train.main(prompt_run(tiny, folder)) == 0
        assert sft.main(sft_run(tiny, folder)) == 0
    return folder


def resume_training(tiny, folder, checkpoint):  # noqa: F811
    train.main(prompt_run(tiny, folder, "--resume_from_checkpoint", str(checkpoint)))


def resume_sft(tiny, folder, checkpoint):  # noqa: F811
    sft.main(sft_run(tiny, folder, "--resume_from_checkpoint", str(checkpoint)))


def export(tiny, folder, checkpoint):  # noqa: F811
    export_adapter.main(["--checkpoint", str(checkpoint), "--adapters_dir", str(folder / "adapters"), "--merge"])


def evaluate_adapter(tiny, folder, checkpoint):  # noqa: F811
    model = ["--model", str(tiny / "model"), "--corpus", str(tiny / "corpus.jsonl"), "--rows", "1"]
    output = ["--workflow", "gated", "--adapter", str(checkpoint), "--output", str(folder / "evaluation.json")]
    evaluate.main([*model, *output, *READING, *LIMITS])


def compare(tiny, folder, checkpoint):  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["compare_states.py", str(checkpoint), str(checkpoint)])
        assert compare_states.main() in (0, 2)


READERS = {
    "compare_states.py": ("out", compare),
    "train.py": ("out", resume_training),
    "sft.py": ("warm", resume_sft),
    "export_adapter.py": ("out", export),
    "evaluate.py": ("out", evaluate_adapter),
}


@pytest.mark.parametrize("script", READERS)
def test_nothing_planted_in_a_checkpoint_ever_runs(script, runs, tiny, tmp_path, monkeypatch):  # noqa: F811
    name, read = READERS[script]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    checkpoint, whole = tmp_path / name / "checkpoint-1", runs / name / "checkpoint-1"
    read(tiny, tmp_path, checkpoint)  # the untouched one can be read
    for file in sorted(path.name for path in whole.iterdir()):
        shutil.rmtree(checkpoint)
        shutil.copytree(whole, checkpoint)
        plant(checkpoint / file, tmp_path / "it_ran")
        try:
            read(tiny, tmp_path, checkpoint)
        except (Exception, SystemExit):  # what cannot be read may be refused in any way
            pass
        assert not (tmp_path / "it_ran").exists(), f"{script} ran what stood in {file}"


def test_the_payload_runs_where_a_file_is_read_without_care(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    plant(tmp_path / "checkpoint-1" / "optimizer.pt", tmp_path / "it_ran")
    torch.load(tmp_path / "checkpoint-1" / "optimizer.pt", weights_only=False)
    assert (tmp_path / "it_ran").exists()


@pytest.mark.parametrize("script", ["train.py", "sft.py", "export_adapter.py", "evaluate.py"])
def test_a_changed_checkpoint_is_refused_by_every_script(script, runs, tiny, tmp_path, monkeypatch):  # noqa: F811
    name, read = READERS[script]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / name / "checkpoint-2" / "adapter_model.safetensors"
    shutil.copyfile(weights.parent.with_name("checkpoint-1") / weights.name, weights)
    with pytest.raises((running.SetupError, ResumeError), match=f"{weights.name} has SHA-256"):
        read(tiny, tmp_path, weights.parent)


# ---- the end of a run ----


def test_a_run_killed_after_its_last_save_logs_and_exports_once(tiny, tmp_path):  # noqa: F811
    arguments = train_arguments(tiny, tmp_path / "out", *LORA, "--validation_rows", "1")
    arguments[arguments.index("--save_strategy") + 1] = "steps"
    arguments += ["--save_steps", "1"]
    assert train.main(arguments) == 0
    logs = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert train.main([*arguments, "--resume_from_checkpoint", "true"]) == 0
    again = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [log["update"] for log in again] == [log["update"] for log in logs] == [1, 2, 2]
    assert again[:2] == logs[:2] and "train_runtime" in again[2]
    versions = sorted(path.name for path in (tmp_path / "out" / "adapters" / "out").glob("v*"))
    assert versions == ["v0001"]  # of the same weights there was a second one
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["adapter"].endswith("adapters/out/v0001")
