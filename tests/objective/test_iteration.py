"""One rollout as data: rewards, both baselines, strict format, and slices whose weights make the objective."""

import itertools

import pytest
import torch

from turngrpo.trainer.config import TurnGRPOConfig
from turngrpo.trainer.objective.iteration import objective_weights, score_rollout, training_slices, weighted_sum
from turngrpo.trainer.reading.rollout import Trajectory, Turn

NAN = float("nan")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("out"))
    return TurnGRPOConfig(folder, report_to="none", bf16=False, use_cpu=True, scale_rewards="none", alpha=0.75)


def reading(group, member, lengths, parsed=True, answer=True, row=None):
    """A trajectory whose turns have completions of these lengths; the last one is the answer turn."""
    steps = [*range(1, len(lengths)), None] if answer else range(1, len(lengths) + 1)
    turns = [Turn(s, [5], [6] * n, [-1.0] * n, "eos", "") for s, n in zip(steps, lengths, strict=True)]
    return Trajectory({} if row is None else {"id": row}, group, member, turns, parsed=parsed)


def score(trajectories, rewards, turn_rewards, config, strict=True, weights=None):
    per_func = torch.tensor(rewards, dtype=torch.float32)
    per_turn = torch.tensor(turn_rewards, dtype=torch.float32).reshape(sum(len(t.turns) for t in trajectories), -1)
    options = config.advantage_options() | {"reward_weights": weights, "strict_format": strict}
    return score_rollout(trajectories, 3, per_func, per_turn, **options)


# ---- rewards and advantages ----


def test_score_by_hand(config):
    trajectories = [reading(0, 0, [2, 3]), reading(0, 1, [1, 1, 1]), reading(1, 0, [4, 4]), reading(1, 1, [4, 4])]
    scored = score(
        trajectories,
        [[1.0, 0.5], [0.0, -0.5], [1.0, 1.0], [1.0, 1.0]],
        [1.0, NAN, -1.0, 1.0, NAN, 1.0, NAN, -1.0, NAN],
        config,
        weights=[1.0, 2.0],
    )
    # r = first + 2 * second: 2, -1, 3, 3. Group means 0.5 and 3, so A_traj = 1.5, -1.5, 0, 0.
    assert scored.rewards.tolist() == [2.0, -1.0, 3.0, 3.0]
    # Turns at step 1 of group 0: 1, -1, mean 0; step 2 has one turn: 0. Group 1 at step 1: 1, -1. Answers: 0.
    # A = 0.75 * A_traj + 0.25 * A_turn. One baseline over all steps of group 0 (mean 1/3) would give 1.292 first.
    a = [0.75 * 1.5 + 0.25, 0.75 * 1.5, -0.75 * 1.5 - 0.25, -0.75 * 1.5, -0.75 * 1.5, 0.25, 0.0, -0.25, 0.0]
    assert scored.advantages.tolist() == pytest.approx(a)
    assert a[:4] == [1.375, 1.125, -1.375, -1.125]
    assert scored.trajectory_ids.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert scored.group_ids.tolist() == [0, 0, 1, 1]
    assert scored.constant_groups() == [False, True]
    assert [len(t.completion_ids) for t in scored.turns] == [2, 3, 1, 1, 1, 4, 4, 4, 4]


def test_batch_baseline_compares_the_same_step_of_every_group(config, tmp_path):
    batch = TurnGRPOConfig(str(tmp_path), report_to="none", bf16=False, use_cpu=True, alpha=0.0, turn_baseline="batch")
    trajectories = [reading(0, 0, [1, 1]), reading(0, 1, [1, 1, 1]), reading(1, 0, [1, 1]), reading(1, 1, [1, 1])]
    turn_rewards = [1.0, NAN, 1.0, 1.0, NAN, -1.0, NAN, -1.0, NAN]
    # Step 1 over all: 1, 1, -1, -1, mean 0. Within their groups all are equal: 0.
    advantages = score(trajectories, [[0.0]] * 4, turn_rewards, batch).advantages.tolist()
    assert advantages == [1.0, 0.0, 1.0, 0.0, 0.0, -1.0, 0.0, -1.0, 0.0]
    assert score(trajectories, [[0.0]] * 4, turn_rewards, config).advantages.tolist() == [0.0] * 9


