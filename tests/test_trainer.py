"""The trainer under a workflow: gradients against an independent reference, invariances, checks, options."""

import asyncio
import contextlib
import functools
import json
import math
import os
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import tiny_model, word_tokenizer
from training import (
    PROMPTS,
    first_batch,
    gradients,
    length_turn_reward,
    make_trainer,
    relative_gap,
    token_reward,
)
from transformers import Qwen2Config, Qwen2ForSequenceClassification, TrainerCallback
from trl import GRPOConfig

from turngrpo.rewards import answer_reward, exit_reward, format_reward, update_reward
from turngrpo.trainer import GatedMemory, MemAgent, SingleTurn, TurnGRPOConfig, TurnGRPOTrainer
from turngrpo.trainer.forward.scoring import fed_tokens

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def corpus(rows=4):
    text = "code of red is 1"
    return Dataset.from_list(
        [
            {
                "id": f"row-{i}",
                "question": "code of red",
                "answers": ["1"],
                "chunks": [
                    {"text": text if k == i % 3 else "blue is yet no", "evidence": k == i % 3} for k in range(3)
                ],
            }
            for i in range(rows)
        ]
    )


class Weights(TrainerCallback):
    def __init__(self):
        self.kept = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.kept.append({name: p.detach().clone() for name, p in model.named_parameters()})


# ---- the objective against an independent computation ----


def reference_gradient(trainer, rollout, model, reference, weights):
    """The objective from transformers' own logits, torch's log_softmax and kl_div, one row at a time, in float64."""
    model.zero_grad()
    total = 0.0
    for index, turn in enumerate(rollout.turns):
        ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
        start = len(turn.prompt_ids) - 1
        logits = model(input_ids=ids).logits[0, start:-1]
        with torch.no_grad():
            reference_logits = reference(input_ids=ids).logits[0, start:-1]
        logprobs = logits.log_softmax(-1)
        chosen = logprobs[torch.arange(len(turn.completion_ids)), torch.tensor(turn.completion_ids)]
        ratio = (chosen - torch.tensor(turn.behavior_logprobs, dtype=torch.float64)).exp()
        advantage = float(rollout.advantages[index])
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        kl = torch.nn.functional.kl_div(reference_logits.log_softmax(-1), logprobs, log_target=True, reduction="none")
        total = total + (weights[index] * (-surrogate + trainer.beta * kl.sum(-1))).sum()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def hand_weights(rollout, loss_type):
    """Literal reading of each loss type: one weight per turn."""
    owners, groups = rollout.trajectory_ids.tolist(), rollout.group_ids.tolist()
    tokens = [len(turn.completion_ids) for turn in rollout.turns]
    turns_of = [owners.count(b) for b in range(len(groups))]
    result = []
    for n, owner in enumerate(owners):
        group = groups[owner]
        in_group = sum(t for t, o in zip(tokens, owners, strict=True) if groups[o] == group)
        result.append(
            {
                "grpo": 1 / tokens[n] / turns_of[owner] / groups.count(group) / len(set(groups)),
                "group": 1 / in_group / len(set(groups)),
                "dapo": 1 / sum(tokens),
            }[loss_type]
        )
    return result


