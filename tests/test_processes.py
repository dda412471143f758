"""One process and two: the same script gives the same numbers, under real launchers and on real processes (gloo)."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import process_cases
import pyarrow.parquet as pq
import pytest
import sft
import torch
import yaml
from accelerate import DistributedType
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file
from training import make_trainer, relative_gap

from turngrpo.trainer import Trajectory, Turn, TurnGRPOConfig, warm_start
from turngrpo.trainer.checks import check_arguments, check_fsdp
from turngrpo.trainer.objective.iteration import score_rollout, training_slices
from turngrpo.trainer.runs.compare import checkpoint_fields, compare_states

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
LIMIT = 400  # seconds for a launch; what takes longer hangs
ENDING = 60  # seconds in which a run ends after one of its processes was killed or failed, its start included
DURATIONS = ("time", "second")


def launch(launcher, folder, *stages):
    """Run stages of cases in the processes of a launcher, in `folder`."""
    command = [*launcher, str(ROOT / "tests" / "helpers" / "process_cases.py"), str(folder), *stages]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT, check=False)


def results(folder, case, kind="MULTI_CPU"):
    """Return what both processes wrote down, which says that there really were two."""
    both = [torch.load(folder / f"{case}_{rank}.pt", weights_only=False) for rank in (0, 1)]
    assert [result["num_processes"] for result in both] == [2, 2]
    assert {result["distributed_type"] for result in both} == {kind}
    return both


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """One launch of two processes by `accelerate launch`; the last stage fails on one of them."""
    folder = tmp_path_factory.mktemp("two")
    launcher = [*ACCELERATE, "--config_file", str(ROOT / "accelerate_configs" / "cpu_2proc.yaml")]
    stages = "full,lora,split,supervised,evaluated,gated,straight,interrupted,served"
    return folder, launch(launcher, folder, stages, "killed", "resumed", "failing")


@pytest.fixture(scope="module")
def two(launched):
    folder, done = launched
    assert (folder / "straight_0.pt").exists(), done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The same cases in this process."""
    folder, kept = tmp_path_factory.mktemp("one"), {}

    def run(case):
        if case not in kept:
            kept[case] = process_cases.run_case(case, folder)
        assert kept[case]["num_processes"] == 1
        return kept[case]

    run.folder = folder
    return run


def assert_same_logs(first, second, left_out=(), tolerance=2e-6):
    """Every logged number but durations is the same, to float32's last digits of sums in another order."""
    assert len(first) == len(second)
    for ours, theirs in zip(first, second, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            if not any(part in name for part in (*DURATIONS, *left_out)):
                assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), name


# ---- numbers ----


def test_rollouts_of_a_server_are_the_same_and_one_process_pushes(one, two):
    whole, parts = one("served"), results(two, "served")
    for part in parts:
        assert_same_logs(part["log"], whole["log"], ("tokens/",), 1e-4)
    # One adapter per rollout. Each process probes the server with 5 requests; every row is asked once.
    assert (parts[0]["names"], parts[1]["names"], whole["names"]) == (2, 0, 2)
    assert parts[0]["asked"] == whole["asked"] + 5


@pytest.mark.parametrize("case", ["full", "lora", "split"])
def test_the_gradient_of_two_processes_is_that_of_one(case, one, two):
    whole, parts = one(case), results(two, case)
    # 3 turns on one process and 9 on the other: neither waits for the other before the update's one reduction.
    assert sorted(part["own_turns"] for part in parts) == [3, 9] or case == "split"
    assert [tokens for part in parts for tokens in part["tokens"]] == whole["tokens"]
    for part in parts:
        assert relative_gap(part["gradient"], whole["gradient"]) < 1e-5
    # Summed twice, or averaged, it would be off by a factor of 2; each alone, by far more than 1e-5.
    assert relative_gap({n: 2 * g for n, g in whole["gradient"].items()}, whole["gradient"]) == pytest.approx(1)
    assert all(torch.equal(g, parts[1]["gradient"][n]) for n, g in parts[0]["gradient"].items())


