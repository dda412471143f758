"""Turns and trajectories, and the loop that drives a workflow with an engine until every trajectory has ended."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol


class NoiseKey(NamedTuple):
    """What the sampling noise of one turn depends on, and nothing else; `position` is the index into its stream."""

    seed: int
    iteration: int
    group: int
    member: int
    turn: int


@dataclass(frozen=True)
class Request:
    """One prompt to complete: token-id segments whose leading ones may be shared, and the key of its noise.

    `messages` is the same prompt in TRL's form, for servers that take no token ids.
    """

    segments: list[list[int]]
    key: NoiseKey
    label: str = ""
    messages: Any = None

    @property
    def prompt_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment]


@dataclass(frozen=True)
class Completion:
    """One sampled completion: ids with the final EOS, BEHAVIOR log-probability of each, and why it stopped."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "eos" or "length"
    text: str | None = None  # where it came as text; None: what the ids decode to


class Engine(Protocol):
    """Completes a batch of requests in their order; the trainer calls `refresh` when the policy may have changed."""

    def refresh(self) -> None: ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...


@dataclass
class Turn:
    """One prompt and its completion: one training sample. `step` is the 1-based chunk index, None for other turns."""

    step: int | None
    prompt_ids: Sequence[int] = field(repr=False)  # not in messages, which TRL fills with whole trajectories
    completion_ids: Sequence[int] = field(repr=False)
    behavior_logprobs: Sequence[float] = field(repr=False)
    finish_reason: str
    text: str
    decision: Any = None
    evidence: bool | None = None
    memory_cut: bool = False


@dataclass
class Trajectory:
    """All turns of one reading: `exit_step` is the last chunk read, `last_evidence` T* (K where none is evidence)."""

    row: dict[str, Any]
    group: int
    member: int
    turns: list[Turn] = field(default_factory=list)
    memory: str | None = None
    exit_step: int | None = None
    last_evidence: int | None = None
    parsed: bool = True
    answer: str | None = None
    memory_tokens: int = 0
    prompt: Any = None  # the last turn's prompt in TRL's form, text or messages
    measures: dict[str, list[float]] | None = None  # of an outline: what its owner observed, by metric name


def outline(trajectory: Trajectory, measures: dict[str, list[float]]) -> Trajectory:
    """Return what another process needs of a trajectory: place, lengths and observations, no token and no text."""
    turns = [
        replace(
            turn,
            prompt_ids=range(len(turn.prompt_ids)),
            completion_ids=range(len(turn.completion_ids)),
            behavior_logprobs=(),
            text="",
            decision=None,
        )
        for turn in trajectory.turns
    ]
    row = {"id": trajectory.row["id"]} if "id" in trajectory.row else {}
    return Trajectory(row, trajectory.group, trajectory.member, turns, parsed=trajectory.parsed, measures=measures)


def decode_completion(tokenizer: Any, ids: Sequence[int], finish_reason: str) -> str:
    """Decode with special tokens kept and only the final EOS dropped; an id that the tokenizer does not know shows.

    Fast tokenizers drop unknown ids without a word; here each becomes `<|unknown_token:ID|>`, which no parser accepts.
    """
    ids = list(ids[:-1] if finish_reason == "eos" else ids)
    parts = []
    for is_known, run in itertools.groupby(ids, lambda token: tokenizer.convert_ids_to_tokens(token) is not None):
        if is_known:
            text = tokenizer.decode(list(run), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            parts.append(text)
        else:
            parts.extend(f"<|unknown_token:{token}|>" for token in run)
    return "".join(parts)


def collect(
    workflow: Any,
    engine: Engine,
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    groups: Sequence[int],
    members: Sequence[int],
    seed: int,
    iteration: int,
    on_turn: Callable[[int, int], None] | None = None,
) -> list[Trajectory]:
    """Read every row to its end and return one trajectory per row, in the order of `rows`.

    All trajectories still reading take their next turn together, so that one engine call holds all members of a group
    at the same step; a trajectory that ends leaves the batch and shifts nobody. `on_turn(turn, active)` reports
    progress.
    """
    trajectories = [
        Trajectory(row=row, group=group, member=member)
        for row, group, member in zip(rows, groups, members, strict=True)
    ]
    states = [workflow.start(row) for row in rows]
    active, index = list(range(len(rows))), 0
    while active:
        if on_turn is not None:
            on_turn(index, len(active))
        messages = getattr(workflow, "messages", lambda state: None)
        requests = [
            Request(
                segments=workflow.prompt(states[i]),
                key=NoiseKey(seed, iteration, groups[i], members[i], index),
                label=row_name(rows[i], groups[i]),
                messages=messages(states[i]),
            )
            for i in active
        ]
        goes_on = []
        for i, request, completion in zip(active, requests, engine.generate(requests), strict=True):
            trajectory = trajectories[i]
            turn = Turn(
                step=index + 1,
                prompt_ids=request.prompt_ids,
                completion_ids=completion.ids,
                behavior_logprobs=completion.logprobs,
                finish_reason=completion.finish_reason,
                text=completion.text
                if completion.text is not None
                else decode_completion(tokenizer, completion.ids, completion.finish_reason),
            )
            trajectory.prompt = request.messages
            trajectory.turns.append(turn)
            if workflow.advance(states[i], turn):
                goes_on.append(i)
        active, index = goes_on, index + 1
    for trajectory, state in zip(trajectories, states, strict=True):
        for name in ("memory", "exit_step", "last_evidence", "parsed", "answer", "memory_tokens"):
            setattr(trajectory, name, getattr(state, name, getattr(trajectory, name)))
        if trajectory.prompt is None:
            trajectory.prompt = tokenizer.decode(trajectory.turns[-1].prompt_ids)
    return trajectories


def row_name(row: dict[str, Any], index: int) -> str:
    """Name a dataset row in messages: its id where it has one, else its place."""
    return f"row {row['id']!r}" if "id" in row else f"row {index}"