def test_scaling_by_the_group(tmp_path):
    scaled = TurnGRPOConfig(
        str(tmp_path), report_to="none", bf16=False, use_cpu=True, scale_rewards="group", alpha=1.0
    )
    trajectories = [reading(0, m, [1], answer=False) for m in range(4)]
    # Population std of 1, 0, 1, 0 is 0.5, so 0.5 / 0.5; with the sample std 0.577 it would be 0.866.
    advantages = score(trajectories, [[1.0], [0.0], [1.0], [0.0]], [NAN] * 4, scaled).advantages.tolist()
    assert advantages == pytest.approx([1.0, -1.0, 1.0, -1.0], abs=1e-6)
    same = score(trajectories, [[0.7]] * 4, [NAN] * 4, scaled)
    assert same.advantages.tolist() == [0.0] * 4 and same.constant_groups() == [True]


def test_strict_format_sets_an_unparsed_trajectory_to_zero_whatever_its_rewards(config):
    trajectories = [reading(0, 0, [1, 1]), reading(0, 1, [1, 1], parsed=False), reading(0, 2, [1, 1], parsed=False)]
    rewards = [[1.0], [5.0], [NAN]]
    scored = score(trajectories, rewards, [1.0, NAN, -1.0, NAN, NAN, NAN], config)
    assert scored.rewards.tolist()[:2] == [1.0, 0.0] and scored.rewards[2].isnan()  # not 5; None wins over strict
    # Means: 1/2 over the two that were judged, 0 over the turn rewards at step 1, which strict format leaves alone.
    a = [0.75 * 0.5 + 0.25, 0.75 * 0.5, -0.75 * 0.5 - 0.25, -0.75 * 0.5, 0.0, 0.0]
    assert scored.advantages.tolist() == pytest.approx(a)
    # What the functions gave stays on record.
    assert scored.rewards_per_func[1].tolist() == [5.0]
    loose = score(trajectories, rewards, [1.0, NAN, -1.0, NAN, NAN, NAN], config, strict=False)
    assert loose.rewards.tolist()[:2] == [1.0, 5.0] and loose.rewards.isnan().tolist() == [False, False, True]


def test_rewards_that_do_not_apply(config):
    trajectories = [reading(0, m, [1], answer=False) for m in range(3)]
    scored = score(trajectories, [[1.0, NAN], [NAN, NAN], [NAN, 0.5]], [NAN] * 3, config)
    assert scored.rewards.tolist()[::2] == [1.0, 0.5] and scored.rewards.isnan().tolist() == [False, True, False]
    # Mean over the two that have a reward, 0.75; as zero the NaN would pull it to 0.5.
    assert scored.advantages.tolist() == pytest.approx([0.75 * 0.25, 0.0, -0.75 * 0.25])
    nobody = score(trajectories, [[NAN]] * 3, [NAN] * 3, config)
    assert nobody.advantages.tolist() == [0.0] * 3 and nobody.constant_groups() == [True]
    none = score_rollout(trajectories, 0, torch.ones(3, 1), torch.zeros(3, 0), strict_format=True)
    assert none.advantages.tolist() == [0.0] * 3  # no turn reward functions


def test_turn_reward_weights(tmp_path):
    weighted = TurnGRPOConfig(
        str(tmp_path), report_to="none", bf16=False, use_cpu=True, alpha=0.0, turn_reward_weights=[1.0, 3.0]
    )
    trajectories = [reading(0, 0, [1], answer=False), reading(0, 1, [1], answer=False)]
    # 1 + 3 * 2 = 7 and (only the first applies) 1: mean 4. Unweighted: 3 and 1, so +-1.
    scored = score(trajectories, [[0.0], [0.0]], [[1.0, 2.0], [1.0, NAN]], weighted)
    assert scored.advantages.tolist() == [3.0, -3.0]


def test_a_turn_outside_the_step_count_gets_no_turn_advantage(config):
    trajectories = [reading(0, 0, [1, 1]), reading(0, 1, [1, 1])]
    # The answer turns are rewarded 9 and -9 by a function that should not have: they are compared with nobody.
    scored = score(trajectories, [[0.0], [0.0]], [0.0, 9.0, 0.0, -9.0], config)
    assert scored.advantages.tolist() == [0.0] * 4


def test_weighted_sum():
    values = torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN], [0.0, 0.0]])
    total, _ = weighted_sum(values, [1.0, 10.0])
    assert total.tolist()[:2] == [21.0, 20.0] and total[2].isnan() and total[3] == 0
    assert weighted_sum(torch.zeros(2, 0), [])[0].isnan().all()
    with pytest.raises(ValueError, match="found 1 weights for 2 reward functions: expected one for each"):
        weighted_sum(values, [0.7])  # would be broadcast


