"""Prompts that share a long prefix: the prefix goes through the model once, members' suffixes attend to it.

    with gradient:   prefix = compute_prefix(policy, prefixes)
                     for suffixes, clusters in micro_batches:
                         hidden = prefix.suffix_hidden(suffixes, clusters)   # (tokens of the suffixes, H), packed
                         loss(hidden).backward()                             # gathers at the prefix's keys and values
                     prefix.backward()                                       # once, through the prefix
    scoring:         the same under no_grad, without the last line
    sampling:        decoder, hidden = start_decoding(prefix, suffixes, clusters, new_tokens)
                     hidden = decoder.step(tokens);  decoder.keep(rows)

Every token passes through the network as one packed row; only attention knows which keys a token may see
(joined_attention.py). Attention is reached through transformers' attention interface, for the time of our own passes
alone; the model's own calls keep the implementation that they were loaded with.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from .joined_attention import Layout, Span, join, joined_attention, part_forward
from .policy import Policy, evaluating

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
def _attending(policy: Policy, current: Attending) -> Iterator[None]:
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
    contexts = lambda: (contextlib.nullcontext(), _attending(policy, current))  # noqa: E731
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
        with _attending(policy, self), _recomputing(policy, replay):
            outputs = policy.backbone(input_ids=inputs[0], position_ids=inputs[1], use_cache=False)
        layers = policy.causal.config.get_text_config().num_hidden_layers
        if self.recorded.keys() != set(range(layers)):
            raise UnsupportedAttention(
                f"{type(policy.causal).__name__} has {layers} layers and {len(self.recorded)} of them use "
                "transformers' attention interface: expected all"
            )
        return outputs.last_hidden_state[0], [self.recorded[layer] for layer in range(layers)]


def _ranges(rows: Sequence[Sequence[int]]) -> list[slice]:
    ends = list(accumulate(map(len, rows)))
    return [slice(end - len(row), end) for row, end in zip(rows, ends, strict=True)]


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
        return self._suffix_pass(suffixes, clusters)[0]

    def _suffix_pass(
        self, suffixes: Sequence[Sequence[int]], clusters: Sequence[int]
    ) -> tuple[Tensor, list[KeyValue]]:
        if not all(suffixes) or not suffixes:
            raise ValueError("a suffix is empty: expected one token at least, from which the response is predicted")
        assert self.leaves or not any(self.lengths), "backward() has freed this prefix"
        rows, ends = _ranges(suffixes), list(accumulate(self.lengths))
        spans: list[Span] = []
        for member, cluster in zip(rows, clusters, strict=True):
            keys = slice(ends[cluster] - self.lengths[cluster], ends[cluster])
            if spans and spans[-1].keys == keys:
                spans[-1] = Span(slice(spans[-1].queries.start, member.stop), keys)
            elif self.lengths[cluster]:
                spans.append(Span(member, keys))
        first = [self.lengths[cluster] for cluster in clusters]
        longest = max(start + len(suffix) for start, suffix in zip(first, suffixes, strict=True))
        return _PackedPass(Layout(rows, spans), longest, self.leaves or None).run(self.policy, suffixes, first)

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


# ---- decoding ----


class Decoder:
    """One new token per row: all rows of a group as one product with its prefix, each row's own keys apart, joined.

    The prefixes (C, kv, P, d) of C clusters are padded and never repeated; a row's own keys and values stand in
    buffers (R, kv, S, d) that are written in place.
    """

    def __init__(
        self, prefix: SharedPrefix, clusters: Sequence[int], own: Sequence[KeyValue], lengths: Tensor, room: int
    ):
        self.policy, self._cluster = prefix.policy, torch.tensor(clusters, device=lengths.device)  # (R,)
        self._prefix_lengths = torch.tensor(prefix.lengths, device=lengths.device)  # (C,)
        self._prefix = [tuple(_unpack(x, prefix.lengths) for x in layer) for layer in prefix.leaves]
        self._lengths, self._longest_own = lengths, int(lengths.max())  # (R,)
        self.longest = max(prefix.lengths) + self._longest_own + room
        rows = torch.arange(len(lengths), device=lengths.device)
        row = rows.repeat_interleave(lengths)  # (T,)
        place = torch.arange(len(row), device=row.device) - (lengths.cumsum(0) - lengths)[row]  # (T,)
        self._own = []
        for layer in own:
            buffers = tuple(x.new_zeros(len(rows), x.shape[1], self._longest_own + room, x.shape[3]) for x in layer)
            for buffer, x in zip(buffers, layer, strict=True):
                buffer[row, :, place] = x[0].transpose(0, 1)  # (T, kv, d)
            self._own.append(buffers)
        self._arrange()

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Take one token (R,) per row; return the hidden states (R, H) that predict the next ones."""
        positions = self._prefix_lengths[self._cluster] + self._lengths  # (R,)
        self._longest_own += 1
        assert self._longest_own <= self._own[0][0].shape[2], "no room for another token"
        self._own_mask = self._mask(self._lengths + 1, self._longest_own)  # (R, 1, 1, S)
        with _attending(self.policy, self):
            outputs = self.policy.backbone(input_ids=tokens[:, None], position_ids=positions[:, None], use_cache=False)
        self._lengths = self._lengths + 1
        return outputs.last_hidden_state[:, 0]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone; a prefix that no row reads any more leaves with them."""
        self._lengths = self._lengths[rows]
        for layer, buffers in enumerate(self._own):
            for buffer in buffers:  # the copy is as wide as what is written, and lands in the same memory
                buffer[: len(rows), :, : self._longest_own] = buffer[rows, :, : self._longest_own]
            self._own[layer] = tuple(buffer[: len(rows)] for buffer in buffers)
        read, self._cluster = self._cluster[rows].unique(return_inverse=True)
        if len(read) < len(self._prefix_lengths):
            self._prefix_lengths = self._prefix_lengths[read]
            width = int(self._prefix_lengths.max())
            self._prefix = [tuple(x[read, :, :width] for x in layer) for layer in self._prefix] if width else []
        self._arrange()

    def _arrange(self) -> None:
        """Give every row a slot in the grid (C, W) of the rows that read each prefix, and mask padded prefixes."""
        self._rows = torch.arange(len(self._cluster), device=self._cluster.device)  # (R,)
        sizes = self._cluster.bincount(minlength=len(self._prefix_lengths))  # (C,)
        order = self._cluster.argsort(stable=True)  # (R,)
        member = torch.empty_like(order)
        member[order] = self._rows - (sizes.cumsum(0) - sizes)[self._cluster[order]]
        self._width = int(sizes.max())
        self._slot = self._cluster * self._width + member  # (R,)
        padded = bool((self._prefix_lengths < self._prefix_lengths.max()).any())
        self._prefix_mask = self._mask(self._prefix_lengths, int(self._prefix_lengths.max())) if padded else None

    def _mask(self, lengths: Tensor, width: int) -> Tensor:
        """Return an additive mask (N, 1, 1, width) that is finite: a row that is all masked gets weight 0."""
        dtype = self._own[0][0].dtype
        hidden = torch.arange(width, device=lengths.device) >= lengths[:, None]  # (N, width)
        return (hidden.to(dtype) * (torch.finfo(dtype).min / 2))[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        for buffer, x in zip(self._own[layer], (key, value), strict=True):
            buffer[self._rows, :, self._lengths] = x[:, :, 0]
        query = query.reshape(len(query), key.shape[1], -1, query.shape[-1])  # (R, kv, r, d)
        own = (buffer[:, :, : self._longest_own] for buffer in self._own[layer])
        out, lse = part_forward(query, *own, scale=scale, mask=self._own_mask)  # (R, kv, r, dv), (R, kv, r)
        if self._prefix:
            grid = query.new_zeros(len(self._prefix_lengths) * self._width, *query.shape[1:])  # (C * W, kv, r, d)
            grid[self._slot] = query
            stacked = self._stack(grid)  # (C, kv, W * r, d)
            parts = part_forward(stacked, *self._prefix[layer], scale=scale, mask=self._prefix_mask)
            out, _ = join(out, lse, *(self._unstack(part, query.shape[2])[self._slot] for part in parts))
        return out.flatten(1, 2)[:, :, None]  # (R, h, 1, dv)

    def _stack(self, grid: Tensor) -> Tensor:
        """(C * W, kv, r, ...) -> (C, kv, W * r, ...)."""
        return grid.unflatten(0, (-1, self._width)).transpose(1, 2).flatten(2, 3)

    def _unstack(self, stacked: Tensor, group: int) -> Tensor:
        """(C, kv, W * r, ...) -> (C * W, kv, r, ...), r = `group` query heads per key head."""
        return stacked.unflatten(2, (self._width, group)).transpose(1, 2).flatten(0, 1)


def _unpack(packed: Tensor, lengths: Sequence[int]) -> Tensor:
    """Turn packed keys or values (1, kv, sum P, d) into padded ones (C, kv, P, d); a view where nothing is padded."""
    if len(set(lengths)) == 1:
        return packed[0].unflatten(1, (len(lengths), -1)).transpose(0, 1)
    padded = packed.new_zeros(len(lengths), packed.shape[1], max(lengths), packed.shape[3])
    for row, part in zip(padded, packed[0].split(list(lengths), dim=1), strict=True):
        row[:, : part.shape[1]] = part
    return padded


@torch.no_grad()
def start_decoding(
    prefix: SharedPrefix, suffixes: Sequence[Sequence[int]], clusters: Sequence[int], room: int
) -> tuple[Decoder, Tensor]:
    """Run the rows' suffixes; return a decoder with room for `room` more tokens, and the last hidden states (R, H)."""
    hidden, own = prefix._suffix_pass(suffixes, clusters)
    lengths = torch.tensor([len(suffix) for suffix in suffixes], device=hidden.device)  # (R,)
    return Decoder(prefix, clusters, own, lengths, room), hidden[lengths.cumsum(0) - 1]


