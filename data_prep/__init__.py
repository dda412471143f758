"""Corpora for turn-by-turn reading (format, loading, splitting, cutting, four makers), and the stock problems.

Names are loaded when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import stock_arithmetic
    from .chunking import chunk_document
    from .code_corpus import build_code_corpus
    from .corpus import CorpusError, corpus_digest, corpus_facts, load_corpus, read_manifest, write_corpus
    from .gold import gold_thought, gold_turns
    from .memagent import convert_memagent
    from .needle import build_needle_corpus
    from .splits import split_by_project
    from .world_corpus import build_world_corpus

_ROOMS = {
    "CorpusError": "corpus",
    "build_code_corpus": "code_corpus",
    "build_needle_corpus": "needle",
    "build_world_corpus": "world_corpus",
    "chunk_document": "chunking",
    "convert_memagent": "memagent",
    "corpus_digest": "corpus",
    "corpus_facts": "corpus",
    "gold_thought": "gold",
    "gold_turns": "gold",
    "load_corpus": "corpus",
    "read_manifest": "corpus",
    "split_by_project": "splits",
    "write_corpus": "corpus",
}

__all__ = [
    "CorpusError",
    "build_code_corpus",
    "build_needle_corpus",
    "build_world_corpus",
    "chunk_document",
    "convert_memagent",
    "corpus_digest",
    "corpus_facts",
    "gold_thought",
    "gold_turns",
    "load_corpus",
    "read_manifest",
    "split_by_project",
    "stock_arithmetic",
    "write_corpus",
]


def __getattr__(name: str) -> Any:
    if name == "stock_arithmetic":
        return importlib.import_module(f"{__name__}.stock_arithmetic")
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
