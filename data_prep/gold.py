"""The gates and the thoughts an ideal reader would write: the targets of a warm start."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from .world import supporting_sentences

MAX_UNIT_CHARACTERS = 240  # of one line or sentence taken into memory
MAX_THOUGHT_CHARACTERS = 600  # a question and two such lines
MIN_THOUGHT_CHARACTERS = 80  # less leaves no room for a line
FOUND, NOT_HERE = "asked: {asked}; found: {found}", "asked: {asked}; not here"
STOP_WORDS = set(
    "a an and are as at by do does for from in into is it of on or that the to was what which who".split()
)
# Gate tags and control tokens: the parser of a turn allows none inside a memory or a thought.
MARKS = re.compile(r"</?(?:think|check|update|next)>|<\|[^|<>\s]*\|>")
UNIT_BREAK = re.compile(r"\n+|(?<=[.?!])[ \t]+(?=\S)")
BLANK = "(blank)"


def gold_turns(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One gold gate decision per chunk up to T*, the last evidence chunk (all chunks when none is evidence).

    `row` has question, answers and chunks. Each turn is {"step": int from 1, "check": bool, "candidate": str,
    "exit": bool}: check is the chunk's label; the candidate of an evidence chunk is the gold memory before it plus
    what the chunk adds (in a row of the small world the sentences that decide the answer, else `relevant_text`), and
    "" elsewhere; exit is True at T* alone.
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
            added = _worth_keeping(row, chunk)
            memory = candidate = memory if added in memory and memory else f"{memory} {added}".strip()
        turns.append({"step": step, "check": chunk["evidence"], "candidate": candidate, "exit": step == last})
    return turns


def gold_thought(row: Mapping[str, Any], chunk: Mapping[str, Any], limit: int = MAX_THOUGHT_CHARACTERS) -> str:
    """The think block of an ideal reader at one chunk of a row: what is asked, and the line of the chunk that says it.

    "asked: QUESTION; found: LINE" where the chunk is evidence, "asked: QUESTION; not here" elsewhere: one line of at
    most `limit` characters without gate tags and control tokens (`<|...|>`). A long question is cut at its end, a long
    line around a gold answer. Raises ValueError for a limit below 80.

    >>> chunk = {"text": "a cat sat . the code of lamp is 12 .", "evidence": True}
    >>> gold_thought({"question": "what is the code of lamp ?", "answers": ["12"], "chunks": [chunk]}, chunk)
    'asked: what is the code of lamp ?; found: the code of lamp is 12 .'
    """
    if limit < MIN_THOUGHT_CHARACTERS:
        raise ValueError(f"limit is {limit}: expected {MIN_THOUGHT_CHARACTERS} characters or more")
    form = FOUND if chunk["evidence"] else NOT_HERE
    room = limit - len(form.format(asked="", found=""))
    asked = " ".join(MARKS.sub(" ", row["question"]).split())
    if not chunk["evidence"]:
        return form.format(asked=_head(asked, room))
    asked, line = _head(asked, room // 2), _worth_keeping(row, chunk)
    places = [match.start() for answer in row["answers"] if (match := _whole_words(answer).search(line))]
    return form.format(asked=asked, found=_cut(line, places[0] if places else 0, room - len(asked)))


def _worth_keeping(row: Mapping[str, Any], chunk: Mapping[str, Any]) -> str:
    """What an evidence chunk adds to the memory of an ideal reader: what decides a small world's answer, exactly."""
    chunks = row["chunks"]
    told = supporting_sentences(row["question"], tuple(each["text"] for each in chunks))
    labels = [each["evidence"] for each in chunks]
    if told is not None and chunk in chunks and [bool(sentences) for sentences in told] == labels:
        return " ".join(told[chunks.index(chunk)])
    return relevant_text(chunk["text"], row["question"], row["answers"])


def relevant_text(text: str, question: str, answers: Iterable[str]) -> str:
    """The lines or sentences of a chunk worth remembering for a question, never empty, on one line.

    Of those that hold a gold answer as whole words, the ones that share most with the question (at most two); when
    none holds an answer, the first of all that shares most. A shared word counts 1 / (lines of the chunk that have
    it). Gate tags and control tokens are taken out; a long line is cut around the answer.

    >>> text = "a cat sat . the code of lamp is 12 . the code of bell is 12 ."
    >>> relevant_text(text, "what is the code of lamp ?", ["12"])
    'the code of lamp is 12 .'
    """
    units = [unit for part in UNIT_BREAK.split(MARKS.sub(" ", text)) if (unit := " ".join(part.split()))]
    if not units:
        return BLANK
    patterns = [_whole_words(answer) for answer in answers]
    matches = {unit: next(filter(None, (pattern.search(unit) for pattern in patterns)), None) for unit in units}
    holding = [unit for unit in matches if matches[unit]]
    asked = _words(question)
    having = Counter(word for unit in units for word in _words(unit))
    shared = {unit: sum(Fraction(1, having[word]) for word in _words(unit) & asked) for unit in holding or matches}
    best = [unit for unit in shared if shared[unit] == max(shared.values())][: 2 if holding else 1]
    return " ".join(_cut(unit, match.start() if (match := matches[unit]) else 0, MAX_UNIT_CHARACTERS) for unit in best)


def _whole_words(answer: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(' '.join(answer.split()))}(?!\w)", re.IGNORECASE)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower())) - STOP_WORDS


def _cut(unit: str, position: int, characters: int) -> str:
    """At most `characters` of a line, with the given position in the middle where the line is longer."""
    start = max(0, min(position - characters // 2, len(unit) - characters))
    return unit[start : start + characters].strip()


def _head(text: str, characters: int) -> str:
    """The first `characters` of a text, an ellipsis among them where it is longer."""
    return text if len(text) <= characters else text[: characters - 3] + "..."
