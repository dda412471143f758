"""The scripts on several processes, through `accelerate launch` and its files in accelerate_configs."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import process_cases
import pyarrow.parquet as pq
import pytest
import torch
import train as train_script
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from safetensors.torch import load_file
from training import relative_gap

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "accelerate_configs"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
LIMIT = 400  # seconds for a launch; what takes longer hangs
DURATIONS = ("time", "second")
READ = ("tokens/generation", "tokens/scoring", "tokens/reference")  # a prefix once in every process
REWARDS = """
def score(completions, **columns):
    return [len(text) % 7 / 3 for text in completions]

def turns(trajectories, **columns):
    return [[len(turn.text) % 5 / 2 for turn in trajectory.turns] for trajectory in trajectories]
"""


def run(command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Return train.py's output folder and summary under a launcher: two updates on each of two rollouts, LoRA."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "length_reward.py").write_text(REWARDS)
    model, given = process_cases.script_folder(folder / "any")
    given += ["--model_name_or_path", str(model), "--max_prompt_length", "150", "--max_completion_length", "8"]
    given += ["--use_cpu", "--bf16", "false", "--gradient_checkpointing", "false", "--report_to", "none"]
    given += ["--reward_funcs", "length_reward.score", "--turn_reward_funcs", "length_reward.turns", "--beta", "0.1"]
    given += ["--num_generations", "4", "--gradient_accumulation_steps", "2", "--num_iterations", "2"]
    given += ["--max_steps", "4", "--learning_rate", "1e-3", "--logging_steps", "1", "--loss_type", "group"]
    given += ["--use_peft", "--lora_r", "4", "--validation_rows", "3", "--alpha", "0.5", "--num_generations_eval", "1"]
    given += ["--eval_strategy", "steps", "--eval_steps", "2", "--save_steps", "2", "--early_stopping_patience", "1"]
    given += ["--load_best_model_at_end", "true", "--metric_for_best_model", "eval_reward"]
    kept = {}

    def launch(name, processes, *more):
        if name not in kept:
            output, size = folder / name, ["--per_device_train_batch_size", str(4 // processes)]
            arguments = ["--output_dir", str(output), *given, *size]
            if processes == 1:
                with contextlib.chdir(folder):
                    assert train_script.main(arguments) == 0
            else:
                config = ["--config_file", str(CONFIGS / f"{name}.yaml"), "--num_processes", str(processes)]
                run([*LAUNCH, *config, *more, str(ROOT / "scripts" / "train.py"), *arguments], folder)
            kept[name] = output, json.loads((output / "summary.json").read_text())
        return kept[name]

    return launch


def adapter(output):
    return load_file(output / "adapters" / output.name / "v0001" / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("name", "kind", "more"),
    [
        ("cpu_2proc", "MULTI_CPU", []),
        ("zero2", "DEEPSPEED", ["--mixed_precision", "no"]),
        ("zero3", "DEEPSPEED", ["--mixed_precision", "no"]),
    ],
)
def test_train_on_two_processes_is_train_on_one(name, kind, more, train):
    if kind == "DEEPSPEED":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install turngrpo[deepspeed]")
    one, alone = train("cpu", 1)
    two, both = train(name, 2, *more)
    assert (alone["processes"], alone["distributed_type"]) == (1, "NO")
    assert (both["processes"], both["distributed_type"]) == (2, kind)
    logs = [[json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] for out in (one, two)]
    assert [log["update"] for log in logs[1] if "grad_norm" in log] == [1, 2, 3, 4]
    for ours, theirs in zip(*logs, strict=True):
        for key in ours:
            if not any(part in key for part in (*DURATIONS, *READ)):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-5), key
    assert max(log["grad_norm"] for log in logs[0] if "grad_norm" in log) > 1e-3
    # Four steps of AdamW at 1e-3 on the same gradients; a doubled learning rate would be off by about 1.
    assert relative_gap(adapter(two), adapter(one)) < 1e-3
    assert both["exported"] == alone["exported"] and alone["exported"]["is_best"]
    assert both["after"].keys() == alone["after"].keys()
    for key, value in alone["after"].items():
        assert both["after"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def test_train_on_two_processes_writes_everything_once(train):
    (one, _), (two, _) = train("cpu", 1), train("cpu_2proc", 2)
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
    exported = sorted(path.name for path in (two / "adapters" / two.name).iterdir())
    assert exported == [".lock", "latest", "v0001"]
    for iteration in (0, 1):
        files = [f"iteration_{iteration:05d}{suffix}.parquet" for suffix in ("", "_process1")]
        parts = [pq.read_table(two / "rollouts" / name)["id"].to_pylist() for name in files]
        assert sum(parts, []) == pq.read_table(one / "rollouts" / files[0])["id"].to_pylist()


def test_three_processes_have_the_gradient_of_one(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "3"]
    run([*torchrun, str(ROOT / "tests" / "helpers" / "process_cases.py"), str(tmp_path), "full"], tmp_path)
    whole = process_cases.run_case("full", tmp_path / "one")
    parts = [torch.load(tmp_path / f"full_{rank}.pt", weights_only=False) for rank in range(3)]
    # Groups of 3 on processes of 2 trajectories: the middle one has a part of both.
    assert [part["own_turns"] for part in parts] == [2, 4, 6]
    for part in parts:
        assert (part["num_processes"], part["distributed_type"]) == (3, "MULTI_CPU")
        assert relative_gap(part["gradient"], whole["gradient"]) < 1e-5
        assert torch.equal(part["advantages"], whole["advantages"])


# ---- what the files of accelerate_configs tell the processes ----


def launch_environment(name):
    """Return how many processes `accelerate launch` starts for a file, and what it tells them, as it does itself."""
    parser = launch_command_parser()
    arguments = parser.parse_args(["--config_file", str(CONFIGS / f"{name}.yaml"), "script.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return arguments.num_processes, prepare_deepspeed_cmd_env(arguments)[1]
    if arguments.num_processes > 1:
        return arguments.num_processes, prepare_multi_gpu_env(arguments)
    return arguments.num_processes, prepare_simple_launcher_cmd_env(arguments)[1]


@pytest.mark.parametrize(
    ("name", "processes", "told"),
    [
        ("cpu", 1, {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"}),
        ("cpu_2proc", 2, {"ACCELERATE_MIXED_PRECISION": "no"}),
        ("single_gpu", 1, {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "False"}),
        ("multi_gpu", 8, {"ACCELERATE_MIXED_PRECISION": "bf16"}),
        (
            "zero2",
            8,
            {
                "ACCELERATE_MIXED_PRECISION": "bf16",
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
                "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
            },
        ),
        (
            "zero3",
            8,
            {
                "ACCELERATE_MIXED_PRECISION": "bf16",
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
                "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
                "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
            },
        ),
        (
            "fsdp2",
            8,
            {
                "ACCELERATE_MIXED_PRECISION": "bf16",
                "ACCELERATE_USE_FSDP": "true",
                "FSDP_VERSION": "2",
                "FSDP_RESHARD_AFTER_FORWARD": "true",
                "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
                "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
                "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
                "FSDP_OFFLOAD_PARAMS": "false",
                "FSDP_ACTIVATION_CHECKPOINTING": "false",
            },
        ),
    ],
)
def test_accelerate_reads_every_config(name, processes, told):
    found, environment = launch_environment(name)
    assert found == processes
    assert told.items() <= environment.items()
    for library in ("DEEPSPEED", "FSDP"):
        assert (f"ACCELERATE_USE_{library}" in environment) == (f"ACCELERATE_USE_{library}" in told)


def test_accelerate_makes_its_plugins_of_the_configs(monkeypatch):
    for name, value in launch_environment("fsdp2")[1].items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert plugin.state_dict_type.name == "FULL_STATE_DICT" and not plugin.cpu_ram_efficient_loading
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install turngrpo[deepspeed]")
    from accelerate.utils import DeepSpeedPlugin

    for stage in (2, 3):
        for name, value in launch_environment(f"zero{stage}")[1].items():
            monkeypatch.setenv(name, value)
        zero = DeepSpeedPlugin().deepspeed_config["zero_optimization"]
        assert zero["stage"] == stage
        assert zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "none"
        assert zero["stage3_gather_16bit_weights_on_model_save"] == (stage == 3)
