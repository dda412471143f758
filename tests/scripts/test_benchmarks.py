"""The benchmarks run and say what they promise; how fast anything is, is not a test's business."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

FOLDER = Path(__file__).parents[2] / "scripts" / "benchmarks"
SIDES = {
    "exact_kl": {"ours", "whole logits", "trl kernels"},
    "train_step": {"ours", "trl"},
    "gated_step": {"shared", "apart"},
    "rollout": {"ours", "unshared", "generate"},
}
FIGURES = {"seconds", "all_seconds", "peak_mib", "over_model_mib", "over_set_up_mib", "times"}
# One process for all of them: importing torch, transformers and trl takes longer than every quick run.
DRIVER = """
import json, runpy, sys
for name, path in json.loads(sys.argv[1]).items():
    print("script:", name, flush=True)
    sys.argv = [path, "--quick", "--json", f"{name}.json"]
    runpy.run_path(path, run_name="__main__")
"""
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER), "PYTHONWARNINGS": "ignore"}


def load_floor():
    """Return floor.py of the benchmarks, which is a script's neighbour and no package."""
    spec = importlib.util.spec_from_file_location("benchmark_floor", FOLDER / "floor.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


floor = load_floor()


def run(command, folder):
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """(what was printed, what was written) of every script's quick run."""
    folder = tmp_path_factory.mktemp("benchmarks")
    paths = {name: str(FOLDER / f"{name}.py") for name in (*SIDES, "scaling")}
    printed = run([sys.executable, "-c", DRIVER, json.dumps(paths)], folder)
    _, *parts = re.split(r"script: (\w+)\n", printed)
    shown = dict(zip(parts[::2], parts[1::2], strict=True))
    return {name: (shown[name], json.loads((folder / f"{name}.json").read_text())) for name in paths}


@pytest.mark.parametrize("script", ["train_step", "gated_step", "rollout"])
def test_sides_are_compared(quick, script):
    shown, written = quick[script]
    assert set(written) >= {"torch", "platform", "threads", "rates", "cases"}
    assert written["rates"].keys() == {"flops", "bandwidth"}
    for case in written["cases"]:
        assert case["name"].split(",")[0] in shown
        assert set(case["sides"]) == set(case["time_ratio"]) == set(case["memory_ratio"]) == SIDES[script]
        assert all(set(side) == FIGURES for side in case["sides"].values())
        assert all(len(side["all_seconds"]) == 2 for side in case["sides"].values())
        first, *others = SIDES[script] & {"ours", "shared"}
        assert not others and case["time_ratio"][first] == 1.0
        for name, side in case["sides"].items():
            assert f"{case['time_ratio'][name]:.2f}" in shown
            assert case["time_ratio"][name] == pytest.approx(case["sides"][first]["seconds"] / side["seconds"])
        assert 0 < case["floor"]["seconds"] < case["sides"][first]["seconds"]


def test_every_purpose_of_our_step_has_its_seconds(quick):
    shown, written = quick["train_step"]
    ours = written["cases"][0]["sides"]["ours"]
    for purpose in ("generation", "scoring", "reference", "optimisation"):
        assert f"{purpose} {ours['times'][f'time/{purpose}']:.3f}" in shown
    assert sum(ours["times"].values()) < 1.5 * ours["seconds"]  # of one step, not of all


def test_sharing_changes_no_gradient(quick):
    shown, written = quick["gated_step"]
    assert 0 < written["gradient_gap"] < 1e-5
    assert f"relative gap of all gradients: {written['gradient_gap']:.1e}" in shown
    assert [case["name"] for case in written["cases"]] == ["step", "rollout", "training"]


def test_growth(quick):
    shown, written = quick["scaling"]
    assert [case["name"] for case in written["cases"]] == ["G=2", "G=4", "P=32", "P=128", "V=512", "V=2048"]
    for first, second in zip(written["cases"][::2], written["cases"][1::2], strict=True):
        assert first["time_ratio"] == first["memory_ratio"] == 1.0
        assert second["time_ratio"] == pytest.approx(second["seconds"] / first["seconds"])
        assert f"{second['time_ratio']:.2f}" in shown
        assert first["floor"]["seconds"] < second["floor"]["seconds"]


def test_exact_kl(quick):
    shown, written = quick["exact_kl"]
    for case in written:
        assert set(case["seconds"]) == set(case["peak_mib"]) == set(case["time_ratio"]) == SIDES["exact_kl"]
        assert f"{case['time_ratio']['whole logits']:.2f}" in shown


def test_gpu_check_dry_run(tmp_path):
    shown = run(["bash", str(FOLDER / "gpu_check.sh"), "--dry_run", "--json", "gpu.json"], tmp_path)
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["failures"] == []
    assert [case["name"] for case in written["cases"]] == ["ours", "trl", "trl, in parts"]
    for case in written["cases"]:
        assert f"{case['time_ratio']:.2f}" in shown and case["peak_mib"] > 0
    assert {one["dtype"] for one in written["checks"]} == {"float32", "bfloat16"}
    assert len(written["checks"]) == 20
    assert all(0 < one["error"] <= one["bound"] for one in written["checks"])


# ---- the floor, by hand ----

SHAPE = floor.Shape(layer_weights=10, head_weights=6, layers=1, query_width=2, key_width=1)
WORK = floor.Work(prefix=3, response=2, members=2)


def test_work_counts_the_prefix_once_and_no_last_token():
    # 3 of the prefix and one of each response; these see the prefix and themselves: 3 * 4 / 2 + 2 * (3 + 1).
    assert (WORK.tokens, WORK.pairs) == (5, 14)
    # With the prefix once per member it would be 8 tokens and 20 pairs; two groups have twice of everything.
    assert WORK._replace(prefix=0, own=3).tokens == 8
    assert WORK._replace(prefix=0, own=3).pairs == 20
    assert (WORK._replace(groups=2).tokens, WORK._replace(groups=2).pairs) == (10, 28)


def test_training_floor():
    # Matrices 2 * 10 * 5, attention 4 * 2 * 14, head 2 * 6 * 4. Under LoRA the policy's forward and backward and the
    # reference's forward are 3 of the first and last; attention is one forward, its double as backward, one forward.
    assert floor.forward_flops(SHAPE, WORK) == (100, 112)
    assert floor.training_flops(SHAPE, WORK) == 3 * (100 + 48) + 4 * 112
    assert floor.training_flops(SHAPE, WORK, frozen=False) == 4 * (100 + 48) + 4 * 112


def test_decoding_floor():
    # Prefill 2 * 10 * 3 and the head for 2 rows 2 * 6 * 2 at 100 a second; one step reads 16 weights, and keys and
    # values of 3 shared tokens and of one of each row, 10 numbers, of 4 bytes at 10 bytes a second: 0.84 + 10.4.
    rates = floor.Rates(flops=100, bandwidth=10)
    assert floor.decoding_seconds(SHAPE, WORK, rates, 4) == pytest.approx(11.24)
    # Where reading costs nothing the step's arithmetic remains: 2 * 16 * 2 at 100 a second.
    assert floor.decoding_seconds(SHAPE, WORK, rates._replace(bandwidth=math.inf), 4) == pytest.approx(0.84 + 0.64)
    step = floor.step_floor(SHAPE, WORK, rates)
    assert step == pytest.approx({"generation": 11.24, "training": 8.92, "seconds": 20.16})


def test_shape_of_a_model():
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    shape, parameters = floor.shape_of(config, AutoModelForCausalLM)
    # Per layer 64 x 64 for queries and output, 64 x 32 for keys and values, three of 64 x 128.
    assert shape == (2 * (2 * 4096 + 2 * 2048 + 3 * 8192), 512 * 64, 2, 64, 32)
    # Besides: 64 + 32 + 32 biases and two norms a layer, the last norm; the head is the embedding, counted once.
    assert parameters == shape.layer_weights + 512 * 64 + 2 * (128 + 128) + 64


def test_rates_are_measured():
    rates = floor.measure_rates(torch.device("cpu"), torch.float32, lambda: None, size=64)
    assert rates.flops > 1e6 and rates.bandwidth > 1e6
