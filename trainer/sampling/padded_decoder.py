"""Decoding on transformers' own cache, for models that share no prefix."""

import torch
from transformers import DynamicCache

from turngrpo.trainer.forward.policy import Policy


class PaddedDecoder:
    """One new token per row on transformers' own cache, rows padded on the left; for models that share no prefix."""

    def __init__(self, policy: Policy, mask: torch.Tensor):
        self.policy, self.cache = policy, DynamicCache(config=policy.causal.config)
        self.mask = mask  # (R, S)

    @classmethod
    def start(cls, policy: Policy, prompts: list[list[int]], pad_id: int) -> tuple["PaddedDecoder", torch.Tensor]:
        """Run the prompts; return a decoder and the last hidden states (R, H)."""
        device, width = next(policy.model.parameters()).device, max(map(len, prompts))
        ids = torch.full((len(prompts), width), pad_id)  # (R, S)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        decoder = cls(policy, mask.to(device))
        return decoder, decoder._forward(ids.to(device), (decoder.mask.cumsum(1) - 1).clamp(min=0))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take one token (R,) per row; return the hidden states (R, H) that predict the next ones."""
        positions = self.mask.sum(1, keepdim=True)  # (R, 1)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        return self._forward(tokens[:, None], positions)

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone."""
        self.mask = self.mask[rows]
        self.cache.reorder_cache(rows)  # type: ignore[arg-type]

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        outputs = self.policy.backbone(
            input_ids=ids, attention_mask=self.mask, position_ids=positions, cache=self.cache, use_cache=True
        )
        return outputs.last_hidden_state[:, -1]
