"""A recipe that evaluates, stops early and goes back to its best adapter; the same after an interruption."""

import contextlib
import json
import signal
import subprocess
import sys

import pytest
import train
from arguments.commands import ExportArguments, TrainArguments
from jobs import exporting, quickstart, stopping
from lib import running
from safetensors.torch import load_file
from test_report import Page, embedded, written
from test_scripts import LIMITS, PLAIN, READING, SCRIPTS, tiny_tokenizer

from turngrpo.data_prep import build_needle_corpus, write_corpus
from turngrpo.trainer import TurnGRPOConfig
from turngrpo.trainer.export.versions import read_version
from turngrpo.trainer.runs import ledger
from turngrpo.trainer.runs.compare import compare_states
from turngrpo.trainer.runs.proof import ResumeError

# Differs between trajectories of a random model; the signal that `armed` names comes in the rollout after update 4.
REWARD = """
import os, signal

def share(trajectories, trainer_state, **columns):
    evaluated = [log["step"] for log in trainer_state.log_history if "eval_reward" in log]
    if evaluated[-1:] == [4] and os.path.exists("armed"):
        with open("armed") as file:
            name = file.read()
        os.remove("armed")
        os.kill(os.getpid(), signal.Signals[name])
    read = [[token for turn in t.turns for token in turn.completion_ids] for t in trajectories]
    return [sum(token % 3 == 0 for token in ids) / len(ids) for ids in read]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return what runs the recipe of a LoRA on a tiny model, at most 12 updates evaluated at every second one."""
    folder = tmp_path_factory.mktemp("stopping")
    (folder / "token_shares.py").write_text(REWARD)
    tokenizer = tiny_tokenizer()
    quickstart.tiny_model(tokenizer, 0, hidden_size=48).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    manifest, rows = build_needle_corpus("multi_key", 2, 6, 3, 8, shared_keys=True)
    write_corpus(folder / "corpus.jsonl", manifest, rows)
    given = ["--config", str(SCRIPTS / "recipes" / "lora.yaml"), "--model_name_or_path", "model"]
    given += ["--corpus", "corpus.jsonl", "--workflow", "memagent", "--reward_funcs", "token_shares.share"]
    given += ["--per_device_train_batch_size", "4", "--num_generations", "4", "--gradient_accumulation_steps", "1"]
    given += ["--max_steps", "12", "--learning_rate", "1e-2", "--warmup_steps", "0", "--validation_rows", "4"]
    given += ["--eval_steps", "2", "--save_steps", "2", "--save_total_limit", "2", "--early_stopping_patience", "2"]
    given += ["--adapter_name", "reader", "--disable_tqdm", "true", *READING, *LIMITS, *PLAIN]

    def start(name, *more):
        with contextlib.chdir(folder), contextlib.redirect_stdout(open(folder / f"{name}.txt", "w")):
            assert train.main([*given, "--output_dir", name, *more]) == 0
        return folder / name

    start.command = [sys.executable, str(SCRIPTS / "train.py"), *given]
    return start


@pytest.fixture(scope="module")
def straight(run):
    return run("straight")


def summary_of(output):
    return json.loads((output / "summary.json").read_text())


def metrics_of(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def version_of(output):
    return load_file(output / "adapters" / "reader" / "v0001" / "adapter_model.safetensors")


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)


