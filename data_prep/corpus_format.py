"""What a corpus file may hold: every check of the manifest and of the rows, with faults collected and not thrown."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

FORMAT = "turngrpo-corpus/1"
LABEL_SOURCES = ("human", "model", "computed")
AGREEMENT_FIELDS = ("kappa", "kappa_items")  # of labels by people or a model; computed ones need none
MANIFEST_FIELDS = ("format", "name", "created", "label_source", *AGREEMENT_FIELDS, "license")
ROW_FIELDS = ("id", "project", "question", "answers")  # and chunks, or document with evidence_spans
LISTED_FAULTS = 20
SHOWN_CHARACTERS = 60  # of a wrong value, or of a name from the file, in a message
JSON_SPACE = b" \t\r\n"  # JSON's white space and no other: bytes.strip() would take \x0b and \x0c too


class Fault(NamedTuple):
    """One thing wrong with a corpus file; line is None when it concerns the file as a whole."""

    line: int | None
    field: str
    found: str
    expected: str


class CorpusError(ValueError):
    """Every fault of one corpus file in one message, the first 20 listed.

    `faults` holds the listed ones and `total` how many there are.
    """

    def __init__(self, path: str, faults: list[Fault], total: int) -> None:
        self.path, self.faults, self.total = path, faults, total
        lines = [f"{path}: {total} fault{'s' if total > 1 else ''}"]
        for fault in faults:
            where = path if fault.line is None else f"{path}, line {fault.line}"
            lines.append(f"  {where}, field {fault.field}: found {fault.found}; expected {fault.expected}")
        if total > len(faults):
            lines.append(f"  and {total - len(faults)} more")
        super().__init__("\n".join(lines))


class NotJson(str):
    """A number literal that Python reads and JSON does not have: NaN, Infinity, -Infinity."""

    fault = "which is not JSON"

    def __repr__(self) -> str:
        return shortened(self)


class TooLarge(NotJson):
    """A number literal that no float can hold, 1e999, which Python would read as infinity."""

    fault = "which is too large for a number"


class BadJson(ValueError):
    """Text that is no JSON; the message is what was found, `expected` what should have been there."""

    def __init__(self, found: str, expected: str = "one JSON object") -> None:
        super().__init__(found)
        self.expected = expected


def shortened(text: str) -> str:
    """The text for a message: its first 60 characters, then an ellipsis where it is longer."""
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def shown_name(name: str) -> str:
    """A field's name as it stands in a message: control characters escaped, shortened."""
    return shortened(repr(name)[1:-1])


def describe(value: Any) -> str:
    """The value, shortened, with its JSON type."""
    if isinstance(value, NotJson):
        return f"{value!r}, {value.fault}"
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "list"}
    name = names.get(type(value), "object")
    return "null" if value is None else f"{shortened(repr(value))} ({name})"


