"""Needle tasks: places, labels and words; and the gold turns of labelled rows."""

import random
import re
from collections import Counter

import pytest

from turngrpo.data_prep import build_needle_corpus, gold_turns, load_corpus, write_corpus
from turngrpo.data_prep.gold import relevant_text
from turngrpo.data_prep.needle import last_positions

NEEDLE = re.compile(r"the code of (\w+) is (\d\d) \.")


def key_of(row):
    return re.fullmatch(r"what (?:is the code|are the \d codes) of (\w+)(?: in order)? \?", row["question"]).group(1)


def last_of(row):
    return max(step for step, chunk in enumerate(row["chunks"], start=1) if chunk["evidence"])


@pytest.mark.parametrize("kind", ["single", "multi_key", "multi_value"])
def test_labels_are_those_found_by_search(kind):
    _, rows = build_needle_corpus(kind, projects=3, rows_per_project=20, seed=4)
    assert len(rows) == 60 and len({row["id"] for row in rows}) == 60
    for row in rows:
        found = [NEEDLE.findall(chunk["text"]) for chunk in row["chunks"]]
        key = key_of(row)
        assert [chunk["evidence"] for chunk in row["chunks"]] == [key in dict(needles) for needles in found]
        values = [value for needles in found for name, value in needles if name == key]
        assert row["answers"] == [" ".join(values)]
        assert len(values) == {"single": 1, "multi_key": 1, "multi_value": 3}[kind]
        if kind == "single":
            assert sum(map(len, found)) == 1
        else:  # as many needles in a chunk without evidence: their number tells nothing
            assert [len(needles) for needles in found] == [1, 1, 1, 1, 1]
            others = [value for needles in found for name, value in needles if name != key]
            assert not set(values) & set(others)


def test_last_evidence_is_spread_over_all_chunks_and_rarely_in_the_last():
    _, rows = build_needle_corpus("multi_key", projects=2, rows_per_project=90)
    # weights 1, 1, 1, 1, 0.5 of 90 rows: 20 each and 10
    for project in ("harbour", "garden"):
        counts = Counter(last_of(row) for row in rows if row["project"] == project)
        assert counts == {1: 20, 2: 20, 3: 20, 4: 20, 5: 10}
    assert Counter(last_positions(12, 3, 5, 1.0, random.Random(0))) == {3: 4, 4: 4, 5: 4}
    assert Counter(last_positions(12, 1, 3, 0.0, random.Random(0))) == {1: 6, 2: 6}
    assert last_positions(2, 5, 5, 0.5, random.Random(0)) == [5, 5]  # one place only
    _, rows = build_needle_corpus("multi_value", projects=2, rows_per_project=50, values=2)
    # the second of two values is never in chunk 1: weights 1, 1, 1, 0.5 of 100 rows, rounded in each project
    assert Counter(last_of(row) for row in rows) == {2: 28, 3: 30, 4: 28, 5: 14}


def test_text_has_the_size_and_the_words_asked_for():
    _, rows = build_needle_corpus(
        "multi_key", projects=12, rows_per_project=8, words_per_chunk=17, needles_per_chunk=2
    )
    words = set()
    for row in rows:
        assert len(row["chunks"]) == 5
        for chunk in row["chunks"]:
            assert len(chunk["text"].split()) == 31  # 17 of filler, two needles of 7
            assert re.fullmatch(r"[a-z0-9.]+( [a-z0-9.]+)*", chunk["text"])
            words |= set(chunk["text"].split())
    assert len(words) <= 320


def test_projects_have_their_own_words_or_share_all():
    for shared in (False, True):
        _, rows = build_needle_corpus("multi_key", projects=4, rows_per_project=90, shared_keys=shared)
        keys, words = {}, {}
        for row in rows:
            keys.setdefault(row["project"], set()).add(key_of(row))
            text = " ".join(chunk["text"] for chunk in row["chunks"])
            words.setdefault(row["project"], set()).update(re.findall("[a-z]+", text))
        assert list(keys) == ["harbour", "garden", "kitchen", "forest"]
        common = set.intersection(*keys.values())
        assert len(common) == (12 if shared else 0)
        unseen = words["forest"] - words["harbour"] - words["garden"] - words["kitchen"]
        assert len(unseen) == (0 if shared else 16)  # 8 keys and 8 nouns


def test_documents_of_any_length_carry_spans():
    _, rows = build_needle_corpus("multi_value", words=1010, words_per_chunk=100, rows_per_project=20, projects=2)
    ends = []
    for row in rows:
        document, key = row["document"], key_of(row)
        found = [match for match in NEEDLE.finditer(document) if match.group(1) == key]
        assert row["evidence_spans"] == [[match.start(), match.end()] for match in found]
        assert row["answers"] == [" ".join(match.group(2) for match in found)]
        assert len(document.split()) == 1010 + 10 * 7  # 10 sections with a needle each
        assert "chunks" not in row
        ends.append(row["evidence_spans"][-1][1] / len(document))
    assert min(ends) < 0.35 and max(ends) > 0.9


