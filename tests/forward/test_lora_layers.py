"""LoRA layers as one function: values and gradients by hand, and peft's own path for everything that is not plain."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model, tuners
from tiny import tiny_model
from torch import nn
from training import make_trainer, relative_gap

from turngrpo.trainer.forward import lora_layers
from turngrpo.trainer.forward.lora_layers import LoraLinear, use_adapted_products

SIZES = {"hidden_size": 16, "intermediate_size": 24}
TOKENS = torch.arange(12).view(2, 6)


class Product(nn.Module):
    """One layer of two numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


def adapted(dtype=torch.float64, **lora):
    model = tiny_model(20, dtype=dtype, **SIZES)
    adapted = get_peft_model(model, LoraConfig(**{"r": 3, "lora_alpha": 4, "target_modules": "all-linear"} | lora))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return adapted.to(dtype)


def run(model):
    """Return the logits and the gradients of every parameter that has one."""
    model.zero_grad()
    logits = model(TOKENS).logits
    (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits).sin()).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def calls(monkeypatch):
    counted, apply = [], lora_layers._AdaptedProduct.apply

    def counting(*arguments):
        counted.append(arguments)
        return apply(*arguments)

    monkeypatch.setattr(lora_layers._AdaptedProduct, "apply", counting)
    return counted


def test_values_and_gradients_by_hand(calls):
    model = get_peft_model(Product(), LoraConfig(r=1, lora_alpha=3, target_modules=["layer"]))
    layer = model.base_model.model.layer
    with torch.no_grad():
        layer.base_layer.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        layer.base_layer.bias.copy_(torch.tensor([10.0, 20.0]))
        layer.lora_A["default"].weight.copy_(torch.tensor([[1.0, -1.0]]))
        layer.lora_B["default"].weight.copy_(torch.tensor([[2.0], [0.5]]))
    use_adapted_products(model)
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    y = model(x)
    y.backward(torch.tensor([[1.0, 10.0]]))
    # W x + b = [15, 31];  A x = -1;  3 B A x = [-6, -1.5]
    assert y.tolist() == [[9.0, 29.5]]
    # dB = 3 g (A x) = [-3, -30];  3 B^T g = 3 (2 + 5) = 21, without the scale 7;  dA = 21 x;  dx = W^T g + 21 A
    assert layer.lora_B["default"].weight.grad.tolist() == [[-3.0], [-30.0]]
    assert layer.lora_A["default"].weight.grad.tolist() == [[21.0, 42.0]]
    assert x.grad.tolist() == [[52.0, 21.0]]
    assert len(calls) == 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_computes_what_peft_computes(calls, checkpointing):
    model = adapted()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    expected, gradients = run(model)
    use_adapted_products(model)
    found, own = run(model)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert own.keys() == gradients.keys() and all("lora" in name for name in own)
    assert max(relative_gap({name: own[name]}, {name: gradients[name]}) for name in own) < 1e-12
    assert len(calls) == 14 * (1 + checkpointing)  # seven layers in each of two blocks


def test_without_a_gradient_too(calls):
    model = adapted()
    with torch.no_grad():
        expected = model(TOKENS).logits
        use_adapted_products(model)
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-12, atol=1e-12)
    assert len(calls) == 14


def test_under_autocast(calls):
    model = adapted(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, gradients = run(model)
        use_adapted_products(model)
        found, own = run(model)
    assert len(calls) == 14 and calls[0][0].dtype == torch.bfloat16
    assert found.dtype == expected.dtype
    exact, precise = run(model)
    assert (found - exact).norm() < 1.5 * (expected - exact).norm()
    assert all(gradient.dtype == torch.float32 for gradient in own.values())
    assert relative_gap(own, precise) < 1.5 * relative_gap(gradients, precise)


def dora(model):
    return adapted(use_dora=True)


def with_bias(model):
    return adapted(lora_bias=True, target_modules=["q_proj", "k_proj", "v_proj"])


def two_adapters(model):
    model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    return model.double()


def merged(model):
    model.merge_adapter()
    return model


def trained_base(model):
    return model.requires_grad_(True)


def other_types(model):
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.float()
    return model


@pytest.mark.parametrize("change", [dora, with_bias, two_adapters, merged, trained_base, other_types])
def test_what_is_not_plain_is_left_to_peft(calls, change):
    model = change(adapted())
    before = copy.deepcopy(model)
    use_adapted_products(model)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, before(TOKENS).logits)
    assert not calls


def test_dropout_is_left_to_peft_while_it_is_at_work(calls):
    model = adapted(lora_dropout=0.5).train()
    use_adapted_products(model)
    torch.manual_seed(0)
    one, other = model(TOKENS).logits, model(TOKENS).logits
    assert not torch.equal(one, other) and not calls
    model.eval()(TOKENS)
    assert len(calls) == 14


def test_a_disabled_adapter_is_the_base_model(calls):
    model = adapted()
    base = tiny_model(20, dtype=torch.float64, **SIZES)
    use_adapted_products(model)
    with model.disable_adapter():
        assert torch.equal(model(TOKENS).logits, base(TOKENS).logits)
    assert not calls


def test_names_merging_and_copies_stay_those_of_peft():
    model = adapted()
    names, logits = list(model.state_dict()), model(TOKENS).logits
    use_adapted_products(model)
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    assert torch.equal(twin(TOKENS).logits, model(TOKENS).logits)
    whole = twin.merge_and_unload()
    assert not any(isinstance(module, tuners.lora.LoraLayer) for module in whole.modules())
    torch.testing.assert_close(whole(TOKENS).logits, logits, rtol=1e-12, atol=1e-12)


def test_the_trainer_uses_them_under_a_workflow(tmp_path):
    trainer = make_trainer(tmp_path, peft_config=LoraConfig(r=2, target_modules="all-linear"))
    assert sum(isinstance(module, LoraLinear) for module in trainer.model.modules()) > 0
