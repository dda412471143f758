"""One group of four responses by hand: equal rewards teach nothing, two winners of four teach literal numbers."""

import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from training import PROMPTS, gradients, make_trainer, relative_gap

from turngrpo.trainer import SingleTurn
from turngrpo.trainer.measuring.metrics import scored_metrics
from turngrpo.trainer.objective.advantages import trajectory_advantages
from turngrpo.trainer.objective.losses import clipped_surrogate, token_weights
from turngrpo.trainer.reading.rollout import Completion

LENGTHS = (1, 2, 4, 5)  # response tokens of the four members, 12 together
CONSTANT = ([0, 0, 0, 0], [1, 1, 1, 1])
MIXED = [1, 0, 1, 0]
# Mean 0.5, population std 0.5: 0.5 / (0.5 + 1e-8) = 0.99999998. The sample std 0.577 would give 0.8660254.
SCALED = {"none": 0.5, "group": 0.99999998}
# grpo: -A / (tokens of the response * 4 responses), for A = 1, -1, 1, -1.
GRPO = [-1 / 4, 1 / 8, -1 / 16, 1 / 20]
# dapo, and group where there is one: -A / 12 tokens.
SHARED = [-1 / 12, 1 / 12, -1 / 12, 1 / 12]


def advantages_of(rewards, scale):
    return trajectory_advantages(torch.tensor(rewards).double(), torch.zeros(4, dtype=torch.long), scale)


def one_group(folder, rewards, **options):
    """Return a float64 trainer of one prompt whose four responses are cut to LENGTHS and get these rewards."""
    trainer = make_trainer(
        folder,
        SingleTurn(),
        torch.float64,
        dataset=Dataset.from_dict({"prompt": PROMPTS[:1]}),
        reward_funcs=lambda completions, **columns: list(rewards),
        turn_reward_funcs=None,
        **{"alpha": 1.0, "per_device_train_batch_size": 4, "max_steps": 1, "seed": 5} | options,
    )
    generate = trainer.engine.generate

    def cut(requests):
        sampled = zip(generate(requests), LENGTHS, strict=True)
        return [Completion(c.ids[:length], c.behavior_logprobs[:length], "length") for c, length in sampled]

    trainer.engine.generate = cut
    return trainer


def keep_scores(trainer):
    """Collect the log-probabilities (n, T) of every micro-batch with the gradient that reaches them, by row length."""
    kept, scorer = {}, trainer.scorer

    def keeping(*arguments):
        for rows, batch, scores in scorer.score(*arguments):
            scores.logprobs.retain_grad()
            kept.update({int(length): (scores.logprobs, row) for row, length in enumerate(batch.mask.sum(1))})
            yield rows, batch, scores

    trainer.scorer = SimpleNamespace(plan=scorer.plan, score=keeping)
    return kept


# ---- the pure functions ----


@pytest.mark.parametrize("scale", ["none", "group"])
def test_advantages(scale):
    for rewards in CONSTANT:
        assert advantages_of(rewards, scale).tolist() == [0, 0, 0, 0]
    a = SCALED[scale]
    assert advantages_of(MIXED, scale).tolist() == pytest.approx([a, -a, a, -a], rel=1e-14)


def test_what_wrong_divisions_give():
    rewards = torch.tensor([CONSTANT[0], CONSTANT[1], MIXED]).double()
    centred = rewards - rewards.mean(1, keepdim=True)
    by_zero, sample = centred / rewards.std(1, correction=0, keepdim=True), centred / rewards.std(1, keepdim=True)
    assert by_zero[:2].isnan().all()  # 0 / 0 where the rewards agree
    assert sample[2].tolist() == pytest.approx([3**0.5 / 2, -(3**0.5) / 2] * 2)
    assert abs(float(advantages_of(MIXED, "group")[0]) - 3**0.5 / 2) > 0.1


@pytest.mark.parametrize("loss_type", ["grpo", "group", "dapo"])
@pytest.mark.parametrize("scale", ["none", "group"])
def test_surrogate_objective_and_gradient_at_ratio_one(scale, loss_type):
    mask = torch.arange(5)[None] < torch.tensor(LENGTHS)[:, None]  # (4, 5)
    weights = token_weights(mask, torch.arange(4), torch.zeros(4, dtype=torch.long), loss_type, torch.float64)
    behavior = torch.linspace(-3, -0.1, 20, dtype=torch.float64).reshape(4, 5)

    def run(rewards):
        logprobs = behavior.clone().requires_grad_()
        loss, stats = clipped_surrogate(logprobs, behavior, advantages_of(rewards, scale), mask)
        objective = (weights * loss).sum()
        assert stats["ratio/mean"] == stats["ratio/max"] == 1 and stats["clip/active"] == 0
        return loss.detach(), objective.item(), torch.autograd.grad(objective, logprobs)[0]

    for rewards in CONSTANT:
        loss, objective, gradient = run(rewards)
        assert loss.eq(0).all() and objective == 0 and gradient.eq(0).all()

    a = SCALED[scale]
    loss, objective, gradient = run(MIXED)
    by_token = GRPO if loss_type == "grpo" else SHARED
    for member, length in enumerate(LENGTHS):
        assert loss[member, :length].tolist() == pytest.approx([(-1) ** (member + 1) * a] * length, rel=1e-14)
        assert gradient[member, :length].tolist() == pytest.approx([by_token[member] * a] * length, rel=1e-14)
        assert gradient[member, length:].eq(0).all()
    # grpo: each response weighs a quarter whatever its length, so -(1 - 1 + 1 - 1) a / 4 = 0: a value of 0 is no
    # missing signal. Otherwise by tokens, -(1 - 2 + 4 - 5) a / 12 = a / 6: the long wrong response weighs more.
    assert objective == pytest.approx(0 if loss_type == "grpo" else a / 6, abs=1e-15)


