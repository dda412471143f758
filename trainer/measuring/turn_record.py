"""What one update makes of a turn: ratios, clipping, KL, entropy and surrogate, by turn and by token."""

from typing import Any

import torch

from turngrpo.trainer.objective.iteration import MicroBatch
from turngrpo.trainer.objective.losses import clip_masks, clipped_surrogate, token_kl


@torch.no_grad()
def turn_records(
    batch: MicroBatch, clip_low: float, clip_high: float, bias_correction: bool, every_token: bool = False
) -> list[dict[str, Any]]:
    """Return the numbers of every turn of a micro-batch, in its order, by the ledger's column names.

    Means are over the turn's response tokens; with `every_token` lists over them come too.
    """
    mask, logprobs = batch.mask, batch.logprobs.detach()  # (n, T)
    gap = (logprobs - batch.behavior_logprobs).where(mask, 0.0)
    ratio = gap.exp()
    surrogate, _ = clipped_surrogate(logprobs, batch.behavior_logprobs, batch.advantages, mask, clip_low, clip_high)
    active, _ = clip_masks(ratio, batch.advantages[:, None], mask, clip_low, clip_high)
    kl = token_kl(logprobs, batch.behavior_logprobs, batch.kl, batch.reference_logprobs, bias_correction)
    tokens = mask.sum(dim=1)  # (n,)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return values.where(mask, 0.0).sum(dim=1) / tokens

    numbers = {
        "ratio_mean": mean(ratio),
        "ratio_max": ratio.where(mask, 0.0).amax(dim=1),
        "clip_active": mean(active.to(ratio)),
        "entropy": mean(batch.entropy),
        "surrogate": mean(surrogate),
        "gap_mean": mean(gap.abs()),
        "gap_max": gap.abs().amax(dim=1),
        "weight": batch.weights.amax(dim=1),
    } | ({} if kl is None else {"kl": mean(kl)})
    columns = torch.stack([value.double() for value in numbers.values()]).T.tolist()  # one transfer
    counts = tokens.tolist()
    records: list[dict[str, Any]] = [
        {"tokens": count, **dict(zip(numbers, row, strict=True))} for count, row in zip(counts, columns, strict=True)
    ]
    if every_token:
        by_token = {
            "logprobs": logprobs,
            "reference_logprobs": batch.reference_logprobs,
            "token_ratio": ratio,
            "token_kl": kl,
            "token_surrogate": surrogate,
            "token_clipped": active,
        }
        for name, values in by_token.items():
            if values is not None:
                for record, row, count in zip(records, values.tolist(), counts, strict=True):
                    record[name] = row[:count]
    return records
