"""MemAgent's parquet with HotpotQA's supporting facts: joins, spans, and rows that do not join."""

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turngrpo.data_prep import convert_memagent, load_corpus, write_corpus
from turngrpo.data_prep.memagent import documents, read_supporting_titles

CONTEXT = (
    "Document 1:\nBonn\nA city.\n\nIt lies on a river.\n\nDocument 2:\nR&D\nWork.\n\nDocument 3:\nOslo\nAnother city."
)
QUESTION = "Which river is in Bonn?"


def record(question=QUESTION, context=CONTEXT, answers=("the Rhine",)):
    return {
        "prompt": [{"role": "user", "content": question}],
        "context": context,
        "reward_model": {"ground_truth": list(answers), "style": "rule"},
        "extra_info": {"index": 0, "question": question, "num_docs": 3},
    }


def save(tmp_path, records, facts, lines=False):
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "in.parquet")
    text = "\n".join(map(json.dumps, facts)) if lines else json.dumps(facts)
    (tmp_path / "facts.json").write_text(text)
    return tmp_path / "in.parquet", tmp_path / "facts.json"


def test_documents_end_where_the_next_begins_and_may_hold_blank_lines():
    assert [(title, CONTEXT[start:end]) for title, start, end in documents(CONTEXT)] == [
        ("Bonn", "Document 1:\nBonn\nA city.\n\nIt lies on a river."),
        ("R&D", "Document 2:\nR&D\nWork."),
        ("Oslo", "Document 3:\nOslo\nAnother city."),
    ]
    nested = "Document 0:\nA\nsee\n\nDocument 5:\nno heading\n\nDocument 1:\nB\ntext\n"
    assert [title for title, *_ in documents(nested)] == ["A", "B"]
    assert list(documents("no document")) == []


GOOD_FACTS = json.dumps({"question": QUESTION, "supporting_facts": [["Bonn", 0]]}).encode()


def test_facts_on_lines_follow_the_rule_of_json_lines(tmp_path):
    path = tmp_path / "facts.jsonl"
    other = json.dumps({"question": "a\u2028b\x85c?", "supporting_facts": [["Oslo", 0]]}, ensure_ascii=False).encode()
    # Only \n ends a line, a \r may stand before it, and blank lines at the end count for nothing.
    path.write_bytes(GOOD_FACTS + b"\r\n" + other + b" \n\n \t\n")
    titles = read_supporting_titles(path)
    assert titles == {QUESTION: {"Bonn"}, "a b c?": {"Oslo"}}
    for mark in (b"\x0b", b"\x0c", b"\x1c", b"\x1e", "\x85".encode(), "\u2028".encode(), "\u2029".encode(), b"\r"):
        path.write_bytes(other + b"\n" + GOOD_FACTS + mark + GOOD_FACTS + b"\n")
        with pytest.raises(ValueError, match=r"facts\.jsonl, line 2: found bad JSON at column \d+ \(Extra data\)"):
            read_supporting_titles(path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (GOOD_FACTS + b"\n" + b"[" * 100_000, r"line 2: found JSON nested too deeply; expected HotpotQA"),
        (b"[" * 100_000, r"facts: found JSON nested too deeply; expected HotpotQA"),
        (b"1" * 5_000, r"line 1: found bad JSON \(Exceeds the limit"),
        (b"[3]", r"record 1, field \(record\): found 3 \(integer\); expected an object"),
        (b'{"question": 1e999}', r"line 1, field question: found 1e999, which is too large for a number; expected a"),
        (
            b'{"question": ["' + b"q" * 100_000 + b'"]}',
            r"field question: found \['q{58}\.\.\. \(list\); expected a str",
        ),
        # A string has a first character too: "Bonn" is not the title "B".
        (b'{"question": "q", "supporting_facts": ["Bonn"]}', r"supporting_facts: found \['Bonn'\] \(list\); expected"),
        (
            b'{"question": "q", "supporting_facts": [[7, 0]]}',
            r"supporting_facts: found \[\[7, 0\]\] \(list\); expected",
        ),
        (
            b'{"question": "q", "supporting_facts": {"title": "Bonn"}}',
            r"found \{'title': 'Bonn'\} \(object\); expected",
        ),
        (b'{"question": "q", "supporting_facts": [[]]}', r"found \[\[\]\] \(list\); expected"),
    ],
)
def test_faulty_facts_are_named_and_shown_in_short(tmp_path, raw, message):
    (tmp_path / "facts").write_bytes(raw)
    with pytest.raises(ValueError, match=message) as caught:
        read_supporting_titles(tmp_path / "facts")
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": None}, "row 0, field context: found null; expected a string"),
        (
            {"extra_info": None, "prompt": []},
            r"row 0, field prompt: found \[\] \(list\); expected a list that ends with",
        ),
        ({"extra_info": {"question": 3}}, r"row 0, field extra_info.question: found 3 \(integer\); expected a string"),
        ({"reward_model": {"ground_truth": [None]}}, r"ground_truth: found \[None\] \(list\); expected a string or"),
        ({"reward_model": {"ground_truth": 3}}, r"ground_truth: found 3 \(integer\); expected a string or"),
    ],
)
def test_columns_of_another_type_are_named(tmp_path, changes, message):
    paths = save(tmp_path, [record() | changes], [{"question": QUESTION, "supporting_facts": [["Bonn", 0]]}])
    with pytest.raises(ValueError, match=message):
        convert_memagent(*paths)


