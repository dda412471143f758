"""Corpora for turn-by-turn reading (format, loading, splitting, cutting, four makers), and the stock problems."""

from . import stock_arithmetic
from .chunking import chunk_document
from .code_corpus import build_code_corpus
from .corpus import CorpusError, corpus_digest, corpus_facts, load_corpus, read_manifest, write_corpus
from .gold import gold_thought, gold_turns
from .memagent import convert_memagent
from .needle import build_needle_corpus
from .splits import split_by_project
from .world_corpus import build_world_corpus

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
