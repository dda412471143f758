"""What the turns read, as text: the chunks of the corpus with their evidence, prompts and tokens; each text once."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from turngrpo.trainer.files import sha256
from turngrpo.trainer.reading.gates import INITIAL_MEMORY

from .sources import Found

CHUNK, MEMORY = "chunk", "memory"  # parts of a prompt that stand elsewhere


class Texts:
    """Texts by number; the same text has one number."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.all)
            self.all.append(text)
        return self._numbers[text]


def corpus_rows(found: Found, ids: set[str]) -> dict[str, Any]:
    """Return question and chunks of rows by id: {"text", "evidence", "spans"} of each chunk, in UTF-16 units.

    Spans are None where the corpus labels whole chunks. Adds a note, and returns nothing, where the file that the run
    read is not there any more or is another one.
    """
    path, digest = found.corpus_file, found.corpus.get("digest")
    if path is None:
        if found.kind != "laboratory":
            named = found.corpus.get("name") or found.corpus.get("file")
            which = f" ({named})" if named else ""
            found.notes.append(
                f"The corpus{which} was not found; chunks are shown inside their prompts. --corpus names it."
            )
        return {}
    if digest is not None and sha256(path) != digest:
        found.notes.append(
            f"{path.name} is not the corpus that the run read (SHA-256); chunks are shown inside their prompts."
        )
        return {}
    rows: dict[str, Any] = {}
    with open(path, "rb") as lines:
        for raw in filter(bytes.strip, lines):
            row = json.loads(raw)
            if str(row.get("id")) in ids:
                rows[str(row["id"])] = row
    cut = None
    for key, row in rows.items():
        if "chunks" in row:
            chunks = [{"text": one["text"], "evidence": one.get("evidence"), "spans": None} for one in row["chunks"]]
        else:
            cut = cut or _cutter(found)
            chunks = cut(row["document"], row["evidence_spans"])
        rows[key] = {"question": row["question"], "chunks": chunks}
    return rows


def _cutter(found: Found) -> Any:
    """Return a function that cuts a document as the run did, and finds the evidence in its chunks."""
    if found.tokenizer is None or found.chunk_size is None:
        found.notes.append("The documents cannot be cut as the run did: its tokenizer or chunk size was not found.")
        return lambda document, spans: []
    from lib.tokenizing import load_tokenizer  # which brings transformers

    from turngrpo.data_prep.chunking import chunk_document

    tokenizer, size = load_tokenizer(str(found.tokenizer.parent)), found.chunk_size

    def cut(document: str, spans: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        chunks, start = [], 0
        for chunk in chunk_document(document, spans, tokenizer, size):
            text, end = chunk["text"], start + len(chunk["text"])
            inside = [(max(a, start) - start, min(b, end) - start) for a, b in spans if a < end and b > start]
            places = [[_units(text[:a]), _units(text[:b])] for a, b in sorted(inside)]
            chunks.append({"text": text, "evidence": chunk["evidence"], "spans": places})
            start = end
        return chunks

    return cut


def _units(text: str) -> int:
    """Return the length of a text in UTF-16 units, which JavaScript counts in."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def decoded(tokenizer: Tokenizer, ids: Sequence[Sequence[int] | None]) -> list[Any]:
    """Return the texts of many lists of token ids; the same list, as readings of a group share it, once."""
    keys = [None if one is None else tuple(one) for one in ids]
    known = [key for key in dict.fromkeys(keys) if key is not None]
    texts = dict(zip(known, tokenizer.decode_batch(known, skip_special_tokens=False), strict=True))
    return [None if key is None else texts[key] for key in keys]


def prompt_parts(text: str, chunk: str | None, memory: str | None, texts: Texts) -> list[int | str]:
    """Return a prompt as numbers of texts, with CHUNK and MEMORY where the turn's own chunk and memory stand.

    What the readings of a group share is kept once, whatever their memories say.
    """
    pieces: list[tuple[str, bool]] = [(text, False)]  # and whether it is a mark
    for mark, known in ((CHUNK, chunk), (MEMORY, memory)):
        pieces = [part for piece in pieces for part in _split(piece, known, mark)]
    return [piece if is_mark else texts.number(piece) for piece, is_mark in pieces]


def _split(piece: tuple[str, bool], known: str | None, mark: str) -> list[tuple[str, bool]]:
    """Return a piece of a prompt with the last place of a known text in it as a mark."""
    text, is_mark = piece
    at = -1 if is_mark or not known else text.rfind(known)
    if at < 0 or known is None:
        return [piece]
    parts = [(text[:at], False), (mark, True), (text[at + len(known) :], False)]
    return [part for part in parts if part[0]]


def memories_before(turns: Iterable[Mapping[str, Any]]) -> list[str | None]:
    """Return what each turn of a trajectory found in memory; None throughout for a workflow without one."""
    before: str | None = INITIAL_MEMORY
    found: list[str | None] = []
    for turn in turns:
        held = turn.get("memory")
        found.append(None if held is None else before)
        before = held if held is not None else before
    return found