@pytest.mark.parametrize("case", ["full", "split"])
def test_baselines_are_over_all_processes(case, one, two):
    parts = results(two, case)
    assert all(torch.equal(part["advantages"], one(case)["advantages"]) for part in parts)
    assert one(case)["advantages"].count_nonzero() > 2


def test_one_group_over_two_processes_has_one_baseline(two):
    for part in results(two, "split"):
        found, rewards = part["advantages"][part["first_turns"]], part["rewards"]
        # alpha is 1, so A = r - mean of all six; each process's three compared among themselves would be another.
        torch.testing.assert_close(found, rewards - rewards.mean())
        alone = torch.cat([half - half.mean() for half in rewards.split(3)])
        assert (found - alone).abs().max() > 0.02


def test_gated_memory_trains_and_evaluates_alike(one, two):
    """Two iterations, two updates each, evaluation of 5 rows x 2 readings in batches of 4: the last one is padded."""
    logs = results(two, "gated")[0]["log"]
    # Prefixes are shared within a process, and rows that fill up the last evaluation batch are sampled, not counted.
    assert_same_logs(one("gated")["log"], logs, left_out=["tokens/generation", "tokens/scoring", "tokens/reference"])
    trained = [entry for entry in logs if "reward" in entry]
    assert len(trained) == 2 and all(entry["reward_std"] > 0 for entry in trained)
    assert 0 < trained[0]["update_accuracy/balanced"] < 1 and trained[1]["kl"] > 1e-3
    assert sum("eval_reward" in entry for entry in logs) == 2


def test_what_is_written_is_written_once(one, two):
    one("gated")
    ours, theirs = (folder / "gated" / "completions" for folder in (one.folder, two))
    assert [path.name for path in sorted(ours.iterdir())] == [path.name for path in sorted(theirs.iterdir())]
    for path in ours.iterdir():  # the table holds the turns of both
        first, second = (pq.read_table(folder / path.name).to_pylist() for folder in (ours, theirs))
        assert [row["completion"] for row in first] == [row["completion"] for row in second]


def test_the_ledgers_of_two_processes_are_that_of_one_in_parts(one, two):
    one("gated")
    for iteration in (0, 1):
        name = f"iteration_{iteration:05d}"
        whole = pq.read_table(one.folder / "gated" / "rollouts" / f"{name}.parquet").to_pylist()
        files = [two / "gated" / "rollouts" / f"{name}{suffix}.parquet" for suffix in ("", "_process1")]
        parts = [row for file in files for row in pq.read_table(file).to_pylist()]
        assert len(whole) == len(parts) > 8
        for ours, theirs in zip(whole, parts, strict=True):
            for column in ours.keys() - {"policy_digest", "seconds", "behavior_logprobs", "advantage"}:
                assert repr(ours[column]) == repr(theirs[column])  # NaN equals NaN
            assert ours["advantage"] == pytest.approx(theirs["advantage"], rel=1e-6)
            assert ours["behavior_logprobs"] == pytest.approx(theirs["behavior_logprobs"], abs=1e-5)


# ---- scripts ----


def test_a_warm_start_on_two_processes_is_that_of_one(one, two):
    logs = one("supervised")["log"], results(two, "supervised")[0]["log"]
    assert_same_logs(*logs, tolerance=2e-3)
    assert logs[0][-1]["loss"] < logs[0][0]["loss"] - 1
    weights = [load_file(folder / "supervised" / "model.safetensors") for folder in (one.folder, two)]
    assert relative_gap(*weights) < 1e-3


def test_a_batch_that_would_be_filled_up_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(sft.SFTConfig, "world_size", 2)
    config = sft.SFTConfig(str(tmp_path), per_device_train_batch_size=3, use_cpu=True, bf16=False, report_to="none")
    warm_start.check_batches(range(12), config)
    with pytest.raises(ValueError, match="13 examples are no multiple of .* = 6.*--dataloader_drop_last"):
        warm_start.check_batches(range(13), config)
    config.dataloader_drop_last = True
    warm_start.check_batches(range(13), config)