# ---- the trainer ----


@pytest.mark.parametrize("scale", ["none", "group"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("rewards", [*CONSTANT, MIXED], ids=str)
def test_the_trainer_trains_on_these_numbers(rewards, loss_type, scale, tmp_path):
    trainer = one_group(tmp_path, rewards, beta=0.5, scale_rewards=scale, loss_type=loss_type)
    kept, losses = keep_scores(trainer), []
    step = trainer.training_step
    trainer.training_step = lambda *arguments: losses.append(float(step(*arguments)))
    found = gradients(trainer)
    rollout = trainer._buffered_inputs[0].rollout
    assert tuple(len(turn.completion_ids) for turn in rollout.turns) == LENGTHS
    assert rollout.constant_groups() == [rewards != MIXED]
    a = SCALED[scale] if rewards == MIXED else 0.0  # rewards are float32, where 0.99999998 is 1
    assert rollout.advantages.tolist() == pytest.approx([a, -a, a, -a], rel=3e-8, abs=0)
    for length, factor in zip(LENGTHS, GRPO if loss_type == "grpo" else SHARED, strict=True):
        logprobs, row = kept[length]
        expected = [factor * a] * length + [0.0] * (logprobs.shape[1] - length)
        assert logprobs.grad[row].tolist() == pytest.approx(expected, rel=3e-8, abs=0)
    # The KL at equality adds nothing to the value, and nothing to the gradient of the weights.
    assert losses == [pytest.approx(0 if loss_type == "grpo" else a / 6, abs=1e-7)]
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in found.values()))
    assert norm > 0.01 if rewards == MIXED else norm == 0


# Rewards 2, 1, None, 2 of 1, 2, (4) and 5 tokens: A = 1/3, -2/3, none, 1/3 over three members and 8 tokens.
UNJUDGED = {
    "grpo": [-1 / 9, 1 / 9, 0, -1 / 45],
    "group": [-1 / 24, 1 / 12, 0, -1 / 24],
}  # of four members: -1 / 12 first


@pytest.mark.parametrize("loss_type", ["grpo", "group", "dapo"])
def test_a_member_that_nobody_judged_is_in_no_denominator(loss_type, tmp_path):
    trainer = one_group(tmp_path, [2, 1, None, 2], loss_type=loss_type)
    kept = keep_scores(trainer)
    gradients(trainer)
    for length, factor in zip(LENGTHS, UNJUDGED["grpo" if loss_type == "grpo" else "group"], strict=True):
        logprobs, row = kept.get(length, (torch.zeros(1, 5, requires_grad=True), 0))
        found = torch.zeros(5) if logprobs.grad is None else logprobs.grad[row]
        assert found[:length].tolist() == pytest.approx([factor] * length, rel=3e-7, abs=0)


def test_the_kl_of_a_member_that_nobody_judged_is_not_trained(tmp_path):
    """Equal rewards leave the KL alone, whose gradient is the mean of those of the members that were judged."""

    def moved(rewards):
        trainer = one_group(tmp_path, rewards, beta=0.5)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(1.1)  # away from the reference
        return gradients(trainer), trainer

    alone = [moved([1 if i == member else None for i in range(4)])[0] for member in range(3)]
    found, trainer = moved([1, 1, 1, None])
    mean = {name: sum(one[name] for one in alone) / 3 for name in found}
    assert relative_gap(found, mean) < 1e-9
    assert relative_gap(alone[0], alone[1]) > 0.1  # where all four are trained, whoever was judged, these are equal
    assert scored_metrics([trainer._buffered_inputs[0].rollout], ["r"], [])["unjudged"] == 1.0


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("rewards", CONSTANT, ids=str)
def test_only_weight_decay_moves_a_policy_whose_rewards_are_equal(rewards, beta, tmp_path):
    trainer = one_group(
        tmp_path,
        rewards,
        beta=beta,
        scale_rewards="group",
        learning_rate=0.1,
        weight_decay=0.2,
        lr_scheduler_type="constant",
    )
    assert all(gradient.eq(0).all() for gradient in gradients(trainer).values())  # exactly, in every parameter
    trainer.model.zero_grad()
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["frac_reward_zero_std"] == 1 and log["grad_norm"] == 0 and log["loss"] == 0
    decayed = 0
    for name, p in trainer.model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # transformers' Trainer exempts both
            assert torch.equal(p, start[name]), name
        else:
            # 1 - 0.1 * 0.2. As a penalty in the loss (Adam with L2) every entry would move by the learning rate, 0.1.
            torch.testing.assert_close(p.detach(), start[name] * 0.98, rtol=1e-15, atol=0)
            decayed += 1
    assert decayed == 15  # the tied embedding, and seven matrices of either layer
