"""Needle tasks in the style of RULER: a few sentences to find in filler text, made offline at any length."""

import random
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any, NamedTuple

from .corpus_format import FORMAT

KINDS = ("single", "multi_key", "multi_value")
VALUES = tuple(str(number) for number in range(10, 100))  # one word each
ADJECTIVES = tuple("old small green quiet heavy round bright plain warm long".split())
VERBS = tuple("holds meets finds keeps lifts follows covers likes moves needs".split())
SHARED_KEYS = tuple("lamp rope bell drum coin harp mask vase ring kite plum sail".split())
SHARED_NOUNS = tuple("man dog horse road hill bird tree house wind chair river bread".split())
# project: (its keys, its filler nouns); no word stands in two places
THEMES = {
    "harbour": ("anchor mast buoy hull oar rudder winch canvas", "sailor gull pier tide crane ferry crew fog"),
    "garden": ("rake hoe spade trellis hose barrow sieve trowel", "rose bee hedge lawn seed snail gardener moss"),
    "kitchen": (
        "ladle whisk grater skillet kettle funnel tongs peeler",
        "cook stove flour soup table spice oven dough",
    ),
    "forest": ("axe tent compass lantern flask saddle trap whistle", "fox owl pine deer trail ranger cabin creek"),
    "workshop": ("hammer chisel clamp drill lathe pliers wrench anvil", "smith bench board nail shed glue iron plank"),
    "school": (
        "chalk ruler globe pencil satchel easel abacus eraser",
        "pupil teacher desk class yard book hall lesson",
    ),
    "market": (
        "scale basket ledger crate awning apron stamp purse",
        "baker grocer stall cheese crowd square cart fruit",
    ),
    "theatre": (
        "curtain wig script spotlight prop trumpet cape fan",
        "actor stage singer usher row crowdsman act poet",
    ),
    "railway": (
        "signal lever ticket coupling piston valve sleeper crowbar",
        "driver train bridge guard track tunnel coal van",
    ),
    "museum": (
        "fossil statue urn tablet scroll crown shield goblet",
        "guide visitor case room wing painter wall floor",
    ),
    "farm": ("plough sickle bucket harness churn pitchfork yoke trough", "farmer cow barn field goat wheat hen fence"),
    "observatory": (
        "lens dial mirror tripod sextant chart prism shutter",
        "star moon dome planet sky comet scholar night",
    ),
}


class Plan(NamedTuple):
    """What the rows of one project have in common; lengths in words."""

    kind: str
    keys: Sequence[str]
    nouns: Sequence[str]
    section_words: Sequence[int]  # filler words of every section (chunk)
    needles: int  # in every section, evidence included
    values: int  # evidence needles of a multi_value row


