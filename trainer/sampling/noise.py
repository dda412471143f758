"""Sampling whose noise is a pure function of a turn's key and a position in it."""

import hashlib

import numpy as np
import torch

from turngrpo.trainer.reading.rollout import NoiseKey


def noise_stream(key: NoiseKey, length: int) -> np.ndarray:
    """Return `length` uniform numbers in [0, 1): the value at a position depends on the key and the position alone."""
    digest = hashlib.sha256(repr(tuple(int(part) for part in key)).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little"))).random(length)


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample by inverting the cumulative distribution; return (tokens (R,), their log-probabilities (R,)).

    logits (R, V), uniforms (R,) float64 in [0, 1). Temperature 0 is greedy. The log-probability is that of the full
    distribution at this temperature (at 1 where greedy), also where `top_p` < 1 restricted the choice.
    """
    behavior_logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)  # (R, V)
    if temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        probabilities = behavior_logprobs.double().exp()
        if top_p < 1:
            probabilities = nucleus(probabilities, top_p)
        cumulative = probabilities.cumsum(dim=-1)  # (R, V)
        total = cumulative[:, -1:].contiguous()
        tokens = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
        # A product that rounds up to the total falls past the last token that has any probability.
        tokens = tokens.minimum(torch.searchsorted(cumulative, total, right=False)).squeeze(1)
        tokens = tokens.clamp(
            max=logits.shape[1] - 1
        )  # NaN logits have no place; the caller sees a NaN log-probability
    return tokens, behavior_logprobs.gather(1, tokens[:, None]).squeeze(1)


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but the smallest set of most probable tokens whose mass reaches `top_p`; (R, V) in and out."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered  # mass of more probable tokens
    return probabilities * torch.zeros_like(probabilities).scatter(1, order, (before < top_p).to(probabilities.dtype))
