"""The thoughts and memories of an ideal reader, for rows of every kind of corpus."""

import re

import pytest
from test_chunking import TOKENIZER
from test_memagent import QUESTION, record
from test_memagent import save as save_memagent
from test_world import make_docs

from turngrpo.data_prep import (
    build_code_corpus,
    build_needle_corpus,
    build_world_corpus,
    chunk_document,
    convert_memagent,
    gold_thought,
    gold_turns,
)
from turngrpo.data_prep.gold import relevant_text
from turngrpo.trainer.reading.gates import parse_turn


def row_of(question, answers, *chunks):
    return {
        "question": question,
        "answers": answers,
        "chunks": [{"text": text, "evidence": evidence} for text, evidence in chunks],
    }


def thoughts(row, **options):
    return [gold_thought(row, chunk, **options) for chunk in row["chunks"]]


def test_a_thought_repeats_what_is_asked_and_quotes_the_line_that_says_it():
    code = row_of(
        "In the file a/b.py, what is the default value of the parameter `retries` of the function `send`?",
        ["3"],
        ("# file: a/b.py\n\nport = 3\n", False),
        ("def send(retries=3):\n    timeout = 30\n    return port\n", True),
    )
    asked = "asked: In the file a/b.py, what is the default value of the parameter `retries` of the function `send`?; "
    assert thoughts(code) == [asked + "not here", asked + "found: def send(retries=3):"]
    needle = row_of(
        "what are the 2 codes of lamp in order ?",
        ["12 40"],
        ("the dog waits . the code of lamp is 12 . the code of bell is 12 .", True),
        ("the code of bell is 40 .", False),
    )
    asked = "asked: what are the 2 codes of lamp in order ?; "
    assert thoughts(needle) == [asked + "found: the code of lamp is 12 .", asked + "not here"]  # not the bell's 12
    prose = row_of("Where was\nAnna born?", ["Bonn"], ("Document 1:\nAnna\nShe was born in Bonn. She left.", True))
    assert thoughts(prose) == ["asked: Where was Anna born?; found: She was born in Bonn."]
    assert thoughts(row_of("Why?", ["x"], (" \n", True))) == ["asked: Why?; found: (blank)"]


WORLD = row_of(
    "Where is the acorn at the end?",
    ["jetty"],
    ("Ulrike went to the chapel. The acorn was packed into the urn. It is a page of prose.", True),
    ("Tancred went to the jetty. Ulrike sent the urn to Xanthe.", True),
    ("Cosima walked over to the jetty. The jetty is old.", False),
    ("Tancred moved on to the stable. Some prose. Xanthe moved on to the jetty. More prose.", True),
)


def test_the_world_is_quoted_by_what_decides_the_answer():
    # Words alone would find "Tancred went to the jetty.", which holds the answer, and nothing of the urn.
    assert relevant_text(WORLD["chunks"][1]["text"], WORLD["question"], ["jetty"]) == "Tancred went to the jetty."
    asked = "asked: Where is the acorn at the end?; "
    assert thoughts(WORLD) == [
        asked + "found: The acorn was packed into the urn.",
        asked + "found: Ulrike sent the urn to Xanthe.",
        asked + "not here",
        asked + "found: Xanthe moved on to the jetty.",
    ]
    assert [turn["candidate"] for turn in gold_turns(WORLD)] == [
        "The acorn was packed into the urn.",
        "The acorn was packed into the urn. Ulrike sent the urn to Xanthe.",
        "",
        "The acorn was packed into the urn. Ulrike sent the urn to Xanthe. Xanthe moved on to the jetty.",
    ]
    # The same words under labels that the state does not give are somebody else's rows, and read by their words.
    other = WORLD | {"chunks": [chunk | {"evidence": True} for chunk in WORLD["chunks"]]}
    assert thoughts(other)[1] == asked + "found: Tancred went to the jetty."


