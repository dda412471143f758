"""Workflows: what the model is asked at every turn, and what its reply does. Plain Python, no torch."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from turngrpo.trainer.reading.chat_format import CLOSE_THINK, ChatFormat
from turngrpo.trainer.reading.gates import (
    GATED_INSTRUCTION,
    INITIAL_MEMORY,
    UNBOXED,
    UNENDED,
    UNGATED_INSTRUCTION,
    GateDecision,
    answer_segments,
    is_plain,
    parse_answer,
    read_turn,
    turn_segments,
)
from turngrpo.trainer.reading.rollout import Turn


@dataclass(frozen=True)
class WorkflowOptions:
    """What a workflow is bound with beside the tokenizer; a TurnGRPOConfig has these fields too."""

    max_memory_tokens: int = 1024
    chat_template_kwargs: dict[str, Any] | None = None


class WorkflowConfig(Protocol):
    """Anything with the fields of WorkflowOptions."""

    @property
    def max_memory_tokens(self) -> int: ...

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


class Workflow(Protocol):
    """One way of working through a dataset row turn by turn.

    `bind` is called once; then per trajectory `start`, and per turn `prompt` and `advance`. Two optional methods:
    `messages(state)` gives the current prompt in TRL's form to reward functions (default: the decoded prompt), and
    `max_prompt_tokens(row)` an upper bound of every prompt of a row, checked before training (default: checked at each
    turn). Attributes of the state named memory, exit_step, last_evidence, parsed, answer, memory_tokens become the
    trajectory's.
    """

    strict_format: bool

    def bind(self, tokenizer: Any, config: WorkflowConfig) -> None: ...

    def start(self, row: dict[str, Any]) -> Any: ...

    def prompt(self, state: Any) -> list[list[int]]: ...

    def advance(self, state: Any, turn: Turn) -> bool: ...


class SingleTurn:
    """One prompt, one completion: reads the dataset column `prompt` (text or messages, as in TRL)."""

    strict_format = False

    def bind(self, tokenizer: Any, config: WorkflowConfig) -> None:
        self.tokenizer = tokenizer
        self.chat_template_kwargs = dict(config.chat_template_kwargs or {})

    def start(self, row: dict[str, Any]) -> dict[str, Any]:
        if "prompt" not in row:
            raise ValueError(f"SingleTurn reads the column 'prompt', found columns {sorted(row)}")
        return {"prompt": row["prompt"]}

    def prompt(self, state: dict[str, Any]) -> list[list[int]]:
        if isinstance(state["prompt"], str):
            return [self.tokenizer(state["prompt"])["input_ids"]]
        encoded = self.tokenizer.apply_chat_template(
            state["prompt"], add_generation_prompt=True, tokenize=True, return_dict=True, **self.chat_template_kwargs
        )
        return [encoded["input_ids"]]

    def messages(self, state: dict[str, Any]) -> Any:
        return state["prompt"]

    def max_prompt_tokens(self, row: dict[str, Any]) -> int:
        return len(self.prompt(self.start(row))[0])

    def advance(self, state: dict[str, Any], turn: Turn) -> bool:
        return False


@dataclass
class _Reading:
    """Where one reader of a document stands; `chunk` is the 0-based index of the chunk to read, K when answering."""

    question: str
    chunks: list[dict[str, Any]]
    last_evidence: int | None  # T*, None where a chunk has no label
    memory: str = INITIAL_MEMORY
    memory_tokens: int = 0
    chunk: int = 0
    answering: bool = False
    exit_step: int | None = None
    parsed: bool = True
    answer: str | None = None
    segments: list[str] = field(default_factory=list)


class _MemoryAgent:
    """What gated and ungated readers share: chunk turns over a memory, then one answer turn from memory alone."""

    instruction: str
    strict_format: bool

    def __init__(self, layout: str, strict_format: bool, exit_gate: bool, instruction: str | None):
        turn_segments(layout, "", "", "", "")  # refuses an unknown layout
        self.layout, self.strict_format, self.exit_gate = layout, strict_format, exit_gate
        self.instruction = self.instruction if instruction is None else instruction

    def bind(self, tokenizer: Any, config: WorkflowConfig) -> None:
        self.chat = ChatFormat(tokenizer, config.chat_template_kwargs)
        self.max_memory_tokens = config.max_memory_tokens

    def start(self, row: dict[str, Any]) -> _Reading:
        missing = [name for name in ("question", "answers", "chunks") if name not in row]
        if missing:
            raise ValueError(f"{type(self).__name__} reads question, answers and chunks; missing {missing}")
        if not row["chunks"]:
            raise ValueError(f"row {row.get('id')!r} has no chunks, expected at least one")
        labels = [chunk.get("evidence") for chunk in row["chunks"]]
        evidence = [k for k, label in enumerate(labels, start=1) if label]
        last_evidence = evidence[-1] if evidence else len(labels)
        reading = _Reading(row["question"], row["chunks"], None if None in labels else last_evidence)
        reading.memory_tokens = len(self.chat.encode_text(INITIAL_MEMORY))
        return reading

    def _segments(self, state: _Reading) -> list[str]:
        if state.answering:
            return answer_segments(state.question, state.memory)
        chunk = state.chunks[state.chunk]["text"]
        return turn_segments(self.layout, self.instruction, state.question, chunk, state.memory)

    def prompt(self, state: _Reading) -> list[list[int]]:
        state.segments = self._segments(state)
        return self.chat.encode(state.segments)

    def messages(self, state: _Reading) -> Any:
        return self.chat.prompt_form(state.segments)

    def max_prompt_tokens(self, row: dict[str, Any]) -> int:
        """Upper bound over the turns of a row: the longest chunk with a full memory, or the answer turn."""
        state = self.start(row)
        memory = max(self.max_memory_tokens, state.memory_tokens) - state.memory_tokens
        lengths = []
        for index in range(len(state.chunks)):
            state.chunk = index
            lengths.append(sum(map(len, self.prompt(state))))
        state.answering = True
        return max(*lengths, sum(map(len, self.prompt(state)))) + memory

    def prompt_parts(self, row: dict[str, Any]) -> dict[str, int]:
        """Return the tokens of the longest prompt that a row can have, by part; they sum up to `max_prompt_tokens`."""
        state, bound = self.start(row), self.max_prompt_tokens(row)
        memory = max(self.max_memory_tokens, state.memory_tokens)
        texts = [len(self.chat.encode_text(chunk["text"])) for chunk in state.chunks]
        state.chunk = texts.index(max(texts))
        state.answering = sum(map(len, self.prompt(state))) + memory - state.memory_tokens < bound
        segments = self._segments(state)
        parts = {"instruction": segments[0], "question": segments[1]}
        lengths = {name: len(self.chat.encode_text(text)) for name, text in parts.items()}
        lengths |= {"chunk": 0 if state.answering else texts[state.chunk], "memory": memory}
        return lengths | {"template": bound - sum(lengths.values())}

    def write(self, state: _Reading, turn: Turn, candidate: str) -> None:
        """Make `candidate` the memory, cut to `max_memory_tokens`."""
        state.memory, state.memory_tokens, turn.memory_cut = self.chat.cut(candidate, self.max_memory_tokens)

    def advance(self, state: _Reading, turn: Turn) -> bool:
        if state.answering:
            turn.step = None
            state.answer = parse_answer(turn.text, turn.finish_reason, self.chat.control_tokens)
            if state.answer is None:
                state.parsed, turn.fault = False, UNBOXED if turn.finish_reason == "eos" else UNENDED
            return False
        turn.evidence = state.chunks[state.chunk].get("evidence")
        turn.decision = self.decide(turn)
        state.parsed &= turn.decision is not None
        state.chunk += 1
        state.exit_step = state.chunk
        if turn.decision is not None and turn.decision.check:
            self.write(state, turn, turn.decision.candidate)
        leaves = self.exit_gate and turn.decision is not None and turn.decision.exit
        state.answering = leaves or state.chunk == len(state.chunks)
        return True

    def decide(self, turn: Turn) -> GateDecision | None:
        raise NotImplementedError


class GatedMemory(_MemoryAgent):
    """GRU-Mem (arXiv 2602.10560): an update gate guards the memory and an exit gate ends the reading.

    `layout` is "chunk_first" or "memory_first"; `strict_format` makes the trainer reward a trajectory with an unparsed
    turn 0; `exit_gate=False` reads to the end whatever the gate says; `instruction` replaces the one of chunk turns.
    """

    instruction = GATED_INSTRUCTION

    def __init__(
        self,
        layout: str = "chunk_first",
        strict_format: bool = True,
        exit_gate: bool = True,
        instruction: str | None = None,
    ):
        super().__init__(layout, strict_format, exit_gate, instruction)

    def decide(self, turn: Turn) -> GateDecision | None:
        found = read_turn(turn.text, turn.finish_reason, self.chat.control_tokens, self.chat.opens_think)
        decision, turn.fault = found
        return decision


class MemAgent(_MemoryAgent):
    """MemAgent (arXiv 2507.02259): the reply is the new memory at every chunk, and every chunk is read."""

    instruction = UNGATED_INSTRUCTION

    def __init__(self, layout: str = "memory_first", strict_format: bool = False, instruction: str | None = None):
        super().__init__(layout, strict_format, exit_gate=False, instruction=instruction)

    def decide(self, turn: Turn) -> GateDecision | None:
        _, closed, reply = turn.text.rpartition(CLOSE_THINK) if self.chat.opens_think else ("", "closed", turn.text)
        candidate = reply.strip()
        if turn.finish_reason != "eos":
            turn.fault = UNENDED
        elif not closed:
            turn.fault = "a think block that does not end"
        elif not candidate:
            turn.fault = "an empty memory"
        elif not is_plain(candidate, self.chat.control_tokens):
            turn.fault = "a control token in the memory"
        if turn.fault is not None:
            return None
        return GateDecision(check=True, candidate=candidate, exit=False)
