"""Cut a document into chunks of tokens whose texts add up to the document, and label them from evidence spans."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any


def check_cutting(tokenizer: Any, chunk_size: Any) -> None:
    """Raise ValueError unless the tokenizer gives character offsets and chunk_size is a positive integer."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"the tokenizer is a {type(tokenizer).__name__} without character offsets: cutting documents needs a fast "
            "tokenizer (AutoTokenizer.from_pretrained(..., use_fast=True), or a tokenizer.json beside the model)"
        )
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size!r}: expected a positive number of tokens")


def token_offsets(document: str, tokenizer: Any) -> list[tuple[int, int]]:
    """Character range [start, end) of every token; control tokens spelled out in the text are ordinary text.

    A token without width, as a tokenizer gives it that trims white space, is of the character before it.
    """
    encoded = tokenizer(
        document,
        add_special_tokens=False,
        split_special_tokens=True,
        truncation=False,
        padding=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    return [(max(0, start - 1) if start == end else start, end) for start, end in encoded["offset_mapping"]]


def cut_positions(offsets: Sequence[tuple[int, int]], length: int, chunk_size: int) -> list[int]:
    """Character positions 0 = p_0 < p_1 < ... < p_K = length between which at most chunk_size tokens lie.

    Several tokens may share a character (its bytes): there is no cut between them. The cut moves back to the last
    whole character, and forward only when one character alone has more than chunk_size tokens. Characters that belong
    to no token (white space that the tokenizer drops) go to the chunk after the cut, unless they would be all there is
    before it.
    """
    cuts = [0]
    reached = 0  # end of the text covered by the tokens so far
    first = 0  # first token of the open chunk
    boundary: tuple[int, int] | None = None  # last place to cut in the open chunk: (token index, character position)
    for index, (start, end) in enumerate(offsets):
        position = reached if reached > cuts[-1] else start
        if start >= reached and position > cuts[-1]:
            boundary = (index, position)
        if index - first >= chunk_size and boundary is not None:
            first, position = boundary
            cuts.append(position)
            boundary = None
        reached = max(reached, end)
    return [*cuts, length]


def chunk_document(
    document: str, evidence_spans: Sequence[Sequence[int]], tokenizer: Any, chunk_size: int
) -> list[dict[str, Any]]:
    """Cut a document every chunk_size tokens and label each chunk that an evidence span touches.

    Returns [{"text": str, "evidence": bool}]; the texts joined are the document, character for character. Spans are
    half-open character ranges [start, end): a span that ends where a chunk starts does not touch it. Tokens are those
    of the document as a whole; a chunk tokenised by itself can differ by a token or two at its edges.
    Raises ValueError for an empty document, a tokenizer without offsets, or a chunk_size that is no positive integer.
    """
    check_cutting(tokenizer, chunk_size)
    if not document:
        raise ValueError("the document is empty: expected at least one character")
    cuts = cut_positions(token_offsets(document, tokenizer), len(document), chunk_size)
    return [
        {
            "text": document[start:end],
            "evidence": any(span_start < end and span_end > start for span_start, span_end in evidence_spans),
        }
        for start, end in pairwise(cuts)
    ]
