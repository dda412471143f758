"""Convert MemAgent's parquet files, which have no evidence labels, with the supporting facts of HotpotQA."""

import hashlib
import html
import json
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

from .corpus_format import FORMAT

COLUMNS = ["prompt", "context", "reward_model", "extra_info"]
ROWS_AT_ONCE = 64


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
        try:
            rows.append(_convert(number, record, titles_of, buckets))
        except Unjoined as reason:
            if unjoined == "error":
                raise ValueError(f"{os.fspath(parquet_path)}, row {number}: {reason}") from reason
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
    """Supporting titles by question, both normalised; None where one question has two different sets."""
    with open(path, encoding="utf-8") as file:
        try:
            first = file.read(1)
            file.seek(0)
            records = json.load(file) if first == "[" else [json.loads(line) for line in file if line.strip()]
        except ValueError as error:  # bad JSON, or no UTF-8
            raise ValueError(f"{os.fspath(path)}: {error}; expected HotpotQA as JSON or JSON Lines") from error
    titles_of: dict[str, set[str] | None] = {}
    for number, record in enumerate(records, start=1):
        try:
            facts = record["supporting_facts"]
            names = facts["title"] if isinstance(facts, dict) else [fact[0] for fact in facts]
            question, titles = _plain(record["question"]), {_plain(name) for name in names}
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{os.fspath(path)}, record {number}: expected question and supporting_facts with titles ({error!r})"
            ) from error
        known = titles_of.setdefault(question, titles)
        if known != titles:
            titles_of[question] = None
    return titles_of


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
    number: int, record: dict[str, Any], titles_of: dict[str, set[str] | None], buckets: int
) -> dict[str, Any]:
    question = (record["extra_info"] or {}).get("question") or record["prompt"][-1]["content"]
    if _plain(question) not in titles_of:
        raise Unjoined("question", f"the question {question!r} is not among the supporting facts")
    wanted = titles_of[_plain(question)]
    if not wanted:
        raise Unjoined("ambiguous", f"the supporting facts of {question!r} name no titles, or two different sets")
    context = record["context"]
    found = [(_plain(title), start, end) for title, start, end in documents(context)]
    missing = wanted - {title for title, _, _ in found}
    if missing:
        raise Unjoined("title", f"no document is headed {', '.join(map(repr, sorted(missing)))}")
    golds = record["reward_model"]["ground_truth"]
    answers = [answer for answer in ([golds] if isinstance(golds, str) else golds or []) if answer.strip()]
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


def _bucket(title: str, buckets: int) -> int:
    return int.from_bytes(hashlib.sha256(title.encode("utf-8")).digest()[:8], "big") % buckets


def _plain(text: str) -> str:
    """Text as it is compared: entities resolved, one Unicode form, white space folded."""
    return " ".join(unicodedata.normalize("NFC", html.unescape(text)).split())
