"""The gates an ideal reader would write: the targets of a warm start."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

MAX_UNIT_CHARACTERS = 240  # of one line or sentence taken into memory
STOP_WORDS = set(
    "a an and are as at by do does for from in into is it of on or that the to was what which who".split()
)
GATE_TAGS = re.compile(r"</?(?:think|check|update|next)>")  # the parser of a turn allows none inside a memory
UNIT_BREAK = re.compile(r"\n+|(?<=[.?!])[ \t]+(?=\S)")
BLANK = "(blank)"


def gold_turns(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One gold gate decision per chunk up to T*, the last evidence chunk (all chunks when none is evidence).

    `row` has question, answers and chunks. Each turn is {"step": int from 1, "check": bool, "candidate": str,
    "exit": bool}: check is the chunk's label; the candidate of an evidence chunk is the gold memory before it plus
    what the chunk adds (see `relevant_text`), and "" elsewhere; exit is True at T* alone.
    Raises ValueError for a row without chunks.
    """
    chunks = row["chunks"]
    if not chunks:
        raise ValueError("the row has no chunks: expected at least one")
    evidence = [step for step, chunk in enumerate(chunks, start=1) if chunk["evidence"]]
    last = evidence[-1] if evidence else len(chunks)
    turns, memory = [], ""
    for step, chunk in enumerate(chunks[:last], start=1):
        candidate = ""
        if chunk["evidence"]:
            added = relevant_text(chunk["text"], row["question"], row["answers"])
            memory = candidate = memory if added in memory and memory else f"{memory} {added}".strip()
        turns.append({"step": step, "check": chunk["evidence"], "candidate": candidate, "exit": step == last})
    return turns


def relevant_text(text: str, question: str, answers: Iterable[str]) -> str:
    """The lines or sentences of a chunk worth remembering for a question, never empty, on one line.

    Of those that hold a gold answer as whole words, the ones that share most with the question (at most two); when
    none holds an answer, the first of all that shares most. A shared word counts 1 / (lines of the chunk that have
    it). Gate tags are taken out; a long line is cut around the answer.

    >>> text = "a cat sat . the code of lamp is 12 . the code of bell is 12 ."
    >>> relevant_text(text, "what is the code of lamp ?", ["12"])
    'the code of lamp is 12 .'
    """
    units = [unit for part in UNIT_BREAK.split(GATE_TAGS.sub(" ", text)) if (unit := " ".join(part.split()))]
    if not units:
        return BLANK
    patterns = [
        re.compile(rf"(?<!\w){re.escape(' '.join(answer.split()))}(?!\w)", re.IGNORECASE) for answer in answers
    ]
    matches = {unit: next(filter(None, (pattern.search(unit) for pattern in patterns)), None) for unit in units}
    holding = [unit for unit in matches if matches[unit]]
    asked = _words(question)
    having = Counter(word for unit in units for word in _words(unit))
    shared = {unit: sum(Fraction(1, having[word]) for word in _words(unit) & asked) for unit in holding or matches}
    best = [unit for unit in shared if shared[unit] == max(shared.values())][: 2 if holding else 1]
    return " ".join(_cut(unit, match.start() if (match := matches[unit]) else 0) for unit in best)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower())) - STOP_WORDS


def _cut(unit: str, position: int) -> str:
    """At most MAX_UNIT_CHARACTERS of a line, with the given position in the middle where the line is longer."""
    start = max(0, min(position - MAX_UNIT_CHARACTERS // 2, len(unit) - MAX_UNIT_CHARACTERS))
    return unit[start : start + MAX_UNIT_CHARACTERS].strip()
