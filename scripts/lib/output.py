"""Where a run writes: the output folder that it claims, and files that are whole or absent."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from turngrpo.trainer.files import is_lock, locked
from turngrpo.trainer.writing import writing

NOTHING_DONE = "Nothing was started: choose another place, or start again then"


def _check_output(folder: Path, resumed: bool) -> None:
    """Raise ValueError where the run would write over what another one left; every process sees it as it is found."""
    if not resumed and folder.is_dir() and not all(map(is_lock, folder.iterdir())):
        saved = any(folder.glob("checkpoint-*"))
        go_on = ", or continue its newest checkpoint with --resume_from_checkpoint true" if saved else ""
        raise ValueError(
            f"--output_dir {str(folder)!r} is not empty and its results would be overwritten: choose another "
            f"--output_dir{',' if saved else ' or'} remove it{go_on}"
        )


def make_output(folder: Path) -> None:
    """Make the output directory; WriteError where nothing can be written there."""
    with writing(str(folder), NOTHING_DONE):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as probe:
            probe.write(b"x")


def _resume_folder(given: str | bool | None, output_dir: str | None) -> str | None:
    """Return the checkpoint to go on from: the folder given, or for "true" the newest of the output directory.

    Raises ValueError where there is none.
    """
    if given in (None, False, "false", "False"):
        return None
    from transformers.trainer_utils import get_last_checkpoint  # which brings torch

    newest = given in (True, "true", "True")
    found = (get_last_checkpoint(output_dir) if Path(output_dir or "").is_dir() else None) if newest else str(given)
    if found is None or not Path(found, "trainer_state.json").is_file():
        raise ValueError(
            f"--resume_from_checkpoint is {str(given)!r}: found no checkpoint in {output_dir if newest else found!r}; "
            "expected a folder checkpoint-N, or true for the newest one of --output_dir"
        )
    return found


@contextmanager
def held(folder: Path, option: str = "--output_dir") -> Iterator[None]:
    """Hold a folder against other processes until the end; one that was not there is made, and goes where it is empty.

    Raises ValueError, which names the other process, where it is held.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{option} is {str(folder)!r}, which is a file: expected a folder, or a new name")
    is_new = not folder.exists()
    with ExitStack() as stack:
        try:
            with writing(str(folder), NOTHING_DONE):
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(folder, wait=False))
        except BlockingIOError as error:
            raise ValueError(f"{option} {str(folder)!r}: {error}") from error
        try:
            yield
        finally:
            if is_new and all(map(is_lock, folder.iterdir())):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def held_file(path: Path, option: str) -> Iterator[None]:
    """Hold a file that will be written against other processes; ValueError, which names the other one, if it is."""
    with ExitStack() as stack:
        try:
            with writing(str(path), NOTHING_DONE):
                stack.enter_context(locked(path.resolve().parent, wait=False, name=f".{path.name}.lock"))
        except BlockingIOError as error:
            raise ValueError(f"{option} is {str(path)!r}: {error}") from error
        yield


@contextmanager
def claimed_output(config: Any) -> Iterator[Path]:
    """Hold a run's output directory to the end, and set the checkpoint that it goes on from; every process must enter.

    Process 0 holds it for all. Raises ValueError where another run is writing there or its results would be
    overwritten, or there is no such checkpoint.
    """
    from accelerate.utils import gather_object  # which brings torch

    folder, fault = Path(config.output_dir or ""), None
    with ExitStack() as stack:
        if config.process_index == 0:
            try:
                stack.enter_context(held(folder))
            except (ValueError, OSError) as error:
                fault = str(error)
        faults = [text for text in gather_object([fault]) if text]
        if faults:
            raise ValueError(faults[0])
        config.resume_from_checkpoint = _resume_folder(config.resume_from_checkpoint, config.output_dir)
        _check_output(folder, config.resume_from_checkpoint is not None)
        config.distributed_state.wait_for_everyone()  # nobody writes before everyone has looked
        yield folder


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