@pytest.mark.parametrize("loss_type", ["grpo", "group", "dapo"])
def test_gradient_equals_an_independent_float64_reference(loss_type, tmp_path):
    trainer = make_trainer(tmp_path, dtype=torch.float64, beta=0.3, loss_type=loss_type, num_iterations=2, seed=4)
    batch = first_batch(trainer)
    rollout = trainer._prepare_inputs(batch).rollout
    assert len({len(t.turns) for t in rollout.trajectories}) > 1  # unequal trajectories
    assert len({len(turn.completion_ids) for turn in rollout.turns}) > 1
    reference = tiny_model(len(trainer.processing_class), dtype=torch.float64)
    # Move the policy away from behavior and reference, so that ratios leave the clipping interval and KL is not 0.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.02 * noise)
    trainer._step = 1  # the second update on this rollout
    ours = gradients(trainer, batch)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert metrics["clip/active"] > 0.01 and metrics["kl"] > 1e-3 and metrics["clip/outside"] > metrics["clip/active"]
    model = tiny_model(len(trainer.processing_class), dtype=torch.float64)
    model.load_state_dict(trainer.model.state_dict())
    theirs = reference_gradient(trainer, rollout, model, reference, hand_weights(rollout, loss_type))
    assert relative_gap(ours, theirs) < 1e-10
    wrong = {"grpo": "dapo", "group": "dapo", "dapo": "group"}[loss_type]
    theirs = reference_gradient(trainer, rollout, model, reference, hand_weights(rollout, wrong))
    assert relative_gap(ours, theirs) > 1e-2


@pytest.mark.parametrize("loss_type", ["grpo", "group", "dapo"])
def test_splitting_a_step_does_not_change_its_gradient(loss_type, tmp_path):
    options = {"dtype": torch.float64, "beta": 0.1, "loss_type": loss_type}
    trainer = make_trainer(tmp_path, max_tokens_per_microbatch=10**6, **options)
    batch = first_batch(trainer)
    whole = gradients(trainer, batch)
    seen = []
    loss = trainer.compute_loss
    trainer.compute_loss = lambda model, batch: seen.append(len(batch.turns)) or loss(model, batch)
    rows = len(trainer._buffered_inputs[0].indices)
    rollout = trainer._buffered_inputs[0].rollout
    tokens = sum(fed_tokens(rollout.turns, part) for part in trainer.scorer.plan(rollout.turns, keys=rollout.clusters))
    for pieces in (2, 5):
        seen.clear()
        trainer._step, trainer.scorer = 1, replace(trainer.scorer, max_tokens=math.ceil(tokens / pieces))
        trainer.num_iterations = 100  # stay on the same rollout
        assert relative_gap(gradients(trainer, batch), whole) < 1e-10
        assert len(seen) >= pieces and sum(seen) == rows
    # The same eight trajectories as two slices of four with accumulation.
    accumulated = make_trainer(
        tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_tokens_per_microbatch=40, **options
    )
    assert relative_gap(gradients(accumulated, batch), whole) < 1e-10


@pytest.mark.parametrize(
    "change", [{"share_prefix": False}, {"rollout_batch_tokens": 30}, {"gradient_checkpointing": True}]
)
def test_how_it_is_computed_changes_nothing(change, tmp_path):
    options = {"dtype": torch.float64, "beta": 0.1}
    plain, changed = make_trainer(tmp_path, **options), make_trainer(tmp_path, **options, **change)
    expected, found = gradients(plain), gradients(changed)
    texts = [[turn.completion_ids for turn in t._buffered_inputs[0].rollout.turns] for t in (plain, changed)]
    assert texts[0] == texts[1]
    assert relative_gap(found, expected) < 1e-10


