"""The small world told in prose: answers, labels and places against an independent solver, and the prose around it."""

import random
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest
from test_chunking import TOKENIZER

from turngrpo.data_prep import build_world_corpus, load_corpus, write_corpus
from turngrpo.data_prep.world import VOCABULARY, Event, Question, World, read_events, supporting_sentences
from turngrpo.data_prep.world_corpus import find_prose, paragraphs

NOUNS = "server request buffer module packet handler cursor header session socket parser worker".split()
VERBS = "returns closes reads checks logs copies opens sends".split()


def make_docs(folder, *projects, sentences=400, extra=""):
    """A folder per project with one file of prose, its sentences of 9 words, four in a paragraph."""
    for project in projects:
        generator = random.Random(project)
        lines = []
        for number in range(sentences):
            first, second = generator.sample(NOUNS, 2)
            verb = generator.choice(VERBS)
            lines.append(f"The {first} {verb} a {second} in step {number} again.")
        blocks = [" ".join(lines[start : start + 4]) for start in range(0, sentences, 4)]
        (folder / project).mkdir(parents=True)
        (folder / project / "guide.rst").write_text("Guide\n=====\n\n" + "\n\n".join(blocks) + f"\n\n{extra}\n")
    return folder


# The independent solver: plain patterns, then the state looked up backwards from scratch for every prefix of the text.

FORMS = [
    (r"\b([A-Z][a-z]+) (?:went to|walked over to|moved on to) the (\w+)\.", (1, 2)),
    (r"\b([A-Z][a-z]+) (?:picked up|took) the (\w+)\.", (2, 1)),
    (r"\b[A-Z][a-z]+ sent the (\w+) to (\w+)\.", (1, 2)),
    (r"\b[A-Z][a-z]+ had the (\w+) brought to (\w+)\.", (1, 2)),
    (r"\bThe (\w+) was (?:packed into|put inside) the (\w+)\.", (1, 2)),
]


def facts_in(text):
    """(sentence, who or what, where or with whom it now is) in the order of the text."""
    found = [
        (match.start(), match[0], match[one], match[other])
        for pattern, (one, other) in FORMS
        for match in re.finditer(pattern, text)
    ]
    return [fact[1:] for fact in sorted(found)]


def look_up(name, facts):
    """Where something is after these facts, with the numbers of those that say so; None when they do not."""
    used = set()
    while name not in VOCABULARY[1]:
        last = [number for number, fact in enumerate(facts) if fact[1] == name]
        if not last:
            return None
        used.add(last[-1])
        name = facts[last[-1]][2]
    return name, used


def solve(question, facts):
    """The answer and the numbers of the facts that decide it, or None."""
    one, other = re.fullmatch(
        r"Wh(?:ere is|ere was|o has) (?:the )?(\w+) (?:at the end|right before the (\w+))\?", question
    ).groups()
    if question.startswith("Who"):
        last = [number for number, fact in enumerate(facts) if fact[1] == one]
        return (facts[last[-1]][2], {last[-1]}) if last else None
    if other is None:
        return look_up(one, facts)
    known = [state for length in range(1, len(facts) + 1) if (state := look_up(one, facts[:length]))]
    for earlier, later in reversed(list(zip(known, known[1:], strict=False))):
        if later[0] == other != earlier[0]:
            return earlier[0], earlier[1] | later[1]
    return None


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    docs = make_docs(tmp_path_factory.mktemp("docs"), "alpha", "delta")
    return build_world_corpus([docs], rows_per_project=63, chunk_size=60, created="2026-01-02")[1]


def told(row):
    """The number of the chunk with every fact of a row."""
    return [(chunk, *fact) for chunk, part in enumerate(row["chunks"], start=1) for fact in facts_in(part["text"])]


def hops_of(row):
    return int(row["id"].split("-")[-3][0])


def evidence_of(row):
    return [number for number, chunk in enumerate(row["chunks"], start=1) if chunk["evidence"]]


