"""Prompts that share a long prefix: the prefix goes through the model once, members' suffixes attend to it.

    one micro-batch: hidden, _ = run_together(policy, prefixes, suffixes, clusters)   # of the suffixes (T, H), packed
    several:         prefix = compute_prefix(policy, prefixes)
                     for suffixes, clusters in micro_batches:
                         hidden = prefix.suffix_hidden(suffixes, clusters)
                         loss(hidden).backward()           # gathers at the prefix's keys and values
                     prefix.backward()                     # once, through the prefix; without gradient left out
    sampling:        decoding.py

Every token passes through the network as one packed row; only attention knows which keys a token may see
(joined_attention.py). Attention is reached through transformers' attention interface, for the time of our own passes
alone; the model's own calls keep the implementation that they were loaded with.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from turngrpo.trainer.forward.joined_attention import Layout, Span, joined_attention
from turngrpo.trainer.forward.policy import Policy

KeyValue = tuple[Tensor, Tensor]
IMPLEMENTATION = "turngrpo_shared_prefix"  # not among the mask functions: transformers then builds no (L, L) mask
UNKNOWN_ARGUMENTS = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")


class UnsupportedAttention(ValueError):
    """The model's attention is not plain causal attention behind transformers' attention interface."""


# ---- our attention function, and the time in which the model uses it ----


class Attending(Protocol):
    """What a pass does in place of the model's attention."""

    longest: int  # no query sees keys further back than this

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return (N, h, L, dv) for query (N, h, L, d), key (N, kv, L, d), value (N, kv, L, dv)."""


_CURRENT: ContextVar[Attending | None] = ContextVar("turngrpo_attending", default=None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as the current pass says; the signature is that of transformers 5.24's attention interface."""
    current: Any = _CURRENT.get()
    asked = [name for name in UNKNOWN_ARGUMENTS if kwargs.get(name) is not None]
    asked += ["dropout"] if dropout else []
    asked += ["attention_mask"] if attention_mask is not None else []
    asked += ["is_causal=False"] if not getattr(module, "is_causal", True) or is_causal is False else []
    asked += ["sliding_window"] if sliding_window is not None and sliding_window < current.longest else []
    if asked:
        raise UnsupportedAttention(
            f"{type(module).__name__} asks for {', '.join(asked)}: expected plain causal layers"
        )
    device = query.device.type
    if torch.is_autocast_enabled(device):  # rotated queries are float32 there, values are not
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return current.attend(layer, query, key, value, scale).transpose(1, 2), None  # (N, L, h, dv)


AttentionInterface.register(IMPLEMENTATION, _attention)


@contextlib.contextmanager
def attending(policy: Policy, current: Attending) -> Iterator[None]:
    """Let the model use our attention function, with `current` behind it."""
    own = policy.causal.config
    configs = {id(c): c for c in (own, policy.causal.base_model.config, own.get_text_config())}.values()
    before = [config._attn_implementation for config in configs]
    token = _CURRENT.set(current)
    try:
        for config in configs:
            config._attn_implementation = IMPLEMENTATION
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation  # a parent sets its parts, so they come after it
        _CURRENT.reset(token)


@contextlib.contextmanager
def _recomputing(policy: Policy, current: Attending) -> Iterator[None]:
    """Make gradient checkpoints of this pass recompute their layers under `current`, which backward knows nothing of.

    Raises ValueError for re-entrant checkpoints: their forward has no graph that recorded keys could belong to.
    """
    modules = [m for m in policy.causal.modules() if getattr(m, "_gradient_checkpointing_func", None) is not None]
    functions = [module._gradient_checkpointing_func for module in modules]
    contexts = lambda: (contextlib.nullcontext(), attending(policy, current))  # noqa: E731
    if any(getattr(function, "keywords", {}).get("use_reentrant") for function in functions):
        raise ValueError("use_reentrant=True cannot share a prefix: set it to False in gradient_checkpointing_kwargs")
    try:
        for module, function in zip(modules, functions, strict=True):
            module._gradient_checkpointing_func = functools.partial(function, context_fn=contexts)
        yield
    finally:
        for module, function in zip(modules, functions, strict=True):
            module._gradient_checkpointing_func = function


# ---- packed passes ----


@dataclass
class _PackedPass:
    """One packed row: attends by `layout`, reads a prefix's keys and values, records its own per layer."""

    layout: Layout
    longest: int
    prefix: Sequence[KeyValue] | None = None
    recorded: dict[int, KeyValue] | None = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if self.recorded is not None:
            self.recorded[layer] = key, value
        prefix = None if self.prefix is None else self.prefix[layer]
        return joined_attention(query, key, value, self.layout, scale, prefix)

    def run(
        self, policy: Policy, rows: Sequence[Sequence[int]], first: Sequence[int]
    ) -> tuple[Tensor, list[KeyValue]]:
        """Run the rows' tokens, positions counted from `first`; return hidden states (T, H) and keys and values."""
        assert self.recorded is not None
        device = next(policy.model.parameters()).device
        ids = [token for row in rows for token in row]
        positions = [start + i for row, start in zip(rows, first, strict=True) for i in range(len(row))]
        inputs = torch.tensor([ids, positions], device=device)[:, None]  # (2, 1, T)
        replay = _PackedPass(self.layout, self.longest, self.prefix, recorded=None)
        with attending(policy, self), _recomputing(policy, replay):
            outputs = policy.backbone(input_ids=inputs[0], position_ids=inputs[1], use_cache=False)
        layers = policy.causal.config.get_text_config().num_hidden_layers
        if self.recorded.keys() != set(range(layers)):
            raise UnsupportedAttention(
                f"{type(policy.causal).__name__} has {layers} layers and {len(self.recorded)} of them use "
                "transformers' attention interface: expected all"
            )
        return outputs.last_hidden_state[0], [self.recorded[layer] for layer in range(layers)]