def test_every_prefix_goes_through_the_model_once_in_sampling_reference_and_training(tmp_path):
    trainer = make_trainer(tmp_path, beta=0.1, num_iterations=2, peft_config=LoraConfig(**LORA), behavior_check="off")
    seen, phase, timed = {}, [], trainer.update_log.timed

    @contextlib.contextmanager
    def watched(name):
        phase.append(name)
        with timed(name):
            yield
        phase.pop()

    trainer.update_log.timed = watched
    trainer.scorer = replace(trainer.scorer, timed=watched)
    layer = trainer.model.get_base_model().model.layers[0].mlp

    def count(module, inputs):
        hidden = inputs[0]
        seen[phase[-1]] = seen.get(phase[-1], 0) + hidden.shape[0] * hidden.shape[1]

    layer.register_forward_pre_hook(count)
    batch = first_batch(trainer)
    gradients(trainer, batch)
    turns, places = trainer._buffered_inputs[0].rollout.turns, trainer._buffered_inputs[0].rollout.places
    groups = {}
    for turn, (group, _, number) in zip(turns, places, strict=True):
        groups.setdefault((group, number), []).append(turn)
    assert max(map(len, groups.values())) == 4 > min(map(len, groups.values()))  # some readers left before others
    once = apart = 0
    for members in groups.values():
        prompts = [turn.prompt_ids for turn in members]
        shared = min(len(os.path.commonprefix(prompts)), min(map(len, prompts)) - 1) if len(members) > 1 else 0
        # All tokens but the last of a response are read, in sampling as in scoring; the shared ones once.
        lengths = [len(turn.prompt_ids) + len(turn.completion_ids) - 1 for turn in members]
        once, apart = once + shared + sum(lengths) - shared * len(members), apart + sum(lengths)
    assert seen == {"generation": once, "reference": once, "scoring": once} and once < apart
    log = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert log["tokens/generation"] == log["tokens/reference"] == log["tokens/scoring"] == once
    gradients(trainer, batch)  # the second update on this rollout: sampled and scored by the reference before
    assert seen == {"generation": once, "reference": once, "scoring": 2 * once}


# ---- behavior policy ----


@pytest.mark.parametrize("check", ["first", "all"])
def test_recorded_logprobs_are_reproduced_before_the_first_update_and_differ_after_it(check, tmp_path):
    trainer = make_trainer(tmp_path, num_iterations=2, behavior_check=check, learning_rate=3e-2)
    trainer.train()
    first, second = trainer.state.log_history[:2]
    assert first["behavior_gap/max"] < 2e-4
    assert first["ratio/max"] == pytest.approx(1, abs=2e-4)
    assert "behavior_gap/max" not in second  # another policy by now: its distance is the ratio's business
    assert abs(second["ratio/max"] - 1) > 1e-2


@pytest.mark.parametrize("check", ["first", "all"])
def test_a_tampered_record_is_caught_and_named(check, tmp_path):
    trainer = make_trainer(tmp_path, behavior_check=check)
    generate = trainer.engine.generate

    def tampered(requests):
        completions = generate(requests)
        if requests[0].key.turn == 0:
            completions[5].behavior_logprobs[-1] += 0.01
        return completions

    trainer.engine.generate = tampered
    with pytest.raises(
        RuntimeError, match=r"worst at iteration 0, group 1, member 1, turn 0, response position \d+, token"
    ):
        trainer.train()


def test_lower_precision_is_measured_and_limited_only_on_request(tmp_path):
    def bfloat16(**options):
        trainer = make_trainer(tmp_path, dtype=torch.bfloat16, max_steps=1, **options)
        generate = trainer.engine.generate

        def shifted(requests):
            completions = generate(requests)
            for completion in completions:
                completion.behavior_logprobs[0] += 0.01  # a gap that bfloat16 could have by rounding
            return completions

        trainer.engine.generate = shifted
        return trainer

    trainer = bfloat16()
    trainer.train()
    assert 0.005 < trainer.state.log_history[0]["behavior_gap/max"] < 1
    with pytest.raises(RuntimeError, match="allowed gap 0.0001"):
        bfloat16(behavior_tolerance=1e-4).train()


def test_dropout_is_zeroed_in_train_mode(tmp_path):
    tokenizer = word_tokenizer()
    model = tiny_model(len(tokenizer), attention_dropout=0.5)
    trainer = make_trainer(
        tmp_path, model=model, peft_config=LoraConfig(lora_dropout=0.5, **LORA), behavior_check="all"
    )
    trainer.train()  # the behavior check would fail with dropout
    assert trainer.model.training
    assert trainer.state.log_history[0]["behavior_gap/max"] < 2e-4


# ---- reference policy ----


