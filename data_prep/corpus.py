"""Read and write a corpus: a manifest line and one JSON object per reading task, split by project."""

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, List, Value

from .chunking import check_cutting, chunk_document
from .corpus_format import CorpusCheck, CorpusError, numbered_lines, shortened
from .splits import DEFAULT_VALIDATION_FRACTION, check_fraction, split_by_project

__all__ = ["CorpusError", "corpus_digest", "corpus_facts", "load_corpus", "read_manifest", "write_corpus"]

LOW_KAPPA = 0.6
FEW_KAPPA_ITEMS = 50
FEATURES = Features(
    {
        "id": Value("string"),
        "project": Value("string"),
        "question": Value("string"),
        "answers": List(Value("string")),
        # 64-bit offsets: the texts of one split may exceed 2 GiB, where Arrow's plain strings end.
        "chunks": List({"text": Value("large_string"), "evidence": Value("bool")}),
    }
)


def load_corpus(
    path: str | os.PathLike[str],
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION,
    seed: int = 0,
    tokenizer: Any = None,
    chunk_size: int | None = None,
) -> DatasetDict:
    """Load a corpus file into `train` and `validation`, split by project.

    Columns: id, project, question (str), answers (list of str), chunks (list of {"text": str, "evidence": bool}); rows
    keep the order of the file. Rows that hold a document are cut every `chunk_size` tokens of a fast `tokenizer`.
    Raises CorpusError listing the faults of the file (also labels by people or a model without a measured kappa), and
    ValueError for an argument out of range; warns when kappa is below 0.6 or was measured on fewer than 50 items.
    """
    check_fraction(validation_fraction)
    if tokenizer is not None and chunk_size is not None:
        check_cutting(tokenizer, chunk_size)
    missing = [name for name, given in (("tokenizer", tokenizer), ("chunk_size", chunk_size)) if given is None]
    check = CorpusCheck(os.fspath(path), f"no {' and no '.join(missing)}" if missing else "")
    rows = list(_checked_rows(path, check))
    _warn_of_weak_agreement(check.path, check.manifest)
    for row in rows:
        if "document" in row:
            row["chunks"] = chunk_document(row.pop("document"), row.pop("evidence_spans"), tokenizer, chunk_size or 0)
    validation = split_by_project((row["project"] for row in rows), validation_fraction, seed)
    return DatasetDict(
        {
            "train": _dataset(row for row in rows if row["project"] not in validation),
            "validation": _dataset(row for row in rows if row["project"] in validation),
        }
    )


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a corpus file; raises CorpusError when the first line is not a sound one."""
    check = CorpusCheck(os.fspath(path))
    with open(path, "rb") as lines:
        check.feed(1, lines.readline())
    check.raise_if_faulty()
    return check.manifest


def corpus_facts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What an export says of a corpus file: its manifest, SHA-256, and numbers of rows and projects.

    Raises CorpusError where load_corpus would.
    """
    check = CorpusCheck(os.fspath(path))
    projects = [row.get("project") for row in _checked_rows(path, check)]
    counts = {"rows": len(projects), "projects": len(set(projects))}
    return check.manifest | {"digest": corpus_digest(path)} | counts


def holds_documents(path: str | os.PathLike[str]) -> bool:
    """Whether a row of a corpus file is a whole document, which is cut as it is loaded; CorpusError as load_corpus."""
    return any("document" in row for row in _checked_rows(path, CorpusCheck(os.fspath(path))))


def corpus_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of the file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_corpus(
    path: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]],
    overwrite: bool = False,
) -> None:
    """Write a corpus file that load_corpus accepts, all of it or nothing.

    Everything goes to a file beside the target, is checked as when loading, and only then takes the target's name.
    Raises FileExistsError when the target is there and overwrite is False, CorpusError for faulty content (its line
    numbers are those the file would have), TypeError for a value that JSON cannot write.
    """
    target = Path(path)
    _refuse_existing(target, overwrite)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    check = CorpusCheck(os.fspath(path))
    try:
        with open(temporary, "xb") as file:
            for number, value in enumerate(chain([manifest], rows), start=1):
                raw = _line(check, number, value)
                check.feed(number, raw)
                file.write(raw + b"\n")
            check.finish()
            file.flush()
            os.fsync(file.fileno())
        _refuse_existing(target, overwrite)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _checked_rows(path: str | os.PathLike[str], check: CorpusCheck) -> Iterator[dict[str, Any]]:
    """The rows of a file as it is read; raises CorpusError at its end when anything was wrong."""
    with open(path, "rb") as lines:
        for number, raw in numbered_lines(lines):
            if (row := check.feed(number, raw)) is not None:
                yield row
    check.finish()


def _refuse_existing(target: Path, overwrite: bool) -> None:
    if os.path.lexists(target) and not overwrite:
        raise FileExistsError(f"{target} exists: expected a new name, or overwrite=True to replace it")


def _line(check: CorpusCheck, number: int, value: Mapping[str, Any]) -> bytes:
    """One line of a corpus file; raises CorpusError for a number or a nesting that JSON cannot write."""
    try:
        return json.dumps(dict(value), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate: as an escape, so that the check can name its field
        return json.dumps(dict(value), ensure_ascii=True).encode("utf-8")
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, a circle
        check.add(number, "(line)", f"a value that JSON cannot write ({error})", "one JSON object")
        check.raise_if_faulty()
        raise


def _dataset(rows: Iterable[Mapping[str, Any]]) -> Dataset:
    kept = list(rows)
    return Dataset.from_dict({name: [row[name] for row in kept] for name in FEATURES}, features=FEATURES)


def _warn_of_weak_agreement(path: str, manifest: Mapping[str, Any]) -> None:
    if manifest["label_source"] == "computed":
        return
    kappa, items = manifest["kappa"], manifest["kappa_items"]
    if kappa < LOW_KAPPA or items < FEW_KAPPA_ITEMS:
        warnings.warn(
            f"{path}: the {manifest['label_source']} labels agree with kappa {kappa} on {shortened(str(items))} "
            f"items, expected {LOW_KAPPA} on {FEW_KAPPA_ITEMS} or more: the policy may learn the labeller; "
            "label again, or measure more items",
            stacklevel=3,
        )


def project_digest(project: str) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a project's name, which says nothing of the name."""
    return hashlib.sha256(project.encode("utf-8", "surrogatepass")).hexdigest()[:16]
