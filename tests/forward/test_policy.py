"""The policy: no hidden noise, its precision, and the head against each model's own logits."""

import contextlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    HyperCLOVAXConfig,
    ModernBertDecoderConfig,
    PhiConfig,
)

from turngrpo.trainer.forward.batching import collate_turns, plan_passes
from turngrpo.trainer.forward.policy import Policy, evaluating, zero_dropout
from turngrpo.trainer.forward.scoring import PolicyPass
from turngrpo.trainer.reading.rollout import Turn
from turngrpo.trainer.sampling.transformers_engine import TransformersEngine

V = 40
TOKENS = torch.tensor([[4, 9, 8, 20, 31, 5, 6, 7, 11, 12]])
COMMON = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 1,
}
GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 3}


def build(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def draws_noise(model):
    """Whether two train-mode passes under different seeds differ."""
    model.train()
    hidden = []
    for seed in (11, 12):
        torch.manual_seed(seed)
        with torch.no_grad():
            hidden.append(model(input_ids=TOKENS, use_cache=False).logits)
    return not torch.equal(*hidden)


# ---- dropout ----

NOISY = {
    "attention dropout of Qwen2, a float": lambda: tiny_model(V, attention_dropout=0.3),
    "three kinds of GPT-2, modules": lambda: build(
        GPT2Config(**GPT2, eos_token_id=3, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    ),
    "LoRA": lambda: get_peft_model(
        tiny_model(V), LoraConfig(r=2, lora_dropout=0.5, init_lora_weights=False, target_modules=["q_proj"])
    ),
}


@pytest.mark.parametrize("name", NOISY)
def test_zero_dropout(name):
    model = NOISY[name]()
    assert draws_noise(model)
    state = torch.get_rng_state()
    zero_dropout(model)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert not draws_noise(model)
    assert all(module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout))


def test_zero_dropout_keeps_the_mode():
    model = tiny_model(V, attention_dropout=0.3).eval()
    zero_dropout(model)
    assert not model.training and [layer.self_attn.attention_dropout for layer in model.model.layers] == [0.0, 0.0]


class Noisy(nn.Module):
    """A layer whose dropout is written into its forward pass, where no attribute can turn it off."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return nn.functional.dropout(self.inner(hidden), 0.1, self.training)


def test_a_model_that_keeps_noise_is_refused():
    model = tiny_model(V)
    model.model.layers[1].mlp = Noisy(model.model.layers[1].mlp)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="Qwen2ForCausalLM draws random noise .* after every dropout was set to 0"):
        zero_dropout(model)
    assert torch.equal(torch.get_rng_state(), state)


# ---- precision and mode ----


def test_dtype_is_the_lower_one_of_weights_and_autocast():
    def autocast():
        return torch.autocast("cpu", torch.bfloat16)

    assert Policy(tiny_model(V)).dtype == torch.float32
    assert Policy(tiny_model(V), autocast).dtype == torch.bfloat16  # not float32, which the weights are
    assert Policy(tiny_model(V, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert Policy(tiny_model(V, dtype=torch.float64)).dtype == torch.float64
    assert Policy(tiny_model(V), lambda: torch.autocast("cpu", torch.bfloat16, enabled=False)).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_backbone_runs_under_autocast():
    model = tiny_model(V).eval()
    linear = model.model.layers[0].mlp.up_proj
    seen = []
    linear.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    for autocast in (contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)):
        Policy(model, autocast).backbone(input_ids=TOKENS)
    assert seen == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_restores_the_mode_also_after_an_error(training):
    model = tiny_model(V).train(training)
    with pytest.raises(KeyError), evaluating(model):
        assert not model.training and not torch.is_grad_enabled()
        raise KeyError
    assert model.training is training and torch.is_grad_enabled()


# ---- heads ----

HEADS = {  # config, (scale, softcap)
    "gemma2": (
        Gemma2Config(**COMMON, num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5),
        (1.0, 0.5),
    ),
    "cohere": (CohereConfig(**COMMON, logit_scale=0.25), (0.25, None)),
    "granite, divides": (GraniteConfig(**COMMON, logits_scaling=4.0), (0.25, None)),
    "hyperclovax, multiplies": (HyperCLOVAXConfig(**COMMON, logits_scaling=4.0), (4.0, None)),
    "phi, a bias": (PhiConfig(**COMMON), (1.0, None)),
    "gpt2": (GPT2Config(**GPT2, eos_token_id=3), (1.0, None)),
}


@pytest.mark.parametrize("name", HEADS)
def test_head_gives_the_logits_of_the_model(name):
    config, (scale, softcap) = HEADS[name]
    model = build(config).double()
    policy = Policy(model)
    with torch.no_grad():
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            model.get_output_embeddings().bias.normal_()
        model.get_output_embeddings().weight.mul_(5)
        expected = model(input_ids=TOKENS).logits
        hidden = policy.backbone(input_ids=TOKENS).last_hidden_state
    head = policy.head()
    assert (head.scale, head.softcap) == (scale, softcap)
    torch.testing.assert_close(head.logits(hidden), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(head.in_full_precision().logits(hidden), expected, rtol=0, atol=1e-12)
    # The plain product of weights is another answer, unless the head is plain.
    plain = hidden @ model.get_output_embeddings().weight.T
    assert (float((plain - expected).detach().abs().max()) > 0.1) == (name != "gpt2")


def test_head_of_a_low_precision_model_gives_float32_logits():
    model = tiny_model(V, dtype=torch.bfloat16).eval()
    policy = Policy(model)
    with torch.no_grad():
        hidden = policy.backbone(input_ids=TOKENS).last_hidden_state
    assert hidden.dtype == torch.bfloat16
    full = policy.head().in_full_precision()
    assert full.weight.dtype == torch.float32 and not full.weight.requires_grad
    exact = hidden.double() @ model.lm_head.weight.detach().double().T
    for head in (policy.head(), full):
        assert head.logits(hidden).dtype == torch.float32
        torch.testing.assert_close(head.logits(hidden).detach().double(), exact, rtol=0, atol=1e-5)
    # The model's own logits are rounded to 8 bits, hundreds of times further off.
    with torch.no_grad():
        assert float((model(input_ids=TOKENS).logits.double() - exact).abs().max()) > 1e-4


def test_head_follows_a_trained_copy_of_the_output_layer():
    base = tiny_model(V, dtype=torch.float64, tie_word_embeddings=False)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])).eval()
    policy = Policy(model)
    with torch.no_grad():
        base.lm_head.modules_to_save["default"].weight.mul_(2)
        hidden = policy.backbone(input_ids=TOKENS).last_hidden_state
        trained = policy.head().logits(hidden)
        torch.testing.assert_close(trained, model(input_ids=TOKENS).logits, rtol=0, atol=1e-12)
        with model.disable_adapter():
            untrained = policy.head().logits(hidden)
    torch.testing.assert_close(untrained * 2, trained, rtol=0, atol=1e-12)


def logits_gap(model):
    policy = Policy(model)
    with torch.no_grad():
        hidden = policy.backbone(input_ids=TOKENS).last_hidden_state
        return float((policy.head().logits(hidden) - model(input_ids=TOKENS).logits).abs().max())


def test_lora_on_the_output_layer_is_refused():
    base = tiny_model(V, dtype=torch.float64, tie_word_embeddings=False)
    adapter = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = get_peft_model(base, adapter).eval()
    with pytest.raises(ValueError, match="adapter on lm_head is not supported"):
        Policy(model).head()


def test_a_head_that_is_more_than_a_product_is_refused():
    """ModernBertDecoder has a dense layer before its decoder: the engine's probe compares with the model's logits."""
    local = {"cls_token_id": 2, "sep_token_id": 3, "local_attention": 8}
    model = build(ModernBertDecoderConfig(**COMMON, **local))
    engine = TransformersEngine(Policy(model), [3], 1, 4, share_prefix=False)
    with pytest.raises(ValueError, match="ModernBertDecoderForCausalLM is not supported"):
        engine.verify()


# ---- scoring ----


@pytest.mark.parametrize("share", [True, False])
def test_hidden_states_of_a_pass_predict_the_response_tokens(share):
    model = tiny_model(V, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    turns = [
        Turn(1, [4, 5, 6], [7, 8, 3], [0.0] * 3, "eos", ""),
        Turn(1, [9], [10, 3], [0.0] * 2, "eos", ""),
        Turn(1, [4, 5, 9, 9], [3], [0.0], "eos", ""),
    ]
    policy = Policy(model)
    (part,) = plan_passes(turns, range(3), ["a", "b", "a"], 100, share)
    (rows,) = part.microbatches
    batch = collate_turns([turns[row] for row in rows], "cpu", torch.float64)
    with torch.no_grad():
        hidden = PolicyPass(policy, turns, part, 1).hidden(rows)
        logprobs = policy.head().logits(hidden).log_softmax(-1)
        recorded = batch.unflatten(logprobs.gather(1, batch.targets[:, None]).squeeze(1))
        for row, turn in zip(recorded, [turns[row] for row in rows], strict=True):
            ids = turn.prompt_ids + turn.completion_ids
            whole = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            for place, token in enumerate(turn.completion_ids):
                before, at = len(turn.prompt_ids) + place - 1, len(turn.prompt_ids) + place
                assert float(row[place]) == pytest.approx(float(whole[before, token]), abs=1e-10)
                # One off, the token would be scored by the state that has already read it.
                assert abs(float(row[place]) - float(whole[at, token])) > 0.01
    assert float(recorded[rows.index(1), 2]) == 0.0  # padding