@pytest.mark.parametrize("kind", ["full", "lora", "warm-started lora"])
def test_the_reference_is_the_policy_as_training_began(kind, tmp_path):
    tokenizer = word_tokenizer()
    model, peft_config = tiny_model(len(tokenizer), seed=5), None
    model.config._name_or_path = "no/such/path"  # a reload would fail
    if kind == "lora":
        peft_config = LoraConfig(**LORA)
    if kind == "warm-started lora":
        model = get_peft_model(model, LoraConfig(init_lora_weights=False, **LORA))
    trainer = make_trainer(tmp_path, model=model, peft_config=peft_config, beta=0.1, max_steps=3, weight_decay=0.1)
    before = trainer.reference.digest()
    frozen = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    kl = [entry["kl"] for entry in trainer.state.log_history[:3]]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[1] > 1e-6
    assert trainer.reference.digest() == before
    assert all(torch.equal(p, frozen[n]) for n, p in trainer.model.named_parameters() if n in frozen)
    if kind == "warm-started lora":
        assert list(trainer.model.peft_config) == ["default"]  # the copy is no adapter that a checkpoint could hold
        assert not any(".default." in name for name in frozen)
        next(iter(trainer.reference._kept.values())).data.add_(1e-3)
        assert trainer.reference.digest() != before


