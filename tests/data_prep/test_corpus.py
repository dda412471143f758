"""The corpus file: what is loaded, what is refused and how the one error reads."""

import json
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_chunking import TOKENIZER

from turngrpo.data_prep import CorpusError, corpus_digest, corpus_facts, load_corpus, read_manifest, write_corpus
from turngrpo.data_prep.corpus import holds_documents

MANIFEST = {
    "format": "turngrpo-corpus/1",
    "name": "toy",
    "created": "2026-01-02",
    "label_source": "computed",
    "kappa": None,
    "kappa_items": None,
    "license": "CC0-1.0",
}


def row(name, project="alpha", **changes):
    fields = {
        "id": name,
        "project": project,
        "question": "what is x ?",
        "answers": ["12"],
        "chunks": [{"text": "x is 12 .", "evidence": True}, {"text": "y is 9 .", "evidence": False}],
    }
    return {key: value for key, value in (fields | changes).items() if value is not ...}


def save(path, *lines, manifest=MANIFEST):
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in (manifest, *lines)]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def faults(path, **options):
    with pytest.raises(CorpusError) as caught:
        load_corpus(path, **options)
    return caught.value


def places(error):
    return [(fault.line, fault.field) for fault in error.faults]


def test_loads_both_sides_with_every_column(tmp_path):
    # seed 0: delta lies at .091, under 0.1; alpha at .351 (see test_splits)
    path = save(tmp_path / "c.jsonl", row("a"), row("d", "delta", answers=["é", "12"]), row("b", question="why ?"))
    corpus = load_corpus(path)
    assert corpus["train"].to_list() == [row("a"), row("b", question="why ?")]
    assert corpus["validation"].to_list() == [row("d", "delta", answers=["é", "12"])]
    assert corpus["train"].column_names == ["id", "project", "question", "answers", "chunks"]
    assert read_manifest(path) == MANIFEST


def test_documents_are_cut_and_labelled(tmp_path):
    document = {"chunks": ..., "document": "xyzxyzx", "evidence_spans": [[2, 4]]}
    path = save(tmp_path / "c.jsonl", row("a", **document), row("d", "delta"))
    corpus = load_corpus(path, tokenizer=TOKENIZER, chunk_size=3)
    expected = [("xyz", True), ("xyz", True), ("x", False)]
    assert corpus["train"][0]["chunks"] == [{"text": text, "evidence": label} for text, label in expected]
    error = faults(path, chunk_size=3)
    assert holds_documents(path) and not holds_documents(save(tmp_path / "e.jsonl", row("a"), row("d", "delta")))
    assert "line 2, field document: found a row with a document, but no tokenizer; expected a tokenizer" in str(error)
    path = save(tmp_path / "d.jsonl", row("a", **document), row("b", **document), row("d", "delta"))
    assert places(faults(path)) == [(2, "document")]  # said once
    assert "but no tokenizer and no chunk_size" in str(faults(path))
    with pytest.raises(ValueError, match="chunk_size is 0"):
        load_corpus(path, tokenizer=TOKENIZER, chunk_size=0)


ROW_FAULTS = [  # line, field, what is found, what is expected
    (b'{"id": "x"', "(line)", "bad JSON at column 11", "one JSON object"),
    (row("r03", question=float("nan")), "question", "NaN, which is not JSON", "a string"),
    (row("r04", project=5), "project", "5 (integer)", "a string that is not empty"),
    (row("r05", answers=...), "answers", "no such field", "a value"),
    (row("r06", topic="t"), "topic", "an unknown field", "only id, project"),
    (row("r07", question=" \n"), "question", "' \\n' (string)", "a string that is not empty"),
    (row("r08", answers=[]), "answers", "[] (list)", "a list of at least one string"),
    (row("r09", answers=["12", ""]), "answers[1]", "'' (string)", "a string that is not empty"),
    (row("r10", chunks=[]), "chunks", "[] (list)", "a list of at least one chunk"),
    (row("r11", chunks=[{"text": "", "evidence": True}]), "chunks[0].text", "'' (string)", "not empty"),
    (row("r12", chunks=[{"text": "t", "evidence": 1}]), "chunks[0].evidence", "1 (integer)", "true or false"),
    (row("r13", chunks=...), "chunks", "neither chunks nor document", "either chunks, or document"),
    (b"\xff\xfe", "(line)", "byte 0xff at byte 1", "valid UTF-8"),
    (b"", "(line)", "a blank line", "a JSON object"),
    (
        json.dumps(row("r16", question="\ud800")).encode(),
        "question",
        "the lone surrogate '\\ud800'",
        "UTF-8 can write",
    ),
    (row("r03"), "id", "'r03' (string), which line 3 has too", "an id that no other row has"),
    (b'{"id": "r18", "id": "r18", ' + json.dumps(row("r18")).encode()[1:], "id", "the same key twice", "once"),
    (b"[1]", "(line)", "[1] (list)", "a JSON object"),
    (b"1" * 5000, "(line)", "bad JSON (Exceeds the limit", "one JSON object"),
]