def _ranges(rows: Sequence[Sequence[int]], start: int = 0) -> list[slice]:
    """Return where each row stands in a packed one, the first at `start`."""
    ends = list(accumulate(map(len, rows), initial=start))
    return [slice(*pair) for pair in pairwise(ends)]


def _spans(members: Sequence[slice], clusters: Sequence[int], lengths: Sequence[int]) -> list[Span]:
    """Return which of the packed prefixes' keys the members see; neighbours in a cluster as one span."""
    ends, spans = list(accumulate(lengths)), list[Span]()
    for member, cluster in zip(members, clusters, strict=True):
        keys = slice(ends[cluster] - lengths[cluster], ends[cluster])
        if spans and spans[-1].keys == keys:
            spans[-1] = Span(slice(spans[-1].queries.start, member.stop), keys)
        elif lengths[cluster]:
            spans.append(Span(member, keys))
    return spans


def _first_positions(
    suffixes: Sequence[Sequence[int]], clusters: Sequence[int], lengths: Sequence[int]
) -> tuple[list[int], int]:
    """Return the position at which each suffix begins, and how long the longest row is with its prefix."""
    if not all(suffixes) or not suffixes:
        raise ValueError("a suffix is empty: expected one token at least, from which the response is predicted")
    first = [lengths[cluster] for cluster in clusters]
    return first, max(start + len(suffix) for start, suffix in zip(first, suffixes, strict=True))


def run_together(
    policy: Policy, prefixes: Sequence[Sequence[int]], suffixes: Sequence[Sequence[int]], clusters: Sequence[int]
) -> tuple[Tensor, list[KeyValue]]:
    """Run prefixes and all their members' suffixes as one packed row, where one micro-batch holds them.

    Returns the suffixes' hidden states (T, H) as `SharedPrefix.suffix_hidden` does, and per layer the keys and values
    of the prefixes, then of the suffixes.
    """
    lengths, filled = list(map(len, prefixes)), [prefix for prefix in prefixes if prefix]
    first, longest = _first_positions(suffixes, clusters, lengths)
    members = _ranges(suffixes, start=sum(lengths))
    layout = Layout([*_ranges(filled), *members], _spans(members, clusters, lengths))
    hidden, computed = _PackedPass(layout, longest).run(policy, [*filled, *suffixes], [*[0] * len(filled), *first])
    return hidden[sum(lengths) :], computed


@dataclass
class SharedPrefix:
    """Keys and values of one prefix per cluster (a group at one step), computed once and packed: (1, kv, P, d)."""

    policy: Policy
    lengths: list[int]  # per cluster, 0 for members that share nothing
    computed: list[KeyValue]  # per layer, in the prefix pass's graph; empty where every length is 0
    leaves: list[KeyValue]  # the same, cut off: suffixes' gradients gather here

    def suffix_hidden(self, suffixes: Sequence[Sequence[int]], clusters: Sequence[int]) -> Tensor:
        """Return the hidden states (T, H) of the members' own tokens, packed in order; `clusters` names the prefixes.

        Row i of a member predicts its token i + 1. Members come in any order, those of a cluster best side by side.
        """
        assert self.leaves or not any(self.lengths), "backward() has freed this prefix"
        first, longest = _first_positions(suffixes, clusters, self.lengths)
        members = _ranges(suffixes)
        layout = Layout(members, _spans(members, clusters, self.lengths))
        return _PackedPass(layout, longest, self.leaves or None).run(self.policy, suffixes, first)[0]

    def backward(self) -> None:
        """Send what the suffixes' backward passes gathered through the prefix, once, and free it."""
        pairs = [
            (computed, leaf.grad)
            for layer in zip(self.computed, self.leaves, strict=True)
            for computed, leaf in zip(*layer, strict=True)
            if leaf.grad is not None
        ]
        self.computed, self.leaves = [], []
        if pairs:
            torch.autograd.backward([computed for computed, _ in pairs], [grad for _, grad in pairs])


def compute_prefix(policy: Policy, prefixes: Sequence[Sequence[int]]) -> SharedPrefix:
    """Run every cluster's prefix through the model, all as one packed row; an empty one is a cluster without."""
    lengths, filled = [len(prefix) for prefix in prefixes], [prefix for prefix in prefixes if prefix]
    if not filled:
        return SharedPrefix(policy, lengths, [], [])
    _, computed = _PackedPass(Layout(_ranges(filled)), max(lengths)).run(policy, filled, [0] * len(filled))
    leaves = [tuple(x.detach().requires_grad_(x.requires_grad) for x in layer) for layer in computed]
    return SharedPrefix(policy, lengths, computed, leaves)  # type: ignore[arg-type]
