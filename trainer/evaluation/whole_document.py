"""The whole document in one prompt: what reading chunk by chunk is compared with, where a document fits."""

from dataclasses import dataclass
from typing import Any

from turngrpo.trainer.reading.chat_format import ChatFormat
from turngrpo.trainer.reading.gates import parse_answer
from turngrpo.trainer.reading.rollout import Turn
from turngrpo.trainer.reading.workflows import WorkflowConfig

INSTRUCTION = "Answer the question from the document. Put the final answer, and nothing else, in \\boxed{}."


@dataclass
class _Asked:
    segments: list[str]
    answer: str | None = None
    parsed: bool = True
    memory: str = ""  # none is kept; an answer that does not parse is a wrong one
    memory_tokens: int = 0


class WholeDocument:
    """One answer turn over all chunks of a corpus row, joined by line ends."""

    strict_format = False

    def bind(self, tokenizer: Any, config: WorkflowConfig) -> None:
        self.chat = ChatFormat(tokenizer, config.chat_template_kwargs)

    def start(self, row: dict[str, Any]) -> _Asked:
        document = "\n".join(chunk["text"] for chunk in row["chunks"])
        return _Asked([INSTRUCTION, "\n\n<document>\n", document, f"\n</document>\n\n{row['question']}"])

    def prompt(self, state: _Asked) -> list[list[int]]:
        return self.chat.encode(state.segments)

    def messages(self, state: _Asked) -> Any:
        return self.chat.prompt_form(state.segments)

    def max_prompt_tokens(self, row: dict[str, Any]) -> int:
        return sum(map(len, self.prompt(self.start(row))))

    def advance(self, state: _Asked, turn: Turn) -> bool:
        turn.step = None
        state.answer = parse_answer(turn.text, turn.finish_reason, self.chat.control_tokens)
        state.parsed = state.answer is not None
        return False