def test_the_state_by_hand():
    world = World()
    events = [
        Event("move", "Ulrike", "jetty"),  # 0
        Event("take", "basket", "Ulrike"),  # 1: the basket is at the jetty, by 0 and 1
        Event("pack", "acorn", "basket"),  # 2: the acorn too, by 0, 1 and 2
        Event("move", "Ulrike", "chapel"),  # 3: all three at the chapel; 0 decides nothing any more
        Event("send", "basket", "Tancred", "Ulrike"),  # 4: with Tancred, of whom nothing is known
        Event("move", "Tancred", "stable"),  # 5
    ]
    for number, event in enumerate(events):
        world.happen(number, event)
    assert world.answer(Question("where", "Ulrike")) == ("chapel", {3})
    assert world.answer(Question("holder", "basket")) == ("Tancred", {4})  # not Ulrike, who took it before
    assert world.answer(Question("where", "basket")) == ("stable", {4, 5})
    assert world.answer(Question("where", "acorn")) == ("stable", {2, 4, 5})  # 1 is overridden by 4
    assert world.answer(Question("before", "Ulrike", "chapel")) == ("jetty", {0, 3})
    assert world.answer(Question("before", "acorn", "chapel")) == ("jetty", {0, 1, 2, 3})
    assert world.answer(Question("before", "Ulrike", "jetty")) is None  # nothing tells where she came from
    assert world.answer(Question("where", "violin")) is None


def test_answers_and_labels_are_those_of_an_independent_solver(rows):
    assert len(rows) == 126
    for row in rows:
        facts = told(row)
        answer, used = solve(row["question"], [fact[1:] for fact in facts])
        assert row["answers"] == [answer]
        # Every chunk with a needed sentence and no other, each in a chunk of its own.
        assert evidence_of(row) == sorted(facts[number][0] for number in used)
        assert len(used) == len(evidence_of(row)) == hops_of(row)
    assert {" ".join(row["question"].split()[:2]) for row in rows} == {"Where is", "Who has", "Where was"}


def test_the_needed_sentences_alone_give_the_answer_and_none_can_be_spared(rows):
    for row in rows:
        facts = [fact[1:] for fact in told(row)]
        answer, used = solve(row["question"], facts)
        needed = [facts[number] for number in sorted(used)]
        assert solve(row["question"], needed) == (answer, set(range(len(needed))))
        for left_out in needed:
            # In the whole text too, where older sentences about the same people come to light.
            for others in (needed, facts):
                again = solve(row["question"], [fact for fact in others if fact is not left_out])
                assert again is None or again[0] != answer


def test_a_reader_who_kept_the_earlier_ones_can_tell_what_is_needed_and_when_to_stop(rows):
    overridden = 0
    for row in rows:
        facts = told(row)
        answer, used = solve(row["question"], [fact[1:] for fact in facts])
        known = set(re.findall(r"\w+", row["question"]))
        for number, (_, _, one, other) in enumerate(facts):
            names = {one, other} - set(VOCABULARY[1])
            if number in used:
                assert names & known
                known |= {one, other}
            else:  # about nobody and nothing that is known by then: its chunk alone is no reason to write
                assert one not in known and other not in known - set(VOCABULARY[1])
        last = max(used)
        assert solve(row["question"], [fact[1:] for fact in facts[: last + 1]])[0] == answer
        movers = {facts[number][2] for number in used}
        overridden += any(fact[2] in movers and number not in used for number, fact in enumerate(facts))
    assert overridden > 10  # people of the chain have been elsewhere before they came into it


def test_hops_and_places_are_balanced_and_named_in_the_id(rows):
    named = Counter(tuple(row["id"].split("-")[1:3]) for row in rows)
    # 126 rows, 9 pairs: 14 each
    assert named == {(f"{hops}hop", place): 14 for hops in (1, 2, 3) for place in ("early", "middle", "late")}
    for row in rows:
        third = {"early": (1, 2, 3), "middle": (4, 5, 6), "late": (7, 8, 9)}[row["id"].split("-")[2]]
        assert evidence_of(row)[-1] in third and len(row["chunks"]) == 9
    assert len({row["id"] for row in rows}) == 126
    lasts = Counter(evidence_of(row)[-1] for row in rows)
    assert set(lasts) == set(range(1, 10)) and max(lasts.values()) <= 35


def test_every_chunk_has_as_many_sentences_of_the_world_and_holds_whole_sentences(rows):
    prose = re.compile(r"The \w+ \w+ a \w+ in step \d+ again\.")
    for row in rows:
        assert Counter(fact[0] for fact in told(row)) == dict.fromkeys(range(1, 10), 3)
        for chunk in row["chunks"]:
            text = chunk["text"]
            for sentence, *_ in facts_in(text):
                text = text.replace(sentence, "", 1)
            assert prose.sub("", text).strip() == ""  # nothing cut, on either side
            # 3 sentences of 5 to 8 words and prose of 9: no room for another sentence of prose is left
            assert 60 - 8 <= len(chunk["text"].split()) <= 60