# Members whose terms sum to one number: by members, then by functions.
SAME_SUMS = {
    "two functions": ([[0.0, 0.7], [0.1, 0.6]], None),  # 0.699999988 and 0.700000025 in float32: +-0.7488 by their std
    "three functions": ([[0.1, 0.4, 0.2], [0.1, 0.2, 0.4]], None),
    "another order": ([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]], None),  # 0.6000000000000001 and 0.6
    "weights": ([[1.0, 0.0], [0.4, 1.4]], [0.7, 0.3]),  # 0.7 and 0.28 + 0.42
}


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rewards", "weights"), SAME_SUMS.values(), ids=SAME_SUMS)
def test_rounding_invents_no_winner(rewards, weights, dtype, scale):
    trajectories = [reading(0, m, [1], answer=False) for m in range(2)]
    options = {"alpha": 1.0, "scale_rewards": scale, "reward_weights": weights}
    scored = score_rollout(trajectories, 0, torch.tensor(rewards, dtype=dtype), torch.zeros(2, 0), **options)
    assert scored.advantages.tolist() == [0.0, 0.0] and scored.constant_groups() == [True]
    # A difference that the terms can tell apart stays one.
    rewards = torch.tensor(rewards, dtype=dtype) + torch.tensor([[1e-5], [0.0]], dtype=dtype)
    scored = score_rollout(trajectories, 0, rewards, torch.zeros(2, 0), **options)
    assert scored.advantages[0] > 0 > scored.advantages[1] and scored.constant_groups() == [False]


def test_no_three_twentieths_of_one_sum_differ():
    """All 10,660 triples a < b < c of twentieths up to 2: c, a, b is the same reward."""
    twentieths = [i / 20 for i in range(41)]
    triples = list(itertools.combinations(twentieths, 3))
    assert len(triples) == 10_660
    rewards = torch.tensor([member for a, b, c in triples for member in ((a, b, c), (c, a, b))], dtype=torch.float64)
    trajectories = [reading(group, m, [1], answer=False) for group in range(len(triples)) for m in range(2)]
    turns = torch.zeros(len(trajectories), 0)
    scored = score_rollout(trajectories, 0, rewards, turns, alpha=1.0, scale_rewards="group")
    assert scored.advantages.abs().max() == 0 and all(scored.constant_groups())
    plain = rewards.float().sum(1).view(-1, 2)
    assert (plain[:, 0] != plain[:, 1]).sum() > 1000  # which plain float32 sums tell apart


def test_turn_rewards_that_differ_by_rounding_are_equal():
    trajectories = [reading(0, m, [1], answer=False) for m in range(2)]
    turns = torch.tensor([[0.0, 0.7], [0.1, 0.6]])
    scored = score_rollout(trajectories, 0, torch.zeros(2, 1), turns, alpha=0.0)
    assert scored.advantages.tolist() == [0.0, 0.0]


def test_a_member_that_nobody_judged_takes_part_in_nothing():
    """Rewards 2, 1, None, 2: the mean is 5/3 of three. As 0 the third would make it 5/4, and lose itself."""
    trajectories = [reading(0, m, [2, m + 1], parsed=m != 2) for m in range(4)]
    per_func = torch.tensor([[2.0], [1.0], [NAN], [2.0]])
    for strict in (True, False):
        scored = score_rollout(trajectories, 0, per_func, torch.zeros(8, 0), alpha=1.0, strict_format=strict)
        a = [1 / 3, 1 / 3, -2 / 3, -2 / 3, 0.0, 0.0, 1 / 3, 1 / 3]
        assert scored.advantages.tolist() == pytest.approx(a)  # wrong: .75, -.25, -1.25, .75
        assert scored.judged.tolist() == [True, True, False, True]
    # Turns of 2 and 1, 2 and 2, (2 and 3), 2 and 4 tokens: denominators of three members and of 3 + 4 + 6 tokens.
    expected = {
        "grpo": [1 / 12, 1 / 6, 1 / 12, 1 / 12, 0, 0, 1 / 12, 1 / 24],
        "group": [1 / 13, 1 / 13, 1 / 13, 1 / 13, 0, 0, 1 / 13, 1 / 13],
        "dapo": [1 / 13, 1 / 13, 1 / 13, 1 / 13, 0, 0, 1 / 13, 1 / 13],
    }
    for loss_type, weights in expected.items():
        assert objective_weights(scored, range(4), loss_type).tolist() == pytest.approx(weights)
    assert objective_weights(scored, [2], "grpo").tolist() == [0.0] * 8