def test_a_reference_that_moves_is_an_error(tmp_path):
    trainer = make_trainer(tmp_path, beta=0.1)

    class Nudge(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with torch.no_grad():
                next(trainer.ref_model.parameters()).add_(1e-3)

    trainer.add_callback(Nudge())
    with pytest.raises(RuntimeError, match="reference policy changed"):
        trainer.train()


def test_k3_is_there_for_comparison(tmp_path):
    logs = {}
    for kl in ("exact", "k3"):
        trainer = make_trainer(tmp_path, beta=0.1, kl=kl, use_bias_correction_kl=False, max_steps=2)
        trainer.train()
        logs[kl] = [entry["kl"] for entry in trainer.state.log_history[:2]]
    assert logs["exact"][0] == pytest.approx(0, abs=1e-6) and logs["k3"][0] == pytest.approx(0, abs=1e-6)
    assert logs["exact"][1] > 0 and logs["k3"][1] > 0 and logs["exact"][1] != logs["k3"][1]


def test_an_adapter_that_is_not_trainable_is_an_error(tmp_path):
    tokenizer = word_tokenizer()
    get_peft_model(tiny_model(len(tokenizer)), LoraConfig(**LORA)).save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(tiny_model(len(tokenizer)), tmp_path / "adapter")
    with pytest.raises(ValueError, match="is_trainable=True"):
        make_trainer(tmp_path, model=model)


# ---- rewards ----


async def async_reward(completions, **columns):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


def partial_reward(trajectories, log_extra, log_metric, trainer_state, **columns):
    log_extra("note", [f"note {t.member}" for t in trajectories])
    log_metric("my_metric", 3.0)
    return [None if t.member == 0 else 1.0 for t in trajectories]


def test_trls_reward_machinery_works_under_a_workflow(tmp_path):
    tokenizer = word_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_labels=1,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    reward_model = Qwen2ForSequenceClassification(config)
    reward_model.config._name_or_path = "a/judge"
    trainer = make_trainer(
        tmp_path,
        tokenizer=tokenizer,
        reward_funcs=[async_reward, partial_reward, reward_model],
        reward_processing_classes=[None, None, tokenizer],
        reward_weights=[2.0, 1.0, 0.0],
        log_completions=True,
        max_steps=1,
    )
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["rewards/async_reward/mean"] == 0.5 and log["rewards/partial_reward/mean"] == 1.0
    assert "rewards/judge/mean" in log and log["my_metric"] == 3.0
    # members 1..3: 2 * 0.5 + 1 = 2; member 0: partial_reward does not apply, 2 * 0.5 = 1; mean 1.75, not 2 - 1/4 * 0.5
    assert log["reward"] == pytest.approx(1.75)
    advantages = {t.member: None for t in trainer._buffered_inputs[0].rollout.trajectories}
    assert len(advantages) == 4
    table = pq.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pylist()
    rollout = trainer._buffered_inputs[0].rollout
    assert len(table) == len(rollout.turns)  # one row per turn, not per trajectory
    assert table[0]["note"] == "note 0" and table[-1]["note"] == "note 3" and table[0]["split"] == "train"
    assert [row["advantage"] for row in table] == pytest.approx(rollout.advantages.tolist())
    assert {"group", "member", "step", "length_turn_reward", "judge"} <= table[0].keys()


def test_rewards_see_the_last_turn_in_trls_form(tmp_path):
    seen = {}

    def spy(prompts, completions, completion_ids, trajectories, answers, question, **columns):
        seen.update(locals())
        return [0.0] * len(prompts)

    trainer = make_trainer(
        tmp_path,
        GatedMemory(strict_format=False),
        dataset=corpus(),
        reward_funcs=spy,
        max_steps=1,
        turn_reward_funcs=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert seen["answers"][0] == ["1"] and seen["question"][0] == "code of red"
    trajectory = seen["trajectories"][0]
    assert seen["completion_ids"][0] == trajectory.turns[-1].completion_ids
    assert seen["prompts"][0][0]["role"] == "user" and "Answer the question" in seen["prompts"][0][0]["content"]
    assert list(seen["completions"][0][0]) == ["role", "content"]
    assert "<|im_end|>" not in seen["completions"][0][0]["content"]  # special tokens stripped, as TRL does


def test_a_reward_function_that_changes_its_arguments_changes_no_turn(tmp_path):
    def greedy_reward(completion_ids, **columns):
        for ids in completion_ids:
            ids.pop()
        return [float(len(ids)) for ids in completion_ids]

    trainer = make_trainer(tmp_path, reward_funcs=greedy_reward, max_steps=1)
    trainer.train()  # the behavior check would fail
    rollout = trainer._buffered_inputs[0].rollout
    assert all(len(turn.completion_ids) == len(turn.behavior_logprobs) for turn in rollout.turns)
    lengths = [len(trajectory.turns[-1].completion_ids) for trajectory in rollout.trajectories]
    assert rollout.rewards.tolist() == [length - 1 for length in lengths]


def test_turn_reward_functions_may_be_async(tmp_path):
    async def judge(trajectories, **columns):
        await asyncio.sleep(0)
        return [[2.0] * len(trajectory.turns) for trajectory in trajectories]

    trainer = make_trainer(tmp_path, turn_reward_funcs=judge, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/judge/mean"] == 2.0


def test_wrong_shapes_of_rewards_are_named(tmp_path):
    def short(trajectories, **columns):
        return [[1.0] for _ in trajectories]

    with pytest.raises(ValueError, match="turn reward function 'short' returned lists of lengths"):
        make_trainer(tmp_path, turn_reward_funcs=short).train()
    with pytest.raises(ValueError, match="turn_reward_weights has 1 numbers"):
        make_trainer(tmp_path, turn_reward_funcs=[short, length_turn_reward], turn_reward_weights=[1.0])


def test_groups_of_equal_rewards_have_zero_advantage_and_need_no_forward_without_beta(tmp_path):
    def constant(completions, **columns):
        return [0.7] * len(completions)

    scored = {}
    for beta in (0.0, 0.5):
        weights = Weights()
        trainer = make_trainer(
            tmp_path,
            reward_funcs=constant,
            turn_reward_funcs=None,
            alpha=1.0,
            beta=beta,
            weight_decay=0.1,
            learning_rate=0.1,
            max_steps=2,
            lr_scheduler_type="constant",
            callbacks=[weights],
        )
        trainer.train()
        log = trainer.state.log_history[0]
        assert log["frac_reward_zero_std"] == 1.0 and log["reward"] == pytest.approx(0.7)
        assert trainer._buffered_inputs[0].rollout.advantages.abs().max() == 0
        scored[beta] = log["tokens/scoring"]
        start, later = weights.kept
        # No reward signal and KL 0 at the start: only AdamW's decay, w * (1 - lr * decay) = 0.99 w, moves the weights.
        name = "model.layers.0.mlp.up_proj.weight"
        torch.testing.assert_close(later[name], start[name] * 0.99, rtol=1e-5, atol=1e-7)
    assert scored[0.0] == 0 and scored[0.5] > 0


# ---- nonfinite numbers ----


def test_a_nonfinite_loss_names_the_turn_and_keeps_the_rollout(tmp_path):
    trainer = make_trainer(tmp_path, behavior_check="off")
    score = trainer.scorer.score

    def poisoned(*arguments):
        for rows, batch, scores in score(*arguments):
            scores.logprobs[0, 0] = torch.nan
            yield rows, batch, scores

    trainer.scorer = SimpleNamespace(plan=trainer.scorer.plan, score=poisoned)
    with pytest.raises(
        FloatingPointError, match=r"loss or KL of iteration 0, group \d, member \d, turn \d is not finite"
    ):
        trainer.train()
    rows = pq.read_table(tmp_path / "nonfinite" / "rollout_00000.parquet").to_pylist()
    turns = trainer._buffered_inputs[0].rollout.turns
    assert [row["completion_ids"] for row in rows] == [turn.completion_ids for turn in turns]
    assert rows[0]["behavior_logprobs"] == turns[0].behavior_logprobs


def test_a_nonfinite_gradient_names_the_update_and_moves_no_weight(tmp_path):
    trainer = make_trainer(tmp_path)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.model.model.norm.weight.register_hook(lambda grad: grad * torch.inf)
    with pytest.raises(
        FloatingPointError, match=r"gradient of update 1 is not finite .* iteration 0, groups \[0, 1\]"
    ):
        trainer.train()
    assert (tmp_path / "nonfinite" / "rollout_00000.parquet").exists()
    assert all(torch.equal(p, start[name]) for name, p in trainer.model.named_parameters())


# ---- evaluation, logging, checkpoints ----


def test_a_loss_scaler_that_overflows_skips_the_update_and_goes_on(tmp_path, monkeypatch):
    # As accelerate sets it up for fp16 on a GPU; 2^127 overflows float32, 2^27 does not.
    monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")
    trainer = make_trainer(tmp_path, max_steps=3, dtype=torch.float32)
    trainer.policy.autocast = contextlib.nullcontext
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    weights = Weights()
    trainer.add_callback(weights)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history[:3]]
    assert not math.isfinite(norms[0]) and math.isfinite(norms[1]) and math.isfinite(norms[2])
    assert all(torch.equal(p, before[name]) for name, p in weights.kept[1].items())  # the first update was skipped
    assert any(not torch.equal(p, before[name]) for name, p in weights.kept[2].items())
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with pytest.raises(FloatingPointError, match="gradient of update"):
        trainer._get_grad_norm(trainer.model, float("nan"))  # not the scale's doing


def test_eval_metrics_are_exact_means_and_eval_loss_is_the_objective(tmp_path):
    # 5 rows x 2 generations in batches of 4: the last batch is half as large, so a mean of batch means would be wrong.
    trainer = make_trainer(
        tmp_path,
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:5]}),
        num_generations_eval=2,
        per_device_eval_batch_size=4,
        beta=0.2,
        eval_top_p=1.0,
    )
    kept = []
    generate = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda rows: kept.append(generate(rows)) or kept[-1]
    metrics = trainer.evaluate()
    assert [len(rollout.trajectories) for rollout in kept] == [4, 4, 2]
    rewards = torch.cat([rollout.rewards for rollout in kept])
    assert metrics["eval_reward"] == pytest.approx(float(rewards.mean()))
    assert metrics["eval_reward"] != pytest.approx(sum(float(r.rewards.mean()) for r in kept) / 3)
    assert [t.group for rollout in kept for t in rollout.trajectories] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    # At ratio 1 the loss of a turn is -A, averaged as "grpo" does; KL to the untouched reference is 0.
    expected = 0.0
    for rollout in kept:
        weights = hand_weights(rollout, "grpo")
        groups = len(set(rollout.group_ids.tolist()))
        for turn, weight, advantage in zip(rollout.turns, weights, rollout.advantages.tolist(), strict=True):
            expected -= weight * len(turn.completion_ids) * advantage * groups / 5
    assert metrics["eval_loss"] == pytest.approx(expected, abs=1e-6)
    assert metrics["eval_kl"] == pytest.approx(0, abs=1e-6)
    again = trainer.evaluate()  # evaluation has its own seed: the same noise every time
    assert again["eval_reward"] == metrics["eval_reward"]