def test_chunks_by_tokens(tmp_path):
    docs = make_docs(tmp_path, "alpha", "delta")
    _, made = build_world_corpus([docs], 9, chunk_size=400, tokenizer=TOKENIZER, facts_per_chunk=2)
    lengths = [len(TOKENIZER(chunk["text"])["input_ids"]) for row in made for chunk in row["chunks"]]
    assert max(lengths) <= 400 and min(lengths) >= 320  # a sentence of prose has at most 70
    assert all(solve(row["question"], [fact[1:] for fact in told(row)])[0] in row["answers"] for row in made)


def test_names_places_and_things_are_no_words_of_the_prose(tmp_path):
    # The belfry, acorns and Ulrike are in the prose of alpha: no story there may use them.
    extra = "In the belfry some acorns fell on ulrike while the old clock was striking ten."
    docs = make_docs(tmp_path / "one", "alpha", extra=extra)
    docs = make_docs(docs, "delta")
    _, made = build_world_corpus([docs], 90, chunk_size=60)
    words = {}
    for row in made:
        text = " ".join(fact[1] for fact in told(row))
        words.setdefault(row["project"], set()).update(re.findall(r"\w+", text))
    assert not words["alpha"] & {"belfry", "acorn", "Ulrike"}
    assert words["delta"] >= {"belfry", "acorn", "Ulrike"}
    extra = f"The {' '.join(VOCABULARY[1][:25])} are all places that one can walk to."
    with pytest.raises(ValueError, match="project 'alpha' has nearly all words for places: 5 are left, expected 8"):
        build_world_corpus([make_docs(tmp_path / "two", "alpha", "delta", extra=extra)], chunk_size=100)


def test_supporting_sentences_of_a_row_and_of_another_kind_of_row(rows):
    for row in rows:
        facts = told(row)
        _, used = solve(row["question"], [fact[1:] for fact in facts])
        found = supporting_sentences(row["question"], tuple(chunk["text"] for chunk in row["chunks"]))
        needed = [facts[number] for number in sorted(used)]
        assert found == tuple(tuple(fact[1] for fact in needed if fact[0] == chunk) for chunk in range(1, 10))
    assert supporting_sentences("what is the code of lamp ?", ("the code of lamp is 12 .",)) is None
    assert supporting_sentences("Where is Ulrike at the end?", ("Tancred went to the jetty.",)) is None
    (event,) = [event for _, event in read_events("x. Old Tancred had the urn brought to Ulrike. y")]
    assert event == Event("send", "urn", "Ulrike", "Tancred")


def test_equal_arguments_give_equal_rows_and_a_corpus_that_loads(tmp_path):
    docs = make_docs(tmp_path / "docs", "alpha", "delta")
    made = [build_world_corpus([docs], 9, chunk_size=60, seed=seed, created="2026-01-02") for seed in (3, 3, 4)]
    assert made[0] == made[1] and made[0][1] != made[2][1]
    assert made[0][0]["label_source"] == "computed" and "9 chunks of 60 words, seed 3" in made[0][0]["name"]
    write_corpus(tmp_path / "w.jsonl", *made[0])
    corpus = load_corpus(tmp_path / "w.jsonl")
    assert (corpus["train"].num_rows, corpus["validation"].num_rows) == (9, 9)
    assert corpus["train"].to_list() == [row for row in made[0][1] if row["project"] == "alpha"]


def test_paragraphs_are_those_of_prose():
    plain = "A line of prose that goes on\nfor two lines and has eight words or more."
    text = (
        f"Title of the page is no sentence\n====\n\n{plain}\n\n"
        ".. note:: directives are left out, however long they get to be.\n\n"
        "    indented = code(that=is, never=prose). It is left out here too.\n\nToo short a line.\n\n"
        "See `the old guide <https://x.y/z>`_ or [the new one](https://x.y) for what is said of links.\n\n"
        "x_1 = {2: 3}; y = [4, 5, 6]; z = x[y[7]] + 8 * 9 - 10 / 11 % 12 .\n\n| a | b | c | d | e | f | g | h |."
    )
    expected = [
        "A line of prose that goes on for two lines and has eight words or more.",
        "See the old guide or the new one for what is said of links.",
    ]
    assert list(paragraphs(text)) == expected == list(paragraphs(text.replace("\n", "\r\n")))
    page = (
        "<html><head><title>A title that has quite enough words to be a paragraph.</title><style>p {}</style></head>"
        "<body><h1>Head</h1><p>A paragraph <b>of</b> prose &amp; more that goes\non to its end."
        "<pre>code that is left out though it has words enough.</pre>"
        "<script>var x = 'a string with more than eight words in it.';</script>"
        "<div>Another one, with no end tag, that has words enough.</body>"
    )
    assert list(paragraphs(page, page=True)) == [
        "A paragraph of prose & more that goes on to its end.",
        "Another one, with no end tag, that has words enough.",
    ]


