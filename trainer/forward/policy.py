"""A causal model as backbone and head: hidden states for whoever samples or scores, and no hidden noise."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

TRAINED = "default"  # PEFT's name of the trained adapter


@dataclass(frozen=True)
class Head:
    """The language-model head: logits = softcap * tanh((h W^T + b) * scale / softcap), or (h W^T + b) * scale."""

    weight: torch.Tensor  # (V, H)
    bias: torch.Tensor | None
    scale: float
    softcap: float | None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 (float64 for a float64 model) logits (..., V) of hidden states (..., H)."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = nn.functional.linear(hidden.to(dtype), self.weight.to(dtype), bias) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def in_full_precision(self) -> "Head":
        """Return a head whose weight needs no conversion at every call, for a sampling loop."""
        weight = self.weight.detach()
        return Head(weight.to(torch.promote_types(weight.dtype, torch.float32)), self.bias, self.scale, self.softcap)


class Policy:
    """A causal model as backbone and head; PEFT layers inside the backbone take part, whichever adapter is active."""

    def __init__(self, model: Any, autocast: Callable[[], Any] = contextlib.nullcontext):
        self.model: Any = model
        self.autocast = autocast
        self.causal: Any = model.get_base_model() if is_peft_model(model) else model

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the arithmetic: the lower one of the weights and of autocast."""
        with self.autocast():
            device = next(self.model.parameters()).device.type
            if torch.is_autocast_enabled(device):
                return torch.get_autocast_dtype(device)
        return next(self.model.parameters()).dtype

    def backbone(self, **inputs: Any) -> Any:
        """Run the model without its head; `last_hidden_state` is (N, L, H)."""
        with self.autocast():
            return self.causal.base_model(**inputs)

    def head(self) -> Head:
        """Return the head as it is now (an active or disabled adapter may replace it)."""
        module = self.causal.get_output_embeddings()
        if isinstance(module, BaseTunerLayer):
            raise ValueError("an adapter on lm_head is not supported: remove it from target_modules")
        config = self.causal.config.get_text_config()
        scale = next(
            (
                v
                for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")
                if (v := getattr(config, name, None)) is not None
            ),
            1.0,
        )
        scaling = getattr(config, "logits_scaling", None)  # Granite divides by it, HyperCLOVA X multiplies
        if scaling is not None:
            scale = scaling if config.model_type == "hyperclovax" else 1 / scaling
        softcap = getattr(config, "final_logit_softcapping", None)
        return Head(module.weight, getattr(module, "bias", None), float(scale), softcap)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run in eval mode (no checkpointing, so the cache works) and without gradient, then restore the mode."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def zero_dropout(model: nn.Module) -> None:
    """Set every dropout to 0 without leaving train mode, and refuse a model whose forward still draws noise.

    Raises ValueError when two train-mode passes over the same tokens under different seeds differ.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout", "dropout_p", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    policy, training = Policy(model), model.training
    device = next(model.parameters()).device
    tokens = torch.arange(1, 9, device=device)[None] % policy.causal.config.get_text_config().vocab_size  # (1, 8)
    model.train()
    outputs = []
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for seed in (0, 1):
            torch.manual_seed(seed)
            outputs.append(policy.backbone(input_ids=tokens, use_cache=False).last_hidden_state)
    model.train(training)
    if not torch.equal(*outputs):
        raise ValueError(
            f"{type(policy.causal).__name__} draws random noise in its forward pass after every dropout was set to 0: "
            "recorded and scored log-probabilities would differ; load it with its dropout rates at 0"
        )


def tensors_digest(tensors: Any) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of (name, tensor) pairs, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        data = tensor.detach().contiguous().cpu()
        digest.update(f"{name} {data.dtype} {tuple(data.shape)}".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