def test_one_error_names_every_faulty_line_and_field(tmp_path):
    path = save(tmp_path / "bad.jsonl", *(line for line, *_ in ROW_FAULTS), row("fine"), row("good", "delta"))
    error = faults(path)
    assert error.total == 19
    assert places(error) == [(number, field) for number, (_, field, *_) in enumerate(ROW_FAULTS, start=2)]
    for text, fault, (_, _, found, expected) in zip(str(error).split("\n")[1:], error.faults, ROW_FAULTS, strict=True):
        assert found in fault.found and expected in fault.expected, fault
        assert text.startswith(f"  {path}, line {fault.line}, field {fault.field}: found {fault.found}; expected")


SPAN = "two integers [start, end) with 0 <= start < end <= 7, the length of the document"


@pytest.mark.parametrize(
    ("changes", "field", "found", "expected"),
    [
        ({"evidence_spans": [[0, 8]]}, "evidence_spans[0]", "[0, 8] (list)", SPAN),
        ({"evidence_spans": [[0, 1], [-1, 3]]}, "evidence_spans[1]", "[-1, 3] (list)", SPAN),
        ({"evidence_spans": [[4, 2]]}, "evidence_spans[0]", "[4, 2] (list)", SPAN),
        ({"evidence_spans": [[2, 2]]}, "evidence_spans[0]", "[2, 2] (list)", SPAN),
        ({"evidence_spans": [[False, True]]}, "evidence_spans[0]", "[False, True] (list)", SPAN),
        ({"evidence_spans": [[0.0, 1]]}, "evidence_spans[0]", "[0.0, 1] (list)", SPAN),
        ({"evidence_spans": [[0, 1, 2]]}, "evidence_spans[0]", "[0, 1, 2] (list)", SPAN),
        ({"evidence_spans": [[0, float("inf")]]}, "evidence_spans[0]", "[0, Infinity] (list)", SPAN),
        ({"evidence_spans": {}}, "evidence_spans", "{} (object)", "a list"),
        ({"evidence_spans": ...}, "evidence_spans", "no such field", "a value"),
        ({"document": ...}, "document", "no such field", "a value"),
        ({"document": "", "evidence_spans": []}, "document", "'' (string)", "a string that is not empty"),
        (
            {"chunks": [{"text": "t", "evidence": True}]},
            "chunks",
            "chunks together with document and",
            "either chunks",
        ),
        ({"document": None, "evidence_spans": []}, "document", "null", "a string that is not empty"),
    ],
)
def test_faults_of_documents(tmp_path, changes, field, found, expected):
    document = {"chunks": ..., "document": "xyzxyzx", "evidence_spans": [[0, 7], [3, 5]]}
    path = save(tmp_path / "c.jsonl", row("a", **document), row("b", **(document | changes)), row("d", "delta"))
    error = faults(path, tokenizer=TOKENIZER, chunk_size=3)
    assert places(error) == [(3, field)]
    assert found in error.faults[0].found and expected in error.faults[0].expected


def test_twenty_faults_are_listed_and_the_others_counted(tmp_path):
    path = save(tmp_path / "c.jsonl", *(row(f"r{number}", question="") for number in range(27)))
    error = faults(path)  # 27 empty questions, and the single project
    assert (len(error.faults), error.total) == (20, 28)
    assert str(error).endswith("\n  and 8 more")
    assert places(error)[-1] == (21, "question")