def test_projects_are_the_subfolders_with_text(tmp_path):
    make_docs(tmp_path, "alpha", "delta", sentences=4)
    for name in (".git", "_static", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / ".git" / "a.txt").write_text("x")
    (tmp_path / "alpha" / "deep").mkdir()
    (tmp_path / "alpha" / "deep" / "B.HTML").write_text("<p>x")
    (tmp_path / "alpha" / "deep" / "code.py").write_text("x")
    found = find_prose([tmp_path])
    assert {name: [path.name for path in files] for name, files in found.items()} == {
        "alpha": ["guide.rst", "B.HTML"],
        "delta": ["guide.rst"],
    }
    assert list(find_prose([tmp_path / "alpha" / "deep", tmp_path / "delta"])) == ["deep", "delta"]


def test_files_that_cannot_be_read_are_counted(tmp_path):
    docs = make_docs(tmp_path, "alpha", "delta", "small")
    (docs / "alpha" / "latin.txt").write_bytes(b"caf\xe9 " * 9)
    (docs / "alpha" / "torn.html").write_text("<p>x</p><![odd declaration")
    (docs / "alpha" / "table.txt").write_text("x" * 1_000_001)
    (docs / "small" / "guide.rst").write_text("A single paragraph with too little prose for a row.")
    counts = Counter()
    build_world_corpus([docs], 9, chunk_size=60, counts=counts)
    assert counts == {
        "files": 3, "projects": 2, "rows": 18, "skipped/unreadable": 2, "skipped/large": 1, "skipped/short": 1
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hops": (4,)}, r"hops is \[4\]: expected one or more of 1, 2, 3"),
        ({"hops": ()}, r"hops is \[\]: expected one or more"),
        (
            {"evidence_places": ("first",)},
            r"evidence_places is \['first'\]: expected one or more of early, middle, late",
        ),
        ({"chunks": 8}, "chunks is 8: expected 9 or more, so that 3 chunks can be evidence in the first third"),
        ({"rows_per_project": 0}, "rows_per_project is 0: expected 1 or more"),
        ({"facts_per_chunk": 0}, "facts_per_chunk is 0: expected 1 or more"),
        ({"chunk_size": 0}, "chunk_size is 0: expected 1 or more"),
        (
            {"chunk_size": 24},
            "chunk_size is 24: the 3 sentences of the world in a chunk take .* expected half at most",
        ),
        ({"chunk_size": 2000}, "0 of 2 projects have prose for a row of 9 chunks of 2000 words: expected two or more"),
    ],
)
def test_arguments_out_of_range_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        build_world_corpus([make_docs(tmp_path, "alpha", "delta")], **({"chunk_size": 60} | options))


def test_sources_without_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match="absent is no folder: expected a folder of documentation"):
        build_world_corpus([tmp_path / "absent"])
    with pytest.raises(ValueError, match=r"holds no text: expected files named \.txt"):
        build_world_corpus([tmp_path])
    docs = make_docs(tmp_path / "one", "alpha"), make_docs(tmp_path / "two", "alpha")
    with pytest.raises(ValueError, match="two projects are named 'alpha'"):
        build_world_corpus(docs)


def test_the_script_makes_a_corpus_that_loads(tmp_path, capsys):
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "prepare_corpus.py"))["main"]
    docs = make_docs(tmp_path / "docs", "alpha", "delta")
    output = tmp_path / "world.jsonl"
    arguments = ["world", "--source", str(docs), "--output", str(output), "--chunk_size", "60"]
    assert script([*arguments, "--hops", "2", "--evidence_places", "late", "--rows_per_project", "4"]) == 0
    assert "8 rows of 2 projects" in capsys.readouterr().out
    for side in load_corpus(output).values():
        assert [len(evidence_of(row)) for row in side] == [2, 2, 2, 2]
        assert all(evidence_of(row)[-1] >= 7 for row in side)
    assert script(arguments) == 1 and "exists" in capsys.readouterr().err
    assert script([*arguments, "--overwrite", "--chunks", "6"]) == 1
    assert "chunks is 6: expected 9 or more" in capsys.readouterr().err
    assert script(["world", "--source", str(tmp_path / "no"), "--output", str(tmp_path / "x.jsonl")]) == 1
    assert "no is no folder" in capsys.readouterr().err