def parse_json(raw: bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    """The JSON value of UTF-8 text, with NotJson where a number is none of JSON or too large; raises BadJson."""
    try:
        return json.loads(
            raw.decode("utf-8"), object_pairs_hook=object_pairs_hook, parse_constant=NotJson, parse_float=_number
        )
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at byte {error.start + 1}"
        raise BadJson(found, "valid UTF-8") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise BadJson(f"bad JSON at {line}column {error.colno} ({error.msg})") from error
    except RecursionError as error:
        raise BadJson("JSON nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise BadJson(f"bad JSON ({error})") from error


def _number(literal: str) -> float | TooLarge:
    value = float(literal)
    return value if math.isfinite(value) else TooLarge(literal)


def is_integer(value: Any) -> bool:
    """True for an integer that is not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


class CorpusCheck:
    """Takes the lines of one corpus file in order and collects what is wrong with them.

    `feed` returns the row of a line (sound or not: `finish` raises CorpusError when anything was wrong).
    `cut_missing` names what is missing for cutting rows that have a document; empty when nothing is.
    """

    def __init__(self, path: str, cut_missing: str = "") -> None:
        self.path, self.cut_missing = path, cut_missing
        self.faults: list[Fault] = []
        self.total = 0
        self.manifest: dict[str, Any] = {}
        self.id_lines: dict[str, int] = {}
        self.projects: set[str] = set()
        self.lines = self.rows = 0
        self.rows_without_project = 0

    def add(self, line: int | None, field: str, found: str, expected: str) -> None:
        """Note one fault; after the first 20 they are only counted."""
        self.total += 1
        if len(self.faults) < LISTED_FAULTS:
            self.faults.append(Fault(line, field, found, expected))

    def raise_if_faulty(self) -> None:
        """Raise the one CorpusError when a fault was noted."""
        if self.total:
            raise CorpusError(self.path, self.faults, self.total)

    def feed(self, line: int, raw: bytes) -> dict[str, Any] | None:
        """Check one line; None for the manifest and for a line that is no JSON object."""
        self.lines = line
        value = self._parse(line, raw)
        if line == 1:
            if value is not None and "format" in value:
                self._check_manifest(value)
                return None
            self.add(1, "format", "no manifest", f'a first line that is a manifest with "format": "{FORMAT}"')
        if value is not None:
            self._check_row(line, value)
        else:
            self.rows_without_project += 1
        return value

    def finish(self) -> None:
        """Check what concerns the file as a whole, then raise CorpusError when anything was wrong."""
        if self.lines < 2 and self.rows == 0:
            found = "no rows" if self.lines else "an empty file"
            self.add(None, "(rows)", found, "a manifest line, then one line per row")
        if len(self.projects) == 1 and self.rows_without_project == 0:
            found = f"the single project {shortened(repr(next(iter(self.projects))))}"
            self.add(None, "project", found, "at least two projects (train and validation are split by project)")
        self.raise_if_faulty()

    def _parse(self, line: int, raw: bytes) -> dict[str, Any] | None:
        """The JSON object of one line, or None with a fault noted."""
        raw = raw.strip(JSON_SPACE)  # a line end would move the column of an error to the next line
        if not raw:
            self.add(line, "(line)", "a blank line", "a JSON object")
            return None
        if raw.startswith(b"\xef\xbb\xbf"):
            self.add(line, "(line)", "a byte order mark", "UTF-8 without one")
            raw = raw[3:]
        duplicates: list[str] = []

        def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            duplicates.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            return dict(pairs)

        try:
            value = parse_json(raw, unique_keys)
        except BadJson as error:
            self.add(line, "(line)", str(error), error.expected)
            return None
        for key in duplicates:
            self.add(line, shown_name(key), "the same key twice in one object", "each key once")
        if not isinstance(value, dict):
            self.add(line, "(line)", describe(value), "a JSON object")
            return None
        return value

    def _check_manifest(self, manifest: dict[str, Any]) -> None:
        self.manifest = manifest
        source = manifest.get("label_source")
        judged = source in ("human", "model")
        rule = f' (labels by "{source}" need a measured agreement)' if judged else " or null"
        agreement = {
            "kappa": f"Cohen's kappa, a number from -1 to 1{rule}",
            "kappa_items": f"how many items kappa was measured on, 1 or more{rule}",
        }
        needed = [field for field in MANIFEST_FIELDS if not (source == "computed" and field in AGREEMENT_FIELDS)]
        self._check_keys(1, "", manifest, needed, MANIFEST_FIELDS, agreement)
        if manifest["format"] != FORMAT:
            self.add(1, "format", describe(manifest["format"]), f'"{FORMAT}"')
        for field in ("name", "created", "license"):
            if field in manifest:
                self._check_text(1, field, manifest[field])
        if "label_source" in manifest and source not in LABEL_SOURCES:
            self.add(1, "label_source", describe(source), "one of " + ", ".join(f'"{name}"' for name in LABEL_SOURCES))
        kappa: Any = manifest.get("kappa")
        items: Any = manifest.get("kappa_items")
        if "kappa" in manifest and (kappa is not None or judged):
            is_number = is_integer(kappa) or isinstance(kappa, float)
            if not is_number or not -1 <= kappa <= 1:
                self.add(1, "kappa", describe(kappa), agreement["kappa"])
        if "kappa_items" in manifest and (items is not None or judged):
            if not is_integer(items) or items < 1:
                self.add(1, "kappa_items", describe(items), agreement["kappa_items"])

    def _check_row(self, line: int, row: dict[str, Any]) -> None:
        self.rows += 1
        document_fields = ("document", "evidence_spans")
        uses_document = any(field in row for field in document_fields)
        if "chunks" in row and uses_document:
            found = "chunks together with " + " and ".join(field for field in document_fields if field in row)
            self.add(line, "chunks", found, "either chunks, or document with evidence_spans")
        elif "chunks" not in row and not uses_document:
            self.add(line, "chunks", "neither chunks nor document", "either chunks, or document with evidence_spans")
        required = ROW_FIELDS + (document_fields if uses_document and "chunks" not in row else ())
        self._check_keys(line, "", row, required, (*ROW_FIELDS, "chunks", *document_fields))
        for field in ("id", "project", "question"):
            if field in row and self._check_text(line, field, row[field]):
                self._note(line, field, row[field])
        self.rows_without_project += not isinstance(row.get("project"), str)
        if "answers" in row:
            for position, answer in enumerate(self._items(line, "answers", row["answers"], "at least one string")):
                self._check_text(line, f"answers[{position}]", answer)
        if "chunks" in row:
            self._check_chunks(line, row["chunks"])
        if uses_document:
            self._check_document(line, row)

    def _note(self, line: int, field: str, value: str) -> None:
        if field == "project":
            self.projects.add(value)
        elif field == "id":
            first = self.id_lines.setdefault(value, line)
            if first != line:
                self.add(line, "id", f"{describe(value)}, which line {first} has too", "an id that no other row has")

    def _check_chunks(self, line: int, chunks: Any) -> None:
        for position, chunk in enumerate(self._items(line, "chunks", chunks, "at least one chunk")):
            field = f"chunks[{position}]"
            if not isinstance(chunk, dict):
                self.add(line, field, describe(chunk), 'an object {"text": string, "evidence": boolean}')
                continue
            self._check_keys(line, field + ".", chunk, ("text", "evidence"), ("text", "evidence"))
            if "text" in chunk:
                self._check_text(line, field + ".text", chunk["text"], blank_allowed=True)
            if "evidence" in chunk and not isinstance(chunk["evidence"], bool):
                self.add(line, field + ".evidence", describe(chunk["evidence"]), "true or false")

    def _check_document(self, line: int, row: dict[str, Any]) -> None:
        if self.cut_missing:
            expected = "a tokenizer and a chunk_size (a document is cut into chunks by tokens)"
            self.add(line, "document", f"a row with a document, but {self.cut_missing}", expected)
            self.cut_missing = ""  # said once, not once per row
        document = row.get("document")
        sound = "document" in row and self._check_text(line, "document", document)
        end_of_text = len(document) if sound and isinstance(document, str) else None
        expected = "two integers [start, end) with 0 <= start < end"
        if end_of_text is not None:
            expected += f" <= {end_of_text}, the length of the document"
        if "evidence_spans" not in row:
            return
        for position, span in enumerate(self._items(line, "evidence_spans", row["evidence_spans"], None)):
            pair = isinstance(span, list) and len(span) == 2 and all(is_integer(bound) for bound in span)
            if not pair or not 0 <= span[0] < span[1] or (end_of_text is not None and span[1] > end_of_text):
                self.add(line, f"evidence_spans[{position}]", describe(span), expected)

    def _check_keys(
        self,
        line: int,
        prefix: str,
        value: dict[str, Any],
        required: Iterable[str],
        allowed: Iterable[str],
        expected: Mapping[str, str] | None = None,
    ) -> None:
        for field in required:
            if field not in value:
                self.add(line, prefix + field, "no such field", (expected or {}).get(field, "a value"))
        names = tuple(allowed)
        for field in value:
            if field not in names:
                self.add(line, prefix + shown_name(field), "an unknown field", "only " + ", ".join(names))

    def _check_text(self, line: int, field: str, value: Any, blank_allowed: bool = False) -> bool:
        """True for a string with text in it that UTF-8 can write; a fault is noted otherwise."""
        blank = isinstance(value, str) and not (value if blank_allowed else value.strip())
        if not isinstance(value, str) or isinstance(value, NotJson) or blank:
            self.add(line, field, describe(value), "a string that is not empty" + " or blank" * (not blank_allowed))
            return False
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            self.add(line, field, f"the lone surrogate {value[error.start]!r}", "characters that UTF-8 can write")
            return False
        return True

    def _items(self, line: int, field: str, value: Any, at_least_one: str | None) -> list[Any]:
        """The items of a list, or none with a fault noted; at_least_one says what a list must hold, None: nothing."""
        if not isinstance(value, list) or (at_least_one and not value):
            self.add(line, field, describe(value), f"a list of {at_least_one}" if at_least_one else "a list")
            return []
        return value


def numbered_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 with the lines of JSON Lines, blank ones at the end of the file left out.

    `lines` end with a newline, as those of a file opened in binary mode do, and a carriage return may stand before it.
    Nothing else ends a line, as it would for str.splitlines; a line of JSON's white space alone is blank.
    """
    blank: list[int] = []
    for number, raw in enumerate(lines, start=1):
        if not raw.strip(JSON_SPACE):
            blank.append(number)
            continue
        yield from ((earlier, b"") for earlier in blank)
        blank.clear()
        yield number, raw