def test_equal_arguments_give_equal_rows_and_another_seed_others(tmp_path):
    first = build_needle_corpus(created="2026-01-02", rows_per_project=3)
    assert build_needle_corpus(created="2026-01-02", rows_per_project=3) == first
    assert build_needle_corpus(created="2026-01-02", rows_per_project=3, seed=1)[1] != first[1]
    write_corpus(tmp_path / "n.jsonl", *first)
    corpus = load_corpus(tmp_path / "n.jsonl", validation_fraction=0.3)
    assert len(corpus["train"]) + len(corpus["validation"]) == 24
    assert not set(corpus["train"]["project"]) & set(corpus["validation"]["project"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "double"}, "kind is 'double': expected one of single, multi_key, multi_value"),
        ({"projects": 13}, "projects is 13: expected 2 to 12"),
        ({"rows_per_project": 0}, "rows_per_project is 0"),
        ({"chunks": 1}, "chunks .* is 1: expected 2 or more"),
        ({"words": 30}, "chunks .* is 1: expected 2 or more"),
        ({"words_per_chunk": 3}, "words_per_chunk is 3: expected 4 or more"),
        ({"last_position_weight": -1}, "last_position_weight is -1"),
        ({"kind": "multi_value", "values": 6}, "values is 6: expected 2 to 5"),
    ],
)
def test_sizes_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_needle_corpus(**options)


def labelled(*chunks):
    return {
        "question": "what are the 2 codes of lamp in order ?",
        "answers": ["12 40"],
        "chunks": [{"text": text, "evidence": evidence} for text, evidence in chunks],
    }


def test_gold_turns_carry_the_memory_forward_and_stop_at_the_last_evidence():
    row = labelled(
        ("the dog waits .", False),
        ("the dog waits . the code of lamp is 12 .", True),
        ("the code of bell is 33 .", False),
        ("the code of lamp is 40 . the code of rope is 12 .", True),
        ("the dog waits .", False),
    )
    assert gold_turns(row) == [
        {"step": 1, "check": False, "candidate": "", "exit": False},
        {"step": 2, "check": True, "candidate": "the code of lamp is 12 .", "exit": False},
        {"step": 3, "check": False, "candidate": "", "exit": False},
        # both codes, not the second alone; and no fifth turn
        {"step": 4, "check": True, "candidate": "the code of lamp is 12 . the code of lamp is 40 .", "exit": True},
    ]


def test_gold_turns_without_evidence_read_to_the_end():
    turns = gold_turns(labelled(("a .", False), ("b .", False)))
    assert [(turn["check"], turn["exit"]) for turn in turns] == [(False, False), (False, True)]
    with pytest.raises(ValueError, match="no chunks"):
        gold_turns(labelled())


def test_relevant_text_prefers_the_answer_as_a_whole_word():
    code = "def send(retries=3):\n    timeout = 30\n    port = 3\n    return port * 3\n"
    question = "what is the value of the variable `port`?"
    assert relevant_text(code, question, ["3"]) == "port = 3 return port * 3"  # not the 3 of 30, not retries=3
    assert relevant_text(code, "what is the default of retries in send?", ["3"]) == "def send(retries=3):"
    prose = "Anna was born in Bonn. Bonn lies on the Rhine. She died in Rome!"
    assert relevant_text(prose, "Where was Anna born?", ["bonn"]) == "Anna was born in Bonn."
    assert relevant_text(prose, "Where does the Rhine flow?", ["Cologne"]) == "Bonn lies on the Rhine."  # no answer
    # no answer here: `_merge` is in one line, "layer" in all; counting words alone the first line would be as good
    lines = "the layer types\nlayer = 1\ndef _merge(layer):\n"
    assert (
        relevant_text(lines, "In layer.py, which exception does `_merge` raise?", ["KeyError"]) == "def _merge(layer):"
    )


def test_relevant_text_is_short_and_free_of_gate_tags():
    assert relevant_text("x</update> <next>end</next> lamp 12", "lamp ?", ["12"]) == "x end lamp 12"
    long = relevant_text("word " * 200 + "lamp 12 " + "word " * 200, "lamp ?", ["12"])
    assert len(long) <= 240 and "lamp 12" in long
    assert relevant_text(" \n\t", "lamp ?", ["12"]) == "(blank)"
    turns = gold_turns(labelled(("the code of lamp is 12 .", True), ("the code of lamp is 12 .", True)))
    assert turns[1]["candidate"] == "the code of lamp is 12 ."  # what is known is not written twice