def test_dict_eval_sets_best_model_and_resume_work(tmp_path):
    sets = {name: Dataset.from_dict({"prompt": PROMPTS[i : i + 2]}) for i, name in enumerate(("near", "far"))}
    options = {
        "eval_dataset": sets,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "per_device_eval_batch_size": 8,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_near_reward",
        "greater_is_better": True,
    }
    trainer = make_trainer(tmp_path, max_steps=3, **options)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "eval_near_reward" in entry]
    assert len(logs) == 3 and all("eval_near_loss" in entry for entry in logs)
    assert any("eval_far_reward" in entry for entry in trainer.state.log_history)
    assert trainer.state.best_metric == max(entry["eval_near_reward"] for entry in logs)
    assert trainer.state.best_model_checkpoint is not None
    resumed = make_trainer(tmp_path, max_steps=4, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 4
    assert resumed._buffered_inputs[0].rollout.iteration == 3  # its sampling noise is not iteration 0's again


def test_costs_are_logged_apart_for_every_update_and_evaluation(tmp_path):
    trainer = make_trainer(
        tmp_path,
        beta=0.1,
        num_iterations=2,
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:2]}),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=8,
    )
    trainer.train()
    train = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert train[0]["tokens/generation"] > 0 and train[0]["time/generation"] > 0
    assert train[1]["tokens/generation"] == 0  # the second update on the same rollout, and no evaluation leaks in
    assert train[0]["tokens/scoring"] == train[0]["tokens/reference"] == train[1]["tokens/scoring"] > 0
    assert train[0]["time/optimisation"] > 0 and train[0]["step_time"] > 0
    assert evaluations[0]["eval_tokens/generation"] > 0
    json.dumps(trainer.state.log_history)


