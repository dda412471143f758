"""MemAgent's parquet with HotpotQA's supporting facts: joins, spans, and rows that do not join."""

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turngrpo.data_prep import convert_memagent, load_corpus, write_corpus
from turngrpo.data_prep.memagent import documents

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
    with pytest.raises(ValueError, match="record 1: expected question and supporting_facts"):
        convert_memagent(parquet, facts)
    pq.write_table(pa.table({"prompt": ["x"]}), parquet)
    (tmp_path / "facts.json").write_text("[]")
    with pytest.raises(ValueError, match="no column context, reward_model, extra_info"):
        convert_memagent(parquet, facts)
    with pytest.raises(ValueError, match="buckets is 1"):
        convert_memagent(parquet, facts, buckets=1)


def test_files_that_are_swapped_are_named(tmp_path):
    parquet, facts = save(tmp_path, [record()], [{"question": QUESTION, "supporting_facts": [["Bonn", 0]]}])
    with pytest.raises(ValueError, match=r"in\.parquet: .* expected HotpotQA as JSON"):
        convert_memagent(parquet, parquet)
    with pytest.raises(ValueError, match=r"facts\.json is no parquet file"):
        convert_memagent(facts, facts)
