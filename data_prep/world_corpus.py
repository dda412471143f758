"""Reading tasks from folders of documentation: the sentences of a small simulated world hidden in real prose."""

import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from .corpus_format import FORMAT
from .world import CAST, KINDS, VOCABULARY, Story, tell_story

PAGES = (".html", ".htm", ".xhtml")
SUFFIXES = (".txt", ".text", ".rst", ".md", ".markdown", *PAGES)
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "_sources", "_static"}
MAX_FILE_BYTES = 1_000_000  # larger ones are tables, logs or data
MIN_WORDS = 8  # of a paragraph: shorter ones are headings, captions and links
MIN_LETTERS = 0.7  # share of a paragraph's characters that are letters or spaces: code and tables have fewer
EVIDENCE_PLACES = ("early", "middle", "late")

# The text of a link in reStructuredText or Markdown, without its address.
_LINK = re.compile(r"`([^`<>]+)(?<! ) ?<[^`<> ]+>`__?|\[([^\[\]]+)\]\([^()\[\] ]+\)")

Size = Callable[[str], int]


class Piece(NamedTuple):
    """One sentence with its size; `opens` is True for the first of a paragraph of prose."""

    text: str
    opens: bool
    size: int


def build_world_corpus(
    sources: Iterable[str | os.PathLike[str]],
    rows_per_project: int = 18,
    chunks: int = 9,
    chunk_size: int = 200,
    tokenizer: Any = None,
    hops: Sequence[int] = (1, 2, 3),
    evidence_places: Sequence[str] = EVIDENCE_PLACES,
    facts_per_chunk: int = 3,
    seed: int = 0,
    name: str = "small world in prose",
    created: str | None = None,
    license: str = "the licenses of the source texts",
    counts: Counter[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Manifest and rows for the prose found in the source folders, each immediate subfolder a project.

    A row has `chunks` chunks of at most `chunk_size` words (tokens, where a `tokenizer` is given), each with
    `facts_per_chunk` sentences of the world among whole sentences of the project's text files (.txt, .rst, .md,
    .html). Its question needs one to three of the world's sentences (`hops`), in as many chunks, which are its
    evidence; the last lies in the early, middle or late third of the chunks (`evidence_places`). All pairs of hops
    and place are equally frequent, and the row's id names its own. Names, places and things of a project's rows are
    words that its prose does not have. Equal sources and arguments give equal rows (`created` is today's date when
    left out).
    `counts` receives: projects, files, rows, skipped/unreadable (no UTF-8, or no HTML), skipped/large, skipped/short
    (projects with too little prose for one row). `progress` is called with (projects done, projects). Raises
    ValueError for a source that is no folder or holds no prose, for two projects of one name, for fewer than two
    projects with enough prose, and for arguments out of range.
    """
    _check_arguments(rows_per_project, chunks, chunk_size, hops, evidence_places, facts_per_chunk)
    counted: Counter[str] = Counter() if counts is None else counts
    size, unit = _size(tokenizer), "words" if tokenizer is None else "tokens"
    projects = find_prose(sources)
    rows: list[dict[str, Any]] = []
    for done, (project, files) in enumerate(sorted(projects.items())):
        if progress is not None:
            progress(done, len(projects))
        generator = random.Random(f"{seed}/{project}")
        pieces = [piece for piece in _read(files, size, counted) if 2 * piece.size <= chunk_size]
        if sum(piece.size for piece in pieces) < (chunks + 1) * chunk_size:
            counted["skipped/short"] += 1
            continue
        vocabulary = _unused_words(project, pieces)
        pairs = _pairs(rows_per_project, hops, evidence_places, len(rows))
        for number, (needed, place) in enumerate(pairs):
            where = _evidence_chunks(needed, place, chunks, generator)
            story = tell_story(needed, where, chunks, facts_per_chunk, vocabulary, generator)
            row = {"id": f"{project}-{needed}hop-{place}-{number:04d}", "project": project}
            rows.append(row | _lay_out(story, pieces, chunk_size, size, generator))
        counted["projects"] += 1
    if progress is not None:
        progress(len(projects), len(projects))
    if counted["projects"] < 2:
        raise ValueError(
            f"{counted['projects']} of {len(projects)} projects have prose for a row of {chunks} chunks of "
            f"{chunk_size} {unit}: expected two or more (take more text, or smaller rows)"
        )
    counted["rows"] += len(rows)
    manifest = {
        "format": FORMAT,
        "name": f"{name}, {chunks} chunks of {chunk_size} {unit}, seed {seed}",
        "created": created or date.today().isoformat(),
        "label_source": "computed",
        "kappa": None,
        "kappa_items": None,
        "license": license,
    }
    return manifest, rows


def find_prose(sources: Iterable[str | os.PathLike[str]]) -> dict[str, list[Path]]:
    """Project names with their text files in order: the immediate subfolders that hold some, or the folder itself."""
    found: dict[str, list[Path]] = {}
    for source in sources:
        folder = Path(source).resolve()
        if not folder.is_dir():
            raise ValueError(f"{source} is no folder: expected a folder of documentation, one subfolder per project")
        parts = {child.name: _text_files(child) for child in sorted(folder.iterdir()) if _is_read(child)}
        parts = {project: files for project, files in parts.items() if files}
        for project, files in (parts or {folder.name: _text_files(folder)}).items():
            if not files:
                raise ValueError(f"{source} holds no text: expected files named {', '.join(SUFFIXES)}")
            if project in found:
                raise ValueError(f"two projects are named {project!r}: {found[project][0]} and {files[0]} are in them")
            found[project] = files
    return found


def paragraphs(text: str, page: bool = False) -> Iterator[str]:
    """The paragraphs of prose in a text file or an HTML page, each on one line; code, tables and headings left out.

    >>> list(paragraphs("Title\\n=====\\n\\nA line of prose that goes on\\nand ends in a full stop.\\n\\n    x = 1"))
    ['A line of prose that goes on and ends in a full stop.']
    """
    if page:
        reader = _Page()
        reader.feed(text)
        reader.close()
        text = "".join(reader.parts)
    for block in re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n").replace("\r", "\n")):
        line = _LINK.sub(r"\1\2", " ".join(block.split()))
        plain = sum(letter.isalpha() or letter == " " for letter in line) >= MIN_LETTERS * len(line)
        starts = page or block.lstrip("\n")[:1].isalpha()  # indented or marked blocks are code, lists, directives
        if starts and plain and line[:1].isalpha() and line[-1:] in ".!?" and len(line.split()) >= MIN_WORDS:
            yield line


class _Page(HTMLParser):
    """Collects the text of a page, a blank line around every block, without scripts, styles and code."""

    LEFT_OUT = {"script", "style", "pre", "head", "nav", "footer", "table"}
    INLINE = {"a", "abbr", "b", "cite", "code", "dfn", "em", "i", "kbd", "q", "samp", "small", "span", "strong", "sub"}
    INLINE |= {"sup", "tt", "u", "var", "img", "wbr", "mark", "br"}

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in self.LEFT_OUT
        self.parts.append("" if tag in self.INLINE else "\n\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden = max(self.hidden - (tag in self.LEFT_OUT), 0)
        self.parts.append("" if tag in self.INLINE else "\n\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(re.sub(r"\s+", " ", data))


def _check_arguments(
    rows: int, chunks: int, chunk_size: int, hops: Sequence[int], places: Sequence[str], facts: int
) -> None:
    if not hops or any(needed not in KINDS for needed in hops):
        raise ValueError(f"hops is {list(hops)}: expected one or more of 1, 2, 3")
    if not places or any(place not in EVIDENCE_PLACES for place in places):
        raise ValueError(f"evidence_places is {list(places)}: expected one or more of {', '.join(EVIDENCE_PLACES)}")
    for name, value, least, why in (
        ("rows_per_project", rows, 1, ""),
        ("facts_per_chunk", facts, 1, ""),
        ("chunks", chunks, 3 * max(hops), f", so that {max(hops)} chunks can be evidence in the first third"),
        ("chunk_size", chunk_size, 1, ""),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}: expected {least} or more{why}")


def _size(tokenizer: Any) -> Size:
    """How long a text is: in words, or in tokens of the tokenizer."""
    if tokenizer is None:
        return lambda text: len(text.split())
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _is_read(folder: Path) -> bool:
    return folder.is_dir() and folder.name not in SKIPPED_FOLDERS and not folder.name.startswith(".")


def _text_files(folder: Path) -> list[Path]:
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if _is_read(Path(parent, name)))
        found += [Path(parent, name) for name in sorted(files) if name.lower().endswith(SUFFIXES)]
    return found


def _read(files: Sequence[Path], size: Size, counts: Counter[str]) -> list[Piece]:
    """The sentences of a project's prose in the order of its files, every paragraph once."""
    found: dict[str, None] = {}
    for path in files:
        if path.stat().st_size > MAX_FILE_BYTES:
            counts["skipped/large"] += 1
            continue
        try:
            read = list(paragraphs(path.read_bytes().decode("utf-8-sig"), path.suffix.lower() in PAGES))
        except (UnicodeDecodeError, AssertionError):  # html.parser's way of giving up on a declaration
            counts["skipped/unreadable"] += 1
            continue
        counts["files"] += 1
        found.update(dict.fromkeys(read))
    sentences = (re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph) for paragraph in found)
    return [_piece(text, size, place == 0) for paragraph in sentences for place, text in enumerate(paragraph)]


