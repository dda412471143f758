"""Attention of packed rows to a shared prefix and to themselves, joined by log-sum-exp, with one exact backward.

The softmax over a row's keys, cut into a part on the prefix and a part on the row's own suffix, is put together from
each part's output O_i and log-sum-exp L_i (Hydragen, arXiv 2402.05099, section 3.1):

    L = logsumexp_i L_i,        O = sum_i exp(L_i - L) O_i

With the joined O and L the backward of a part is the ordinary one of flash attention (arXiv 2307.08691, section 2.3),

    P = exp(scale Q K^T - L),   dV = P^T dO,   dS = P (dO V^T - rowsum(dO O)),   dQ = scale dS K,   dK = scale dS^T Q

so every part runs through a fused kernel where there is one, and through plain tensors blocked over queries where not.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ELEMENTS = 2**24  # scores of the plain path at once: 64 MiB in float32
CPU_KERNEL_GROUPS_HEADS = torch.__version__ >= "2.9"  # before pytorch#157893 it takes as many key as query heads


class Span(NamedTuple):
    """Queries of the packed row and the keys that all of them see."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class Layout:
    """Which tokens of a packed row attend to which: each range of `own` causally to itself, `shared` to prefixes."""

    own: Sequence[slice]
    shared: Sequence[Span] = field(default=())


# ---- one part: (B, h, S, d) queries against (B, kv, P, d) keys, query heads in groups of h / kv ----


def part_forward(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale Q K^T + mask) V (B, h, S, dv) and its log-sum-exp (B, h, S), float32 or float64.

    `mask` (B, 1, S, P), of the queries' type, is added to the scores; `causal` needs S = P.
    """
    if _fused_on_cpu(query, key, value):
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return operator(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    if mask is None and _fused_on_cuda(query, value):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = flash(query, key, value, 0.0, causal, False, scale=scale)
        return out, lse
    return plain_forward(query, key, value, scale, causal, mask)


def part_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one part's queries, keys and values, given the JOINED output and log-sum-exp."""
    if _fused_on_cpu(query, key, value):
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return operator(grad, query, key, value, out, lse, 0.0, causal, scale=scale)
    if _fused_on_cuda(query, value):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
        lengths, noise = (query.shape[2], key.shape[2]), torch.zeros(2, dtype=torch.int64, device=query.device)
        state = *lengths, 0.0, causal, noise, noise[:0]
        return flash(grad, query, key, value, out, lse.contiguous(), None, None, *state, scale=scale)
    return plain_backward(grad, query, key, value, out, lse, scale, causal)


