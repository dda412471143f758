"""Questions about code: literal rows of a small package, and what makes a question too ambiguous to ask."""

import json
import runpy
from collections import Counter
from pathlib import Path

import pytest

from turngrpo.data_prep import build_code_corpus, gold_turns, load_corpus
from turngrpo.data_prep.code_facts import Source, find_facts

STORE = '''"""Où sont les caisses."""
from dataclasses import dataclass

LIMIT = 48
GREETING = "guten tag"
VERBOSE = True
RATE = compute()


@dataclass
class Crate(base.Box):
    width: float = 2.5

    def lift(self, height=-3, *, unit: str = "metre") -> "Crate":
        if height > LIMIT:
            raise errors.TooHigh(height)
        return self


async def ship(target, retries=0x10) -> list[int]:
    """ünïcode before the fact"""
    def inner(step=7): return step
    raise ValueError(target)
'''

FACTS = [
    ("import_source", "`dataclass`", ("dataclasses",), ["from dataclasses import dataclass"]),
    ("module_constant", "`LIMIT`", ("48",), ["LIMIT = 48"]),
    ("module_constant", "`GREETING`", ("guten tag", '"guten tag"'), ['GREETING = "guten tag"']),
    ("base_class", "class `Crate`", ("base.Box", "Box"), ["class Crate(base.Box"]),
    ("class_attribute", "class `Crate` assign to its attribute `width`", ("2.5",), ["width: float = 2.5"]),
    ("parameter_default", "`height` of the method `Crate.lift`", ("-3",), ["def lift(self, height=-3"]),
    (
        "parameter_default",
        "`unit` of the method `Crate.lift`",
        ("metre", '"metre"'),
        ['def lift(self, height=-3, *, unit: str = "metre"'],
    ),
    (
        "raised_exception",
        "method `Crate.lift` raise",
        ("errors.TooHigh", "TooHigh"),
        ['def lift(self, height=-3, *, unit: str = "metre") -> "Crate":', "raise errors.TooHigh(height)"],
    ),
    ("parameter_default", "`retries` of the function `ship`", ("0x10", "16"), ["async def ship(target, retries=0x10"]),
    ("return_annotation", "function `ship`", ("list[int]",), ["async def ship(target, retries=0x10) -> list[int]"]),
    (
        "raised_exception",
        "function `ship` raise",
        ("ValueError",),
        ["async def ship(target, retries=0x10) -> list[int]:", "raise ValueError(target)"],
    ),
    ("parameter_default", "`step` of the function `ship.inner`", ("7",), ["def inner(step=7"]),
]


def test_facts_of_a_file():
    # not asked: VERBOSE (a guess finds it), RATE (no literal), Crate as the annotation of Crate.lift (in the question)
    source = Source("shop/store.py", STORE)
    found = [fact for fact in find_facts(source) if fact.answers]
    assert sorted(fact.kind for fact in found) == sorted(kind for kind, *_ in FACTS)
    for kind, named, answers, evidence in FACTS:
        (fact,) = [fact for fact in found if fact.kind == kind and fact.answers == answers]
        assert fact.question.startswith("In the file shop/store.py, ") and named in fact.question
        assert [STORE[start:end] for start, end in fact.spans] == evidence


FILL = "".join(f"# line {number:03d} of plain filling text\n" for number in range(60))


def make_package(folder, name="shop", **files):
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for stem, text in files.items():
        content = text if isinstance(text, bytes) else text.encode()
        (package / f"{stem}.py").write_bytes(content)
    return package


def build(source, **options):
    return build_code_corpus([source], **({"min_chars": 500, "max_chars": 900, "created": "2026-01-02"} | options))


def test_rows_of_a_package(tmp_path):
    package = make_package(tmp_path, store=f"{FILL}LIMIT = 48\n\n\nclass Crate(Box):\n    pass\n{FILL}", other=FILL)
    manifest, rows = build(package, rows_per_project=5, license="MIT")
    assert manifest == {
        "format": "turngrpo-corpus/1",
        "name": "code reading",
        "created": "2026-01-02",
        "label_source": "computed",
        "kappa": None,
        "kappa_items": None,
        "license": "MIT",
    }
    asked = [(row["id"], row["question"], row["answers"], spans_of(row)) for row in rows]
    limit = "In the file shop/store.py, what value is assigned to the module constant `LIMIT`?"
    base = "In the file shop/store.py, what is the base class of the class `Crate`?"
    assert asked == [
        ("shop-0000", limit, ["48"], ["LIMIT = 48"]),
        ("shop-0001", base, ["Box"], ["class Crate(Box"]),
    ]
    for row in rows:
        assert row["project"] == "shop" and 450 <= len(row["document"]) <= 900
        assert row["document"].count("# file: shop/store.py\n") == 1
    assert build(package, rows_per_project=5, license="MIT") == (manifest, rows)
    assert build(package, rows_per_project=5, license="MIT", seed=1)[1] != rows


def spans_of(row):
    return [row["document"][start:end] for start, end in row["evidence_spans"]]


@pytest.mark.parametrize(
    "rival",
    [
        "LIMIT = 50\n",  # the same constant in another file
        "class Rival:\n    LIMIT = 50\n",
        "def rival():\n    LIMIT = 50\n",
        '"""An example:\n\n    LIMIT = 50\n"""\n',
        "if True:\n    LIMIT = 50\n",
        "rival(LIMIT=50)\n",
        "LIMIT: int = 50\n",
        "LIMIT += 2\n",
    ],
)
def test_a_question_that_a_second_place_answers_is_not_asked(tmp_path, rival):
    harmless = "if LIMIT == 50:\n    pass\nself.LIMIT = LIMIT + 1\n"
    options = {"min_chars": 2000, "max_chars": 2100}  # long enough to hold all of both files
    store = f"LIMIT = 48\n{FILL[:900]}"
    _, rows = build(make_package(tmp_path / "one", store=store, other=harmless + FILL[:900]), **options)
    assert [row["answers"] for row in rows] == [["48"]]
    _, rows = build(make_package(tmp_path / "two", store=store, other=rival + FILL[:900]), **options)
    assert [row["answers"] for row in rows] == []


