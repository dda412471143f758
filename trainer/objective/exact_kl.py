"""KL(current || reference) over the whole vocabulary at every prefix: on logits, and fused from hidden states.

    KL = sum_j p_j (log p_j - log q_j),        dKL/dz_j = p_j (log p_j - log q_j - KL)

with p = softmax(z) the CURRENT policy and q the frozen REFERENCE, which never gets a gradient. The walk over tiles of
the head is in fused_head.py.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turngrpo.trainer.objective.fused_head import (
    CPU_TILE_ELEMENTS,
    TILE_ELEMENTS,
    FrozenHead,
    HeadOptions,
    HeadTensors,
    TrainedHead,
    weighted,
    work_dtype,
)


def _full_logsumexp(logits: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    largest = logits.amax(-1, keepdim=True).to(dtype)  # (..., 1)
    total = torch.zeros_like(largest)
    for block in logits.split(block_size, -1):
        total += (block.to(dtype) - largest).exp().sum(-1, keepdim=True)
    return total.log() + largest


def _vocabulary_blocks(
    policy_logits: Tensor, reference_logits: Tensor, policy_lse: Tensor, reference_lse: Tensor, block_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (p, log p - log q) block by block, each under the normaliser of the FULL vocabulary."""
    blocks = zip(policy_logits.split(block_size, -1), reference_logits.split(block_size, -1), strict=True)
    for policy, reference in blocks:
        logp = policy.to(policy_lse.dtype) - policy_lse  # (..., block)
        yield logp.exp(), logp - (reference.to(policy_lse.dtype) - reference_lse)


class _ExactPrefixKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, policy_logits: Tensor, reference_logits: Tensor, block_size: int) -> Tensor:
        dtype = work_dtype(policy_logits, reference_logits)
        policy_lse = _full_logsumexp(policy_logits, block_size, dtype)  # (..., 1)
        reference_lse = _full_logsumexp(reference_logits, block_size, dtype)  # (..., 1)
        kl = torch.zeros_like(policy_lse)
        saved = policy_logits, reference_logits, policy_lse, reference_lse
        for probs, log_ratio in _vocabulary_blocks(*saved, block_size):
            kl += weighted(probs, log_ratio).sum(-1, keepdim=True)
        ctx.save_for_backward(*saved, kl)
        ctx.block_size = block_size
        return kl.squeeze(-1).to(policy_logits.dtype)  # (...)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        policy_logits, reference_logits, policy_lse, reference_lse, kl = ctx.saved_tensors
        blocks = _vocabulary_blocks(policy_logits, reference_logits, policy_lse, reference_lse, ctx.block_size)
        grad = torch.empty_like(policy_logits)  # (..., V)
        for part, (probs, log_ratio) in zip(grad.split(ctx.block_size, -1), blocks, strict=True):
            part.copy_(weighted(probs, (log_ratio - kl) * grad_kl.unsqueeze(-1)))
        return grad, None, None


def exact_prefix_kl(policy_logits: Tensor, reference_logits: Tensor, block_size: int = 4096) -> Tensor:
    """Return KL(current || reference) at every prefix, walking the vocabulary in blocks with full normalisers.

    KL = sum_j p_j (log p_j - log q_j), p and q normalised over all V (blocks normalised by themselves give another
    number)

    policy_logits and reference_logits (..., V) -> (...), in the dtype of policy_logits (computed in float32, float64
    for float64). The gradient reaches policy_logits alone. A policy logit of -inf contributes 0 and gets gradient 0; a
    token that only the reference excludes gives inf.
    """
    if policy_logits.shape != reference_logits.shape:
        raise ValueError(
            f"policy_logits have shape {tuple(policy_logits.shape)} and reference_logits "
            f"{tuple(reference_logits.shape)}, expected the same: score the same prefixes over the same vocabulary"
        )
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, expected at least 1: 4096 is the default")
    return _ExactPrefixKL.apply(policy_logits, reference_logits, block_size)


def fused_logprobs_and_kl(
    policy_hidden: Tensor,
    reference_hidden: Tensor | None,
    lm_head_weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    reference_lm_head_weight: Tensor | None = None,
    reference_bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    tile_elements: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return log p[target], KL(current || reference) and the entropy of every row without its (M, V) logits.

    x = (hidden W^T + b) * logit_scale;   z = (softcap * tanh(x / softcap) where there is one, else x) / temperature
    log p = z - logsumexp(z);   KL = sum_j p_j (log p_j - log q_j);   entropy = -sum_j p_j log p_j

    policy_hidden and reference_hidden (M, H), lm_head_weight (V, H), bias (V,), targets (M,) -> three (M,), the KL
    None without reference_hidden; M = 0 is allowed. Logits exist a tile at a time: blocks of rows go over tiles of the
    vocabulary, `tile_elements` logits and as many weights at most (one column at least; the default follows the
    device), and the work holds about five such tiles. Gradients of log p and KL reach policy_hidden, and
    lm_head_weight and bias where they require one; the entropy is a metric. With a frozen head the forward pass finds
    the gradients too, (M, H) each, and backward multiplies them; a trained head is walked over again in backward.
    Without a head of its own the reference uses the policy's, as a constant, which is right only while that is frozen.

    Half-precision inputs are cast, the head tile by tile, and results are float32 (float64 for float64): products of
    rounded logits would break the agreement with the recorded log-probabilities.
    """
    hidden = [policy_hidden] if reference_hidden is None else [policy_hidden, reference_hidden]
    if targets.dim() != 1 or any(x.dim() != 2 or len(x) != len(targets) for x in hidden):
        shapes = [tuple(x.shape) for x in (*hidden, targets)]
        raise ValueError(f"hidden states and targets have shapes {shapes}, expected (M, H) and (M,): flatten the rows")
    if tile_elements is None:
        tile_elements = CPU_TILE_ELEMENTS if policy_hidden.device.type == "cpu" else TILE_ELEMENTS
    if not temperature > 0 or tile_elements < 1:
        raise ValueError(f"temperature={temperature}, tile_elements={tile_elements}, expected above 0 and at least 1")
    if reference_bias is not None and reference_lm_head_weight is None:
        raise ValueError("reference_bias is given without reference_lm_head_weight: give both, or neither to share")
    if len(targets) and not 0 <= targets.min() <= targets.max() < len(lm_head_weight):
        found = f"from {targets.min()} to {targets.max()}"
        raise ValueError(f"targets are {found}, expected 0 to {len(lm_head_weight) - 1}: pass response tokens alone")
    trained_head = lm_head_weight.requires_grad or (bias is not None and bias.requires_grad)
    frozen_head = torch.is_grad_enabled() and policy_hidden.requires_grad and not trained_head
    return (FrozenHead if frozen_head else TrainedHead).apply(
        HeadOptions(temperature, logit_scale, softcap, tile_elements),
        *HeadTensors(
            policy_hidden, lm_head_weight, bias, targets, reference_hidden, reference_lm_head_weight, reference_bias
        ),
    )