def test_an_evaluation_on_two_processes_is_that_of_one(one, two):
    """Both evaluate the same weights, those of the warm start on two."""
    shutil.copytree(two / "supervised", one.folder / "supervised", dirs_exist_ok=True)
    ours, theirs = one("evaluated")["report"], results(two, "evaluated")[1]["report"]
    assert ours["rows"] == theirs["rows"] == 6 and len(ours["policies"]) == 5
    for name, policy in ours["policies"].items():
        for part in ("metrics", "intervals", "breakdown"):
            assert policy[part] == theirs["policies"][name][part]
    low, high = ours["policies"]["model"]["intervals"]["response_tokens/mean"]
    assert low < high  # rows differ, so that one counted twice would show


# ---- endings ----


def endings(folder, stage):
    return [json.loads((folder / f"{stage}_ending_{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


def test_a_killed_process_ends_the_run_and_a_resume_is_identical(two):
    first, second = endings(two, "killed")
    assert second["status"] == -signal.SIGKILL and first["status"] != 0
    assert max(first["seconds"], second["seconds"]) < ENDING  # nobody waits for the dead
    left = sorted(path.name for path in (two / "killed").iterdir() if "checkpoint" in path.name)
    assert left == ["checkpoint-1", "checkpoint-2", "partial-checkpoint-3"]
    results(two, "resumed")
    assert compare_states(two / "straight" / "checkpoint-4", two / "resumed" / "checkpoint-4") == []
    names = [f"iteration_{i:05d}{suffix}.parquet" for i in (0, 1) for suffix in ("", "_process1")]
    rollouts = two / "resumed" / "rollouts"
    assert sorted(path.name for path in rollouts.glob("*.parquet")) == names
    assert sorted(path.name for path in (rollouts / "abandoned_0_from_00001").iterdir()) == names[2:]


def test_a_signal_to_one_process_ends_all_after_the_same_update(two):
    assert [(one["came"], one["update"]) for one in results(two, "interrupted")] == [(True, 2)] * 2
    left = [path.name for path in (two / "interrupted").iterdir() if "checkpoint" in path.name]
    assert left == ["checkpoint-2"]
    (stop,) = compare_states(two / "straight" / "checkpoint-2", two / "interrupted" / "checkpoint-2")
    assert stop.endswith("TrainerControl/args/should_training_stop: False against True")


def test_a_process_that_fails_ends_the_launch_with_its_error(launched, two):
    done = launched[1]  # it ended within LIMIT, though the other process waits for the rewards of this one
    assert done.returncode != 0 and "ZeroDivisionError: no reward on process 1" in done.stderr
    assert not list(two.glob("failing_*.pt"))


def test_another_number_of_processes_is_refused_by_name(two, tmp_path):
    shutil.copytree(two / "straight", tmp_path / "straight")
    with pytest.raises(ValueError, match="processes: the checkpoint's run had 2, this one has 1"):
        process_cases.resumable(tmp_path / "straight", resume=2)


# ---- weights in parts: DeepSpeed and FSDP2 ----

ENGINES = {"zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}
RESUMES = ("straight,stopped", "continued")
STAGES = {  # each with an engine of its own
    "DEEPSPEED": [
        "zero2:full,lora,gated",
        "zero3:full,lora,loaded,loaded_lora,gated",
        *(f"{engine}:{cases}" for engine in ("zero2", "zero3") for cases in RESUMES),
        "zero2:lower",
        "zero3:lower",
    ],
    "FSDP": ["fsdp2:full,lora,gated,straight,stopped", "fsdp2:continued", "fsdp2:lower"],
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Return the folder of an engine's cases on two processes; one launch for DeepSpeed and one for FSDP2."""
    folders = {}

    def get(engine):
        kind = ENGINES[engine]
        if kind == "DEEPSPEED":
            pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install turngrpo[deepspeed]")
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            done = launch(TORCHRUN, folders[kind], *STAGES[kind])
            assert done.returncode == 0, done.stderr[-3000:]
        return folders[kind] / engine

    return get


@pytest.mark.parametrize(
    ("engine", "case"),
    # ZeRO-3 cuts a model into parts as it is loaded.
    [
        *((engine, case) for engine in ENGINES for case in ("full", "lora")),
        ("zero3", "loaded"),
        ("zero3", "loaded_lora"),
    ],
)
def test_the_gradient_that_shards_step_with_is_that_of_one_process(engine, case, one, sharded):
    whole, parts = one("full" if case == "loaded" else case), results(sharded(engine), case, ENGINES[engine])
    assert sorted(part["own_turns"] for part in parts) == [3, 9]
    assert [tokens for part in parts for tokens in part["tokens"]] == whole["tokens"]
    for part in parts:  # the engine's mean over processes, or its scaling by accumulation, would be off by 2
        assert relative_gap(part["gradient"], whole["gradient"]) < 1e-5
        assert part["sharded"] == (engine != "zero2")  # there really were parts, which ZeRO-2 makes of states alone
    assert_same_logs(whole["log"], parts[0]["log"])  # the engine's gradient norm is among them


@pytest.mark.parametrize("engine", ENGINES)
def test_gated_memory_trains_alike_on_shards(engine, one, sharded):
    logs = results(sharded(engine), "gated", ENGINES[engine])[0]["log"]
    assert_same_logs(one("gated")["log"], logs, left_out=["tokens/generation", "tokens/scoring", "tokens/reference"])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_on_shards_resumes_identically(engine, sharded):
    results(sharded(engine), "continued", ENGINES[engine])
    folders = [sharded(engine) / run / "checkpoint-4" for run in ("straight", "continued")]
    assert compare_states(*folders) == []
    states = [name for name in checkpoint_fields(folders[0]) if "exp_avg_sq" in name]
    assert len(states) > 10 or engine != "fsdp2"  # the optimizer's own state was there to compare
    assert states or any(folders[0].rglob("*optim_states.pt"))


@pytest.mark.parametrize("engine", ENGINES)
def test_bfloat16_weights_keep_their_reference(engine, sharded):
    """DeepSpeed casts the weights; the reference's digest, checked at the end, is of what trains."""
    part = results(sharded(engine), "lower", ENGINES[engine])[0]
    assert part["dtypes"] == ({"torch.bfloat16"} if engine != "fsdp2" else {"torch.float32", "torch.bfloat16"})
    assert part["log"][0]["kl"] == pytest.approx(0, abs=1e-6) and part["log"][1]["kl"] > 0


# ---- options and launchers ----


def test_slices_of_the_same_number_train_together():
    """Two processes hold trajectories 0, 1 and 2, 3; each of two updates takes one of either."""
    trajectories = [
        Trajectory({}, group, 0, [Turn(1, [5], [6] * n, [], "eos", "")]) for group, n in enumerate((1, 2, 4, 8))
    ]
    rewards = torch.tensor([[1.0]] * 4), torch.zeros(4, 0)
    rollout = score_rollout(trajectories, 0, *rewards, own=range(2, 4))
    first, second = training_slices(rollout, 1, 1, "dapo")
    assert (first.indices, second.indices) == ([2], [3])
    # Tokens 1 + 4 and 2 + 8; over all four slices it would be 15, of this process's alone 4.
    assert first.weights.tolist() == pytest.approx([1 / 5, 0, 1 / 5, 0])
    assert second.weights.tolist() == pytest.approx([0, 1 / 10, 0, 1 / 10])


def test_an_update_holds_whole_groups_over_all_processes(tmp_path, monkeypatch):
    options = {"report_to": [], "use_cpu": True, "bf16": False, "loss_type": "grpo", "num_generations": 4}
    monkeypatch.setattr(TurnGRPOConfig, "world_size", 2)
    config = TurnGRPOConfig(str(tmp_path), per_device_train_batch_size=2, **options)
    config.check_workflow_options()  # 2 * 2 processes = 4: one group
    config = TurnGRPOConfig(str(tmp_path), per_device_train_batch_size=2, steps_per_generation=2, **options)
    with pytest.raises(ValueError, match="= 2 \\* 1 on every process is not a multiple of num_generations=4"):
        config.check_workflow_options()


def test_fsdp_is_refused_where_accelerate_would_train_without_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"FSDP needs several GPUs, found 1 process\(es\) on cpu.*cpu_2proc.yaml"):
        make_trainer(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FSDP_VERSION", "1", "needs fsdp_version: 2: see"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true", "needs fsdp_cpu_ram_efficient_loading: false: see"),
        ("FSDP_OFFLOAD_PARAMS", "true", "needs fsdp_offload_params: false: see"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", r"needs fsdp_activation_checkpointing: false \(use gradient_ch"),
        ("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT", "needs fsdp_state_dict_type: FULL_STATE_DICT: see"),
    ],
)
def test_fsdp_options_that_leave_no_whole_weights_are_refused_by_name(name, value, message, monkeypatch):
    state = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU)
    args = SimpleNamespace(distributed_state=state, fsdp_plugin_args=None)
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    check_fsdp(args)  # as in accelerate_configs/fsdp2.yaml
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        check_fsdp(args)


def test_other_ways_to_share_out_rows_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(TurnGRPOConfig, "world_size", 2)
    with pytest.raises(ValueError, match="without even_batches is not honoured"):
        make_trainer(tmp_path, accelerator_config={"even_batches": False})


def test_fp16_is_refused_by_name_under_fsdp(tmp_path, monkeypatch):
    options = {"bf16": False, "use_cpu": True, "report_to": "none"}
    configs = [TurnGRPOConfig(str(tmp_path), fp16=fp16, **options) for fp16 in (True, False)]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr("turngrpo.trainer.checks.check_fsdp", lambda args: None)  # there are no GPUs here
    with pytest.raises(ValueError, match="fp16 is not honoured under a workflow with DeepSpeed or FSDP"):
        check_arguments({"args": configs[0], "model": "any"})
    assert check_arguments({"args": configs[1], "model": "any"}) is configs[1]


def test_fp16_is_refused_by_name_under_deepspeed(tmp_path, monkeypatch):
    configs = [
        TurnGRPOConfig(str(tmp_path), fp16=fp16, bf16=False, use_cpu=True, report_to="none") for fp16 in (True, False)
    ]
    monkeypatch.setenv(
        "ACCELERATE_USE_DEEPSPEED", "true"
    )  # as a launcher does; a config made now would need DeepSpeed
    with pytest.raises(ValueError, match="fp16 is not honoured under a workflow with DeepSpeed"):
        check_arguments({"args": configs[0], "model": "any"})
    assert check_arguments({"args": configs[1], "model": "any"}) is configs[1]


@pytest.mark.parametrize(
    ("name", "kind", "processes"),
    [
        ("cpu", "NO", 1),
        ("cpu_2proc", "MULTI_GPU", 2),
        ("single_gpu", "NO", 1),
        ("multi_gpu", "MULTI_GPU", 8),
        ("zero2", "DEEPSPEED", 8),
        ("zero3", "DEEPSPEED", 8),
        ("fsdp2", "FSDP", 8),
    ],
)
def test_every_accelerate_config_loads(name, kind, processes):
    path = ROOT / "accelerate_configs" / f"{name}.yaml"
    config = load_config_from_file(str(path))  # refuses a key that accelerate does not know
    assert config.distributed_type.value == kind and config.num_processes == processes
    assert config.use_cpu == name.startswith("cpu")
    stage = yaml.safe_load(path.read_text(encoding="utf-8")).get("deepspeed_config", {}).get("zero_stage")
    assert stage == {"zero2": 2, "zero3": 3}.get(name)