@pytest.mark.parametrize(
    ("changes", "field", "found"),
    [
        ({"format": "turngrpo-corpus/2"}, "format", "'turngrpo-corpus/2' (string)"),
        ({"label_source": "guessed"}, "label_source", "'guessed' (string)"),
        ({"name": ""}, "name", "'' (string)"),
        ({"license": ...}, "license", "no such field"),
        ({"created": 2026}, "created", "2026 (integer)"),
        ({"notes": "n"}, "notes", "an unknown field"),
        ({"kappa": "0.8"}, "kappa", "'0.8' (string)"),
        ({"kappa": True}, "kappa", "True (boolean)"),
        ({"kappa": float("nan")}, "kappa", "NaN, which is not JSON"),
        ({"kappa": 1.5}, "kappa", "1.5 (number)"),
        ({"kappa_items": 80.0}, "kappa_items", "80.0 (number)"),
        ({"label_source": "human", "kappa": None, "kappa_items": 80}, "kappa", "null"),
        ({"label_source": "model", "kappa": -1.01, "kappa_items": 80}, "kappa", "-1.01 (number)"),
        ({"label_source": "model", "kappa": 0.8, "kappa_items": None}, "kappa_items", "null"),
        ({"label_source": "human", "kappa": 0.8, "kappa_items": 0}, "kappa_items", "0 (integer)"),
        ({"label_source": "human", "kappa": ..., "kappa_items": 80}, "kappa", "no such field"),
        ({"label_source": "model", "kappa": 0.8, "kappa_items": ...}, "kappa_items", "no such field"),
    ],
)
def test_faults_of_the_manifest_come_with_those_of_the_rows(tmp_path, changes, field, found):
    manifest = {key: value for key, value in (MANIFEST | changes).items() if value is not ...}
    path = save(tmp_path / "c.jsonl", row("a"), row("d", "delta", answers=3), manifest=manifest)
    error = faults(path)
    assert places(error) == [(1, field), (3, "answers")]
    assert error.faults[0].found == found
    judged = manifest.get("label_source") in ("human", "model")
    assert ("need a measured agreement" in error.faults[0].expected) == (judged and field.startswith("kappa"))
    with pytest.raises(CorpusError, match=field):
        read_manifest(path)


def test_labels_by_people_or_a_model_load_with_a_kappa(tmp_path):
    def load(**changes):
        manifest = {key: value for key, value in (MANIFEST | changes).items() if value is not ...}
        load_corpus(save(tmp_path / "c.jsonl", row("a"), row("d", "delta"), manifest=manifest))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(label_source="human", kappa=0.6, kappa_items=50)
        load(label_source="model", kappa=1, kappa_items=50)
        load(kappa=0.1, kappa_items=1)  # computed labels need none
        load(kappa=..., kappa_items=...)
    with pytest.warns(UserWarning, match="model labels agree with kappa 0.59 on 50 items"):
        load(label_source="model", kappa=0.59, kappa_items=50)
    with pytest.warns(UserWarning, match="human labels agree with kappa 0.9 on 49 items"):
        load(label_source="human", kappa=0.9, kappa_items=49)
    with pytest.warns(UserWarning):
        load(label_source="human", kappa=-1, kappa_items=1000)


def test_a_file_without_a_manifest_still_has_its_rows_checked(tmp_path):
    path = save(tmp_path / "c.jsonl", row("b", "delta", question=3), manifest=row("a", answers=[]))
    assert places(faults(path)) == [(1, "format"), (1, "answers"), (2, "question")]


def test_a_single_project_and_an_empty_corpus(tmp_path):
    error = faults(save(tmp_path / "c.jsonl", row("a"), row("b")))
    assert places(error) == [(None, "project")]
    assert "field project: found the single project 'alpha'; expected at least two projects" in str(error)
    assert places(faults(save(tmp_path / "c.jsonl"))) == [(None, "(rows)")]
    (tmp_path / "c.jsonl").write_bytes(b"")
    assert "found an empty file; expected a manifest line" in str(faults(tmp_path / "c.jsonl"))


def test_line_ends(tmp_path):
    # no faults: blank lines at the end, Windows line ends, a line separator in a string; a byte order mark is one
    path = save(tmp_path / "c.jsonl", row("a", question="a\u2028b"), row("d", "delta"))
    raw = path.read_bytes().replace(b"\\u2028", "\u2028".encode())
    path.write_bytes(raw.replace(b"\n", b"\r\n") + b"\n \n")
    assert load_corpus(path)["train"]["question"][:] == ["a\u2028b"]
    path.write_bytes(b"\xef\xbb\xbf" + raw)
    assert [fault.found for fault in faults(path).faults] == ["a byte order mark"]