def build_needle_corpus(
    kind: str = "multi_key",
    projects: int = 8,
    rows_per_project: int = 64,
    chunks: int = 5,
    words_per_chunk: int = 24,
    seed: int = 0,
    last_position_weight: float = 0.5,
    shared_keys: bool = False,
    words: int | None = None,
    needles_per_chunk: int = 1,
    values: int = 3,
    created: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Manifest and rows of needle tasks, each "what is the code of <key> ?" over filler sentences.

    `single` has one needle; `multi_key` has one evidence needle and needles with other keys so that every chunk has
    `needles_per_chunk`; `multi_value` asks for `values` codes of one key, each in a chunk of its own, among needles
    with other keys. Every chunk holds exactly `words_per_chunk` filler words and its needles of 7 words (a full stop
    is a word). The last evidence chunk is spread over all chunks that can be the last one with equal weights, except
    the last of the text, which has `last_position_weight` times the weight of another.
    A project is a theme with its own filler nouns and keys; with `shared_keys` all projects use the same keys and
    nouns, so that validation shows no unseen word. With `words` rows hold a document of that many filler words with
    evidence spans (and `chunks` is not used): a section of `words_per_chunk` filler words takes the place of a chunk.
    `created` is today's date when left out; `progress` is called with (projects done, projects).
    Raises ValueError for an unknown kind or a size out of range.
    """
    if words is not None:
        chunks = words // max(words_per_chunk, 1)
    _check_sizes(kind, projects, rows_per_project, chunks, words_per_chunk, last_position_weight, needles_per_chunk)
    if kind == "multi_value" and not 2 <= values <= chunks:
        raise ValueError(f"values is {values}: expected 2 to {chunks}, the number of chunks (one value in each)")
    section_words = [words_per_chunk] * chunks
    section_words[-1] += 0 if words is None else words - chunks * words_per_chunk
    rows: list[dict[str, Any]] = []
    for done, theme in enumerate(list(THEMES)[:projects]):
        if progress is not None:
            progress(done, projects)
        keys, nouns = (SHARED_KEYS, SHARED_NOUNS) if shared_keys else (text.split() for text in THEMES[theme])
        needed = values if kind == "multi_value" else 1
        plan = Plan(kind, keys, nouns, section_words, needles_per_chunk, needed)
        generator = random.Random(f"{seed}/{kind}/{theme}")
        for index, last in enumerate(
            last_positions(rows_per_project, needed, chunks, last_position_weight, generator)
        ):
            row = {"id": f"{theme}-{index:04d}", "project": theme}
            rows.append(row | _row(plan, last, generator, as_document=words is not None))
    if progress is not None:
        progress(projects, projects)
    length = f"{chunks} chunks of {words_per_chunk} words" if words is None else f"documents of {words} words"
    manifest = {
        "format": FORMAT,
        "name": f"needle {kind}, {length}, {'shared' if shared_keys else 'separate'} keys, seed {seed}",
        "created": created or date.today().isoformat(),
        "label_source": "computed",
        "kappa": None,
        "kappa_items": None,
        "license": "Apache-2.0",
    }
    return manifest, rows


def last_positions(rows: int, first: int, chunks: int, last_weight: float, generator: random.Random) -> list[int]:
    """The last evidence chunk (from 1) of every row, first..chunks in even shares, shuffled.

    Chunk `chunks` has `last_weight` times the share of another one. The shares are met as exactly as whole rows allow.
    """
    weights = [1.0] * (chunks - first) + [last_weight if chunks > first else 1.0]
    total, positions, passed = sum(weights), [], 0.0
    for position, weight in enumerate(weights, start=first):
        before, passed = passed, passed + weight
        positions += [position] * (round(rows * passed / total) - round(rows * before / total))
    generator.shuffle(positions)
    return positions


def _check_sizes(
    kind: str, projects: int, rows: int, chunks: int, words: int, last_weight: float, needles: int
) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}: expected one of {', '.join(KINDS)}")
    if not 2 <= projects <= len(THEMES):
        raise ValueError(f"projects is {projects}: expected 2 to {len(THEMES)}, one theme each")
    if not last_weight >= 0:
        raise ValueError(f"last_position_weight is {last_weight}: expected 0 or more (1: as usual as any other)")
    for name, value, least in (
        ("rows_per_project", rows, 1),
        ("chunks (or words / words_per_chunk)", chunks, 2),
        ("words_per_chunk", words, SHORTEST_SENTENCE),
        ("needles_per_chunk", needles, 1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}: expected {least} or more")


def _row(plan: Plan, last: int, generator: random.Random, as_document: bool) -> dict[str, Any]:
    """Question, answers and the text of one row whose last evidence section is `last` (from 1)."""
    key, *other_keys = generator.sample(list(plan.keys), len(plan.keys))
    codes = generator.sample(VALUES, len(VALUES))
    asked, other_codes = codes[: plan.values], codes[plan.values :]
    places = sorted([*generator.sample(range(1, last), plan.values - 1), last])
    sections: list[list[tuple[str, bool]]] = []  # the sentences of a section, with whether each is evidence
    distractors = 0
    for section, words in enumerate(plan.section_words, start=1):
        sentences = [(sentence, False) for sentence in _filler(plan.nouns, words, generator)]
        needles = [(key, asked[places.index(section)], True)] if section in places else []
        while plan.kind != "single" and len(needles) < plan.needles:
            other = other_keys[distractors % len(other_keys)], other_codes[distractors % len(other_codes)]
            needles.append((*other, False))
            distractors += 1
        for name, code, evidence in needles:
            sentences.insert(generator.randint(0, len(sentences)), (f"the code of {name} is {code} .", evidence))
        sections.append(sentences)
    several = plan.kind == "multi_value"
    # The number of codes is in the question: without it no reader can know which one is the last.
    question = f"what are the {plan.values} codes of {key} in order ?" if several else f"what is the code of {key} ?"
    row: dict[str, Any] = {"question": question, "answers": [" ".join(asked)]}
    return row | (_as_document(sections) if as_document else _as_chunks(sections))


def _as_chunks(sections: Sequence[Sequence[tuple[str, bool]]]) -> dict[str, Any]:
    return {
        "chunks": [
            {"text": " ".join(text for text, _ in section), "evidence": any(evidence for _, evidence in section)}
            for section in sections
        ]
    }


def _as_document(sections: Sequence[Sequence[tuple[str, bool]]]) -> dict[str, Any]:
    spans, position = [], 0
    for section in sections:
        for text, evidence in section:
            if evidence:
                spans.append([position, position + len(text)])
            position += len(text) + 1
    return {"document": " ".join(text for section in sections for text, _ in section), "evidence_spans": spans}


# Sentences of 4 to 7 words, so that any number of words from 4 on can be filled exactly.
PATTERNS = {
    4: "the {noun} {verb} .",
    5: "the {adjective} {noun} {verb} .",
    6: "the {noun} {verb} the {other} .",
    7: "the {noun} {verb} the {adjective} {other} .",
}
SHORTEST_SENTENCE = min(PATTERNS)


def _filler(nouns: Sequence[str], words: int, generator: random.Random) -> list[str]:
    """Sentences of exactly `words` words together (full stops counted)."""
    sentences, left = [], words
    while left:
        length = generator.choice([size for size in PATTERNS if left == size or left - size >= SHORTEST_SENTENCE])
        noun, other = generator.sample(list(nouns), 2)
        words_of = {"verb": generator.choice(VERBS), "adjective": generator.choice(ADJECTIVES)}
        sentences.append(PATTERNS[length].format(noun=noun, other=other, **words_of))
        left -= length
    return sentences
