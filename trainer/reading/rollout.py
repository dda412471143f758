"""Turns and trajectories, and the loop that drives a workflow with an engine until every trajectory has ended."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple, Protocol

from tqdm.auto import tqdm

from turngrpo.trainer.faults import UserFault

EVAL_ITERATION = -1  # evaluation noise has a domain of its own, whatever eval_seed is


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
    behavior_logprobs: list[float]
    finish_reason: str  # "eos" or "length"
    text: str | None = None  # where it came as text; None: what the ids decode to


@dataclass
class TokenCounts:
    """Real tokens that went through the model: prompt prefixes (once per group), suffixes, and decoding steps."""

    prefix: int = 0
    suffix: int = 0
    decode: int = 0

    @property
    def total(self) -> int:
        return self.prefix + self.suffix + self.decode


class Engine(Protocol):
    """Completes a batch of requests in their order; the trainer calls `refresh` when the policy may have changed.

    `counts` are the tokens that went through the model so far, `prompt_limit` is the longest prompt it takes, and
    `share_prefix` says whether the model here computes the common prefix of a group once.
    """

    counts: TokenCounts

    @property
    def prompt_limit(self) -> int: ...

    @property
    def share_prefix(self) -> bool: ...

    def refresh(self) -> None: ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...


def check_prompts(requests: Sequence[Request], limit: int, limits: str) -> None:
    """Raise ValueError naming the first request without a prompt or with more than `limit` tokens."""
    for request in requests:
        length = len(request.prompt_ids)
        if not 1 <= length <= limit:
            raise ValueError(
                f"{request.label}, turn {request.key.turn}: the prompt has {length} tokens, expected 1 to {limit} "
                f"({limits}); prompts are never truncated"
            )


@dataclass
class Turn:
    """One prompt and its completion: one training sample. `step` is the 1-based chunk index, None for other turns.

    A workflow's `advance` may set `step`, `decision`, `evidence`, `memory_cut` and `fault`.
    """

    step: int | None
    prompt_ids: list[int] = field(repr=False)  # not in messages, which TRL fills with whole trajectories
    completion_ids: list[int] = field(repr=False)
    behavior_logprobs: list[float] = field(repr=False)
    finish_reason: str
    text: str
    decision: Any = None
    evidence: bool | None = None
    memory_cut: bool = False
    memory: str | None = None  # after the turn
    fault: str | None = None  # why it did not parse

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        return len(self.completion_ids)


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


class ReadOnly:
    """A record that nothing can be written into once it is sealed."""

    def __setattr__(self, name: str, value: Any) -> None:
        if "sealed" in self.__dict__:
            raise AttributeError(f"{name} is read-only: rewards are given the records that training goes on with")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)


def _refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise TypeError("this list is read-only: rewards are given the records that training goes on with; copy it first")


class ReadOnlyList(list[Any]):
    """A list that stays as it is."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = sort = reverse = _refuse


class ReadOnlyTurn(ReadOnly, Turn):
    """A Turn that stays as it is, its lists too."""


class ReadOnlyTrajectory(ReadOnly, Trajectory):
    """A Trajectory that stays as it is, its turns too; its row is a copy."""


