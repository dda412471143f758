"""The behavior check: before the first update, scoring must reproduce the log-probabilities recorded at sampling."""

import math
from typing import Any

import torch

from turngrpo.trainer.forward.batching import TurnBatch

TOLERANCE = 2e-4  # float32 noise between a cached decoding step and a full pass; real differences are far larger


def default_tolerance(dtype: torch.dtype, rollout_engine: str = "transformers") -> float:
    """Return the allowed gap: 2e-4 in float32 and float64; in lower precision or with vLLM it is only measured."""
    exact = rollout_engine == "transformers" and dtype in (torch.float32, torch.float64)
    return TOLERANCE if exact else math.inf


def behavior_gap(logprobs: torch.Tensor, batch: TurnBatch) -> torch.Tensor:
    """Return |scored - recorded| per response token, (N, T), 0 off the mask."""
    return torch.where(batch.mask, (logprobs - batch.behavior_logprobs).abs(), 0.0)


def describe_gap(
    name: str, row: int, gap: torch.Tensor, batch: TurnBatch, logprobs: torch.Tensor, tolerance: float, tokenizer: Any
) -> str:
    """Say where the worst token of a row stands, what was recorded and what was scored."""
    position = int(gap[row].argmax())
    token = int(batch.targets[int(batch.mask[:row].sum()) + position])
    return (
        f"scoring does not reproduce the recorded log-probabilities: worst at {name}, response position {position}, "
        f"token {token} {tokenizer.decode([token])!r}: recorded {float(batch.behavior_logprobs[row, position]):.6f}, "
        f"scored {float(logprobs[row, position]):.6f}, allowed gap {tolerance:g} (behavior_tolerance); the record "
        "was altered, or sampling and scoring compute different things"
    )
