"""The trajectories as data that page.js reads: JSON Lines, each a batch of them with the texts that it adds."""

import base64
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from .sources import Found
from .texts import Texts, corpus_rows, decoded, memories_before, prompt_parts
from .turns import FAULTS, KINDS

BATCH = 25  # trajectories
GZIP = 31  # window bits of zlib that mean gzip's format
LEVEL = 5  # of zlib: 6 takes almost twice as long for 2% fewer bytes


def packed(found: Found, trajectories: Sequence[dict[str, Any]], max_bytes: float) -> tuple[str, int]:
    """Return base64 of gzip of the batches, as many as fit in so many bytes, and how many trajectories these hold.

    Nothing in such text can break out of it.
    """
    stream, held, count = zlib.compressobj(LEVEL, wbits=GZIP), b"", 0
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
        own = [turn for one in batch for turn in one["turns"]]
        prompts = [turn.pop("prompt_ids", None) for turn in own]
        if tokenizer is not None:
            for turn, prompt in zip(own, decoded(tokenizer, prompts), strict=True):
                turn["prompt"] = prompt
            said = set[int]().union(*(turn.get("completion_ids") or () for turn in own)) - words.keys()
            words |= zip(said, decoded(tokenizer, [[token] for token in said]), strict=True)
        for one in batch:
            _complete(one, rows.get(str(one.get("row_id")), {"chunks": []})["chunks"], texts)
        shown = {name: rows[name] | {"chunks": [_numbered(c, texts) for c in rows[name]["chunks"]]} for name in new}
        yield {
            "trajectories": batch,
            "rows": shown,
            "texts": texts.all[first_text:],
            "tokens": dict(list(words.items())[first_word:]),
        }


def _numbered(chunk: Mapping[str, Any], texts: Texts) -> dict[str, Any]:
    return {**chunk, "text": texts.number(chunk["text"])}


def _complete(trajectory: Mapping[str, Any], chunks: Sequence[Mapping[str, Any]], texts: Texts) -> None:
    """Put into every turn the memory that it found, and the parts of its prompt in place of its text."""
    for turn, before in zip(trajectory["turns"], memories_before(trajectory["turns"]), strict=True):
        step, prompt = turn.get("step"), turn.pop("prompt", None)
        turn["memory_before"] = before
        if prompt is not None:
            chunk = chunks[step - 1]["text"] if step and step <= len(chunks) else None
            turn["prompt"] = prompt_parts(prompt, chunk, before, texts)


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
