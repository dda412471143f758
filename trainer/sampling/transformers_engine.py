"""TransformersEngine: samples turns with shared prefixes and records the log-probability of every sampled token."""

import copy
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from turngrpo.trainer.forward.batching import shared_prefix_length
from turngrpo.trainer.forward.decoding import Decoder, start_decoding
from turngrpo.trainer.forward.policy import Head, Policy, evaluating
from turngrpo.trainer.forward.shared_prefix import UnsupportedAttention
from turngrpo.trainer.forward.support import why_unsupported
from turngrpo.trainer.reading.rollout import Completion, NoiseKey, Request, TokenCounts, check_prompts
from turngrpo.trainer.sampling.engine_check import probe_requests, recorded_gaps
from turngrpo.trainer.sampling.noise import noise_stream, sample_tokens
from turngrpo.trainer.sampling.padded_decoder import PaddedDecoder


@dataclass
class TransformersEngine:
    """Samples with the training model itself: one prefill per group and step, then a decoding loop on its KV cache.

    `rollout_batch_tokens` bounds the prompt and response tokens in the cache at once. Tokens and log-probabilities of
    a row do not depend on its neighbours: its noise is its own, and padding is masked.
    """

    policy: Policy
    eos_ids: Sequence[int]
    pad_id: int
    max_new_tokens: int
    max_prompt_length: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    share_prefix: bool = True
    rollout_batch_tokens: int = 262144
    counts: TokenCounts = field(default_factory=TokenCounts)

    def refresh(self) -> None:
        """Do nothing: it samples from the policy as it is."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete every request, in order; requests of one group share the computation of their common prefix."""
        prompts = [request.prompt_ids for request in requests]
        fit = f"{self.max_new_tokens} new tokens must fit the model's positions"
        check_prompts(requests, self.prompt_limit, f"max_prompt_length={self.max_prompt_length}, and {fit}")
        groups: dict[tuple[int, int], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault((request.key.group, request.key.turn), []).append(index)
        completions: list[Completion | None] = [None] * len(requests)
        with evaluating(self.policy.model):
            head = self.policy.head().in_full_precision()
            for batch in self._pack(list(groups.values()), prompts):
                rows = [index for group in batch for index in group]
                keys = [requests[index].key for index in rows]
                sampled = self._sample(head, [[prompts[i] for i in group] for group in batch], keys)
                for index, completion in zip(rows, sampled, strict=True):
                    if not np.isfinite(completion.behavior_logprobs).all():
                        raise FloatingPointError(
                            f"{requests[index].label}, turn {requests[index].key.turn}: the logits are not finite"
                        )
                    completions[index] = completion
        return [completion for completion in completions if completion is not None]

    @property
    def prompt_limit(self) -> int:
        """The longest prompt: as configured, and with room for a completion within the model's positions."""
        limit = self.max_prompt_length or sys.maxsize
        positions = getattr(self.policy.causal.config.get_text_config(), "max_position_embeddings", None)
        return limit if positions is None else min(limit, positions - self.max_new_tokens)

    def verify(self) -> None:
        """Sample a few tokens of unequal prompts and compare with plain full passes of the model itself.

        An architecture that cannot share a prefix goes on without sharing, with one warning; one that does not work at
        all (its cache ignores masks, or its logits are no plain product of head and hidden states) raises ValueError.
        """
        reason = why_unsupported(self.policy, self._longest()) if self.share_prefix else None
        if reason is not None:
            self._stop_sharing(reason)
        gap = self._probe()
        if not gap <= self._probe_tolerance():
            raise ValueError(
                f"{self._name()} is not supported under a workflow: log-probabilities of a padded batch with a cache "
                f"differ from those of a plain pass by {gap:.3g}; use a decoder-only attention model"
            )

    def _longest(self) -> int:
        """Return the longest row that a prompt and its completion can make."""
        limit = self.prompt_limit
        return limit if limit == sys.maxsize else limit + self.max_new_tokens

    def _name(self) -> str:
        return type(self.policy.causal).__name__

    def _probe_tolerance(self) -> float:
        return 1e-3 if self.policy.dtype in (torch.float32, torch.float64) else 0.5

    def _probe(self) -> float:
        """Return the largest difference of recorded log-probabilities from the model's own logits in a plain pass."""
        probe = copy.copy(self)
        probe.max_new_tokens, probe.temperature, probe.top_p, probe.eos_ids = 3, 1.0, 1.0, []
        probe.counts, probe.max_prompt_length = TokenCounts(), None
        return float(recorded_gaps(probe, self.policy, probe_requests(self.policy.head().weight.shape[0])).max())

    def _pack(self, groups: list[list[int]], prompts: list[list[int]]) -> list[list[list[int]]]:
        """Put groups of like prompt length together, as many at once as the token budget of the cache holds.

        The cache holds one padded prefix per group, and per row what is left of its prompt and the new tokens.
        """
        batches: list[list[list[int]]] = []
        rows = prefix = own = 0
        for group in sorted(groups, key=lambda g: -max(len(prompts[i]) for i in g)):
            shared = self._shared([prompts[i] for i in group])
            prefix, own = max(prefix, shared), max([own, *(len(prompts[i]) - shared for i in group)])
            rows += len(group)
            held = (len(batches[-1]) + 1) * prefix + rows * (own + self.max_new_tokens) if batches else 0
            if batches and held <= self.rollout_batch_tokens:
                batches[-1].append(group)
            else:
                batches.append([group])
                rows, prefix, own = len(group), shared, max(len(prompts[i]) - shared for i in group)
        return batches

    def _shared(self, prompts: list[list[int]]) -> int:
        """Return how many leading tokens of a group's prompts are computed once."""
        return shared_prefix_length(prompts, self.share_prefix)

    def _sample(self, head: Head, groups: list[list[list[int]]], keys: list[NoiseKey]) -> list[Completion]:
        """Prefill the groups' prompts and decode all their rows together; rows that finish leave the batch."""
        decoder, hidden = self._start(groups)
        device, rows = hidden.device, len(keys)
        noise = np.stack([noise_stream(key, self.max_new_tokens) for key in keys])
        uniforms = torch.from_numpy(noise).to(device)  # (R, max_new_tokens)
        eos = torch.tensor(list(self.eos_ids), device=device)
        tokens = torch.zeros(rows, self.max_new_tokens, dtype=torch.long, device=device)
        behavior_logprobs = torch.zeros(rows, self.max_new_tokens, dtype=head.weight.dtype, device=device)
        lengths = torch.full((rows,), self.max_new_tokens, device=device)
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
        alive = torch.arange(rows, device=device)
        for position in range(self.max_new_tokens):
            sampled, sampled_logprobs = sample_tokens(
                head.logits(hidden), uniforms[alive, position], self.temperature, self.top_p
            )
            tokens[alive, position], behavior_logprobs[alive, position] = sampled, sampled_logprobs
            done = torch.isin(sampled, eos)
            if done.any():
                lengths[alive[done]], ended[alive[done]] = position + 1, True
                keep = (~done).nonzero().squeeze(1)
                alive, sampled = alive[keep], sampled[keep]
                if not len(alive):
                    break
                decoder.keep(keep)
            if position + 1 == self.max_new_tokens:
                break
            hidden = decoder.step(sampled)
            self.counts.decode += len(alive)
        ids, values, counts, finished = tokens.tolist(), behavior_logprobs.tolist(), lengths.tolist(), ended.tolist()
        return [
            Completion(ids[r][: counts[r]], values[r][: counts[r]], "eos" if finished[r] else "length")
            for r in range(rows)
        ]

    def _start(self, groups: list[list[list[int]]]) -> tuple["Decoder | PaddedDecoder", torch.Tensor]:
        """Prefill: each group's common prefix once, the rest of every row; returns the last hidden states (R, H)."""
        if self.share_prefix:
            try:
                return self._start_shared(groups)
            except UnsupportedAttention as reason:
                self._stop_sharing(str(reason))
        prompts = [prompt for group in groups for prompt in group]
        self.counts.suffix += sum(map(len, prompts))
        return PaddedDecoder.start(self.policy, prompts, self.pad_id)

    def _start_shared(self, groups: list[list[list[int]]]) -> tuple[Decoder, torch.Tensor]:
        shared = [self._shared(group) for group in groups]
        suffixes = [prompt[n:] for group, n in zip(groups, shared, strict=True) for prompt in group]
        clusters = [number for number, group in enumerate(groups) for _ in group]
        prefixes = [group[0][:n] for group, n in zip(groups, shared, strict=True)]
        started = start_decoding(self.policy, prefixes, suffixes, clusters, self.max_new_tokens)
        self.counts.prefix += sum(shared)
        self.counts.suffix += sum(map(len, suffixes))
        return started

    def _stop_sharing(self, reason: str) -> None:
        warnings.warn(f"{self._name()} cannot share a prefix ({reason}); prompts are computed apart", stacklevel=3)
        self.share_prefix = False