# ---- which models can ----

PROBE_PREFIXES: list[list[int]] = [[1, 2, 3, 4, 5], [], [6, 7]]
PROBE_SUFFIXES, PROBE_CLUSTERS = [[8, 9, 10], [11], [12, 13], [14, 1, 2]], [0, 0, 1, 2]


def why_unsupported(policy: Policy, longest: int = sys.maxsize) -> str | None:
    """Say why this model cannot share a prefix in rows of up to `longest` tokens, or None: its results are compared.

    Callers that get a reason compute prompts apart, and say so once.
    """
    config, name = policy.causal.config.get_text_config(), type(policy.causal).__name__
    types = set(getattr(config, "layer_types", None) or ["full_attention", "sliding_attention"])
    window = getattr(config, "sliding_window", None)
    if types - {"full_attention", "sliding_attention"}:
        return f"{name} has layers of the types {sorted(types)}, expected attention to all tokens"
    if window is not None and window < longest and "sliding_attention" in types:
        return f"{name} has a sliding window of {window} tokens, shorter than the rows"
    if "position_ids" not in inspect.signature(policy.causal.base_model.forward).parameters:
        return f"{name} takes no position_ids"
    try:
        gap = _probe(policy)
    except UnsupportedAttention as error:
        return str(error)
    tolerance = 1e-3 if policy.dtype in (torch.float32, torch.float64) else 0.1
    return None if gap <= tolerance else f"{name}: hidden states differ from a plain pass by {gap:.3g} of the largest"


def _probe(policy: Policy) -> float:
    """Return the largest difference of hidden states from those of plain passes, over the largest of these."""
    device = next(policy.model.parameters()).device
    suffixes, clusters = PROBE_SUFFIXES, PROBE_CLUSTERS
    with evaluating(policy.model):
        prefix = compute_prefix(policy, PROBE_PREFIXES)
        decoder, _ = start_decoding(prefix, suffixes, clusters, 2)
        steps = [decoder.step(torch.full((len(suffixes),), token, device=device)) for token in (3, 5)]
        packed = prefix.suffix_hidden(suffixes, clusters).split([len(suffix) for suffix in suffixes])
        gaps, sizes = [], []
        for row, (suffix, cluster) in enumerate(zip(suffixes, clusters, strict=True)):
            ids = torch.tensor([[*PROBE_PREFIXES[cluster], *suffix, 3, 5]], device=device)
            plain = policy.backbone(input_ids=ids, use_cache=False).last_hidden_state[0, -len(suffix) - 2 :]
            ours = torch.cat([packed[row], *(step[row, None] for step in steps)])
            gaps.append(float((ours - plain).abs().max()))
            sizes.append(float(plain.abs().max()))
    return max(gaps) / max(sizes)
