"""Files that are whole or absent: digests, what is really on disk, and folders that one process holds at a time."""

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

LOCK, HOLDER = ".lock", ".holder"
MANIFEST, RUN_FILE = "manifest.json", "turngrpo_run.json"  # beside an exported adapter, and in a checkpoint


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path, leave_out: str = "") -> dict[str, str]:
    """Return the SHA-256 of every file below a folder by relative path, without the file `leave_out` at its top."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / leave_out)
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_below(folder: Path) -> None:
    """Wait until everything below a folder is on disk, its own names last."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


@contextmanager
def locked(folder: Path, wait: bool, name: str = LOCK) -> Iterator[None]:
    """Hold the lock `name` in a folder, which is free again when its process dies, however it dies.

    With `wait` this waits for another holder; without it another holder is a BlockingIOError that says which process
    it is, as that wrote into a file beside the lock.
    """
    lock, holder = FileLock(folder / name, timeout=-1 if wait else 0), folder / f"{name}{HOLDER}"
    try:
        lock.acquire()
    except Timeout as error:
        text = f"another process holds {folder / name if name != LOCK else folder}{_holder(holder)}"
        raise BlockingIOError(f"{text}: wait for it to end, or choose another place") from error
    try:
        holder.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _holder(path: Path) -> str:
    """Return which process holds a lock, as far as it has said so."""
    try:
        told = read_json(path)
    except (OSError, ValueError):
        return ""
    return f" (process {told.get('pid')} on {told.get('host')})"


def is_lock(path: Path) -> bool:
    """Whether a file is there for a lock alone, and nobody's result."""
    return path.name in (LOCK, LOCK + HOLDER)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; ValueError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON ({error}): expected the file as it was written") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}: expected an object")
    return content
