"""Where a run writes: the output folder that it claims, and files that are whole or absent."""

import json
import math
import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from transformers.trainer_utils import get_last_checkpoint


def _check_output(folder: Path, resumed: bool) -> None:
    """Raise ValueError where the run would write over what another one left; every process sees it as it is found."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir is {str(folder)!r}, which is a file: expected a folder, or a new name")
    if folder.is_dir() and any(folder.iterdir()) and not resumed:
        raise ValueError(
            f"--output_dir {str(folder)!r} is not empty and its results would be overwritten: choose another "
            "--output_dir, remove it, or continue its newest checkpoint with --resume_from_checkpoint true"
        )


def make_output(folder: Path) -> None:
    """Make the output directory; OSError where nothing can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder) as probe:
        probe.write(b"x")


def _resume_folder(given: str | bool | None, output_dir: str | None) -> str | None:
    """Return the checkpoint to go on from: the folder given, or for "true" the newest of the output directory.

    Raises ValueError where there is none.
    """
    if given in (None, False, "false", "False"):
        return None
    newest = given in (True, "true", "True")
    found = (get_last_checkpoint(output_dir) if Path(output_dir or "").is_dir() else None) if newest else str(given)
    if found is None or not Path(found, "trainer_state.json").is_file():
        raise ValueError(
            f"--resume_from_checkpoint is {str(given)!r}: found no checkpoint in {output_dir if newest else found!r}; "
            "expected a folder checkpoint-N, or true for the newest one of --output_dir"
        )
    return found


def claim_output(config: Any) -> Path:
    """Return a run's output directory and set the checkpoint that it goes on from; every process must call it.

    Raises ValueError where another run's results would be overwritten, or there is no such checkpoint.
    """
    folder = Path(config.output_dir or "")
    config.resume_from_checkpoint = _resume_folder(config.resume_from_checkpoint, config.output_dir)
    _check_output(folder, config.resume_from_checkpoint is not None)
    config.distributed_state.wait_for_everyone()  # nobody writes before everyone has looked
    return folder


def write_json(path: Path, value: Any) -> None:
    """Write JSON, all of it or nothing; NaN is refused."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file, all of it or nothing."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None, in nested dicts and lists."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