READERS = [load_corpus, read_manifest, corpus_facts]
ENDS = [b"\x0b", b"\x0c", b"\x1c", b"\x1d", b"\x1e", "\x85".encode(), "\u2028".encode(), "\u2029".encode(), b"\r"]


@pytest.mark.parametrize("end", ENDS)
def test_only_a_newline_ends_a_line_for_every_reader(tmp_path, end):
    good, other, path = json.dumps(row("a")).encode(), row("d", "delta"), tmp_path / "c.jsonl"

    def found_by(reader, *lines, manifest=MANIFEST):
        with pytest.raises(CorpusError) as caught:
            reader(save(path, *lines, manifest=manifest))
        return [(fault.line, fault.found) for fault in caught.value.faults]

    # One line with two objects, not two lines; a carriage return between them is white space of JSON.
    second = len(good) + (2 if end == b"\r" else 1)
    middle = [(2, f"bad JSON at column {second} (Extra data)")]
    for reader in (load_corpus, corpus_facts):
        assert found_by(reader, good + end + json.dumps(row("b")).encode(), other) == middle
        if end != b"\r":  # which may stand before \n
            assert found_by(reader, good + end, other) == middle
            assert found_by(reader, good, other, end, row("b")) == [(4, "bad JSON at column 1 (Expecting value)")]
    if end != b"\r":
        manifest = json.dumps(MANIFEST).encode() + end
        expected = (1, f"bad JSON at column {len(manifest) - len(end) + 1} (Extra data)")
        assert all(found_by(reader, row("a"), other, manifest=manifest)[0] == expected for reader in READERS)


def test_line_separators_inside_a_string_are_text_for_every_reader(tmp_path):
    text, path = "a\x85b\u2028c\u2029d", tmp_path / "c.jsonl"
    write_corpus(path, MANIFEST, [row("a", question=text), row("d", "delta")])
    assert text.encode() in path.read_bytes()  # as they are, not as escapes
    assert load_corpus(path)["train"]["question"][:] == [text]
    assert corpus_facts(path) == MANIFEST | {"digest": corpus_digest(path), "rows": 2, "projects": 2}
    # A raw control character is none of JSON inside a string either; escaped it is text.
    line = json.dumps(row("a", question="a\x0bb\x0cc")).encode()
    assert load_corpus(save(path, line, row("d", "delta")))["train"]["question"][:] == ["a\x0bb\x0cc"]
    raw = line.replace(b"\\u000b", b"\x0b")
    column = raw.index(b"\x0b") + 1
    assert faults(save(path, raw, row("d", "delta"))).faults[0].found == (
        f"bad JSON at column {column} (Invalid control character at)"
    )


LONG = "k" * 100_000


@pytest.mark.parametrize(
    ("line", "field", "found"),
    [
        (row("x", **{LONG: 1}), "k" * 60 + "...", "an unknown field"),
        (row("x", chunks=[{"text": "t", "evidence": True, LONG: 1}]), "chunks[0]." + "k" * 60 + "...", "an unknown f"),
        (
            json.dumps(row("x")).encode()[:-1] + f', "m": {{"{LONG}": 1, "{LONG}": 2}}}}'.encode(),
            "k" * 60 + "...",
            "the",
        ),
        (row("x", **{"\ud800\x1b[0m": 1}), "\\ud800\\x1b[0m", "an unknown field"),
        (row(LONG), "id", "'" + "k" * 59 + "... (string), which line 2 has too"),
        (row("x", question=[LONG]), "question", "['" + "k" * 58 + "... (list)"),
        (json.dumps(row("x")).replace('"x"', "1e999", 1).encode(), "id", "1e999, which is too large for a number"),
        (
            json.dumps(row("x")).replace('"x"', "-1" + "0" * 9000 + ".5", 1).encode(),
            "id",
            "-1" + "0" * 58 + "..., which is",
        ),
        (json.dumps(row("x")).replace('"x"', "9" * 4000, 1).encode(), "id", "9" * 60 + "... (integer)"),
        (b'{"id": ' + b"[" * 900 + b"]" * 900 + b"}", "id", "[" * 60 + "... (list)"),
    ],
)
def test_what_a_file_holds_is_shown_in_short(tmp_path, line, field, found):
    error = faults(save(tmp_path / "c.jsonl", row(LONG), line, row("d", "delta")))
    assert any(fault.line == 3 and fault.field == field and fault.found.startswith(found) for fault in error.faults)
    assert len(str(error)) < 2_000 + 20 * len(str(tmp_path))
    error = faults(save(tmp_path / "c.jsonl", row("a", LONG), row("b", LONG)))
    assert error.faults[0].found == "the single project '" + "k" * 59 + "..."


