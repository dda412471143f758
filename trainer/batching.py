"""How turns become padded batches: a budget of padded tokens, like lengths together, masks from lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .rollout import Turn


def plan_microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut rows into micro-batches with rows x longest <= `max_tokens`, longest first; a longer row stands alone."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # Rows come longest first, so the first row of a batch sets its padded width.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@dataclass(frozen=True)
class TurnBatch:
    """A right-padded batch of N turns, L tokens wide, T response positions wide."""

    input_ids: torch.Tensor  # (N, L)
    attention_mask: torch.Tensor  # (N, L)
    positions: torch.Tensor  # (M,) index into the N * L hidden states that predict the M response tokens, row-major
    targets: torch.Tensor  # (M,)
    mask: torch.Tensor  # (N, T) bool, M True
    behavior_logprobs: torch.Tensor  # (N, T)

    @property
    def tokens(self) -> int:
        return int(self.attention_mask.sum())

    def unflatten(self, values: torch.Tensor) -> torch.Tensor:
        """Put M response values back into (N, T), zero elsewhere; gradients flow."""
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)


def collate_turns(turns: Sequence[Turn], pad_id: int, device: torch.device | str, dtype: torch.dtype) -> TurnBatch:
    """Pad turns on the right; the response mask comes from lengths, never from token values (EOS may equal PAD)."""
    prompts, completions = [len(t.prompt_ids) for t in turns], [len(t.completion_ids) for t in turns]
    width, longest = max(p + c for p, c in zip(prompts, completions, strict=True)), max(completions)
    input_ids = torch.full((len(turns), width), pad_id)  # (N, L)
    attention_mask = torch.zeros(len(turns), width, dtype=torch.long)  # (N, L)
    mask = torch.zeros(len(turns), longest, dtype=torch.bool)  # (N, T)
    behavior = torch.zeros(len(turns), longest, dtype=dtype)  # (N, T)
    positions = []
    for row, (turn, p, c) in enumerate(zip(turns, prompts, completions, strict=True)):
        input_ids[row, : p + c] = torch.tensor([*turn.prompt_ids, *turn.completion_ids])
        attention_mask[row, : p + c] = 1
        mask[row, :c] = True
        behavior[row, :c] = torch.tensor(turn.behavior_logprobs, dtype=dtype)
        positions.append(torch.arange(p - 1, p + c - 1) + row * width)  # the state before a token predicts it
    return TurnBatch(
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.to(device),
        positions=torch.cat(positions).to(device),
        targets=torch.tensor([token for t in turns for token in t.completion_ids]).to(device),
        mask=mask.to(device),
        behavior_logprobs=behavior.to(device),
    )
