"""The trajectories as data that page.js reads: JSON Lines, each a batch of them with the texts that it adds."""

import base64
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from .sources import Found
from .texts import Prompts, Texts, corpus_rows, memories_before
from .turns import FAULTS, KINDS, OF_TOKENS

DIGITS = 3  # significant ones of a token's numbers, of which there are many
BATCH = 25  # trajectories
GZIP = 31  # window bits of zlib that mean gzip's format


def packed(found: Found, trajectories: Sequence[dict[str, Any]], max_bytes: float) -> tuple[str, int]:
    """Return base64 of gzip of the batches, as many as fit in so many bytes, and how many trajectories these hold.

    Nothing in such text can break out of it.
    """
    stream, held, count = zlib.compressobj(6, wbits=GZIP), b"", 0
    for batch in batches(found, trajectories):
        trial = stream.copy()
        piece = trial.compress(_json(batch).encode("utf-8", "replace") + b"\n") + trial.flush(zlib.Z_SYNC_FLUSH)
        if 4 / 3 * (len(held) + len(piece)) > max_bytes:
            break
        stream, held, count = trial, held + piece, count + len(batch["trajectories"])
    return base64.b64encode(held + stream.flush()).decode(), count


def batches(found: Found, trajectories: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield trajectories with the ledger's names; rows, texts and tokens come with the batch that needs them first."""
    yield {"trajectories": [], "faults": FAULTS, "kinds": KINDS}
    tokenizer = None if found.tokenizer is None else Tokenizer.from_file(str(found.tokenizer))
    if tokenizer is None and trajectories:
        found.notes.append("The run's tokenizer was not found: prompts are left out and tokens are shown as ids.")
    rows = corpus_rows(found, {str(one.get("row_id")) for one in trajectories}) if trajectories else {}
    texts, added, words = Texts(), set[str](), dict[int, str]()
    for start in range(0, len(trajectories), BATCH):
        batch = trajectories[start : start + BATCH]
        first_text, first_word = len(texts.all), len(words)
        new = {str(one.get("row_id")) for one in batch} & rows.keys() - added
        added |= new
        for one in batch:
            chunks = [chunk["text"] for chunk in rows.get(str(one.get("row_id")), {"chunks": []})["chunks"]]
            _complete(one, chunks, Prompts(tokenizer, texts) if tokenizer else None)
            for token in {token for turn in one["turns"] for token in turn.get("completion_ids") or ()} - words.keys():
                if tokenizer is not None:
                    words[token] = tokenizer.decode([token], skip_special_tokens=False)
        shown = {name: rows[name] | {"chunks": [_numbered(c, texts) for c in rows[name]["chunks"]]} for name in new}
        yield {
            "trajectories": batch,
            "rows": shown,
            "texts": texts.all[first_text:],
            "tokens": dict(list(words.items())[first_word:]),
        }


def _numbered(chunk: Mapping[str, Any], texts: Texts) -> dict[str, Any]:
    return {**chunk, "text": texts.number(chunk["text"])}


def _complete(trajectory: Mapping[str, Any], chunks: Sequence[str], prompts: Prompts | None) -> None:
    """Put into every turn its prompt as parts, the memory that it found, and the tokens' numbers in a few digits."""
    for turn, before in zip(trajectory["turns"], memories_before(trajectory["turns"]), strict=True):
        step, ids = turn.get("step"), turn.pop("prompt_ids", None)
        turn["memory_before"] = before
        if prompts is not None and ids is not None:
            turn["prompt"] = prompts.parts(ids, chunks[step - 1] if step and step <= len(chunks) else None, before)
        for record in (turn, *turn.get("updates", ())):
            for name in OF_TOKENS:
                if record.get(name) is not None:
                    record[name] = [float(f"{value:.{DIGITS}g}") for value in record[name]]


def _json(value: Any) -> str:
    """Return JSON; a number that JSON has none for becomes its name."""
    options: Any = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    try:
        return json.dumps(value, **options)
    except ValueError:
        return json.dumps(_finite(value), **options)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