def test_a_turn_reward_judges_too():
    trajectories = [reading(0, m, [1, 1]) for m in range(2)]
    turns = torch.tensor([[1.0], [NAN], [NAN], [NAN]])
    scored = score_rollout(trajectories, 0, torch.tensor([[NAN], [NAN]]), turns)
    assert scored.judged.tolist() == [True, False]


def test_turn_names(config):
    trajectories = [reading(0, 0, [1, 1], row="a"), reading(0, 1, [1, 1, 1], row="a"), reading(4, 0, [1, 1])]
    scored = score(trajectories, [[0.0]] * 3, [NAN] * 7, config)
    assert scored.turn_name(3) == "iteration 3, group 0 (row 'a'), member 1, turn 1"
    assert scored.turn_name(4) == "iteration 3, group 0 (row 'a'), member 1, turn 2"
    assert scored.turn_name(6) == "iteration 3, group 4, member 0, turn 1"


# ---- slices ----


def rollout(config):
    """Two groups of two: trajectories of 2 + 4, 1 + 1 + 2, 3 and 5 + 1 tokens."""
    trajectories = [reading(0, 0, [2, 4]), reading(0, 1, [1, 1, 2]), reading(1, 0, [3]), reading(1, 1, [5, 1])]
    return score(trajectories, [[1.0], [0.0], [1.0], [0.0]], [NAN] * 8, config)


def test_weights_of_every_loss_type_by_hand(config):
    scored = rollout(config)
    # grpo: tokens of the response * turns * 2 trajectories * 2 groups: 2*2*4, 4*2*4; 1*3*4, 1*3*4, 2*3*4; 3*1*4; ...
    weights = objective_weights(scored, range(4), "grpo")
    assert weights.tolist() == pytest.approx([1 / n for n in (16, 32, 12, 12, 24, 12, 40, 8)])
    # group: 6 + 4 = 10 tokens in group 0, 3 + 6 = 9 in group 1, two groups.
    weights = objective_weights(scored, range(4), "group")
    assert weights.tolist() == pytest.approx([1 / 20] * 5 + [1 / 18] * 3)
    # dapo: 19 tokens.
    weights = objective_weights(scored, range(4), "dapo")
    assert weights.tolist() == pytest.approx([1 / 19] * 8)
    # Of the second group alone: its own tokens only.
    weights = objective_weights(scored, [2, 3], "group")
    assert weights.tolist() == pytest.approx([0] * 5 + [1 / 9] * 3)


@pytest.mark.parametrize("loss_type", ["grpo", "group", "dapo"])
@pytest.mark.parametrize(
    ("size", "per_update", "owners"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (2, 1, [[0, 1], [2, 3]]),
        (2, 2, [[0, 1], [2, 3]]),
        (1, 2, [[0], [1], [2], [3]]),
        (1, 4, [[0], [1], [2], [3]]),
    ],
)
def test_slices_keep_groups_whole_per_update_and_weigh_one(config, loss_type, size, per_update, owners):
    scored = rollout(config)
    slices = training_slices(scored, size, per_update, loss_type)
    assert [sorted({int(scored.trajectory_ids[i]) for i in part.indices}) for part in slices] == owners
    assert sorted(i for part in slices for i in part.indices) == list(range(8))  # every turn once
    whole = objective_weights(scored, range(4), loss_type)
    for start in range(0, len(slices), per_update):
        update = slices[start : start + per_update]
        members = [i for part in update for i in part.indices]
        groups = scored.group_ids[scored.trajectory_ids[members]].unique().tolist()
        for group in groups:  # nobody of a group is missing from the update
            inside = {int(scored.trajectory_ids[i]) for i in members}
            assert inside >= {i for i, g in enumerate(scored.group_ids.tolist()) if g == group}
        total = sum(
            float(part.weights[i]) * len(scored.turns[i].completion_ids) for part in update for i in part.indices
        )
        assert total == pytest.approx(1, abs=1e-12)
        if len(members) == 8:  # cutting the step into slices changes no weight
            assert all(torch.equal(part.weights, whole) for part in update)