def test_numbers_beyond_a_float_and_long_ones_in_the_manifest(tmp_path):
    path, rows = tmp_path / "c.jsonl", (row("a"), row("d", "delta"))
    manifest = json.dumps(MANIFEST | {"kappa": 0.5}).replace("0.5", "1e999").encode()
    assert faults(save(path, *rows, manifest=manifest)).faults[0].found == "1e999, which is too large for a number"
    judged = MANIFEST | {"label_source": "human", "kappa": 0.5, "kappa_items": 10**4000}
    with pytest.warns(UserWarning, match=r"kappa 0\.5 on 10{59}\.\.\. items"):
        load_corpus(save(path, *rows, manifest=judged))


def test_what_json_cannot_write_is_a_fault_of_its_line(tmp_path):
    circle: list = []
    circle.append(circle)
    deep = 1
    for _ in range(100_000):
        deep = [deep]
    for value in (10**5000, circle, deep):
        with pytest.raises(
            CorpusError, match=r"c\.jsonl, line 3, field \(line\): found a value that JSON cannot write"
        ):
            write_corpus(tmp_path / "c.jsonl", MANIFEST, [row("a"), row("d", "delta", answers=value)])
    assert list(tmp_path.iterdir()) == []


def test_deep_nesting_is_a_fault_and_not_a_crash(tmp_path):
    path = save(tmp_path / "c.jsonl", row("a"), b"[" * 100_000, row("d", "delta"))
    assert faults(path).faults[0].found.startswith(("JSON nested too deeply", "bad JSON"))


def test_writing_is_all_or_nothing(tmp_path):
    path = tmp_path / "c.jsonl"
    with pytest.raises(CorpusError, match="line 3, field answers"):
        write_corpus(path, MANIFEST, [row("a"), row("d", "delta", answers=[])])
    with pytest.raises(CorpusError, match="lone surrogate"):
        write_corpus(path, MANIFEST, [row("a"), row("d", "delta", question="\udfff")])
    with pytest.raises(CorpusError, match="NaN, which is not JSON"):
        write_corpus(path, MANIFEST | {"kappa": float("nan")}, [row("a"), row("d", "delta")])
    with pytest.raises(TypeError):
        write_corpus(path, MANIFEST, [row("a"), row("d", "delta", answers={"12"})])
    assert list(tmp_path.iterdir()) == []
    write_corpus(path, MANIFEST, iter([row("a"), row("d", "delta")]))
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_corpus(path, MANIFEST, [row("z"), row("d", "delta")])
    with pytest.raises(CorpusError):
        write_corpus(path, MANIFEST, [row("z")], overwrite=True)
    assert path.read_bytes() == before
    write_corpus(path, MANIFEST, [row("z"), row("d", "delta")], overwrite=True)
    assert load_corpus(path)["train"]["id"][:] == ["z"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.jsonl"]


def test_the_digest_is_that_of_the_bytes(tmp_path):
    (tmp_path / "c").write_bytes(b"abc")  # the test vector of FIPS 180-2
    assert corpus_digest(tmp_path / "c") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
WORDS = TEXT.filter(str.strip)
CHUNKS = st.lists(st.fixed_dictionaries({"text": TEXT, "evidence": st.booleans()}), min_size=1, max_size=3)
ROWS = st.lists(
    st.tuples(WORDS, st.sampled_from(["alpha", "delta"]), WORDS, st.lists(WORDS, min_size=1, max_size=2), CHUNKS),
    max_size=4,
    unique_by=lambda fields: fields[0],
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=ROWS)
def test_what_is_written_is_loaded(tmp_path, drawn):
    names = ("id", "project", "question", "answers", "chunks")
    rows = [dict(zip(names, fields, strict=True)) for fields in drawn]
    rows = [*(item for item in rows if item["id"] not in ("a", "d")), row("a"), row("d", "delta")]
    write_corpus(tmp_path / "c.jsonl", MANIFEST, rows, overwrite=True)
    corpus = load_corpus(tmp_path / "c.jsonl")
    assert corpus["train"].to_list() == [item for item in rows if item["project"] == "alpha"]
    assert corpus["validation"].to_list() == [item for item in rows if item["project"] == "delta"]