def test_a_recipe_ends_on_a_plateau_and_exports_its_best_adapter(straight):
    """Best after update 2; evaluations 4 and 6 are no better, and two are all that the patience takes."""
    rewards = {log["update"]: log["eval_reward"] for log in metrics_of(straight) if "eval_reward" in log}
    assert list(rewards) == [2, 4, 6] and rewards[2] > max(rewards[4], rewards[6])
    assert {path.name for path in straight.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-6"}
    saved = {n: load_file(straight / f"checkpoint-{n}" / "adapter_model.safetensors") for n in (2, 6)}
    assert equal(version_of(straight), saved[2]) and not equal(saved[2], saved[6])
    summary = summary_of(straight)
    assert (summary["updates"], summary["stopped_early"]) == (6, True)
    assert summary["best"] == {
        "metric": "eval_reward", "value": rewards[2], "update": 2, "checkpoint": "checkpoint-2",
        "evaluations": 3, "as_good": 1,
    }  # fmt: skip
    assert summary["exported"] == {"version": "v0001", "update": 2, "is_best": True}
    assert summary["convergence"]["verdict"] == "too few evaluations"
    assert summary["after"]["reward"] == pytest.approx(rewards[2], abs=1e-9)  # and not rewards[6]
    said = " ".join(straight.with_suffix(".txt").read_text().split())
    assert "6 updates, then no better validation for as long as the early stopping waits" in said
    assert "at checkpoint-2; adapter v0001 is the best, of update 2" in said


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_an_interruption_changes_nothing(name, run, straight):
    """Ended in update 5, between two evaluations, with one of the patience spent; the folder is then renamed.

    SIGTERM finishes the update and leaves its checkpoint, SIGKILL the one of update 4.
    """
    armed = straight.parent / "armed"
    armed.write_text(name)
    if name == "SIGTERM":
        with pytest.raises(KeyboardInterrupt):
            run(name)
    else:
        command = [*run.command, "--output_dir", name]
        ended = subprocess.run(command, cwd=straight.parent, capture_output=True, timeout=300, check=False)
        assert ended.returncode == -signal.SIGKILL
    left = {path.name for path in (straight.parent / name).glob("checkpoint-*")}
    assert not armed.exists() and max(left) == {"SIGTERM": "checkpoint-5", "SIGKILL": "checkpoint-4"}[name]
    (straight.parent / name).rename(straight.parent / f"{name}_moved")
    resumed = run(f"{name}_moved", "--resume_from_checkpoint", "true")
    ours, theirs = summary_of(resumed), summary_of(straight)
    for name in ("updates", "stopped_early", "convergence", "best", "exported", "before", "after"):
        assert ours[name] == theirs[name], name
    assert equal(version_of(resumed), version_of(straight))
    assert not compare_states(straight / "checkpoint-6", resumed / "checkpoint-6")


def test_a_finished_run_that_is_resumed_trains_no_more(run, straight):
    before = summary_of(straight), metrics_of(straight)
    run("straight", "--resume_from_checkpoint", "true")
    after = summary_of(straight), metrics_of(straight)
    for name in before[0].keys() - {"seconds", "policies"}:
        assert after[0][name] == before[0][name], name
    assert [log for log in after[1] if "reward" in log] == [log for log in before[1] if "reward" in log]
    assert [path.name for path in sorted((straight / "adapters" / "reader").glob("v*"))] == ["v0001"]


def test_a_number_is_the_same_wherever_it_stands(straight, tmp_path):
    """From the ledger's rows to metrics.jsonl, from its evaluations to summary.json and the card, and to the page."""
    summary, logs = summary_of(straight), metrics_of(straight)
    turns = ledger.read(straight).to_pandas()
    trained = {log["update"]: log for log in logs if "reward" in log}
    assert list(trained) == [1, 2, 3, 4, 5, 6]
    for update, rows in turns.groupby("update"):
        readings = rows.groupby(["group", "member"])
        assert readings.reward.first().mean() == pytest.approx(trained[update]["reward"], abs=1e-6)
        chunks = readings.step.count().mean()  # an answer turn has no step
        assert chunks == pytest.approx(trained[update]["turns/mean"])
        assert rows.completion_ids.map(len).sum() == trained[update]["tokens/optimisation"]

    evaluated = {log["update"]: log for log in logs if "eval_reward" in log}
    best = evaluated[summary["best"]["update"]]
    assert best["eval_reward"] == summary["best"]["value"]
    policy = summary["policies"]["after"]
    manifest = read_version(straight / "adapters" / "reader" / "v0001")
    assert manifest["update"] == summary["exported"]["update"] == best["update"]
    for name in ("reward", "turns/mean", "response_tokens/mean"):
        value = summary["after"][name]
        assert value == policy["metrics"][name] == manifest["metrics"]["after"][name]
        assert best[f"eval_{name}"] == pytest.approx(value, abs=1e-6)
    bounds = [best[f"eval_interval/reward/{side}"] for side in ("low", "high")]
    assert bounds == pytest.approx(policy["intervals"]["reward"], abs=1e-6) and bounds[0] < bounds[1]
    card = (straight / "adapters" / "reader" / "v0001" / "README.md").read_text()
    before, after = (f"{summary[when]['reward']:.4g}" for when in ("before", "after"))
    assert f"| reward | {before} | {after} |" in card and "interval/" not in card

    shown = written(straight, tmp_path / "page.html")
    rewards = [{one["reward"] for one in embedded(shown)["trajectories"] if one["iteration"] == i} for i in range(6)]
    recorded = [set(rows.reward) for _, rows in turns.groupby("iteration")]
    assert rewards == recorded and len(rewards[0]) > 1
    page, spans = Page(shown), []
    for kind, found in (("training", trained), ("validation", evaluated)):
        ends = [
            found[update]["reward" if kind == "training" else "eval_reward"] for update in (min(found), max(found))
        ]
        spans.append(f"{kind} {ends[0]:.4g} → {ends[1]:.4g}")
    assert f"reward{', '.join(spans)}" in " ".join(page.text.split()).replace("reward ", "reward")
    assert page.table("Policies")["after"][0].startswith(f"{summary['after']['reward']:.3f}")


def test_a_checkpoint_is_exported_with_its_own_numbers(straight):
    """summary.json is about update 2, whose weights were exported; the last checkpoint has its own evaluation."""
    for update in (2, 6):
        (log,) = [log for log in metrics_of(straight) if log["update"] == update and "eval_reward" in log]
        version = exporting.export(
            ExportArguments(str(straight / f"checkpoint-{update}"), f"of-{update}", str(straight / "other"))
        )
        metrics = read_version(version)["metrics"]
        assert metrics["after"]["reward"] == pytest.approx(log["eval_reward"], abs=1e-6)
        assert (metrics["before"] is None) == (update == 6)


def test_a_damaged_best_checkpoint_is_not_loaded(run, straight):
    """The last test of this run: what it finishes with is no longer what was saved."""
    weights = straight / "checkpoint-2" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    said = (
        "the best checkpoint cannot be loaded: .*checkpoint-2 is not as it was saved:\n  adapter_model.* has SHA-256"
    )
    with pytest.raises(ResumeError, match=said):
        run("straight", "--resume_from_checkpoint", "true")
    assert len(list((straight / "adapters" / "reader").glob("v*"))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--early_stopping_patience", "0"], "--early_stopping_patience is 0: expected 1 or more"),
        (["--early_stopping_threshold", "-1"], "--early_stopping_threshold is -1.0: expected a finite number >= 0"),
        (["--load_best_model_at_end", "false"], "--load_best_model_at_end false: expected evaluations along the way"),
        (["--load_best_model_at_end", "false", "--eval_strategy", "no"], "with --eval_strategy no and"),
        (["--metric_for_best_model", "eval_loss"], "metric_for_best_model='eval_loss'.*set .*'eval_reward'"),
        (["--save_steps", "4"], "save_steps=4 with load_best_model_at_end and eval_steps=2: .* set save_steps to"),
        (
            ["--metric_for_best_model", "eval_reword"],
            "'eval_reword', which no evaluation measures: did you mean eval_reward",
        ),
    ],
)
def test_what_cannot_stop_early_is_refused_before_training(run, options, message):
    with pytest.raises(running.SetupError, match=message):
        run("refused", *options)


