"""What a subclass may override under a workflow is obeyed; what nothing would call is refused by name."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from tiny import tiny_model, word_tokenizer
from training import PROMPTS, ParityWorkflow, first_batch, gradients, make_trainer, relative_gap, token_reward

from turngrpo.trainer import TurnGRPOConfig, TurnGRPOTrainer
from turngrpo.trainer.checks import UNUSED_HOOKS
from turngrpo.trainer.objective.iteration import MicroBatch


def make_subclass(monkeypatch, kind, folder, **options):
    """Make the small trainer of a subclass."""
    monkeypatch.setattr("training.TurnGRPOTrainer", kind)
    return make_trainer(folder, dtype=torch.float64, **options)


def test_a_doubled_loss_doubles_the_gradient(tmp_path, monkeypatch):
    class Doubled(TurnGRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return 2 * super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    options = {"beta": 0.1, "max_tokens_per_microbatch": 40}
    once = gradients(make_trainer(tmp_path, dtype=torch.float64, **options))
    twice = gradients(make_subclass(monkeypatch, Doubled, tmp_path, **options))
    assert relative_gap(twice, {name: 2 * gradient for name, gradient in once.items()}) < 1e-12
    assert relative_gap(twice, once) > 0.9  # not the loss as it was


def test_the_loss_gets_one_typed_micro_batch_after_the_other(tmp_path, monkeypatch):
    seen = []

    class Watching(TurnGRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            seen.append(inputs)
            return super().compute_loss(model, inputs)

    trainer = make_subclass(monkeypatch, Watching, tmp_path, beta=0.1, max_tokens_per_microbatch=40)
    gradients(trainer)
    rollout = trainer._buffered_inputs[0].rollout
    assert len(seen) > 1 and all(type(batch) is MicroBatch for batch in seen)
    assert sum(len(batch.turns) for batch in seen) == len(rollout.turns)
    # The weights of all tokens of an optimizer step sum to 1 ("grpo"); each micro-batch has its share.
    assert sum(float(batch.weights.sum()) for batch in seen) == pytest.approx(1)
    for batch in seen:
        for row, turn in enumerate(batch.turns):
            count = len(turn.completion_ids)
            assert batch.mask[row].sum() == count and batch.mask[row, :count].all()
            assert batch.behavior_logprobs[row, :count].tolist() == turn.behavior_logprobs
            index = next(i for i, other in enumerate(rollout.turns) if other is turn)
            assert batch.advantages[row] == rollout.advantages[index] and batch.names[row] == rollout.turn_name(index)
        assert batch.logprobs.requires_grad and batch.kl.requires_grad and batch.reference_logprobs is None


def test_training_is_on_what_the_generation_step_returned(tmp_path, monkeypatch):
    class Reversed(TurnGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            rollout = super()._generate_and_score_completions(inputs)
            return replace(rollout, advantages=-rollout.advantages)

    plain = gradients(make_trainer(tmp_path / "plain", dtype=torch.float64))
    trainer = make_subclass(monkeypatch, Reversed, tmp_path / "reversed")
    turned = gradients(trainer)
    assert relative_gap(turned, {name: -gradient for name, gradient in plain.items()}) < 1e-12
    assert (tmp_path / "reversed" / "rollouts" / "iteration_00000.parquet").exists()  # what it returned is recorded


@pytest.mark.parametrize("name", UNUSED_HOOKS)
def test_a_hook_that_nothing_calls_is_refused_by_name(name, tmp_path, monkeypatch):
    kind = type("Mine", (TurnGRPOTrainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(ValueError, match=f"Mine overrides {name}, which nothing calls under a workflow"):
        make_subclass(monkeypatch, kind, tmp_path)


def test_without_a_workflow_every_hook_is_trls(tmp_path):
    called = []

    class Mine(TurnGRPOTrainer):
        def _compute_loss(self, model, inputs):
            called.append(sorted(inputs))
            return super()._compute_loss(model, inputs)

    tokenizer = word_tokenizer()
    config = TurnGRPOConfig(
        str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_completion_length=4, max_steps=1,
        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": PROMPTS})

    def reward(completion_ids, **columns):
        return [float(len(ids)) for ids in completion_ids]

    Mine(tiny_model(len(tokenizer)), reward, config, rows, None, tokenizer).train()
    assert len(called) == 1 and "completion_ids" in called[0]
    with pytest.raises(ValueError, match="Mine overrides _compute_loss, which nothing calls"):
        Mine(tiny_model(len(tokenizer)), token_reward, config, rows, None, tokenizer, workflow=ParityWorkflow())


def test_there_are_no_outputs_beside_the_loss(tmp_path):
    trainer = make_trainer(tmp_path)
    first_batch(trainer)
    with pytest.raises(ValueError, match="return_outputs is not honoured under a workflow"):
        trainer.compute_loss(trainer.model, None, return_outputs=True)