def test_long_questions_and_titles_are_shown_in_short(tmp_path):
    facts = [{"question": QUESTION, "supporting_facts": [[f"{number}" + "t" * 9_000, 0] for number in range(9)]}]
    paths = save(tmp_path, [record(), record("q" * 9_000 + "?")], facts)
    for kept, message in (
        (0, "no document is headed '0t{58}..., '1t{58}..., '2t{58}..., ..."),
        (1, "the question 'q{59}..."),
    ):
        pq.write_table(pa.Table.from_pylist([[record(), record("q" * 9_000 + "?")][kept]]), paths[0])
        with pytest.raises(ValueError, match=message.replace("...", r"\.\.\.")) as caught:
            convert_memagent(*paths, unjoined="error")
        assert len(str(caught.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("lines", [False, True])
def test_rows_join_by_question_and_titles(tmp_path, lines):
    facts = [
        {"question": "Which river is in  Bonn?", "supporting_facts": [["R&amp;D", 0], ["Bonn", 1], ["Bonn", 0]]},
        {"question": "Other?", "supporting_facts": {"title": ["Oslo"], "sent_id": [0]}},
    ]
    paths = save(tmp_path, [record(), record("Other?", answers=["x", " "])], facts, lines)
    manifest, rows = convert_memagent(*paths, buckets=1000, created="2026-01-02")
    assert "1000" in manifest["name"] and manifest["label_source"] == "computed"
    assert [row["id"] for row in rows] == ["memagent-000000", "memagent-000001"]
    assert [row["answers"] for row in rows] == [["the Rhine"], ["x"]]
    # the documents with these titles, in full; the third is no evidence for the first question
    assert [[CONTEXT[start:end].split("\n")[1] for start, end in row["evidence_spans"]] for row in rows] == [
        ["Bonn", "R&D"],
        ["Oslo"],
    ]
    # printf Bonn | sha256sum: the first 16 digits modulo 1000; likewise Oslo
    assert [row["project"] for row in rows] == ["titles-0281", "titles-0095"]
    write_corpus(tmp_path / "out.jsonl", manifest, rows)
    from test_chunking import TOKENIZER

    corpus = load_corpus(tmp_path / "out.jsonl", tokenizer=TOKENIZER, chunk_size=64)
    joined = ["".join(chunk["text"] for chunk in side[0]["chunks"]) for side in corpus.values()]
    assert joined == [CONTEXT, CONTEXT]


def test_rows_that_do_not_join_are_counted_or_refused(tmp_path):
    facts = [
        {"question": QUESTION, "supporting_facts": [["Bonn", 0]]},
        {"question": "Twice?", "supporting_facts": [["Bonn", 0]]},
        {"question": "Twice?", "supporting_facts": [["Oslo", 0]]},
        {"question": "Absent?", "supporting_facts": [["Bonn", 0], ["Rome", 0]]},
    ]
    records = [record(), record("Unknown?"), record("Twice?"), record("Absent?"), record(answers=[])]
    paths = save(tmp_path, records, facts)
    counts = Counter()
    _, rows = convert_memagent(*paths, counts=counts)
    assert [row["id"] for row in rows] == ["memagent-000000"]
    assert counts == {
        "rows": 1,
        "skipped/question": 1,
        "skipped/ambiguous": 1,
        "skipped/title": 1,
        "skipped/answer": 1,
    }
    with pytest.raises(ValueError, match=r"in\.parquet, row 1: the question 'Unknown\?' is not among"):
        convert_memagent(*paths, unjoined="error")


def test_files_of_another_form_are_refused(tmp_path):
    parquet, facts = save(tmp_path, [record()], [{"question": QUESTION}])
    with pytest.raises(ValueError, match="record 1, field supporting_facts: found null; expected"):
        convert_memagent(parquet, facts)
    pq.write_table(pa.table({"prompt": ["x"]}), parquet)
    (tmp_path / "facts.json").write_text("[]")
    with pytest.raises(ValueError, match="no column context, reward_model, extra_info"):
        convert_memagent(parquet, facts)
    with pytest.raises(ValueError, match="buckets is 1"):
        convert_memagent(parquet, facts, buckets=1)


def test_files_that_are_swapped_are_named(tmp_path):
    parquet, facts = save(tmp_path, [record()], [{"question": QUESTION, "supporting_facts": [["Bonn", 0]]}])
    with pytest.raises(ValueError, match=r"in\.parquet, line 1: found byte 0x.. at .* expected HotpotQA as JSON"):
        convert_memagent(parquet, parquet)
    with pytest.raises(ValueError, match=r"facts\.json is no parquet file"):
        convert_memagent(facts, facts)