def test_peaks_over_several_updates_are_their_largest(tmp_path):
    peaks = {}
    for every in (1, 2):
        trainer = make_trainer(tmp_path / str(every), num_iterations=2, logging_steps=every, learning_rate=0.05)
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "ratio/max" in entry]
        peaks[every] = [(entry["ratio/max"], entry["ratio/mean"]) for entry in logs]
    (first, second), (both,) = peaks[1], peaks[2]
    assert first[0] < 1.01 < 1.5 < second[0]
    assert both[0] == second[0]  # their mean would be halfway
    assert both[1] == pytest.approx((first[1] + second[1]) / 2)


def test_texts_are_kept_for_the_completion_log_alone(tmp_path):
    kept = {}
    for asked in (False, True):
        trainer = make_trainer(tmp_path / str(asked), log_completions=asked, max_steps=1)
        trainer.train()
        kept[asked] = len(trainer._logs["prompt"])
    assert kept == {False: 0, True: len(trainer._buffered_inputs[0].rollout.turns)}


def test_the_device_cache_is_cleared_as_often_as_asked(tmp_path, monkeypatch):
    cleared = []
    trainer = make_trainer(tmp_path, torch_empty_cache_steps=2, max_steps=4)
    monkeypatch.setattr(
        "turngrpo.trainer.turn_grpo_trainer.clear_device_cache", lambda: cleared.append(trainer.state.global_step)
    )
    trainer.train()
    assert cleared == [0, 2]