def _fused_on_cpu(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return False
    return query.shape[3] == value.shape[3] and (CPU_KERNEL_GROUPS_HEADS or query.shape[1] == key.shape[1])


def _fused_on_cuda(query: Tensor, value: Tensor) -> bool:
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    size, recent = query.shape[3], torch.cuda.get_device_capability(query.device) >= (8, 0)
    return recent and size == value.shape[3] and size % 8 == 0 and size <= 256


def _blocks(query: Tensor, key: Tensor) -> Iterator[slice]:
    batch, heads, queries, _ = query.shape
    size = max(1, BLOCK_ELEMENTS // (batch * heads * key.shape[2]))
    return (slice(start, min(start + size, queries)) for start in range(0, queries, size))


def _scores(
    query: Tensor, key: Tensor, rows: slice, scale: float, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the scores (B, kv, r, n, P) of a block of queries, and its queries stacked (B, kv, r * n, d)."""
    batch, kv_heads, keys, _ = key.shape
    stacked = query[:, :, rows].to(key.dtype).reshape(batch, kv_heads, -1, query.shape[-1])  # (B, kv, r * n, d)
    scores = (stacked @ key.transpose(2, 3) * scale).unflatten(2, (-1, rows.stop - rows.start))  # (B, kv, r, n, P)
    if mask is not None:
        scores = scores + (mask[:, :, rows] if mask.shape[2] > 1 else mask)[:, :, None]
    if causal:
        places = torch.arange(keys, device=key.device)
        scores = scores.masked_fill(places > places[rows, None], -math.inf)
    return scores, stacked


def plain_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Do what `part_forward` does with plain tensors, in float32 at least: any device, type and head size."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(*query.shape[:3], value.shape[-1])  # (B, h, S, dv)
    lse = query.new_empty(query.shape[:3], dtype=dtype)  # (B, h, S)
    with torch.autocast(query.device.type, enabled=False):
        key, value = key.to(dtype), value.to(dtype)
        for rows in _blocks(query, key):
            scores, _ = _scores(query, key, rows, scale, causal, mask)
            block = scores.logsumexp(-1)  # (B, kv, r, n)
            probs = (scores - block[..., None]).exp().flatten(2, 3)  # (B, kv, r * n, P)
            out[:, :, rows] = (probs @ value).reshape(out[:, :, rows].shape).to(out.dtype)
            lse[:, :, rows] = block.flatten(1, 2)
    return out, lse


def plain_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `part_backward` does with plain tensors, in float32 at least: any device, type and head size."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    grad_query = torch.empty_like(query)  # (B, h, S, d)
    with torch.autocast(query.device.type, enabled=False):
        keys, values = key.to(dtype), value.to(dtype)
        grad_key, grad_value = torch.zeros_like(keys), torch.zeros_like(values)
        delta = (grad.to(dtype) * out.to(dtype)).sum(-1)  # (B, h, S)
        for rows in _blocks(query, key):
            scores, stacked = _scores(query, keys, rows, scale, causal)
            shape = scores.shape[:-1]
            probs = (scores - lse[:, :, rows].reshape(*shape, 1)).exp().flatten(2, 3)  # (B, kv, r * n, P)
            grads = grad[:, :, rows].to(dtype).reshape(*stacked.shape[:3], -1)  # (B, kv, r * n, dv)
            grad_value += probs.transpose(2, 3) @ grads
            grad_scores = grads @ values.transpose(2, 3) - delta[:, :, rows].reshape(*stacked.shape[:3], 1)
            grad_scores = grad_scores * probs * scale  # (B, kv, r * n, P)
            grad_key += grad_scores.transpose(2, 3) @ stacked
            grad_query[:, :, rows] = (grad_scores @ keys).reshape(grad_query[:, :, rows].shape).to(query.dtype)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


# ---- the parts joined ----


def join(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output (..., d) and log-sum-exp (...) of attention over the keys of both parts."""
    joined = torch.logaddexp(lse, other_lse)  # (...)
    ours, theirs = (lse - joined).exp()[..., None], (other_lse - joined).exp()[..., None]
    return (out * ours + other_out * theirs).to(out.dtype), joined


class _JoinedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, scale: float, *tensors: Tensor) -> Tensor:
        query, key, value, *prefix = tensors
        sources = prefix or (key, value)
        out = query.new_empty(len(query), query.shape[2], query.shape[1], value.shape[-1]).transpose(1, 2)
        lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))  # (1, h, T)
        for rows in layout.own:
            own = (x[:, :, rows] for x in (query, key, value))
            out[:, :, rows], lse[:, :, rows] = part_forward(*own, scale=scale, causal=True)
        for rows, keys in layout.shared:
            other = part_forward(query[:, :, rows], *(x[:, :, keys] for x in sources), scale=scale)
            out[:, :, rows], lse[:, :, rows] = join(out[:, :, rows], lse[:, :, rows], *other)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *prefix, out, lse = ctx.saved_tensors
        if grad.stride(-1) != 1:  # kernels read whole vectors, and a sum's gradient is one number, expanded
            grad = grad.contiguous()
        grads = [torch.empty_like(x) for x in (query, key, value)] + [torch.zeros_like(x) for x in prefix]
        for rows in ctx.layout.own:
            own = (x[:, :, rows] for x in (grad, query, key, value, out, lse))
            for total, part in zip(grads[:3], part_backward(*own, scale=ctx.scale, causal=True), strict=True):
                total[:, :, rows] = part
        for rows, keys in ctx.layout.shared:
            given, asked, joined, norm = (x[:, :, rows] for x in (grad, query, out, lse))
            prefix_key, prefix_value = (x[:, :, keys] for x in prefix or (key, value))
            parts = part_backward(given, asked, prefix_key, prefix_value, joined, norm, scale=ctx.scale, causal=False)
            for total, where, part in zip(
                (grads[0], *(grads[3:] or grads[1:])), (rows, keys, keys), parts, strict=True
            ):
                total[:, :, where] += part
        return None, None, *grads


def joined_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    scale: float,
    prefix: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the attention (1, h, T, dv) of a packed row: every range of `layout.own` causally to itself, and the
    queries of every `layout.shared` span to keys of the prefix besides, which are the row's own where none is given;
    neither is ever repeated.

    query (1, h, T, d), key (1, kv, T, d), value (1, kv, T, dv), prefix (1, kv, P, d) and (1, kv, P, dv); the ranges of
    `own` cover the row. Gradients reach all five.
    """
    assert sum(rows.stop - rows.start for rows in layout.own) == query.shape[2], "own ranges must cover the row"
    return _JoinedAttention.apply(layout, scale, query, key, value, *(prefix or ()))
