"""Every logged name of a rollout by hand."""

import pytest
import torch

from turngrpo.trainer.measuring.metrics import Meter, exit_kind, rollout_metrics, scored_metrics
from turngrpo.trainer.objective.iteration import score_rollout
from turngrpo.trainer.reading.gates import GateDecision
from turngrpo.trainer.reading.rollout import Trajectory, Turn

NAN = float("nan")
YES, NO = GateDecision(True, "x", False), GateDecision(False, "", False)


def turn(step, decision=None, evidence=None, tokens=2, finish="eos", cut=False):
    return Turn(step, [5], [6] * tokens, [-1.0] * tokens, finish, "", decision, evidence, cut)


def reading(turns, **values):
    row = {"answers": ["Paris", "Paris, France"]}
    defaults = {"memory": "m", "exit_step": 1, "last_evidence": 1, "memory_tokens": 3}
    return Trajectory(row, values.pop("group", 0), values.pop("member", 0), turns, **(defaults | values))


PARSED = reading(  # 2 of 3 gates right, exact exit at 3, right answer
    [
        turn(1, YES, evidence=True, tokens=3),
        turn(2, YES, evidence=False, tokens=4, cut=True),
        turn(3, YES, evidence=True, cut=True),
        turn(None, tokens=1),
    ],
    exit_step=3,
    last_evidence=3,
    answer="the paris",
    memory_tokens=10,
)
UNPARSED = reading(  # one gate right, one unparsed, which counts as wrong; would be an exact exit
    [turn(1, NO, evidence=False), turn(2, None, evidence=False, finish="length", tokens=8), turn(None, tokens=6)],
    member=1,
    exit_step=2,
    last_evidence=2,
    parsed=False,
    answer="Paris",
    memory_tokens=4,
)
EARLY = reading([turn(1, NO, evidence=True), turn(None)], group=1, exit_step=1, last_evidence=2, answer=None)
LATE = reading(
    [turn(1, NO, evidence=True), turn(2, NO, evidence=None), turn(None)],
    group=1,
    member=1,
    exit_step=2,
    last_evidence=1,
    answer="Rome",
    memory_tokens=0,
)
ALL = [PARSED, UNPARSED, EARLY, LATE]


def test_every_metric_of_a_rollout_by_hand():
    assert rollout_metrics(ALL) == {
        # Evidence chunks: yes, yes, no, no -> 2 of 4. The mean of the trajectories' own rates would be (1+0+0)/3.
        "update_accuracy/evidence": 0.5,
        # Evidence-free: yes (wrong), no (right), unparsed (wrong) -> 1 of 3; without the unparsed one 1 of 2.
        "update_accuracy/evidence_free": pytest.approx(1 / 3),
        # Mean of the two sides, 5/12; over all 7 labelled turns together it would be 3/7.
        "update_accuracy/balanced": pytest.approx(5 / 12),
        "exit/exact": 0.25,  # PARSED alone: the unparsed one also left at T*, and is no exact exit
        "exit/early": 0.25,
        "exit/late": 0.25,
        "format/parsed": 0.75,
        "answer/accuracy": 0.5,  # "the paris" and "Paris"; no answer and "Rome" are wrong
        "turns/mean": 2.0,  # chunk turns: 3, 2, 1, 2; with the answer turns 3
        "response_tokens/mean": (10 + 16 + 4 + 6) / 4,
        "memory_tokens/mean": (10 + 4 + 3 + 0) / 4,
        "memory/cut": 0.5,  # cuts per trajectory: 2, 0, 0, 0
    }


@pytest.mark.parametrize(
    ("exit_step", "last_evidence", "parsed", "kind"),
    [
        (3, 3, True, "exact"),
        (3, 3, False, None),
        (2, 3, True, "early"),
        (2, 3, False, "early"),
        (4, 3, True, "late"),
        (4, 3, False, "late"),
        (None, 3, True, None),
        (3, None, True, None),
    ],
)
def test_exit_kind(exit_step, last_evidence, parsed, kind):
    assert exit_kind(Trajectory({}, 0, 0, exit_step=exit_step, last_evidence=last_evidence, parsed=parsed)) == kind