def _piece(text: str, size: Size, opens: bool = False) -> Piece:
    return Piece(text, opens, size(f"\n\n{text}"))  # with what may join it to the sentence before it


def _unused_words(project: str, pieces: Sequence[Piece]) -> list[list[str]]:
    """People, places, things and containers without the words of the prose; ValueError where too few are left."""
    used = {word for piece in pieces for word in re.findall(r"\w+", piece.text.lower())}
    left = [[word for word in words if not {word.lower(), f"{word.lower()}s"} & used] for words in VOCABULARY]
    for kind, words, needed in zip(("people", "places", "things", "containers"), left, CAST, strict=True):
        if len(words) < needed:
            raise ValueError(
                f"the prose of project {project!r} has nearly all words for {kind}: {len(words)} are left, expected "
                f"{needed} (divide the project into smaller ones)"
            )
    return left


def _pairs(rows: int, hops: Sequence[int], places: Sequence[str], first: int) -> Iterator[tuple[int, str]]:
    """Hops and evidence place of the rows of a project, in turn through all pairs, from row `first` of the corpus."""
    pairs = list(product(dict.fromkeys(hops), dict.fromkeys(places)))
    return (pairs[(first + row) % len(pairs)] for row in range(rows))


def _evidence_chunks(hops: int, place: str, chunks: int, generator: random.Random) -> list[int]:
    """Numbers (from 1) of the evidence chunks: the last in the third that `place` names, the others before it."""
    third = EVIDENCE_PLACES.index(place)
    inside = [chunk for chunk in range(1, chunks + 1) if (chunk - 1) * 3 // chunks == third and chunk >= hops]
    last = generator.choice(inside)
    return [*sorted(generator.sample(range(1, last), hops - 1)), last]


def _lay_out(
    story: Story, pieces: Sequence[Piece], chunk_size: int, size: Size, generator: random.Random
) -> dict[str, Any]:
    """Question, answers and chunks of one row: the story's sentences at random places, prose from a random start."""
    start = generator.randrange(len(pieces))
    prose = iter([*pieces[start:], *pieces[:start]])
    chunks, waiting = [], next(prose)
    for told in story.chunks:
        facts = [_piece(fact.sentence, size) for fact in told]
        room = chunk_size - sum(fact.size for fact in facts)
        if 2 * room < chunk_size:
            raise ValueError(
                f"chunk_size is {chunk_size}: the {len(facts)} sentences of the world in a chunk take "
                f"{chunk_size - room} of it, expected half at most (a larger chunk_size, or fewer facts_per_chunk)"
            )
        taken: list[Piece] = []
        while waiting.size <= room:
            taken.append(waiting)
            room -= waiting.size
            waiting = next(prose)
        slots = sorted(generator.randrange(len(taken) + 1) for _ in facts)
        for fact, slot in reversed(list(zip(facts, slots, strict=True))):
            taken.insert(slot, fact)
        chunks.append({"text": _join(taken), "evidence": any(fact.evidence for fact in told)})
    return {"question": story.question, "answers": [story.answer], "chunks": chunks}


def _join(pieces: Sequence[Piece]) -> str:
    """One text: a blank line before every paragraph, a space between sentences."""
    breaks = ["", *("\n\n" if piece.opens else " " for piece in pieces[1:])]
    return "".join(gap + piece.text for gap, piece in zip(breaks, pieces, strict=True))