def test_parameters_and_classes_of_one_name_are_not_asked(tmp_path):
    store = "def load(mode='fast', depth=3):\n    pass\n\n\nclass Tool(Base):\n    pass\n" + FILL[:900]
    other = "def load(depth=4):\n    pass\n\n\nclass Tool(Other):\n    pass\n" + FILL[:900]
    package = make_package(tmp_path, store=store, other=other)
    _, rows = build(package, min_chars=1800, max_chars=2200)
    # only one load has a mode; depth could be 3 or 4, the base of Tool Base or Other
    assert [row["answers"] for row in rows] == [["fast", "'fast'"]]


def test_unreadable_files_are_skipped_and_counted(tmp_path):
    counts = Counter()
    package = make_package(
        tmp_path,
        store=f"LIMIT = 48\n{FILL}",
        broken="def (:\n",
        latin=b"name = '\xe9'\n",
        nul=b"x = 1\x00\n",
        windows=b"WIDTH = 31\r\n" + FILL.encode(),
        marked=b"\xef\xbb\xbfDEPTH = 77\n" + FILL.encode(),
    )
    (package / "_vendor").mkdir()
    (package / "_vendor" / "copied.py").write_text(f"COPIED = 5\n{FILL}")
    _, rows = build(package, counts=counts)
    assert sorted(row["answers"][0] for row in rows) == ["31", "48", "77"]
    assert not any("\r" in row["document"] or "\ufeff" in row["document"] for row in rows)
    assert counts["skipped/syntax"] == 2 and counts["skipped/undecodable"] == 1
    assert counts["files"] == 3 and counts["rows"] == counts["row/module_constant"] == 3


def test_a_folder_of_packages_gives_one_project_each(tmp_path):
    make_package(tmp_path, "alpha", a=f"LIMIT = 48\n{FILL}")
    make_package(tmp_path, "beta/inner", b=f"WIDTH = 31\n{FILL}")
    (tmp_path / "beta-1.0.dist-info").mkdir()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.py").write_text("x = 1\n")
    seen = []
    _, rows = build(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert [(row["project"], row["answers"]) for row in rows] == [("alpha", ["48"]), ("beta", ["31"])]
    assert "In the file beta/inner/b.py, " in rows[1]["question"]
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_sources_that_cannot_be_projects(tmp_path):
    package = make_package(tmp_path, "alpha", a="x = 1\n")
    with pytest.raises(ValueError, match="is no folder"):
        build(tmp_path / "absent")
    with pytest.raises(ValueError, match="two projects are named 'alpha'"):
        build_code_corpus([package, make_package(tmp_path / "again", "alpha", a="x = 1\n")])
    with pytest.raises(ValueError, match="'alpha' .* lies inside another project"):
        (tmp_path / "setup.py").write_text("")
        build_code_corpus([tmp_path, package])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no Python files"):
        build(tmp_path / "empty")
    with pytest.raises(ValueError, match="min_chars <= max_chars"):
        build(package, min_chars=10, max_chars=9)


def test_the_script_makes_a_corpus_of_real_code_with_evidence_everywhere(tmp_path, capsys):
    import click
    import yaml

    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "prepare_corpus.py"))["main"]
    output = tmp_path / "code.jsonl"
    sources = [str(Path(module.__file__).parent) for module in (yaml, click)]
    arguments = ["code", "--source", *sources, "--output", str(output), "--rows_per_project", "20"]
    assert script([*arguments, "--min_chars", "6000", "--max_chars", "9000"]) == 0
    shown = capsys.readouterr().out
    assert "40 rows of 2 projects" in shown and "yaml" in shown and "row/base_class" in shown
    before = output.read_bytes()
    assert script(arguments) == 1 and "exists" in capsys.readouterr().err
    assert output.read_bytes() == before
    rows = [json.loads(line) for line in before.decode().split("\n")[1:-1]]
    tenths = Counter()
    for row in rows:
        assert any(row["answers"][0] in text for text in spans_of(row)), row["question"]
        assert 5400 <= len(row["document"]) <= 9000
        tenths[10 * row["evidence_spans"][-1][1] // len(row["document"])] += 1
    assert len(tenths) == 10 and max(tenths.values()) <= 8  # 40 rows: 4 for each tenth when spread evenly
    assert len({row["question"] for row in rows}) == 40


def test_gold_memory_of_a_code_row_holds_the_answer(tmp_path):
    from test_chunking import TOKENIZER

    make_package(tmp_path, "alpha", a=f"{FILL}LIMIT = 48\n{FILL}")
    make_package(tmp_path, "delta", b=f"{FILL}def ship(weight=31):\n    pass\n{FILL}")
    manifest, rows = build(tmp_path)
    from turngrpo.data_prep import write_corpus

    write_corpus(tmp_path / "c.jsonl", manifest, rows)
    corpus = load_corpus(tmp_path / "c.jsonl", tokenizer=TOKENIZER, chunk_size=100)
    (alpha,) = corpus["train"]
    turns = gold_turns(alpha)
    assert turns[-1] == {"step": len(turns), "check": True, "candidate": "LIMIT = 48", "exit": True}
    assert all(turn["candidate"] == "" and not turn["check"] and not turn["exit"] for turn in turns[:-1])
