"""CURRENT and REFERENCE scores of turns: every shared prefix once, response positions alone through one fused head."""

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn

from turngrpo.trainer.forward.batching import Pass, TurnBatch, collate_turns, fed_length, pad_turns, plan_passes
from turngrpo.trainer.forward.policy import TRAINED, Head, Policy, evaluating, tensors_digest
from turngrpo.trainer.forward.shared_prefix import SharedPrefix, compute_prefix, run_together
from turngrpo.trainer.objective.exact_kl import fused_logprobs_and_kl
from turngrpo.trainer.objective.losses import token_kl
from turngrpo.trainer.reading.rollout import Turn, progress

# Largest difference of log-probabilities that rounding explains: a new adapter may turn weights by an identity.
PROBE_TOLERANCE, LOW_PROBE_TOLERANCE = 1e-4, 0.1
PROBE_TOKENS = 8  # of an adapter's own tokens


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
    """The frozen policy: the base model under a new adapter, else what the model was when this object was made.

    Of a model with an adapter that is no new one, of whatever kind, every parameter that is trained is kept as it was,
    and stands in its place while the reference is asked; of a model without adapters all is copied. The base model is
    never copied under an adapter.
    """

    def __init__(self, policy: Policy, new_adapter: bool = False):
        model: Any = policy.model
        self.policy, self._trained, self._is_new = policy, policy, new_adapter
        self._kept: dict[str, nn.Parameter] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._context: Callable[[], Any] = lambda: _standing_in(self._places)
        if not is_peft_model(model):
            snapshot = copy.deepcopy(model)
            snapshot.__dict__.pop("forward", None)  # TRL's patched forward is bound to the trained model
            self.policy = Policy(snapshot.eval().requires_grad_(False), policy.autocast)
        elif new_adapter:
            self._context = model.disable_adapter
        else:
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            copies = {p: nn.Parameter(p.detach().clone(), requires_grad=False) for p in trained.values()}
            self._kept = {name: copies[p] for name, p in trained.items()}
            self._places = _places(model, copies)

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
        state = [(name, p) for name, p in self.policy.model.named_parameters() if not p.requires_grad]
        return tensors_digest(state + [(f"reference.{name}", p) for name, p in self._kept.items()])

    def check(self) -> None:
        """Raise ValueError where KL would not start at 0, or where the reference moves with what is trained.

        A few tokens are scored by both policies, and by the reference again while every trained weight of an adapter
        stands moved.
        """
        model: Any = self._trained.model
        own, reference = self._probe(self._trained), self._probe_reference()
        limit = PROBE_TOLERANCE if self._trained.dtype in (torch.float32, torch.float64) else LOW_PROBE_TOLERANCE
        gap = float((own - reference).abs().max())
        if not is_peft_model(model):
            assert gap <= limit, f"a copy of the model differs from it by {gap:.3g}"
            return
        kind = _kind(model)
        if not gap <= limit and self._is_new:
            raise ValueError(
                f"a new {kind} adapter changes the base model, its reference, before anything is trained "
                f"(log-probabilities by up to {gap:.3g}), and KL would not start at 0: initialise it so that it "
                "changes nothing, or let the changed model be the reference: model=get_peft_model(base, peft_config)"
            )
        with _standing_in(_places(model, {p: _moved(p) for p in model.parameters() if p.requires_grad})):
            moved = float((self._probe_reference() - reference).abs().max())
        if not (gap <= limit and moved <= limit):
            raise ValueError(
                f"the reference of this {kind} adapter is not the policy as training begins (log-probabilities differ "
                f"by {gap:.3g}, and by {moved:.3g} once the adapter moves): set beta=0, or train another kind of "
                "adapter, as LoRA on linear layers"
            )

    def _probe_reference(self) -> torch.Tensor:
        with self._context():
            return self._probe(self.policy)

    def _probe(self, policy: Policy) -> torch.Tensor:
        """Return a policy's log-probabilities (1, L, V) after made-up tokens, and after those that have weights."""
        size, device = policy.head().weight.shape[0], next(policy.model.parameters()).device
        ids = [token % size for token in (*range(1, 9), *trained_tokens(self._trained.model))]
        with evaluating(policy.model):
            hidden = policy.backbone(input_ids=torch.tensor([ids], device=device), use_cache=False).last_hidden_state
            return policy.head().logits(hidden).log_softmax(-1)


def _kind(model: Any) -> str:
    """Return PEFT's name of the kind of the trained adapter, as in LORA."""
    kind = model.peft_config[TRAINED].peft_type
    return str(getattr(kind, "value", kind))


def trained_tokens(model: Any) -> list[int]:
    """Return a few of the tokens whose embeddings an adapter trains one by one."""
    config = model.peft_config[TRAINED] if is_peft_model(model) else None
    listed = [getattr(config, name, None) or [] for name in ("trainable_token_indices", "token_indices")]
    groups = [group for one in listed for group in (one.values() if isinstance(one, dict) else [one])]
    return [int(token) for group in groups for token in list(group)[:PROBE_TOKENS]]


def _moved(parameter: nn.Parameter) -> nn.Parameter:
    """Return what a parameter might become in training."""
    return nn.Parameter(parameter.detach() * 1.25 + 0.05, requires_grad=False)


def _places(model: nn.Module, others: Mapping[Any, nn.Parameter]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return (module, name, the other) of everything in a model that holds one of the parameters `others`."""
    return [
        (module, name, others[parameter])
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter in others
    ]


@contextlib.contextmanager
def _standing_in(places: Sequence[tuple[nn.Module, str, nn.Parameter]]) -> Iterator[None]:
    """Let every module of `places` hold the other parameter, then again what it held."""
    before = [(module, name, module._parameters[name]) for module, name, _ in places]
    try:
        for module, name, other in places:
            module._parameters[name] = other
        yield
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter


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
    log-probability of each token, and `with_reference_logprobs` that too. `timed(name)` wraps the parts of the work,
    `count(name, tokens)` what went through the model for each, and `bar(turns)` a whole plan: what it yields is told
    the turns of every micro-batch.
    """

    policy: Policy
    pad_id: int
    reference: Reference | None = None
    temperature: float = 1.0
    kl: str = "exact"
    max_tokens: int = 16384
    share_prefix: bool = False
    with_reference_logprobs: bool = False
    timed: Callable[[str], Any] = lambda name: contextlib.nullcontext()
    count: Callable[[str, float], None] = lambda name, tokens: None
    bar: Callable[[int], Any] = lambda turns: progress("", turns, "turn", hidden=True)

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
        with self.bar(sum(len(rows) for part in plan for rows in part.microbatches)) as bar:
            for part in plan:
                for scored in self._score_pass(turns, part, kept):
                    yield scored
                    bar.update(len(scored[0]))

    def _score_pass(
        self, turns: Sequence[Turn], part: Pass, kept: dict[tuple[int, ...], torch.Tensor] | None
    ) -> Iterator[tuple[list[int], TurnBatch, Scores]]:
        device = next(self.policy.model.parameters()).device
        dtype = torch.promote_types(self.policy.dtype, torch.float32)
        against = self._against(turns, part, kept)
        with self.timed("scoring"):
            current = PolicyPass(self.policy, turns, part, self.pad_id)
        self.count("scoring", fed_tokens(turns, part))
        for rows, reference_hidden in zip(part.microbatches, against, strict=True):
            batch = collate_turns([turns[row] for row in rows], device, dtype)
            with self.timed("scoring"):
                scores = self._scores(current.hidden(rows), reference_hidden, batch)
            if reference_hidden is not None and (self.kl != "exact" or self.with_reference_logprobs):
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
