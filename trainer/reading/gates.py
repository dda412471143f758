"""The text protocol of the gates: the blocks of a turn, its writer and its strict parser, prompts in both layouts."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

INITIAL_MEMORY = "No memory yet."

# A gate tag or a control token (`<|im_start|>`, `<|unknown_token:7|>`) may never stand inside free text.
_CONTROL = re.compile(r"<\|[^|<>\s]*\|>")
BLOCKS = ("think", "check", "update", "next")  # of a chunk turn, in their order
_TAG = re.compile(rf"</?(?:{'|'.join(BLOCKS)})>")
_EVERY_TAG = tuple(f"<{slash}{name}>" for name in BLOCKS for slash in ("", "/"))  # of a turn, in order
_TAGS_OF_A_TURN = {_EVERY_TAG, _EVERY_TAG[2:]}  # with a think block, and without
_BOXED = "\\boxed{"
UNENDED, UNBOXED = "cut before its end", "not one whole \\boxed{}"  # why a turn, or an answer, does not parse

GATED_INSTRUCTION = """\
You read a long document one section at a time to answer a question. Only the memory is carried on.
Reply with exactly these blocks, in this order:
<think>your reasoning, may be empty</think>
<check>yes or no: does this section hold information that the question needs</check>
<update>the full new memory: what to keep of the old memory and what this section adds</update>
<next>continue or end: end as soon as the memory is enough to answer</next>"""

UNGATED_INSTRUCTION = """\
You read a long document one section at a time to answer a question. Only the memory is carried on.
Reply with the full updated memory: keep what the question needs, add what this section tells about it."""

ANSWER_INSTRUCTION = "Answer the question from the memory alone. Put the final answer, and nothing else, in \\boxed{}."


@dataclass(frozen=True)
class GateDecision:
    """What one parsed turn decided: write `candidate` into memory (`check`) and stop reading (`exit`)."""

    check: bool
    candidate: str
    exit: bool


def is_plain(text: str, control_tokens: Collection[str]) -> bool:
    """Whether no control token stands in a text: `<|...|>`, or one of the tokenizer's `control_tokens`."""
    return not (_CONTROL.search(text) or any(token in text for token in control_tokens))


def for_memory(text: str, control_tokens: Collection[str]) -> str:
    """Return a text with all that `parse_turn` allows in no memory taken out: gate tags and control tokens.

    >>> for_memory("a <update>b</update> <|im_end|> c", [])
    'a b c'
    """
    if is_plain(text, control_tokens) and not _TAG.search(text):
        return text
    for token in sorted(control_tokens, key=len, reverse=True):  # one may be a part of another
        text = text.replace(token, " ")
    return for_memory(" ".join(_TAG.sub(" ", _CONTROL.sub(" ", text)).split()), control_tokens)


def parse_turn(
    text: str, finish_reason: str, control_tokens: Collection[str] = (), opens_think: bool = False
) -> GateDecision | None:
    """Return the gates of one completion, or None where it breaks the format in any way (GRU-Mem, section 3).

    `read_turn` says in which.
    """
    return read_turn(text, finish_reason, control_tokens, opens_think)[0]


def read_turn(
    text: str, finish_reason: str, control_tokens: Collection[str] = (), opens_think: bool = False
) -> tuple[GateDecision, None] | tuple[None, str]:
    """Return (gates, None) of one completion, or (None, why it does not parse).

    `text` is the completion decoded with special tokens kept and only the final EOS dropped; `finish_reason` is "eos"
    or "length". The blocks stand once each and in order, `<think>` may be absent, nothing but white space stands
    between them, no tag or control token (`<|...|>`, or one of `control_tokens`) stands inside think or update, and
    check=yes needs a candidate. Where the prompt `opens_think`, the text begins inside that block.
    """
    text = f"<think>{text}" if opens_think else text
    if finish_reason != "eos":
        return None, UNENDED
    blocks = _blocks(text)
    if isinstance(blocks, str):
        return None, blocks
    if not all(is_plain(blocks.get(name, ""), control_tokens) for name in ("think", "update")):
        return None, "a control token in think or update"
    check, candidate, go = (blocks[name].strip() for name in ("check", "update", "next"))
    if check not in ("yes", "no"):
        return None, "check is neither yes nor no"
    if go not in ("continue", "end"):
        return None, "next is neither continue nor end"
    if check == "yes" and not candidate:
        return None, "check is yes and update is empty"
    return GateDecision(check=check == "yes", candidate=candidate, exit=go == "end"), None


