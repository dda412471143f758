"""Decoding on shared prefixes, a token per row and step.

decoder, hidden = start_decoding(policy, prefixes, suffixes, clusters, new_tokens)
hidden = decoder.step(tokens);  decoder.keep(rows)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from turngrpo.trainer.forward.joined_attention import join, part_forward
from turngrpo.trainer.forward.policy import Policy
from turngrpo.trainer.forward.shared_prefix import KeyValue, attending, run_together


class Decoder:
    """One new token per row: all rows of a group as one product with its prefix, each row's own keys apart, joined.

    The prefixes (C, kv, P, d) of C clusters are padded and never repeated; a row's own keys and values stand in
    buffers (R, kv, S, d) that are written in place.
    """

    def __init__(
        self,
        policy: Policy,
        prefix_lengths: Sequence[int],
        clusters: Sequence[int],
        computed: Sequence[KeyValue],
        lengths: Tensor,
        room: int,
    ):
        self.policy, self._cluster = policy, torch.tensor(clusters, device=lengths.device)  # (R,)
        self._prefix_lengths, shared = torch.tensor(prefix_lengths, device=lengths.device), sum(prefix_lengths)  # (C,)
        self._prefix = [
            tuple(_unpack(x[:, :, :shared], prefix_lengths) for x in layer) for layer in computed if shared
        ]
        self._lengths, self._longest_own = lengths, int(lengths.max())  # (R,)
        self.longest = max(prefix_lengths) + self._longest_own + room
        rows = torch.arange(len(lengths), device=lengths.device)
        row = rows.repeat_interleave(lengths)  # (T,)
        place = torch.arange(len(row), device=row.device) - (lengths.cumsum(0) - lengths)[row]  # (T,)
        self._own = []
        for layer in computed:
            buffers = tuple(x.new_zeros(len(rows), x.shape[1], self._longest_own + room, x.shape[3]) for x in layer)
            for buffer, x in zip(buffers, layer, strict=True):
                buffer[row, :, place] = x[0, :, shared:].transpose(0, 1)  # (T, kv, d)
            self._own.append(buffers)
        self._arrange()

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Take one token (R,) per row; return the hidden states (R, H) that predict the next ones."""
        positions = self._prefix_lengths[self._cluster] + self._lengths  # (R,)
        self._longest_own += 1
        assert self._longest_own <= self._own[0][0].shape[2], "no room for another token"
        self._own_mask = self._mask(self._lengths + 1, self._longest_own)  # (R, 1, 1, S)
        with attending(self.policy, self):
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
    policy: Policy,
    prefixes: Sequence[Sequence[int]],
    suffixes: Sequence[Sequence[int]],
    clusters: Sequence[int],
    room: int,
) -> tuple[Decoder, Tensor]:
    """Run the rows' prompts; return a decoder with room for `room` more tokens, and the last hidden states (R, H)."""
    hidden, computed = run_together(policy, prefixes, suffixes, clusters)
    lengths = torch.tensor([len(suffix) for suffix in suffixes], device=hidden.device)  # (R,)
    decoder = Decoder(policy, list(map(len, prefixes)), clusters, computed, lengths, room)
    return decoder, hidden[lengths.cumsum(0) - 1]
