"""Reading tasks from folders of Python projects: one fact of the code is asked, with exact answer and evidence."""

import os
import random
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from .code_facts import KINDS, Fact, Source, find_facts
from .corpus_format import FORMAT

SKIPPED_FOLDERS = {"__pycache__", "_vendor", "vendor", "vendored", "third_party", "site-packages", "node_modules"}
MAX_FILE_BYTES = 1_000_000  # larger ones are tables of data
SHORTEST = 0.9  # of min_chars: pieces end with a line and rarely fill the last characters
MIN_PIECE = 200  # characters; less room than this stays empty
OWN_SHARE = 0.5  # of one side of the evidence, text of the fact's own file; the rest is other files


class Segment(NamedTuple):
    """A piece of a file made of whole lines: characters [start, end) of its text, under one line naming the file."""

    source: Source
    start: int
    end: int

    @property
    def head(self) -> str:
        return f"# file: {self.source.path}\n"

    @property
    def text(self) -> str:
        return f"{self.head}{self.source.text[self.start : self.end].rstrip()}\n\n"


def build_code_corpus(
    sources: Iterable[str | os.PathLike[str]],
    rows_per_project: int = 20,
    min_chars: int = 8_000,
    max_chars: int = 24_000,
    seed: int = 0,
    name: str = "code reading",
    created: str | None = None,
    license: str = "the licenses of the source packages",
    counts: Counter[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Manifest and rows for the Python projects found in the source folders.

    A row's document is made of files and pieces of files of its project, min_chars to max_chars characters long (at
    most a tenth less), with the evidence at places spread evenly from its first to its last line. Equal sources and
    arguments give equal rows (`created` is today's date when left out). Facts whose question a second place of the
    document might answer are left out, so a project can give fewer rows than asked for, and none when it is too small.
    `counts` receives: projects, files, rows, row/<kind>, skipped/syntax, skipped/undecodable, skipped/large.
    `progress` is called with (projects done, projects). Raises ValueError for a source that is no folder or holds no
    Python project, for two projects of one name or one inside the other, and for sizes out of order.
    """
    if not 0 < min_chars <= max_chars or rows_per_project < 1:
        raise ValueError(
            f"rows_per_project is {rows_per_project}, min_chars {min_chars}, max_chars {max_chars}: "
            "expected at least one row and 0 < min_chars <= max_chars"
        )
    counted: Counter[str] = Counter() if counts is None else counts
    projects = find_projects(sources)
    rows: list[dict[str, Any]] = []
    for done, (project, folder) in enumerate(sorted(projects.items())):
        if progress is not None:
            progress(done, len(projects))
        files = read_sources(project, folder, counted)
        generator = random.Random(f"{seed}/{project}")
        made = list(_project_rows(project, files, rows_per_project, (min_chars, max_chars), generator, counted))
        counted["projects"] += bool(made)
        rows.extend(made)
    if progress is not None:
        progress(len(projects), len(projects))
    counted["rows"] += len(rows)
    manifest = {
        "format": FORMAT,
        "name": name,
        "created": created or date.today().isoformat(),
        "label_source": "computed",
        "kappa": None,
        "kappa_items": None,
        "license": license,
    }
    return manifest, rows


def find_projects(sources: Iterable[str | os.PathLike[str]]) -> dict[str, Path]:
    """Project names with their folders.

    A folder with an `__init__.py`, a pyproject.toml or a setup.py is one project. Of any other folder each immediate
    subfolder with Python files below it is a project, or the folder itself when there is none.
    """
    found: dict[str, Path] = {}
    for source in sources:
        folder = Path(source).resolve()
        if not folder.is_dir():
            raise ValueError(f"{source} is no folder: expected a Python package or a folder of packages")
        parts = [folder]
        if not any((folder / mark).exists() for mark in ("__init__.py", "pyproject.toml", "setup.py")):
            parts = [child for child in sorted(folder.iterdir()) if child.is_dir() and _is_project(child)] or parts
        for part in parts:
            if next(_python_files(part), None) is None:
                raise ValueError(f"{source} holds no Python files: expected a Python package or a folder of packages")
            if found.setdefault(part.name, part) != part:
                raise ValueError(
                    f"two projects are named {part.name!r}: {found[part.name]} and {part}; rename one, or leave it out"
                )
    for name, folder in found.items():
        for other in found.values():
            if other in folder.parents:
                raise ValueError(
                    f"project {name!r} ({folder}) lies inside another project ({other}): give one of them as a source"
                )
    return found


def read_sources(project: str, folder: Path, counts: Counter[str]) -> list[Source]:
    """The parsed files of a project in the order of their paths, which begin with the project's name."""
    sources = []
    for path in _python_files(folder):
        raw = path.read_bytes()
        if not raw.strip():
            continue
        if len(raw) > MAX_FILE_BYTES:
            counts["skipped/large"] += 1
            continue
        try:
            text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
            sources.append(Source(f"{project}/{path.relative_to(folder).as_posix()}", text))
        except UnicodeDecodeError:
            counts["skipped/undecodable"] += 1
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the ways in which ast.parse gives up
            counts["skipped/syntax"] += 1
    counts["files"] += len(sources)
    return sources


def _is_project(folder: Path) -> bool:
    skipped = folder.name in SKIPPED_FOLDERS or folder.name.startswith((".", "__"))
    return not skipped and next(_python_files(folder), None) is not None


def _python_files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(files) if name.endswith(".py"))


def _project_rows(
    project: str,
    sources: Sequence[Source],
    wanted: int,
    sizes: tuple[int, int],
    generator: random.Random,
    counts: Counter[str],
) -> Iterator[dict[str, Any]]:
    """Up to `wanted` rows, the kinds in turn, the evidence of row i about (i + 1/2) / wanted into its document."""
    facts = {source.path: find_facts(source) for source in sources}
    by_path = {source.path: source for source in sources}
    places = [(row + 0.5) / wanted for row in range(wanted)]
    generator.shuffle(places)
    made = 0
    for path, fact in _in_turn(facts, generator):
        if made == wanted:
            return
        length = generator.randint(*sizes)
        segments, own = _lay_out(by_path[path], fact, sources, length, places[made], generator)
        document = "".join(segment.text for segment in segments)
        if not SHORTEST * sizes[0] <= len(document) <= sizes[1] or not _is_unambiguous(fact, segments, facts):
            continue
        shift = _length(segments[:own]) + len(segments[own].head) - segments[own].start
        yield {
            "id": f"{project}-{made:04d}",
            "project": project,
            "question": fact.question,
            "answers": list(fact.answers),
            "document": document,
            "evidence_spans": [[start + shift, end + shift] for start, end in fact.spans],
        }
        counts[f"row/{fact.kind}"] += 1
        made += 1


def _in_turn(facts: dict[str, list[Fact]], generator: random.Random) -> Iterator[tuple[str, Fact]]:
    """Facts that have an answer, in random order, one of each kind before a second of any."""
    waiting: dict[str, list[tuple[str, Fact]]] = {kind: [] for kind in KINDS}
    for path, found in facts.items():
        for fact in found:
            if fact.answers:
                waiting[fact.kind].append((path, fact))
    for group in waiting.values():
        generator.shuffle(group)
    while any(waiting.values()):
        for group in waiting.values():
            if group:
                yield group.pop()


def _lay_out(
    source: Source, fact: Fact, sources: Sequence[Source], length: int, place: float, generator: random.Random
) -> tuple[list[Segment], int]:
    """Segments of about `length` characters with the fact at the fraction `place`, and the index of the fact's own.

    A project too small for that place has the fact where its files allow.
    """
    first = _line_start(source, fact.spans[0][0])
    last = _line_end(source, max(end for _, end in fact.spans))
    budget = max(length - (last - first) - len(f"# file: {source.path}\n\n\n"), 0)
    pool = [Segment(other, 0, len(other.text)) for other in sources if other is not source]
    generator.shuffle(pool)
    above, below = first, len(source.text) - last  # what the fact's own file can give
    spare = _length(pool)
    own_left = min(above, int(max(place * budget * OWN_SHARE, place * (budget - spare))))
    left = _fill(pool, place * budget - own_left)
    room = budget - own_left - _length(left)
    own_right = min(below, int(max(room * OWN_SHARE, room - _length(pool))))
    right = _fill(pool, room - own_right)
    room = max(room - own_right - _length(right), 0)  # what the other files left open
    more = min(room, below - own_right)
    own_right, own_left = own_right + more, min(above, own_left + room - more)
    start = min(_line_start(source, first - own_left, forward=True), first)
    end = max(_line_end(source, last + own_right, back=True), last)
    return [*left, Segment(source, start, end), *right], len(left)


def _length(segments: Iterable[Segment]) -> int:
    return sum(len(segment.text) for segment in segments)


def _fill(pool: list[Segment], budget: float) -> list[Segment]:
    """Segments taken off the pool, at most `budget` characters together; the last may be the head of one."""
    segments: list[Segment] = []
    while pool:
        source, start, stop = pool[0]
        room = int(budget) - len(pool[0].head) - len("\n\n")
        end = stop if room >= stop - start else max(_line_end(source, start + room, back=True), start)
        if room < MIN_PIECE or end == start:
            break
        segments.append(Segment(source, start, end))
        budget -= len(segments[-1].text)
        pool[:1] = [Segment(source, end, stop)] if end < stop else []
    return segments


def _line_start(source: Source, position: int, forward: bool = False) -> int:
    """Start of the line that holds the position; forward: of the next line unless the position starts one."""
    index = bisect_right(source.line_starts, position) - 1
    starts_line = source.line_starts[index] == position
    return (
        source.line_starts[index]
        if starts_line or not forward
        else min(source.line_starts[index + 1], len(source.text))
    )


def _line_end(source: Source, position: int, back: bool = False) -> int:
    """End of the line that holds the position, its newline included; back: the last line start up to the position."""
    if position >= len(source.text):
        return len(source.text)
    index = bisect_right(source.line_starts, position) - 1
    return source.line_starts[index] if back else min(source.line_starts[index + 1], len(source.text))


def _is_unambiguous(fact: Fact, segments: Sequence[Segment], facts: dict[str, list[Fact]]) -> bool:
    """True when one statement of the document has the fact's key and nothing else there looks like one.

    A place that looks like such a statement (in a docstring, say) but is none that `ast` knows counts against it.
    """
    same_key = 0
    for source, begin, stop in segments:
        stated = []  # where ast knows a statement of this form
        for other in facts[source.path]:
            if other.key == fact.key and any(start < stop and end > begin for start, end in other.spans):
                same_key += 1
            if other.pattern == fact.pattern:
                stated.append(other.spans[0])
        for match in re.finditer(fact.pattern, source.text[begin:stop]):
            if not any(start <= match.start() + begin < end for start, end in stated):
                return False
    return same_key == 1
