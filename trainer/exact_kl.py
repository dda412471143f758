"""KL(current || reference) over the whole vocabulary at every prefix: on logits, and fused from hidden states.

    KL = sum_j p_j (log p_j - log q_j),        dKL/dz_j = p_j (log p_j - log q_j - KL)

with p = softmax(z) the CURRENT policy and q the frozen REFERENCE, which never gets a gradient. Both functions
recompute in backward what they would otherwise have to keep.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_ELEMENTS = 2**24  # a tile of logits is 64 MiB in float32; backward holds about six of them


def _work_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where an input is, else float32: sums over a vocabulary lose too much in half precision."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _weighted(probs: Tensor, values: Tensor) -> Tensor:
    """p * v with 0 * inf = 0: a token that cannot be sampled (logit -inf) contributes nothing."""
    return (probs * values).where(probs != 0, 0.0)


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
        dtype = _work_dtype(policy_logits, reference_logits)
        policy_lse = _full_logsumexp(policy_logits, block_size, dtype)  # (..., 1)
        reference_lse = _full_logsumexp(reference_logits, block_size, dtype)  # (..., 1)
        kl = torch.zeros_like(policy_lse)
        saved = policy_logits, reference_logits, policy_lse, reference_lse
        for probs, log_ratio in _vocabulary_blocks(*saved, block_size):
            kl += _weighted(probs, log_ratio).sum(-1, keepdim=True)
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
            part.copy_(_weighted(probs, (log_ratio - kl) * grad_kl.unsqueeze(-1)))
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


class _Options(NamedTuple):
    temperature: float
    logit_scale: float
    softcap: float | None
    tile_elements: int


class _Tensors(NamedTuple):
    policy_hidden: Tensor  # (M, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    targets: Tensor  # (M,)
    reference_hidden: Tensor | None  # (M, H)
    reference_weight: Tensor | None  # (V, H)
    reference_bias: Tensor | None  # (V,)


class _Head(NamedTuple):
    """A language-model head in the work dtype, with what the model and the sampler do to its output."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    options: _Options

    def logits(self, hidden: Tensor) -> Tensor:
        logits = hidden.to(self.weight.dtype) @ self.weight.T  # (n, V)
        if self.bias is not None:
            logits += self.bias
        logits *= self.options.logit_scale
        if self.options.softcap:
            logits.div_(self.options.softcap).tanh_().mul_(self.options.softcap)
        return logits.div_(self.options.temperature)

    def backward(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient at `logits` into the one at hidden W^T + b, in place: d tanh(x) = 1 - tanh(x)^2."""
        if self.options.softcap:
            tanh = logits * (self.options.temperature / self.options.softcap)
            grad *= 1 - tanh.square_()
        return grad.mul_(self.options.logit_scale / self.options.temperature)


def _heads(tensors: _Tensors, options: _Options) -> tuple[_Head, _Head]:
    """Return the heads of policy and reference, cast once; a shared weight (also a detached view) is one copy."""
    _, weight, bias, _, _, reference_weight, reference_bias = tensors
    dtype = _work_dtype(tensors.policy_hidden, weight)
    policy = _Head(weight.to(dtype), None if bias is None else bias.to(dtype), options)
    if reference_weight is None:
        return policy, policy
    cast_weight = policy.weight if reference_weight.is_set_to(weight) else reference_weight.to(dtype)
    return policy, _Head(cast_weight, None if reference_bias is None else reference_bias.to(dtype), options)


def _row_tiles(
    tensors: _Tensors, policy: _Head, reference: _Head
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
    """Yield (rows, policy logits, log p, log p - log q), as many rows at a time as fit a tile, at least one."""
    size = max(1, policy.options.tile_elements // len(policy.weight))
    for start in range(0, len(tensors.policy_hidden), size):
        rows = slice(start, start + size)
        logits = policy.logits(tensors.policy_hidden[rows])  # (n, V)
        logp, log_ratio = logits.log_softmax(-1), None  # (n, V)
        if tensors.reference_hidden is not None:
            log_ratio = logp - reference.logits(tensors.reference_hidden[rows]).log_softmax(-1)  # (n, V)
        yield rows, logits, logp, log_ratio


class _FusedLogprobsAndKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: _Options, *args: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        tensors = _Tensors(*args)
        ctx.save_for_backward(*tensors)
        ctx.options = options
        with torch.autocast(tensors.policy_hidden.device.type, enabled=False):
            policy, reference = _heads(tensors, options)
            logprobs = policy.weight.new_empty(len(tensors.policy_hidden))  # (M,)
            entropy, kl = torch.empty_like(logprobs), torch.empty_like(logprobs)  # (M,), (M,)
            for rows, _, logp, log_ratio in _row_tiles(tensors, policy, reference):
                probs = logp.exp()  # (n, V)
                logprobs[rows] = logp.gather(-1, tensors.targets[rows, None]).squeeze(-1)
                entropy[rows] = -_weighted(probs, logp).sum(-1)
                if log_ratio is not None:
                    kl[rows] = _weighted(probs, log_ratio).sum(-1)
        ctx.mark_non_differentiable(entropy)
        return logprobs, None if tensors.reference_hidden is None else kl, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_kl: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        tensors = _Tensors(*ctx.saved_tensors)
        hidden, weight, bias = tensors[:3]
        with torch.autocast(hidden.device.type, enabled=False):
            policy, reference = _heads(tensors, ctx.options)
            needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[1:4]
            grad_hidden = torch.empty_like(hidden) if needs_hidden else None  # (M, H)
            grad_weight = torch.zeros_like(policy.weight) if needs_weight else None  # (V, H)
            grad_bias = policy.weight.new_zeros(len(weight)) if needs_bias else None  # (V,)
            for rows, logits, logp, log_ratio in _row_tiles(tensors, policy, reference):
                probs, grad_target = logp.exp(), grad_logprobs[rows, None]  # (n, V), (n, 1)
                grad = _weighted(probs, -grad_target)  # d log p[target] / dz = onehot(target) - p
                grad.scatter_add_(-1, tensors.targets[rows, None], grad_target)
                if log_ratio is not None:
                    log_ratio -= _weighted(probs, log_ratio).sum(-1, keepdim=True)  # minus the KL
                    grad += _weighted(probs, log_ratio * grad_kl[rows, None])
                grad = policy.backward(grad, logits)  # (n, V)
                if grad_hidden is not None:
                    grad_hidden[rows] = (grad @ policy.weight).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight.addmm_(grad.T, hidden[rows].to(grad.dtype))
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        return None, grad_hidden, grad_weight, grad_bias, None, None, None, None


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
    tile_elements: int = TILE_ELEMENTS,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return log p[target], KL(current || reference) and the entropy of every row without its (M, V) logits.

    x = (hidden W^T + b) * logit_scale;   z = (softcap * tanh(x / softcap) where there is one, else x) / temperature
    log p = z - logsumexp(z);   KL = sum_j p_j (log p_j - log q_j);   entropy = -sum_j p_j log p_j

    policy_hidden and reference_hidden (M, H), lm_head_weight (V, H), bias (V,), targets (M,) -> three (M,), the KL
    None without reference_hidden; M = 0 is allowed. Rows go through in tiles of at most `tile_elements` logits (at
    least one row), and again in backward. Gradients of log p and KL reach policy_hidden, and lm_head_weight and bias
    where they require one; the entropy is a metric. Without a head of its own the reference uses the policy's, as a
    constant, which is right only while that head is frozen.

    Half-precision inputs are cast, each head once per call, and results are float32 (float64 for float64): products of
    rounded logits would break the agreement with the recorded log-probabilities. The reference costs one more product
    per tile, and with a half-precision head of its own another cast copy.
    """
    hidden = [policy_hidden] if reference_hidden is None else [policy_hidden, reference_hidden]
    if targets.dim() != 1 or any(x.dim() != 2 or len(x) != len(targets) for x in hidden):
        shapes = [tuple(x.shape) for x in (*hidden, targets)]
        raise ValueError(f"hidden states and targets have shapes {shapes}, expected (M, H) and (M,): flatten the rows")
    if not temperature > 0 or tile_elements < 1:
        raise ValueError(f"temperature={temperature}, tile_elements={tile_elements}, expected above 0 and at least 1")
    if reference_bias is not None and reference_lm_head_weight is None:
        raise ValueError("reference_bias is given without reference_lm_head_weight: give both, or neither to share")
    return _FusedLogprobsAndKL.apply(
        _Options(temperature, logit_scale, softcap, tile_elements),
        *_Tensors(
            policy_hidden, lm_head_weight, bias, targets, reference_hidden, reference_lm_head_weight, reference_bias
        ),
    )
