"""CURRENT and REFERENCE scores of turns: every shared prefix once, response positions alone through one fused head."""

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import is_peft_model
from trl.trainer.utils import use_adapter

from turngrpo.trainer.forward.batching import Pass, TurnBatch, collate_turns, fed_length, pad_turns, plan_passes
from turngrpo.trainer.forward.policy import Head, Policy, tensors_digest
from turngrpo.trainer.forward.shared_prefix import SharedPrefix, compute_prefix, run_together
from turngrpo.trainer.objective.exact_kl import fused_logprobs_and_kl
from turngrpo.trainer.objective.losses import token_kl
from turngrpo.trainer.reading.rollout import Turn


class PolicyPass:
    """One Pass of a policy: hidden states of its micro-batches' response positions, and what is left of backward."""

    def __init__(self, policy: Policy, turns: Sequence[Turn], part: Pass, pad_id: int):
        self.policy, self.turns, self.pad_id = policy, turns, pad_id
        self._cluster = {i: number for number, cluster in enumerate(part.clusters) for i in cluster.members}
        self._prefixes = [turns[cluster.members[0]].prompt_ids[: cluster.shared] for cluster in part.clusters]
        apart = len(part.microbatches) > 1
        self._prefix: SharedPrefix | None = (
            compute_prefix(policy, self._prefixes) if self._prefixes and apart else None
        )

    def hidden(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the hidden states (M, H) that predict the response tokens of some turns, in their order."""
        turns = [self.turns[row] for row in rows]
        if not self._prefixes:
            device = next(self.policy.model.parameters()).device
            input_ids, attention_mask, positions = pad_turns(turns, self.pad_id, device)
            outputs = self.policy.backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
            return outputs.last_hidden_state.flatten(0, 1)[positions]
        clusters = [self._cluster[row] for row in rows]
        suffixes = [
            [*turn.prompt_ids, *turn.completion_ids][len(self._prefixes[cluster]) : -1]
            for turn, cluster in zip(turns, clusters, strict=True)
        ]
        if self._prefix is None:
            states, _ = run_together(self.policy, self._prefixes, suffixes, clusters)  # (tokens, H)
        else:
            states = self._prefix.suffix_hidden(suffixes, clusters)
        ends = torch.tensor([len(suffix) for suffix in suffixes]).cumsum(0).tolist()
        responses = [torch.arange(end - len(t.completion_ids), end) for t, end in zip(turns, ends, strict=True)]
        return states[torch.cat(responses).to(states.device)]

    def backward(self) -> None:
        """Send the gradient that the micro-batches' backward passes left at shared prefixes through them."""
        if self._prefix is not None and torch.is_grad_enabled():
            self._prefix.backward()


class Reference:
    """The frozen policy: the base model or the frozen copy of a warm-started adapter under LoRA, else a snapshot."""

    def __init__(self, policy: Policy):
        model: Any = policy.model
        self._adapter: str | None = None
        if is_peft_model(model):
            self.policy = policy
            self._adapter = "ref" if "ref" in model.peft_config else None
            self._context: Callable[[], Any] = lambda: use_adapter(model, self._adapter)
        else:
            snapshot = copy.deepcopy(model)
            snapshot.__dict__.pop("forward", None)  # TRL's patched forward is bound to the trained model
            self.policy = Policy(snapshot.eval().requires_grad_(False), policy.autocast)
            self._context = contextlib.nullcontext

    @torch.no_grad()
    def hidden(self, turns: Sequence[Turn], part: Pass, pad_id: int) -> list[torch.Tensor]:
        """Return the hidden states (M, H) of every micro-batch of a Pass, without gradient."""
        with self._context():
            one = PolicyPass(self.policy, turns, part, pad_id)
            return [one.hidden(rows) for rows in part.microbatches]

    def head(self) -> Head:
        """Return the reference's head, without gradient."""
        with self._context():
            head = self.policy.head()
        return Head(head.weight.detach(), None if head.bias is None else head.bias.detach(), head.scale, head.softcap)

    def digest(self) -> str:
        """Return the SHA-256 of every weight that the reference is made of and training must not change."""
        state = self.policy.model.named_parameters()
        return tensors_digest((name, p) for name, p in state if not p.requires_grad)


@dataclass(frozen=True)
class Scores:
    """Per response token of a batch, (N, T) each: CURRENT log-probability and exact KL carry gradient."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None


@dataclass(frozen=True)
class Scorer:
    """Scores the response tokens of turns under the current policy, against the reference where there is one.

    kl="exact" gives KL(current || reference) over the vocabulary at every prefix, kl="k3" the reference's
    log-probability of each token. `timed(name)` wraps the parts of the work, `count(name, tokens)` what went through
    the model for each.
    """

    policy: Policy
    pad_id: int
    reference: Reference | None = None
    temperature: float = 1.0
    kl: str = "exact"
    max_tokens: int = 16384
    share_prefix: bool = False
    timed: Callable[[str], Any] = lambda name: contextlib.nullcontext()
    count: Callable[[str, float], None] = lambda name, tokens: None

    def plan(
        self, turns: Sequence[Turn], indices: Sequence[int] | None = None, keys: Sequence[Hashable] | None = None
    ) -> list[Pass]:
        """Plan the turns `indices` (all when left out); turns of the same key share the prefix of their prompts."""
        indices = range(len(turns)) if indices is None else indices
        share = self.share_prefix and keys is not None
        return plan_passes(turns, list(indices), keys or [], self.max_tokens, share)

    def score(
        self, turns: Sequence[Turn], plan: Sequence[Pass], kept: dict[tuple[int, ...], torch.Tensor] | None = None
    ) -> Iterator[tuple[list[int], TurnBatch, Scores]]:
        """Yield (turn indices, their batch, scores) of every micro-batch.

        With gradient, the caller runs backward on a micro-batch before it asks for the next; the shared prefixes'
        part follows after the last one of a Pass. `kept` holds the reference's hidden states by micro-batch
        for later calls.
        """
        device = next(self.policy.model.parameters()).device
        dtype = torch.promote_types(self.policy.dtype, torch.float32)
        for part in plan:
            against = self._against(turns, part, kept)
            with self.timed("scoring"):
                current = PolicyPass(self.policy, turns, part, self.pad_id)
            self.count("scoring", fed_tokens(turns, part))
            for rows, reference_hidden in zip(part.microbatches, against, strict=True):
                batch = collate_turns([turns[row] for row in rows], device, dtype)
                with self.timed("scoring"):
                    scores = self._scores(current.hidden(rows), reference_hidden, batch)
                if reference_hidden is not None and self.kl != "exact":
                    with self.timed("reference"):
                        scores = replace(scores, reference_logprobs=self._reference_logprobs(reference_hidden, batch))
                yield rows, batch, scores
            with self.timed("optimisation"):
                current.backward()

    @torch.no_grad()
    def sum_kl(
        self,
        turns: Sequence[Turn],
        indices: Sequence[int] | None = None,
        keys: Sequence[Hashable] | None = None,
        bias_correction: bool = False,
    ) -> tuple[torch.Tensor | None, float | None]:
        """Return KL(current || reference), without gradient: sums over the tokens of every turn (N,), and of all.

        Turns outside `indices` have 0. Without a reference both are None.
        """
        if self.reference is None:
            return None, None
        sums, total = torch.zeros(len(turns), dtype=torch.float64), 0.0
        for rows, batch, scores in self.score(turns, self.plan(turns, indices, keys)):
            reference_logprobs = scores.reference_logprobs
            kl = token_kl(scores.logprobs, batch.behavior_logprobs, scores.kl, reference_logprobs, bias_correction)
            assert kl is not None
            sums[rows] = (kl * batch.mask).sum(dim=1).double().cpu()
            total += float((kl * batch.mask).sum())
        return sums, total

    def _against(
        self, turns: Sequence[Turn], part: Pass, kept: dict[tuple[int, ...], torch.Tensor] | None
    ) -> list[torch.Tensor] | list[None]:
        """Return the reference's hidden states of every micro-batch, or a None for each."""
        keys = [tuple(rows) for rows in part.microbatches]
        if self.reference is None:
            return [None] * len(keys)
        if kept is not None and all(key in kept for key in keys):
            return [kept[key] for key in keys]
        with self.timed("reference"):
            hidden = self.reference.hidden(turns, part, self.pad_id)
        self.count("reference", fed_tokens(turns, part))
        if kept is not None:
            kept.update(zip(keys, hidden, strict=True))
        return hidden

    def _scores(self, hidden: torch.Tensor, reference_hidden: torch.Tensor | None, batch: TurnBatch) -> Scores:
        head, against = self.policy.head(), None
        reference: dict[str, Any] = {}
        if self.reference is not None and self.kl == "exact":
            own, against = self.reference.head(), reference_hidden
            reference = {"reference_lm_head_weight": own.weight, "reference_bias": own.bias}
        logprobs, divergence, entropy = fused_logprobs_and_kl(
            hidden, against, head.weight, batch.targets, bias=head.bias, **self._options(head), **reference
        )
        return Scores(
            logprobs=batch.unflatten(logprobs),
            entropy=batch.unflatten(entropy),
            kl=None if divergence is None else batch.unflatten(divergence),
        )

    @torch.no_grad()
    def _reference_logprobs(self, hidden: torch.Tensor, batch: TurnBatch) -> torch.Tensor:
        assert self.reference is not None
        head = self.reference.head()
        logprobs, _, _ = fused_logprobs_and_kl(
            hidden, None, head.weight, batch.targets, bias=head.bias, **self._options(head)
        )
        return batch.unflatten(logprobs)

    def _options(self, head: Head) -> dict[str, Any]:
        return {"temperature": self.temperature, "logit_scale": head.scale, "softcap": head.softcap}


def fed_tokens(turns: Sequence[Turn], part: Pass) -> int:
    """Return the tokens that a Pass sends through the model: prefixes once, suffixes each."""
    again = {i: cluster.shared for cluster in part.clusters for i in cluster.members}
    own = sum(fed_length(turns[i]) - again.get(i, 0) for rows in part.microbatches for i in rows)
    return own + sum(cluster.shared for cluster in part.clusters)
