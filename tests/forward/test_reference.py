"""The reference of every kind of adapter: the policy as training begins, from the first KL to the last digest."""

import pytest
import torch
from adapter_kinds import (
    ELSEWHERE,
    KINDS,
    PROMPTS,
    REFUSED,
    START_CHANGED,
    adapter_config,
    base_model,
    warm_model,
)
from peft import LoraConfig, PeftModel, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from tiny import tiny_model, word_tokenizer
from training import make_trainer

from turngrpo.trainer.checks import check_adapters, marked_trainable
from turngrpo.trainer.forward.policy import Policy
from turngrpo.trainer.forward.scoring import Reference

TOKENS = torch.arange(4, 14)[None]
V = len(word_tokenizer())


def logprobs(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits.log_softmax(-1)


def train_further(model):
    """Move everything that is trained, as an optimizer does: in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5).add_(0.2)


def test_every_kind_of_peft_is_decided_about():
    known = {kind for kind, _ in KINDS.values()} | set(REFUSED) | set(PROMPTS) | ELSEWHERE
    assert known == {kind.value for kind in PeftType}  # a new one: add it to tests/helpers/adapter_kinds.py


TIED = ["LORA", "LORA on embeddings", "LORA and single tokens", "LN_TUNING", "VBLORA"]


@pytest.mark.parametrize(("name", "tied"), [*((name, False) for name in KINDS), *((name, True) for name in TIED)])
def test_kl_of_a_warm_start_is_zero_at_the_first_update_and_export_is_what_was_trained(name, tied, tmp_path):
    """Where only names with ".default." are copied it is 0.12 with adapted embeddings, 0.06 for LoKr, 0.01 for HRA."""
    model = warm_model(name, V, tie_word_embeddings=tied)
    start = logprobs(model)
    trainer = make_trainer(tmp_path, model=model, beta=0.1)
    trainer.train()  # ends with the reference's digest
    first, second = [log["kl"] for log in trainer.state.log_history if "kl" in log]
    assert first == 0.0 and second > 0.0
    assert (logprobs(model) - start).abs().max() > 1e-4
    assert marked_trainable(model) == {name for name, p in model.named_parameters() if p.requires_grad}
    with trainer.reference._context():
        assert torch.equal(logprobs(model), start)
    assert list(model.peft_config) == ["default"]
    again = PeftModel.from_pretrained(base_model(V, tie_word_embeddings=tied), trainer.export_adapter("mine"))
    torch.testing.assert_close(logprobs(again), logprobs(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_the_reference_of_a_warm_start_stays_while_the_adapter_moves(name):
    model = warm_model(name, V)
    start, reference = logprobs(model), Reference(Policy(model))
    reference.check()
    digest = reference.digest()
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    train_further(model)
    moved = logprobs(model)
    with reference._context():
        assert torch.equal(logprobs(model), start)
    assert torch.equal(logprobs(model), moved) and (moved - start).abs().max() > 1e-4
    assert reference.digest() == digest
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags


@pytest.mark.parametrize("name", KINDS)
def test_the_reference_of_a_new_adapter_is_the_base_or_it_is_refused(name):
    base = base_model(V)
    start = logprobs(base)
    model = get_peft_model(base, adapter_config(name))
    reference = Reference(Policy(model), new_adapter=True)
    changed = float((logprobs(model) - start).abs().max())
    if name in START_CHANGED:
        assert changed > 5e-4
        with pytest.raises(ValueError, match=f"a new {name} adapter changes the base model, its reference, before"):
            reference.check()
        Reference(Policy(model)).check()  # as a warm start it is its own reference
        return
    assert changed < 1e-5
    reference.check()
    train_further(model)
    with reference._context():
        torch.testing.assert_close(logprobs(model), start, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_kind_whose_policy_is_not_causal_or_not_certain_is_refused(kind):
    config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](task_type="CAUSAL_LM", **REFUSED[kind])
    with pytest.raises(ValueError, match=f"adapters of the kind {kind} are not honoured under a workflow"):
        check_adapters(None, config)


def test_a_new_adapter_that_does_not_start_as_the_base_is_refused_before_training(tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    with pytest.raises(ValueError, match=r"a new LORA adapter changes .* model=get_peft_model\(base, peft_config\)"):
        make_trainer(tmp_path, model=base_model(V), peft_config=lora, beta=0.1)
    make_trainer(tmp_path, model=base_model(V), peft_config=lora, beta=0.0)  # without a reference nothing is compared
    trainer = make_trainer(tmp_path, model=get_peft_model(base_model(V), lora), beta=0.1, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == 0.0


def test_a_reference_that_moves_with_what_is_trained_is_refused():
    model = get_peft_model(base_model(V), LoraConfig(r=2, target_modules=["q_proj"]))
    model.get_base_model().model.norm.weight.requires_grad_(True)  # the base model is no frozen policy then
    with pytest.raises(ValueError, match="the reference of this LORA adapter is not the policy as training begins"):
        Reference(Policy(model), new_adapter=True).check()


def test_a_model_that_is_trained_whole_has_a_copy_for_its_reference():
    model = tiny_model(V)
    start, reference = logprobs(model), Reference(Policy(model))
    reference.check()
    train_further(model)
    assert torch.equal(logprobs(reference.policy.model), start) and not torch.equal(logprobs(model), start)