def read_only(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory that looks the same and cannot be changed; its row is a copy."""
    turns, lists = [], ("prompt_ids", "completion_ids", "behavior_logprobs")
    for turn in trajectory.turns:
        own = {name: ReadOnlyList(getattr(turn, name)) for name in lists}
        turns.append(ReadOnlyTurn(**{**vars(turn), **own}))
    changed = {"turns": ReadOnlyList(turns), "row": copy.deepcopy(trajectory.row)}
    sealed = ReadOnlyTrajectory(**{**vars(trajectory), **changed})
    for record in (*turns, sealed):
        record.__dict__["sealed"] = True
    return sealed


@dataclass(frozen=True)
class TurnOutline:
    """The lengths of another process's turn: all that its share of an objective and of the metrics depends on."""

    step: int | None
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str


@dataclass(frozen=True)
class TrajectoryOutline:
    """What a process knows of another one's trajectory: its place, its turns' lengths, and what its owner observed.

    `row` holds the id alone, where there is one; `measures` are observations by metric name.
    """

    row: dict[str, Any]
    group: int
    member: int
    turns: list[TurnOutline]
    parsed: bool
    measures: dict[str, list[float]]


def outline(trajectory: Trajectory, measures: dict[str, list[float]]) -> TrajectoryOutline:
    """Return what other processes need of a trajectory: no token and no text."""
    turns = [TurnOutline(t.step, t.prompt_tokens, t.completion_tokens, t.finish_reason) for t in trajectory.turns]
    row = {"id": trajectory.row["id"]} if "id" in trajectory.row else {}
    return TrajectoryOutline(row, trajectory.group, trajectory.member, turns, trajectory.parsed, measures)


def decode_completion(tokenizer: Any, ids: Sequence[int], finish_reason: str) -> str:
    """Decode with special tokens kept and only the final EOS dropped; an id that the tokenizer does not know shows.

    Fast tokenizers drop unknown ids without a word; here each becomes `<|unknown_token:ID|>`, which no parser accepts.
    """
    ids = list(ids[:-1] if finish_reason == "eos" else ids)
    known, parts = _known_ids(tokenizer, len(tokenizer)), []
    for is_known, run in itertools.groupby(ids, known.__contains__):
        if is_known:
            text = tokenizer.decode(list(run), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            parts.append(text)
        else:
            parts.extend(f"<|unknown_token:{token}|>" for token in run)
    return "".join(parts)


@functools.lru_cache(maxsize=8)
def _known_ids(tokenizer: Any, size: int) -> frozenset[int]:
    """Return the ids that have a token; `size` is the tokenizer's, which grows with tokens that are added."""
    named = (
        token for token in range(size) if tokenizer.is_fast and tokenizer.convert_ids_to_tokens(token) is not None
    )
    return frozenset(tokenizer.get_vocab().values()) | frozenset(named)


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
    max_turns: int | None = None,
) -> list[Trajectory]:
    """Read every row to its end and return one trajectory per row, in the order of `rows`.

    All trajectories still reading take their next turn together, so that one engine call holds all members of a group
    at the same step; a trajectory that ends leaves the batch and shifts nobody. `on_turn(turn, active)` reports
    progress. Raises ValueError naming a row that goes on after `max_turns`, and for a workflow that returns what is
    no prompt or no decision to go on.
    """
    trajectories = [
        Trajectory(row=row, group=group, member=member)
        for row, group, member in zip(rows, groups, members, strict=True)
    ]
    states, name = [workflow.start(row) for row in rows], type(workflow).__name__
    active, index = list(range(len(rows))), 0
    while active:
        if on_turn is not None:
            on_turn(index, len(active))
        if max_turns is not None and index >= max_turns:
            raise UserFault(
                f"{row_name(rows[active[0]], groups[active[0]])} still goes on after {index} turns, as many as "
                f"max_turns={max_turns} allows: let {name}.advance return False where it ends, or raise max_turns"
            )
        messages = getattr(workflow, "messages", lambda state: None)
        requests = [
            Request(
                segments=check_segments(
                    workflow.prompt(states[i]), f"{name}.prompt, {row_name(rows[i], groups[i])}, turn {index}"
                ),
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
                behavior_logprobs=completion.behavior_logprobs,
                finish_reason=completion.finish_reason,
                text=completion.text
                if completion.text is not None
                else decode_completion(tokenizer, completion.ids, completion.finish_reason),
            )
            trajectory.prompt = request.messages
            trajectory.turns.append(turn)
            if check_goes_on(workflow.advance(states[i], turn), f"{name}.advance, {request.label}, turn {index}"):
                goes_on.append(i)
            turn.memory = getattr(states[i], "memory", None)
        active, index = goes_on, index + 1
    for trajectory, state in zip(trajectories, states, strict=True):
        for name in ("memory", "exit_step", "last_evidence", "parsed", "answer", "memory_tokens"):
            setattr(trajectory, name, getattr(state, name, getattr(trajectory, name)))
        if trajectory.prompt is None:
            trajectory.prompt = tokenizer.decode(trajectory.turns[-1].prompt_ids)
    return trajectories


def check_segments(segments: Any, where: str) -> list[list[int]]:
    """Return what a workflow's prompt returned; ValueError for anything but a list of lists of token ids."""
    if isinstance(segments, list | tuple) and all(isinstance(segment, list | tuple) for segment in segments):
        odd = [t for segment in segments for t in segment if not isinstance(t, Integral) or isinstance(t, bool)]
        if not odd:
            return segments  # type: ignore[return-value]
        found = f"segments that hold {odd[0]!r} ({type(odd[0]).__name__})"
    elif isinstance(segments, list | tuple):
        wrong = next(segment for segment in segments if not isinstance(segment, list | tuple))
        kind = type(wrong).__name__
        found = {"int": "one flat list of token ids", "str": "a list of texts"}.get(
            kind, f"a list that holds a {kind}"
        )
    else:
        found = f"a {type(segments).__name__}"
    raise UserFault(
        f"{where}: found {found}, expected a list of segments, each a list of token ids, as in [[1, 2], [3]]: "
        "ChatFormat(tokenizer).encode([text, ...]) makes them of texts; one list of ids goes in as [ids], a tensor as "
        "[tensor.tolist()]"
    )


def check_goes_on(value: Any, where: str) -> bool:
    """Return what a workflow's advance returned; ValueError for anything but a bool (numpy's too)."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise UserFault(
            f"{where}: returned {value!r:.60}, expected True while the trajectory goes on, and False at its end"
        )
    return bool(value)


def row_name(row: dict[str, Any], index: int) -> str:
    """Name a dataset row in messages: its id where it has one, else its place."""
    return f"row {row['id']!r}" if "id" in row else f"row {index}"


@contextlib.contextmanager
def progress(label: str, total: int, unit: str, hidden: bool) -> Iterator[Any]:
    """Show a bar of one stage, which goes when it has ended; yields it."""
    with tqdm(total=total, desc=label, unit=unit, leave=False, disable=hidden) as bar:
        yield bar


@contextlib.contextmanager
def rollout_progress(label: str, rows: int, hidden: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of the trajectories that have ended in one rollout; yields collect()'s `on_turn`."""
    with progress(label, rows, "trajectory", hidden) as bar:

        def on_turn(turn: int, active: int) -> None:
            bar.set_postfix_str(f"turn {turn + 1}, {active} reading")
            bar.update(rows - active - bar.n)

        yield on_turn