def _blocks(text: str) -> dict[str, str] | str:
    """The text inside every block; what is wrong unless the tags are a turn's with white space between the blocks.

    One pass from tag to tag that stops at the first tag too many: no text is read twice, however it is made.
    """
    tags = list(islice(_TAG.finditer(text), len(_EVERY_TAG) + 1))
    if tuple(tag[0] for tag in tags) not in _TAGS_OF_A_TURN:
        return "the tags are not those of a turn, once each and in order"
    edges = [0, *(edge for tag in tags for edge in tag.span()), len(text)]
    pieces = [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
    if any(piece.strip() for piece in pieces[::2]):
        return "text outside the blocks"
    return {tag[0][1:-1]: piece for tag, piece in zip(tags[::2], pieces[1::2], strict=True)}


def parse_answer(text: str, finish_reason: str, control_tokens: Collection[str] = ()) -> str | None:
    """Return the content of the one `\\boxed{}` of an answer turn; None without EOS, for none, several or a torn one.

    A brace after a backslash is text; no control token may stand anywhere, as in `parse_turn`.
    """
    if finish_reason != "eos" or text.count(_BOXED) != 1 or not is_plain(text, control_tokens):
        return None
    start = text.index(_BOXED) + len(_BOXED)
    depth, escaped = 1, False
    for position in range(start, len(text)):
        if escaped or text[position] == "\\":
            escaped = not escaped
            continue
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
    return None


def turn_segments(layout: str, instruction: str, question: str, chunk: str, memory: str) -> list[str]:
    """Return the user text of a chunk turn as segments to tokenise apart; their concatenation is the user message.

    "chunk_first" puts the memory last, so that all trajectories of a group share every token before it; "memory_first"
    is MemAgent's order (arXiv 2507.02259): question, memory, chunk.
    """
    question_part = f"\n\n<question>\n{question}\n</question>\n\n"
    chunk_part = ["<section>\n", chunk, "\n</section>\n\n"]
    memory_part = ["<memory>\n", memory, "\n</memory>"]
    if layout == "chunk_first":
        return [instruction, question_part, *chunk_part, *memory_part]
    if layout == "memory_first":
        return [instruction, question_part, *memory_part, "\n\n", *chunk_part[:2], "\n</section>"]
    raise ValueError(f"layout is {layout!r}, expected 'chunk_first' or 'memory_first'")


def answer_segments(question: str, memory: str) -> list[str]:
    """Return the user text of the answer turn (question and memory only) as segments to tokenise apart."""
    return [ANSWER_INSTRUCTION, f"\n\n<question>\n{question}\n</question>\n\n", "<memory>\n", memory, "\n</memory>"]


def write_turn(decision: GateDecision, think: str = "", opens_think: bool = False) -> str:
    """Return the text that `parse_turn` reads as `decision`; without `think` there is no think block.

    Where the prompt `opens_think`, the text begins inside the block and closes it.

    >>> print(write_turn(GateDecision(check=True, candidate="the code is 7", exit=False)))
    <check>yes</check>
    <update>the code is 7</update>
    <next>continue</next>
    """
    start = f"<think>{think}</think>\n" if think or opens_think else ""
    start = start.removeprefix("<think>") if opens_think else start
    check, leave = "yes" if decision.check else "no", "end" if decision.exit else "continue"
    return f"{start}<check>{check}</check>\n<update>{decision.candidate}</update>\n<next>{leave}</next>"
