"""What a run shows: a few turns, a warning of rewards that tell nothing apart, a bar of every long stage."""

import contextlib
import io
import warnings

import pytest
from datasets import Dataset
from training import make_trainer

from turngrpo.trainer.measuring import update_log
from turngrpo.trainer.measuring.update_log import CONSTANT_ROLLOUTS, shortened
from turngrpo.trainer.reading import rollout


def constant_reward(completions, **columns):
    return [0.5] * len(completions)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Return (what a run of constant rewards printed on stdout, on stderr, its warnings); it evaluates once."""
    patch = pytest.MonkeyPatch()
    patch.setenv("COLUMNS", "70")
    sizes = {"max_steps": CONSTANT_ROLLOUTS + 1, "learning_rate": 0.0, "logging_steps": 3, "beta": 0.1}
    evaluation = {"eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 8}
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        make_trainer(
            tmp_path_factory.mktemp("shown"),
            reward_funcs=constant_reward,
            eval_dataset=Dataset.from_dict({"prompt": ["red is", "blue is"]}),
            log_completions=True,
            disable_tqdm=False,
            behavior_check="all",
            **sizes,
            **evaluation,
        ).train()
    patch.undo()
    return out.getvalue(), err.getvalue(), [str(one.message) for one in said]


def test_constant_groups_are_warned_of_once(shown):
    found = [text for text in shown[2] if "frac_reward_zero_std" in text]
    assert len(found) == 1  # six rollouts in a row, and one warning at the fifth
    assert found[0].startswith("in each of the last 5 rollouts all members of every group had the same reward")


def test_rewards_that_differ_are_not_warned_of(tmp_path):
    trainer = make_trainer(tmp_path)
    log = trainer.update_log
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for values in ([1.0] * 4, [0.5], [1.0] * 4):  # nine rollouts, no five in a row
            for value in values:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(update_log, "scored_metrics", lambda *given, v=value: {"frac_reward_zero_std": v})
                    log.add_rollout(None, 0)


def test_every_long_stage_has_a_bar(shown):
    bars = shown[1]
    for label in ("rollout 1:", "behavior check:", "update 2: optimisation:", "evaluation:", "evaluation: scoring:"):
        assert label in bars, label


def test_bars_are_hidden_where_they_are_not_wanted(capsys):
    with rollout.progress("update 1", 3, "turn", hidden=True) as bar:
        bar.update(3)
    assert capsys.readouterr().err == ""


def test_a_few_turns_are_printed_one_below_the_other(shown):
    lines = shown[0].splitlines()
    heads = [line for line in lines if line.startswith(("update 3, split train", "─ update 3, split train"))]
    assert len(heads) == update_log.SHOWN_TURNS
    blocks = [line for i, head in enumerate(lines) if head in heads for line in lines[i : i + 3]]
    assert max(map(len, blocks)) <= 70
    assert "constant_reward 0.5  length_turn_reward" in shown[0] and "advantage +" in shown[0]
    assert "┃" not in shown[0]  # no table of narrow columns


def test_a_long_text_keeps_its_ends():
    text = "a" * 350 + "b" * 350
    assert shortened(text) == "a" * 300 + " ... [100 characters] ... " + "b" * 300
    assert shortened("a" * 600) == "a" * 600