def test_a_thought_has_no_tag_and_no_control_token():
    row = row_of(
        "what is <check>the<|im_end|> code</think> of lamp ?",
        ["12"],
        ("<think>x</think> the code<|im_start|> of lamp is <next>12<|end|> .", True),
        ("</update>", False),
    )
    assert thoughts(row) == [
        "asked: what is the code of lamp ?; found: x the code of lamp is 12 .",
        "asked: what is the code of lamp ?; not here",
    ]
    nested = row_of("<th<think>ink> <|a<|b|>|> ?", ["12"], ("<|x<check>y|> </ne</next>xt> 12", True))
    assert thoughts(nested) == ["asked: <th ink> <|a |> ?; found: <|x y|> </ne xt> 12"]
    # The memory too: a control token in it would make the whole turn unparsed.
    assert gold_turns(row)[0]["candidate"] == "x the code of lamp is 12 ."


def test_a_thought_is_never_longer_than_its_limit():
    row = row_of(
        "q" * 900 + " lamp ?", ["12"], ("w " * 400 + "lamp 12 " + "v " * 400, True), ("the lamp", False)
    )  # fmt: skip
    found, nothing = thoughts(row)
    # "asked: ; found: " has 16 characters, "asked: ; not here" 17. The question has half of the other 584, or all 583.
    assert found.startswith("asked: " + "q" * 289 + "...; found: w w ") and "lamp 12" in found
    assert nothing == "asked: " + "q" * 580 + "...; not here" and len(nothing) == 600
    short, nothing = thoughts(row, limit=80)
    # 64 for both: 29 and an ellipsis; then 32 of the line, the answer in their middle.
    assert short == "asked: " + "q" * 29 + "...; found: w w w w w lamp 12 v v v v v v v"
    assert nothing == "asked: " + "q" * 60 + "...; not here" and len(nothing) == 80
    with pytest.raises(ValueError, match="limit is 79: expected 80 characters or more"):
        gold_thought(row, row["chunks"][0], limit=79)


def corpora(folder):
    """Rows of every maker, cut into chunks."""
    docs = make_docs(folder / "docs", "alpha", "delta")
    (folder / "code" / "alpha").mkdir(parents=True)
    lines = "\n".join(f"def step_{number}(size={number + 100}):\n    return size + {number}\n" for number in range(90))
    (folder / "code" / "alpha" / "__init__.py").write_text(lines)
    facts = [{"question": QUESTION, "supporting_facts": [["Bonn", 0]]}]
    made = {
        "world": build_world_corpus([docs], 18, chunk_size=60)[1],
        "code": build_code_corpus([folder / "code" / "alpha"], 8, 2000, 3000)[1],
        "memagent": convert_memagent(*save_memagent(folder, [record()], facts))[1],
    }
    for kind in ("single", "multi_key", "multi_value"):
        made[kind] = build_needle_corpus(kind, projects=2, rows_per_project=6)[1]
    for row in (row for rows in made.values() for row in rows if "document" in row):
        row["chunks"] = chunk_document(row["document"], row["evidence_spans"], TOKENIZER, 40)
    return made


def test_rows_of_every_maker_have_thoughts_that_parse_and_quote_their_chunk(tmp_path):
    made = corpora(tmp_path)
    assert {kind: len(rows) for kind, rows in made.items()} == {
        "world": 36, "code": 8, "memagent": 1, "single": 12, "multi_key": 12, "multi_value": 12
    }  # fmt: skip
    for row in (row for rows in made.values() for row in rows):
        asked = f"asked: {row['question']}; "
        for chunk, thought in zip(row["chunks"], thoughts(row), strict=True):
            assert len(thought) <= 600 and parse_turn(
                f"<think>{thought}</think><check>no</check><update></update><next>end</next>", "eos"
            )
            if not chunk["evidence"]:
                assert thought == asked + "not here"
                continue
            assert thought.startswith(asked + "found: ")
            quoted = thought.removeprefix(asked + "found: ")
            folded = " ".join(chunk["text"].split())
            assert quoted in folded or all(part in folded for part in re.split(r"(?<=\.) ", quoted)), row
        if row in made["world"]:
            assert row["answers"][0] in " ".join(thoughts(row))
