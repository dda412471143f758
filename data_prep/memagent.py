"""Convert MemAgent's parquet files, which have no evidence labels, with the supporting facts of HotpotQA."""

import hashlib
import html
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from itertools import pairwise
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from .corpus_format import FORMAT, JSON_SPACE, BadJson, describe, numbered_lines, parse_json, shortened

COLUMNS = ["prompt", "context", "reward_model", "extra_info"]
ROWS_AT_ONCE = 64
FACTS = '[[title, sentence], ...] or {"title": [title, ...], ...} with titles that are strings'
SHOWN_TITLES = 3  # of those that no document has, in a message


def convert_memagent(
    parquet_path: str | os.PathLike[str],
    supporting_facts: str | os.PathLike[str],
    unjoined: Literal["skip", "error"] = "skip",
    buckets: int = 64,
    created: str | None = None,
    counts: Counter[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Manifest and rows of a MemAgent parquet file, evidence being the documents that HotpotQA's facts name.

    `supporting_facts` is HotpotQA as JSON (a list) or JSON Lines, with `supporting_facts` as [[title, sentence], ...]
    or {"title": [...], ...}. A row joins when its question is there and every title is the heading of one of the
    row's documents; each such document, heading included, is an evidence span. Rows that do not join are skipped
    (`counts`: rows, skipped/question, skipped/ambiguous, skipped/title, skipped/answer) or, with unjoined="error",
    raise ValueError. The project is a hash bucket of the alphabetically first title, as the manifest's name says.
    `created` is today's date when left out; `progress` is called with (rows read, rows).
    """
    if unjoined not in ("skip", "error"):
        raise ValueError(f'unjoined is {unjoined!r}: expected "skip" or "error"')
    if buckets < 2:
        raise ValueError(f"buckets is {buckets}: expected 2 or more, the split by project needs two")
    titles_of = read_supporting_titles(supporting_facts)
    counted: Counter[str] = Counter() if counts is None else counts
    rows: list[dict[str, Any]] = []
    try:
        file = pq.ParquetFile(parquet_path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{os.fspath(parquet_path)} is no parquet file: {error}") from error
    missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
    if missing:
        raise ValueError(
            f"{os.fspath(parquet_path)} has no column {', '.join(missing)}: expected MemAgent's {', '.join(COLUMNS)}"
        )
    total = file.metadata.num_rows
    for number, record in enumerate(_records(file)):
        if progress is not None:
            progress(number, total)
        place = f"{os.fspath(parquet_path)}, row {number}"
        try:
            rows.append(_convert(number, place, record, titles_of, buckets))
        except Unjoined as reason:
            if unjoined == "error":
                raise ValueError(f"{place}: {reason}") from reason
            counted[f"skipped/{reason.kind}"] += 1
    if progress is not None:
        progress(total, total)
    counted["rows"] += len(rows)
    manifest = {
        "format": FORMAT,
        "name": f"MemAgent with HotpotQA supporting facts, project = SHA-256 bucket (of {buckets}) of the first title",
        "created": created or date.today().isoformat(),
        "label_source": "computed",
        "kappa": None,
        "kappa_items": None,
        "license": "CC-BY-SA-4.0 (HotpotQA)",
    }
    return manifest, rows


class Unjoined(Exception):
    """A row without evidence labels; `kind` is what could not be found."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def read_supporting_titles(path: str | os.PathLike[str]) -> dict[str, set[str] | None]:
    """Supporting titles by question, both normalised; None where one question has two different sets.

    Raises ValueError naming file, record or line, field and what was expected.
    """
    titles_of: dict[str, set[str] | None] = {}
    for place, record in _fact_records(path):
        _expect(isinstance(record, dict), place, "(record)", record, "an object")
        asked, facts = record.get("question"), record.get("supporting_facts")
        _expect(type(asked) is str, place, "question", asked, "a string")  # a NotJson is a string to isinstance
        names: Any = facts.get("title") if isinstance(facts, dict) else None
        if isinstance(facts, list):
            names = [fact[0] if isinstance(fact, list) and fact else None for fact in facts]
        sound = isinstance(names, list) and all(type(name) is str for name in names)
        _expect(sound, place, "supporting_facts", facts, FACTS)
        question, titles = _plain(asked), {_plain(name) for name in names}
        known = titles_of.setdefault(question, titles)
        if known != titles:
            titles_of[question] = None
    return titles_of


def _fact_records(path: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    """Every record of a JSON list, or of JSON Lines, with the place to name when it is faulty."""
    name = os.fspath(path)
    with open(path, "rb") as file:
        first = next((raw.lstrip(JSON_SPACE)[:1] for raw in file if raw.strip(JSON_SPACE)), b"")
        file.seek(0)
        place = name
        try:
            if first == b"[":
                for number, record in enumerate(parse_json(file.read()), start=1):
                    yield f"{name}, record {number}", record
                return
            for number, raw in numbered_lines(file):
                place = f"{name}, line {number}"
                yield place, parse_json(raw.strip(JSON_SPACE))
        except BadJson as error:
            raise ValueError(f"{place}: found {error}; expected HotpotQA as JSON or JSON Lines") from error


def _expect(sound: bool, place: str, field: str, found: Any, expected: str) -> None:
    if not sound:
        raise ValueError(f"{place}, field {field}: found {describe(found)}; expected {expected}")


def documents(context: str) -> Iterator[tuple[str, int, int]]:
    """Title and half-open character range, heading included, of every "Document i:" of a context."""
    starts: list[int] = []
    position, number = 0, None
    while found := re.compile(rf"(?:\A|\n\n)(Document {number or '([01])'}:\n)").search(context, position):
        starts.append(found.start(1))
        position = found.end() - 1
        number = (int(found.group(2)) if number is None else number) + 1
    for start, end in pairwise([*starts, len(context)]):
        text = context[start:end].rstrip()
        title = text.split("\n", 2)[1] if "\n" in text else ""
        yield title, start, start + len(text)


def _records(file: pq.ParquetFile) -> Iterator[dict[str, Any]]:
    for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=COLUMNS):
        yield from batch.to_pylist()


def _convert(
    number: int, place: str, record: dict[str, Any], titles_of: dict[str, set[str] | None], buckets: int
) -> dict[str, Any]:
    question, context, golds = _columns(place, record)
    if _plain(question) not in titles_of:
        raise Unjoined("question", f"the question {shortened(repr(question))} is not among the supporting facts")
    wanted = titles_of[_plain(question)]
    if not wanted:
        name = shortened(repr(question))
        raise Unjoined("ambiguous", f"the supporting facts of {name} name no titles, or two different sets")
    found = [(_plain(title), start, end) for title, start, end in documents(context)]
    missing = wanted - {title for title, _, _ in found}
    if missing:
        named = ", ".join(shortened(repr(title)) for title in sorted(missing)[:SHOWN_TITLES])
        raise Unjoined("title", f"no document is headed {named}{', ...' if len(missing) > SHOWN_TITLES else ''}")
    answers = [answer for answer in golds if answer.strip()]
    if not answers:
        raise Unjoined("answer", "ground_truth holds no answer")
    return {
        "id": f"memagent-{number:06d}",
        "project": f"titles-{_bucket(min(wanted), buckets):04d}",
        "question": question,
        "answers": answers,
        "document": context,
        "evidence_spans": [[start, end] for title, start, end in found if title in wanted],
    }


def _columns(place: str, record: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Question, context and gold answers of one row; raises ValueError naming the column of another type."""
    extra, prompt, model = record["extra_info"], record["prompt"], record["reward_model"]
    question = extra.get("question") if isinstance(extra, dict) else None
    if not question:
        last = prompt[-1] if isinstance(prompt, list) and prompt else None
        question = last.get("content") if isinstance(last, dict) else None
        _expect(isinstance(question, str), place, "prompt", prompt, 'a list that ends with {"content": the question}')
    _expect(isinstance(question, str), place, "extra_info.question", question, "a string")
    _expect(isinstance(record["context"], str), place, "context", record["context"], "a string")
    golds = model.get("ground_truth") if isinstance(model, dict) else model
    golds = [golds] if isinstance(golds, str) else [] if golds is None else golds
    sound = isinstance(golds, list) and all(isinstance(gold, str) for gold in golds)
    _expect(sound, place, "reward_model.ground_truth", golds, "a string or a list of strings")
    return str(question), record["context"], golds


def _bucket(title: str, buckets: int) -> int:
    return int.from_bytes(hashlib.sha256(title.encode("utf-8")).digest()[:8], "big") % buckets


def _plain(text: str) -> str:
    """Text as it is compared: entities resolved, one Unicode form, white space folded."""
    return " ".join(unicodedata.normalize("NFC", html.unescape(text)).split())
