"""What goes through the model together: prefixes of groups once, their members cut by a budget of tokens."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from turngrpo.trainer.reading.rollout import Turn


def common_prefix_length(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many leading tokens all prompts share, at most all but the last token of the shortest."""
    limit = min(map(len, prompts)) - 1
    low, high = min(prompts), max(prompts)  # type: ignore[type-var]  # in lexicographic order the extremes differ first
    for position in range(limit):
        if low[position] != high[position]:
            return position
    return limit


def shared_prefix_length(prompts: Sequence[Sequence[int]], share: bool = True) -> int:
    """Return how many leading tokens of a group's prompts at one step go through the model once; of one alone none."""
    return common_prefix_length(prompts) if share and len(prompts) > 1 else 0


@dataclass(frozen=True)
class Cluster:
    """Turns whose prompts begin with the same `shared` tokens: those of one group at one step."""

    members: list[int]
    shared: int


@dataclass(frozen=True)
class Pass:
    """The prefixes of some clusters, computed once, and micro-batches of their members; no clusters: padded rows."""

    clusters: list[Cluster]
    microbatches: list[list[int]]


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


def plan_passes(
    turns: Sequence[Turn], indices: Sequence[int], keys: Sequence[Hashable], max_tokens: int, share: bool
) -> list[Pass]:
    """Plan the turns `indices` so that a prefix and one micro-batch of its suffixes hold `max_tokens` tokens at most.

    `keys` names the cluster of every turn. Small clusters go together, without padding; a cluster above the budget is
    cut into micro-batches, one member each at least. Without `share`: padded micro-batches of plan_microbatches.
    """
    lengths = {i: fed_length(turns[i]) for i in indices}
    if not share:
        plan = plan_microbatches([lengths[i] for i in indices], max_tokens)
        return [Pass([], [[indices[row] for row in rows]]) for rows in plan]
    by_key: dict[Hashable, list[int]] = {}
    for index in indices:
        by_key.setdefault(keys[index], []).append(index)
    sizes: list[tuple[int, Cluster]] = []
    for members in by_key.values():
        shared = shared_prefix_length([turns[i].prompt_ids for i in members])
        sizes.append((shared + sum(lengths[i] - shared for i in members), Cluster(members, shared)))
    passes: list[Pass] = []
    filled = 0
    for size, cluster in sorted(sizes, key=lambda pair: -pair[0]):
        if passes and filled + size <= max_tokens:  # a cluster above the budget leaves no room for others
            passes[-1].clusters.append(cluster)
            passes[-1].microbatches[0].extend(cluster.members)
            filled += size
        else:
            passes.append(Pass([cluster], _cut(cluster, lengths, max_tokens)))
            filled = size
    return passes


def _cut(cluster: Cluster, lengths: dict[int, int], max_tokens: int) -> list[list[int]]:
    """Cut a cluster's members, longest suffix first, into micro-batches that fit beside the prefix."""
    batches: list[list[int]] = []
    room = 0
    for index in sorted(cluster.members, key=lambda i: -lengths[i]):
        suffix = lengths[index] - cluster.shared
        if not batches or suffix > room:
            batches.append([])
            room = max_tokens - cluster.shared
        batches[-1].append(index)
        room -= suffix
    return batches


def fed_length(turn: Turn) -> int:
    """Return how many tokens of a turn the model reads: all but the last, which predicts nothing that is scored."""
    return turn.prompt_tokens + turn.completion_tokens - 1


@dataclass(frozen=True)
class TurnBatch:
    """The response tokens of N turns: M of them in a row, and (N, T) wherever they stand in a table."""

    targets: torch.Tensor  # (M,)
    mask: torch.Tensor  # (N, T) bool, M True
    behavior_logprobs: torch.Tensor  # (N, T)

    def unflatten(self, values: torch.Tensor) -> torch.Tensor:
        """Put M response values back into (N, T), zero elsewhere; gradients flow."""
        return values.new_zeros(self.mask.shape).masked_scatter(self.mask, values)


def collate_turns(turns: Sequence[Turn], device: torch.device | str, dtype: torch.dtype) -> TurnBatch:
    """Line up response tokens; the mask comes from lengths, never from token values (EOS may equal PAD)."""
    lengths = torch.tensor([len(turn.completion_ids) for turn in turns])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]  # (N, T)
    recorded = torch.tensor([value for turn in turns for value in turn.behavior_logprobs], dtype=dtype)  # (M,)
    return TurnBatch(
        targets=torch.tensor([token for turn in turns for token in turn.completion_ids]).to(device),
        mask=mask.to(device),
        behavior_logprobs=torch.zeros(mask.shape, dtype=dtype).masked_scatter(mask, recorded).to(device),
    )


def pad_turns(
    turns: Sequence[Turn], pad_id: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad turns on the right: input ids and attention mask (N, L), and which of N * L states predict a response."""
    lengths = [fed_length(turn) for turn in turns]
    width = max(lengths)
    input_ids = torch.full((len(turns), width), pad_id)  # (N, L)
    attention_mask = torch.zeros(len(turns), width, dtype=torch.long)  # (N, L)
    positions = []
    for row, (turn, length) in enumerate(zip(turns, lengths, strict=True)):
        input_ids[row, :length] = torch.tensor([*turn.prompt_ids, *turn.completion_ids][:-1])
        attention_mask[row, :length] = 1
        # The state before a token predicts it.
        positions.append(torch.arange(length - len(turn.completion_ids), length) + row * width)
    return input_ids.to(device), attention_mask.to(device), torch.cat(positions).to(device)  # positions (M,)
