"""The clipped surrogate, the per-token weights that make it the objective, and the k3 estimate of the KL."""

import torch
from torch import Tensor

LOSS_TYPES = ("grpo", "group", "dapo")


def clip_masks(
    ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return (N, T) bool which tokens' clipped branch was taken, and which ratios left the interval on either side."""
    above, below = mask & (ratio > 1 + clip_high), mask & (ratio < 1 - clip_low)
    return (above & (advantages > 0)) | (below & (advantages < 0)), above | below


def clipped_surrogate(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped loss of every token and its statistics (arXiv 1707.06347, eq. 7; GRPO 2402.03300, eq. 3).

    ratio = exp(logp_current - logp_behavior)
    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    logprobs (CURRENT, the only input with a gradient), behavior_logprobs and mask (N, T), advantages (N,) or (N, T) ->
    loss (N, T), 0 off the mask whatever stands there. Statistics are detached 0-d tensors over the "tokens" of the
    mask, 0 where it has none: "clip/active" counts tokens whose clipped branch was taken (gradient 0), "clip/outside"
    those whose ratio left the interval on either side.
    """
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1).expand(-1, logprobs.shape[1])  # (N, T)
    shapes = [tuple(x.shape) for x in (logprobs, behavior_logprobs, advantages, mask)]
    if logprobs.dim() != 2 or len(set(shapes)) != 1:
        raise ValueError(
            f"logprobs, behavior_logprobs, advantages and mask have shapes {shapes}, expected the same (N, T) for all "
            "(advantages may be (N,)): pad every row to the same length"
        )
    active = mask.bool()  # (N, T)
    advantages = advantages.detach().to(logprobs.dtype)  # (N, T)
    # Selected before exp() too, not in the loss alone: 0 * NaN off the mask would still reach the gradient.
    log_ratio = (logprobs - behavior_logprobs.detach()).where(active, 0.0)  # (N, T)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).where(active, 0.0)  # (N, T)

    with torch.no_grad():
        tokens = active.sum()
        clip_active, outside = clip_masks(ratio, advantages, active, clip_low, clip_high)
        sampled_ratio, gap = ratio.where(active, 0.0), log_ratio.abs()  # both 0 off the mask

        def mean(x: Tensor) -> Tensor:
            return x.sum() / tokens.clamp(min=1)  # over the tokens of the mask

        def largest(x: Tensor) -> Tensor:
            return torch.cat([x.flatten(), x.new_zeros(1)]).max()  # of nonnegative numbers, 0 for none

        stats = {
            "ratio/mean": mean(sampled_ratio),
            "ratio/max": largest(sampled_ratio),
            "clip/active": mean(clip_active),
            "clip/outside": mean(outside),
            "behavior_gap/mean": mean(gap),
            "behavior_gap/max": largest(gap),
            "tokens": tokens,
        }
    return loss, stats


def token_weights(
    mask: Tensor, trajectory_ids: Tensor, group_ids: Tensor, loss_type: str, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the weight of every token: the objective is the sum of weight * loss.

    "grpo": mean over the tokens of a response, then over the turns of a trajectory, the trajectories of a group, the
    groups (arXiv 2402.03300, eq. 3, with turns in between). "group": mean over all response tokens of a group, then
    over the groups (GRU-Mem, arXiv 2602.10560). "dapo": mean over all tokens (arXiv 2503.14476).

    mask (N, T), trajectory_ids and group_ids (N,), one row per turn of the WHOLE optimizer step -> (N, T), summing to
    1, so that cutting the step into micro-batches changes nothing. A row without a token is no turn; a trajectory or
    group of such rows does not count. `dtype` is the mask's where that is floating, else float32.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type is {loss_type!r}, expected one of {LOSS_TYPES}: choose one under a workflow")
    if mask.dim() != 2 or trajectory_ids.shape != mask.shape[:1] or group_ids.shape != mask.shape[:1]:
        shapes = [tuple(x.shape) for x in (mask, trajectory_ids, group_ids)]
        raise ValueError(f"mask, trajectory_ids and group_ids have shapes {shapes}, expected (N, T), (N,), (N,)")
    if dtype is None:
        dtype = mask.dtype if mask.is_floating_point() else torch.float32
    active = mask.bool()  # (N, T)
    lengths = active.sum(1)  # (N,)
    rows = lengths.nonzero().squeeze(1)  # (R,): the turns that count
    tokens = lengths[rows]  # (R,)
    pairs = torch.stack([group_ids[rows], trajectory_ids[rows]], dim=1)  # (R, 2)
    trajectories, trajectory, turns = torch.unique(pairs, dim=0, return_inverse=True, return_counts=True)
    _, group, members = torch.unique(trajectories[:, 0], return_inverse=True, return_counts=True)
    row_group = group[trajectory]  # (R,)
    if loss_type == "grpo":  # tokens of the response * turns of the trajectory * trajectories of the group * groups
        denominator = tokens * turns[trajectory] * members[row_group] * len(members)
    elif loss_type == "group":  # tokens of the group * groups
        denominator = torch.zeros_like(members).index_add(0, row_group, tokens)[row_group] * len(members)
    else:  # tokens of the step
        denominator = tokens.sum().expand_as(tokens)
    weights = torch.zeros(len(lengths), dtype=torch.float64, device=mask.device)  # (N,)
    weights[rows] = denominator.double().reciprocal()
    return weights.to(dtype).unsqueeze(1).where(active, 0.0)  # (N, T)


def k3_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return Schulman's k3 estimate of KL(current || reference) at tokens sampled from the current policy.

    exp(d) - d - 1 with d = logp_reference - logp_current (joschu.net/blog/kl-approx.html; arXiv 2402.03300, eq. 4):
    never negative, exact only in expectation; `exact_kl` gives the exact value. Equal shapes, here (N, T); no gradient
    to the reference. Off the mask, select before calling: a weight of 0 does not silence a NaN.
    """
    log_ratio = reference_logprobs.detach() - logprobs  # (N, T)
    return torch.expm1(log_ratio) - log_ratio  # expm1 keeps the difference of nearly equal policies


def token_kl(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    exact: Tensor | None,
    reference_logprobs: Tensor | None,
    bias_correction: bool,
) -> Tensor | None:
    """Return KL(current || reference) of every token (N, T): `exact` where there is one, else k3, None without either.

    k3 is made from `reference_logprobs`; with `bias_correction` it is multiplied by the ratio current / behavior, as
    TRL does (DeepSeek-V3.2, arXiv 2512.02556, equation 7).
    """
    if exact is not None or reference_logprobs is None:
        return exact
    k3 = k3_kl(logprobs, reference_logprobs)
    return k3 * torch.exp(logprobs - behavior_logprobs) if bias_correction else k3