def test_names_without_an_observation_are_left_out():
    single = Trajectory({"prompt": "p"}, 0, 0, [turn(1)])  # a SingleTurn row: no memory, no labels, no answers
    assert rollout_metrics([single]) == {"format/parsed": 1.0, "turns/mean": 1.0, "response_tokens/mean": 2.0}
    one_sided = reading([turn(1, YES, evidence=True), turn(None)], answer="Paris")
    metrics = rollout_metrics([one_sided])
    assert metrics["update_accuracy/evidence"] == 1.0  # and no balanced accuracy of one side alone
    assert "update_accuracy/evidence_free" not in metrics and "update_accuracy/balanced" not in metrics
    assert "update_accuracy/evidence" not in rollout_metrics([reading([turn(1, YES, evidence=None), turn(None)])])
    unlabelled = rollout_metrics([reading([turn(1)], last_evidence=None)])
    assert not [name for name in unlabelled if name.startswith("exit/")]
    assert rollout_metrics([]) == {}


@pytest.fixture(scope="module")
def scored():
    per_func = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, NAN], [0.0, 0.0]])
    per_turn = torch.tensor([[1.0], [-1.0], [1.0], [NAN], [1.0], [-1.0], [NAN], [-1.0], [NAN], [-1.0], [NAN], [NAN]])
    return score_rollout(ALL, 0, per_func, per_turn, strict_format=True)


def test_scored_metrics_by_hand(scored):
    metrics = scored_metrics([scored], ["answer_reward", "format_reward"], ["update_reward"])
    expected = {
        "rewards/answer_reward/mean": 0.5,
        "rewards/answer_reward/std": (1 / 3) ** 0.5,  # sample std of 1, 1, 0, 0, as TRL's
        "rewards/format_reward/mean": 1 / 3,  # over the three where it applied; not 1/4
        "rewards/format_reward/std": (1 / 3) ** 0.5,  # of 1, 0, 0
        "rewards/update_reward/mean": (3 - 4) / 7,  # over the 7 labelled turns of 12
        "reward": 0.5,  # trained rewards: 2, 0 (strict format, not 1), 0, 0
        "reward_std": 1.0,  # deviations 1.5, -0.5 three times: 3 / 3
        "frac_reward_zero_std": 0.5,  # group 1 is 0, 0
        "completions/mean_length": (3 + 4 + 2 + 1 + 2 + 8 + 6 + 2 + 2 + 2 + 2 + 2) / 12,
        "completions/min_length": 1.0,
        "completions/max_length": 8.0,
        "completions/mean_terminated_length": 28 / 11,  # without the one of 8 that was cut
        "completions/min_terminated_length": 1.0,
        "completions/max_terminated_length": 6.0,
        "completions/clipped_ratio": 1 / 12,
        "exit/exact": 0.25,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6), name
    assert metrics.items() >= rollout_metrics(ALL).items()


def test_several_rollouts_are_pooled(scored):
    once = scored_metrics([scored], ["a", "f"], ["u"])
    twice = scored_metrics([scored, scored], ["a", "f"], ["u"])
    assert twice["reward"] == once["reward"] and twice["frac_reward_zero_std"] == 0.5  # 2 of 4 groups
    assert twice["rewards/a/std"] == pytest.approx((8 * 0.25 / 7) ** 0.5)  # of 8 rewards, not a mean of two stds


def test_meter():
    meter = Meter()
    # Micro-batches of 1 and 3 tokens with means 4 and 0: (4 + 0) / 4, not (4 + 0) / 2.
    meter.add_mean("ratio/mean", 4.0, 1)
    meter.add_mean("ratio/mean", 0.0, 3)
    meter.add_mean("kl", 0.0, 0)  # nothing observed
    meter.add_peak("ratio/max", -2.0)
    meter.add_peak("ratio/max", -3.0)
    assert meter.flush() == {"ratio/mean": 1.0, "ratio/max": -2.0}  # a peak may be negative
    assert meter.flush() == {}
    meter.add_mean("ratio/mean", 6.0, 2)
    assert meter.flush() == {"ratio/mean": 3.0}
