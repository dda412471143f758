"""Make a corpus file of reading tasks.

    python scripts/prepare_corpus.py code --source DIR [DIR ...] --output code.jsonl
    python scripts/prepare_corpus.py needle --output needle.jsonl --kind multi_key --shared_keys
    python scripts/prepare_corpus.py needle --output long.jsonl --words 100000 --words_per_chunk 500
    python scripts/prepare_corpus.py world --source DOCS [DOCS ...] --output world.jsonl --hops 1 2 3
    python scripts/prepare_corpus.py memagent --input train.parquet --supporting_facts hotpot.json --output mem.jsonl

The file begins with a manifest line; `turngrpo.data_prep.load_corpus` reads it. An existing file is replaced only
with --overwrite. With --tokenizer the table that is printed at the end also counts tokens.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from turngrpo.data_prep import (
    build_code_corpus,
    build_needle_corpus,
    build_world_corpus,
    convert_memagent,
    write_corpus,
)
from turngrpo.data_prep.needle import KINDS
from turngrpo.data_prep.world import KINDS as KINDS_BY_HOPS
from turngrpo.data_prep.world_corpus import EVIDENCE_PLACES
from turngrpo.trainer.showing import visible
from turngrpo.trainer.writing import writing

Corpus = tuple[dict[str, Any], list[dict[str, Any]]]
TABLE_PROJECTS = 20


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the four commands; defaults are those of the functions they call."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--output", required=True, help="the corpus file to write (JSON Lines)")
    common.add_argument("--overwrite", action="store_true", help="replace the output file when it exists")
    common.add_argument("--tokenizer", help="name or folder of a tokenizer: tokens are counted too")

    shared: dict[str, Any] = {"parents": [common], "formatter_class": shown, "allow_abbrev": False}
    code = commands.add_parser("code", **shared, help="questions about Python code")
    code.add_argument("--source", nargs="+", required=True, help="packages, or folders of packages")
    code.add_argument("--rows_per_project", type=int, default=20, help="at most this many rows of each package")
    code.add_argument("--min_chars", type=int, default=8_000, help="shortest document, in characters")
    code.add_argument("--max_chars", type=int, default=24_000, help="longest document, in characters")
    code.add_argument("--license", default="the licenses of the source packages", help="stated in the manifest")
    code.add_argument("--seed", type=int, default=0)

    needle = commands.add_parser("needle", **shared, help="sentences to find in filler")
    needle.add_argument("--kind", choices=KINDS, default="multi_key", help="what is hidden and asked for")
    needle.add_argument("--projects", type=int, default=8, help="how many themes")
    needle.add_argument("--rows_per_project", type=int, default=64)
    needle.add_argument("--chunks", type=int, default=5, help="chunks of a row")
    needle.add_argument("--words_per_chunk", type=int, default=24, help="filler words of a chunk")
    needle.add_argument("--words", type=int, help="rows hold one document of this many filler words instead of chunks")
    needle.add_argument("--needles_per_chunk", type=int, default=1)
    needle.add_argument("--values", type=int, default=3, help="values asked for (multi_value)")
    needle.add_argument("--last_position_weight", type=float, default=0.5, help="1: as usual as any other place")
    needle.add_argument("--shared_keys", action="store_true", help="the same words in every project")
    needle.add_argument("--seed", type=int, default=0)

    world = commands.add_parser("world", **shared, help="a small world told in prose")
    world.add_argument("--source", nargs="+", required=True, help="folders of documentation, a subfolder per project")
    world.add_argument("--rows_per_project", type=int, default=18)
    world.add_argument("--chunks", type=int, default=9, help="chunks of a row")
    world.add_argument("--chunk_size", type=int, default=200, help="words of a chunk; tokens with --tokenizer")
    world.add_argument("--hops", nargs="+", type=int, choices=tuple(KINDS_BY_HOPS), default=[1, 2, 3])
    world.add_argument("--evidence_places", nargs="+", choices=EVIDENCE_PLACES, default=list(EVIDENCE_PLACES))
    world.add_argument("--facts_per_chunk", type=int, default=3, help="sentences of the world in every chunk")
    world.add_argument("--license", default="the licenses of the source texts", help="stated in the manifest")
    world.add_argument("--seed", type=int, default=0)

    memagent = commands.add_parser("memagent", **shared, help="MemAgent's parquet")
    memagent.add_argument("--input", required=True, help="the parquet file")
    memagent.add_argument("--supporting_facts", required=True, help="HotpotQA, JSON or JSON Lines")
    memagent.add_argument("--unjoined", choices=("skip", "error"), default="skip", help="rows without labels")
    memagent.add_argument("--buckets", type=int, default=64, help="how many projects")
    return parser.parse_args(arguments)


def make_corpus(
    options: argparse.Namespace, tokenizer: Any, counts: Counter[str], progress: Callable[[int, int], None]
) -> Corpus:
    """Call the maker that the command names with the options of that command."""
    left_out = ("command", "output", "overwrite", "tokenizer")
    given = {name: value for name, value in vars(options).items() if name not in left_out}
    if options.command == "code":
        return build_code_corpus(given.pop("source"), **given, counts=counts, progress=progress)
    if options.command == "needle":
        return build_needle_corpus(**given, progress=progress)
    if options.command == "world":
        return build_world_corpus(given.pop("source"), **given, tokenizer=tokenizer, counts=counts, progress=progress)
    paths = given.pop("input"), given.pop("supporting_facts")
    return convert_memagent(*paths, **given, counts=counts, progress=progress)


def measure(row: dict[str, Any], tokenizer: Any) -> Counter[str]:
    """Rows, characters, words, tokens, and characters of evidence (whole chunks, or spans of a document)."""
    if "document" in row:
        text = row["document"]
        evidence = sum(end - start for start, end in row["evidence_spans"])
    else:
        text = "\n".join(chunk["text"] for chunk in row["chunks"])
        evidence = sum(len(chunk["text"]) for chunk in row["chunks"] if chunk["evidence"])
    sizes = Counter(rows=1, characters=len(text), words=len(text.split()), evidence=evidence)
    if tokenizer is not None:
        sizes["tokens"] = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return sizes


def summary_table(rows: Sequence[dict[str, Any]], tokenizer: Any) -> Table:
    """One line per project (the first 20) and one for all: rows, mean words, characters and tokens, evidence share."""
    sizes: dict[str, Counter[str]] = {}
    for row in rows:
        sizes.setdefault(row["project"], Counter()).update(measure(row, tokenizer))
    table = Table("project", title=f"{len(rows)} rows of {len(sizes)} projects")
    for heading in ("rows", "words/row", "characters/row", "evidence", *(["tokens/row"] if tokenizer else [])):
        table.add_column(heading, justify="right")
    shown = list(sizes.items())[:TABLE_PROJECTS]
    if len(sizes) > TABLE_PROJECTS:
        shown.append((f"{len(sizes) - TABLE_PROJECTS} more", sum(list(sizes.values())[TABLE_PROJECTS:], Counter())))
    for project, size in [*shown, ("all", sum(sizes.values(), Counter()))]:
        count = max(size["rows"], 1)
        cells = [f"{size['rows']}", f"{size['words'] / count:.0f}", f"{size['characters'] / count:.0f}"]
        cells.append(f"{size['evidence'] / max(size['characters'], 1):.1%}")
        table.add_row(project, *cells, *([f"{size['tokens'] / count:.0f}"] if tokenizer else []))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the corpus, write it, print the table; 0, or 1 with the reason on standard error."""
    options = parse_arguments(arguments)
    console = Console()
    if os.path.lexists(options.output) and not options.overwrite:
        print(
            f"error: --output {options.output!r} exists: choose another, or give --overwrite to replace it",
            file=sys.stderr,
        )
        return 1
    if not Path(options.output).resolve().parent.is_dir():
        print(f"error: --output is {options.output!r}: its folder does not exist, make it first", file=sys.stderr)
        return 1
    tokenizer, counts = None, Counter[str]()
    try:
        if options.tokenizer:
            from lib.tokenizing import load_tokenizer

            tokenizer = load_tokenizer(options.tokenizer)
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("rows" if options.command == "memagent" else "projects", total=None)

            def show(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            manifest, rows = make_corpus(options, tokenizer, counts, show)
        with writing(options.output, "A file that was there is as it was; the same command makes it again"):
            write_corpus(options.output, manifest, rows, overwrite=options.overwrite)
    except (ValueError, OSError) as error:
        print(visible(f"error: {error}"), file=sys.stderr)
        return 1
    console.print(summary_table(rows, tokenizer))
    for name in sorted(counts):
        console.print(f"{name}: {counts[name]}", highlight=False)
    console.print(f"wrote {options.output}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