@pytest.mark.parametrize("length", [{"max_steps": 1}, {"max_steps": -1, "num_train_epochs": 1}])
def test_too_few_rows_for_a_rollout_are_named(length, tmp_path):
    trainer = make_trainer(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=7, **length)
    with pytest.raises(ValueError, match="the train dataset has 6 rows, but one rollout takes 7 prompts"):
        trainer.train()


def test_iterable_datasets_stream_through(tmp_path):
    def rows():
        yield from ({"prompt": prompt} for prompt in PROMPTS * 3)

    trainer = make_trainer(tmp_path, dataset=IterableDataset.from_generator(rows))
    trainer.train()
    groups = [t.row["prompt"] for t in trainer._buffered_inputs[0].rollout.trajectories]
    assert len(groups) == 8 and len(set(groups[:4])) == 1 and len(set(groups[4:])) == 1


@pytest.mark.parametrize("workflow", [GatedMemory(), GatedMemory("memory_first"), MemAgent(), SingleTurn()])
def test_every_workflow_trains(workflow, tmp_path):
    tokenizer = word_tokenizer(pad_is_eos=True)
    single = isinstance(workflow, SingleTurn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(
            tmp_path,
            workflow,
            tokenizer=tokenizer,
            dataset=None if single else corpus(),
            reward_funcs=token_reward if single else [answer_reward, exit_reward, format_reward],
            turn_reward_funcs=length_turn_reward if single else update_reward,
        )
        trainer.train()
    log = trainer.state.log_history[0]
    assert math.isfinite(log["loss"])
    assert log["turns/mean"] == (1 if single else 3)
    assert ("update_accuracy/balanced" in log) == (not single)
    assert single or log["format/parsed"] == 0  # a random model writes no gates: every chunk turn counts as wrong
    assert single or log["rewards/update_reward/mean"] == (
        pytest.approx(-1) if isinstance(workflow, GatedMemory) else log["rewards/update_reward/mean"]
    )


def test_a_plain_config_rows_that_cannot_fit_and_missing_columns_are_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"train row 'row-0': up to \d+ prompt tokens"):
        make_trainer(tmp_path, GatedMemory(), dataset=corpus(), max_prompt_length=30, reward_funcs=format_reward)
    with pytest.raises(ValueError, match="missing \\['question', 'answers', 'chunks'\\]"):
        make_trainer(tmp_path, GatedMemory(), reward_funcs=format_reward)
    with pytest.raises(ValueError, match="would split a group"):
        make_trainer(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=3, generation_batch_size=12)
    with pytest.raises(ValueError, match="not a multiple of gradient_accumulation_steps"):
        make_trainer(tmp_path, gradient_accumulation_steps=2, steps_per_generation=3)
    with pytest.warns(UserWarning, match="format_reward"):
        make_trainer(tmp_path, GatedMemory(), dataset=corpus())


def test_default_config_is_made_for_a_workflow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # TRL's own default asks for bf16 on an accelerator; everything else about args=None is ours.
    on_cpu = functools.partialmethod(TurnGRPOConfig.__init__, use_cpu=True, bf16=False, report_to=[], loss_type="grpo")
    monkeypatch.setattr(TurnGRPOConfig, "__init__", on_cpu)
    tokenizer, dataset = word_tokenizer(), Dataset.from_dict({"prompt": PROMPTS})
    model = tiny_model(len(tokenizer), max_position_embeddings=1024)
    model.config._name_or_path = "somewhere/tiny"
    rewards = {"workflow": SingleTurn(), "turn_reward_funcs": length_turn_reward}
    trainer = TurnGRPOTrainer(model, token_reward, None, dataset, None, tokenizer, **rewards)
    assert isinstance(trainer.args, TurnGRPOConfig) and trainer.args.output_dir == "tiny-GRPO"
    plain = GRPOConfig("out", use_cpu=True, bf16=False, report_to=[])
    with pytest.raises(ValueError, match="args is a GRPOConfig, but a workflow needs a TurnGRPOConfig"):
        TurnGRPOTrainer(model, token_reward, plain, dataset, None, tokenizer, **rewards)
