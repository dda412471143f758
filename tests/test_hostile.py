"""Mutated corpora, seeded: a file is loaded, or refused by one error that names it, and nothing else ever happens.

The others of this kind: gate texts and answers against independent readers (tests/reading/test_gates.py), damage of
every file of a checkpoint (tests/runs/test_proof.py), code planted in every file of one and every script that reads it
(tests/scripts/test_checkpoint_scripts.py), servers (tests/sampling/test_hostile_server.py), disks
(tests/scripts/test_writing.py), text on a terminal (tests/test_showing.py).
"""

import copy
import json
import random
import re

from datasets import DatasetDict

from turngrpo.data_prep import CorpusError, load_corpus

MANIFEST = {"format": "turngrpo-corpus/1", "name": "toy", "created": "2026-01-02", "label_source": "computed",
            "kappa": None, "kappa_items": None, "license": "CC0-1.0"}  # fmt: skip
CHUNKS = [{"text": "x is 12 .", "evidence": True}, {"text": "y is 9 .", "evidence": False}]
VALUES = [
    *(None, True, 0, -1, 1.5, 10**400, "", " ", "a", "x" * 100_000, "\ud800", "\x00", "\u202e", [], {}, [[]], [None]),
    *({"text": "a"}, [["a"]], [[0, 3]], [[3, 0]], [[0, 10**9]], [CHUNKS], {"a": {"a": []}}, "2026-99-99", "human"),
]
LITERALS = [b"NaN", b"-Infinity", b"1e999", b"1" * 5_000, b"[" * 5_000, b"{", b"}", b'"', b"\\", b",", b":"]
BYTES = [b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\n", b"\r", b"\r\n", b"\x0b", b"\x0c", b"\xe2\x80\xa8"]


def lines():
    rows = [
        {"id": f"r{n}", "project": f"p{n % 3}", "question": "what is x ?", "answers": ["12"], "chunks": CHUNKS}
        for n in range(6)
    ]
    return [MANIFEST, *rows]


def places(value):
    """Yield every (container, key) inside a value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def mutated(generator):
    """A corpus file with one to three changes: of values, of keys, of lines, or of bytes."""
    parts = copy.deepcopy(lines())
    count = generator.choice([1, 1, 2, 3])
    for _ in range(generator.randrange(count + 1)):
        container, key = generator.choice([place for part in parts for place in places(part)])
        change = generator.randrange(3)
        if change == 0:
            container[key] = copy.deepcopy(generator.choice(VALUES))
        elif change == 1:
            del container[key]
        elif isinstance(container, dict):
            container[generator.choice(["", "extra", key.upper(), "k" * 100_000, "\x1b[2J"])] = container.pop(key)
        else:
            container.append(container[key])
    raw = [json.dumps(part).encode() for part in parts]
    for _ in range(count):
        change, at = generator.randrange(6), generator.randrange(len(raw))
        cut = generator.randrange(len(raw[at]) + 1)
        if change == 0:
            raw[at] = raw[at][:cut]
        elif change == 1:
            raw[at] = raw[at][:cut] + generator.choice([*LITERALS, *BYTES]) + raw[at][cut + generator.randrange(2) :]
        elif change == 2:
            raw.insert(at, generator.choice([b"", b" ", b"null", b"[]", b"{}", raw[at]]))
        elif change == 3 and len(raw) > 1:
            del raw[at]
    return generator.choice([b"\n", b"\n", b"\n", b"\r\n", b"\r"]).join(raw) + generator.choice([b"\n", b"", b"\n\n"])


def test_a_mutated_corpus_is_loaded_or_refused_by_one_error_that_names_it(tmp_path):
    generator, path, loaded = random.Random(14), tmp_path / "corpus.jsonl", 0
    for number in range(300):
        path.write_bytes(mutated(generator))
        try:
            corpus = load_corpus(path)
        except ValueError as error:
            text = str(error)
            assert str(path) in text and "expected" in text, (number, text)
            assert len(text) < 20_000, (number, len(text))
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text), (number, text)
            if isinstance(error, CorpusError) and any(fault.line for fault in error.faults):
                assert re.search(r", line [1-9][0-9]*, field ", text), (number, text)
        else:
            assert isinstance(corpus, DatasetDict)
            loaded += 1
    assert 30 < loaded < 200  # both are tried


def test_the_corpus_that_is_mutated_loads(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines()))
    assert sum(map(len, load_corpus(tmp_path / "corpus.jsonl").values())) == 6