def test_a_threshold_alone_says_nothing():
    options = TrainArguments(early_stopping_threshold=0.1)
    with pytest.raises(ValueError, match="says nothing without --early_stopping_patience"):
        stopping.check_early_stopping(options, TurnGRPOConfig("unused", use_cpu=True, bf16=False))


def test_the_closing_sentence():
    summary = {
        "updates": 50,
        "stopped_early": False,
        "convergence": {"verdict": "converged", "slope": 0.001, "interval": [-0.002, 0.004]},
        "best": {
            "metric": "eval_reward",
            "value": 1.25,
            "update": 40,
            "checkpoint": None,
            "evaluations": 5,
            "as_good": 1,
        },
        "exported": {"version": None, "update": 50, "is_best": False},
    }
    assert stopping.ending(summary) == (
        "50 updates; validation reward: converged (+0.001 per update, 95% [-0.002, +0.004]); best eval_reward 1.25 at "
        "update 40, without a checkpoint; model/ is the last, of update 50"
    )
    summary |= {"updates": 1, "exported": {"version": "v0001", "update": 1, "is_best": True}}
    summary["best"] |= {"update": 1, "checkpoint": "checkpoint-1", "evaluations": 3, "as_good": 3}
    assert stopping.ending(summary).startswith("1 update; ") and stopping.ending(summary).endswith(
        "at checkpoint-1, as in 3 evaluations of 3; adapter v0001 is the last, of update 1"
    )
