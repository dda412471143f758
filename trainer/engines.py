"""TransformersEngine: samples turns with shared prefixes and records the log-probability of every sampled token."""

import copy
import hashlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache

from .batching import common_prefix_length
from .decoding import Decoder, start_decoding, why_unsupported
from .policy import Head, Policy, evaluating
from .rollout import Completion, Engine, NoiseKey, Request
from .shared_prefix import UnsupportedAttention


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
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)  # (R, V)
    if temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        probabilities = logprobs.double().exp()
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
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but the smallest set of most probable tokens whose mass reaches `top_p`; (R, V) in and out."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered  # mass of more probable tokens
    return probabilities * torch.zeros_like(probabilities).scatter(1, order, (before < top_p).to(probabilities.dtype))


@dataclass
class TokenCounts:
    """Real tokens that went through the model: prompt prefixes (once per group), suffixes, and decoding steps."""

    prefix: int = 0
    suffix: int = 0
    decode: int = 0

    @property
    def total(self) -> int:
        return self.prefix + self.suffix + self.decode


def check_prompts(requests: Sequence[Request], limit: int, limits: str) -> None:
    """Raise ValueError naming the first request without a prompt or with more than `limit` tokens."""
    for request in requests:
        length = len(request.prompt_ids)
        if not 1 <= length <= limit:
            raise ValueError(
                f"{request.label}, turn {request.key.turn}: the prompt has {length} tokens, expected 1 to {limit} "
                f"({limits}); prompts are never truncated"
            )


def probe_requests(vocabulary: int) -> list[Request]:
    """Return short prompts of made-up tokens: two groups, whose members are of unequal length and share a prefix."""
    lengths = {0: (1, 2, 4), 1: (3, 5)}  # of what is a member's own, after group + 2 shared tokens
    return [
        Request(
            [
                [(5 * i + group + 1) % vocabulary for i in range(group + 2)],
                [(7 * i + 3 * member + 2) % vocabulary for i in range(length)],
            ],
            NoiseKey(0, 0, group, member, 0),
        )
        for group, members in lengths.items()
        for member, length in enumerate(members)
    ]


def recorded_gaps(engine: Engine, policy: Policy, requests: Sequence[Request]) -> torch.Tensor:
    """Return |recorded - the policy's own in a plain pass per row| of every token an engine samples, inf for NaN."""
    gaps = []
    device = next(policy.model.parameters()).device
    completions = engine.generate(requests)
    with evaluating(policy.model), policy.autocast():
        for request, completion in zip(requests, completions, strict=True):
            count = len(completion.ids)
            ids = torch.tensor([[*request.prompt_ids, *completion.ids]], device=device)
            logits = policy.model(input_ids=ids, use_cache=False).logits[0, -count - 1 : -1]
            expected = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
            recorded = torch.tensor(completion.logprobs, device=device)
            gaps.append((expected[torch.arange(count), ids[0, -count:]] - recorded).abs())
    return torch.cat(gaps).nan_to_num(nan=torch.inf, posinf=torch.inf)


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
        check_prompts(requests, self._prompt_limit(), f"max_prompt_length={self.max_prompt_length}, and {fit}")
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
                    if not np.isfinite(completion.logprobs).all():
                        raise FloatingPointError(
                            f"{requests[index].label}, turn {requests[index].key.turn}: the logits are not finite"
                        )
                    completions[index] = completion
        return [completion for completion in completions if completion is not None]

    def _prompt_limit(self) -> int:
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
        limit = self._prompt_limit()
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
        return common_prefix_length(prompts) if self.share_prefix and len(prompts) > 1 else 0

    def _sample(self, head: Head, groups: list[list[list[int]]], keys: list[NoiseKey]) -> list[Completion]:
        """Prefill the groups' prompts and decode all their rows together; rows that finish leave the batch."""
        decoder, hidden = self._start(groups)
        device, rows = hidden.device, len(keys)
        noise = np.stack([noise_stream(key, self.max_new_tokens) for key in keys])
        uniforms = torch.from_numpy(noise).to(device)  # (R, max_new_tokens)
        eos = torch.tensor(list(self.eos_ids), device=device)
        tokens = torch.zeros(rows, self.max_new_tokens, dtype=torch.long, device=device)
        logprobs = torch.zeros(rows, self.max_new_tokens, dtype=head.weight.dtype, device=device)
        lengths = torch.full((rows,), self.max_new_tokens, device=device)
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
        alive = torch.arange(rows, device=device)
        for position in range(self.max_new_tokens):
            sampled, sampled_logprobs = sample_tokens(
                head.logits(hidden), uniforms[alive, position], self.temperature, self.top_p
            )
            tokens[alive, position], logprobs[alive, position] = sampled, sampled_logprobs
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
        ids, values, counts, finished = tokens.tolist(), logprobs.tolist(), lengths.tolist(), ended.tolist()
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
