"""CURRENT and REFERENCE scores of a batch of turns: hidden states of response positions only, then one fused head."""

import contextlib
import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import is_peft_model
from trl.trainer.utils import use_adapter

from .batching import TurnBatch
from .exact_kl import fused_logprobs_and_kl
from .policy import Head, Policy


class Reference:
    """The frozen policy: the base model or the frozen copy of a warm-started adapter under LoRA, else a snapshot."""

    def __init__(self, policy: Policy):
        model: Any = policy.model
        self._adapter: str | None = None
        if is_peft_model(model):
            self.policy = policy
            self._adapter = "ref" if "ref" in model.peft_config else None
            self._context: Callable[[], Any] = lambda: use_adapter(model, self._adapter)
        else:
            snapshot = copy.deepcopy(model)
            snapshot.__dict__.pop("forward", None)  # TRL's patched forward is bound to the trained model
            self.policy = Policy(snapshot.eval().requires_grad_(False), policy.autocast)
            self._context = contextlib.nullcontext

    @torch.no_grad()
    def response_hidden(self, batch: TurnBatch) -> tuple[torch.Tensor, Head]:
        """Return (hidden states (M, H), head) of the reference, without gradient."""
        with self._context():
            hidden, head = self.policy.response_hidden(batch), self.policy.head()
        weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        return hidden, Head(weight, bias, head.scale, head.softcap)

    def digest(self) -> str:
        """Return the SHA-256 of every weight that the reference is made of and training must not change."""
        state = self.policy.model.named_parameters()
        return tensors_digest((name, p) for name, p in state if not p.requires_grad)


def tensors_digest(tensors: Any) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of (name, tensor) pairs, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        data = tensor.detach().contiguous().cpu()
        digest.update(f"{name} {data.dtype} {tuple(data.shape)}".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Scores:
    """Per response token of a batch, (N, T) each: CURRENT log-probability and exact KL carry gradient."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None


def score_turns(
    policy: Policy,
    batch: TurnBatch,
    temperature: float,
    reference: Reference | None = None,
    kl: str = "exact",
    timed: Callable[[str], Any] = lambda name: contextlib.nullcontext(),
) -> Scores:
    """Score the response tokens of a batch under the current policy, against the reference where there is one.

    kl="exact" gives KL(current || reference) over the vocabulary at every prefix, kl="k3" the reference's
    log-probability of each token. `timed(name)` wraps the reference's part and the current policy's.
    """
    against: tuple[torch.Tensor, Head] | None = None
    if reference is not None:
        with timed("reference"):
            against = reference.response_hidden(batch)
    with timed("scoring"):
        hidden, head = policy.response_hidden(batch), policy.head()
        options: dict[str, Any] = {"temperature": temperature, "logit_scale": head.scale, "softcap": head.softcap}
        if against is None or kl != "exact":
            logprobs, divergence, entropy = fused_logprobs_and_kl(
                hidden, None, head.weight, batch.targets, bias=head.bias, **options
            )
        else:
            logprobs, divergence, entropy = fused_logprobs_and_kl(
                hidden,
                against[0],
                head.weight,
                batch.targets,
                bias=head.bias,
                reference_lm_head_weight=against[1].weight,
                reference_bias=against[1].bias,
                **options,
            )
    reference_logprobs = None
    if against is not None and kl != "exact":
        with timed("reference"), torch.no_grad():
            reference_logprobs, _, _ = fused_logprobs_and_kl(
                against[0], None, against[1].weight, batch.targets, bias=against[1].bias, **options
            )
    return Scores(
        logprobs=batch.unflatten(logprobs),
        entropy=batch.unflatten(entropy),
        kl=None if divergence is None else batch.unflatten(divergence),
        reference_logprobs=None if reference_logprobs is None else batch.unflatten(reference_logprobs),
    )
