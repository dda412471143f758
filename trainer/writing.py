"""What could not be written: one error that says why, what is safe, and how to go on."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = {
    errno.ENOSPC: "no space is left on the disk: make room",
    errno.EDQUOT: "the disk quota is used up: make room, or ask for more",
    errno.EROFS: "the file system is read-only: make it writable, or choose another folder",
    errno.EFBIG: "a file would be larger than the file system or this user's limit (ulimit -f) allows: raise it",
    errno.EIO: "the disk fails: choose another one",
}  # which only writing ends in
REASONS = FULL | {
    errno.EACCES: "this user may not write there: change the permissions, or choose another folder",
    errno.EPERM: "this user may not write there: change the permissions, or choose another folder",
    errno.ENOENT: "its folder is gone: was it moved or removed? Put it back",
    errno.ENOTDIR: "a part of its path is a file: move that away",
    errno.ESTALE: "the network's file system has lost it: mount that again",
}
# safetensors, tokenizers (Rust) and torch (C++) raise errors of their own without an errno; these are their words.
RUST = re.compile(r"\(os error (\d+)\)")
TORCH_REASON = re.compile(r"open file failed with strerror: (.+)")
TORCH_FOLDER = re.compile(r"Parent directory .* does not exist")
TORCH_WRITER = re.compile(r"PytorchStreamWriter failed writing|inline_container\.cc.*unexpected pos", re.DOTALL)
UNSAID = "torch's writer failed and does not say why, mostly since the disk or the quota is full: make room"


class WriteError(OSError):
    """Something could not be written: the message says what, why, what is safe and how to go on."""


def write_fault(error: BaseException | None, known: dict[int, str] = REASONS) -> str | None:
    """Return why something could not be written, from the first error of the chain of causes that says so, or None."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        number = error.errno if isinstance(error, OSError) else _number(str(error))
        if number in known:
            return f"{known[number]} ({_one_line(error)})"
        if not isinstance(error, OSError) and TORCH_WRITER.search(str(error)):
            return UNSAID
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


@contextmanager
def writing(what: str, safe: str) -> Iterator[None]:
    """Turn what fails since something cannot be written into a WriteError; `safe` says what is, and what to do.

    A ValueError is the user's fault and stays what it is.
    """
    try:
        yield
    except (WriteError, ValueError):
        raise
    except Exception as error:
        reason = write_fault(error)
        if reason is None:
            raise
        raise WriteError(f"{what} was not written: {reason}. {safe}") from error


def going_on(output: str | os.PathLike[str] | None) -> str:
    """Say how a run goes on whose output folder this is."""
    found = [path.name for path in Path(output or ".").glob("checkpoint-*") if path.name[11:].isdecimal()]
    if not found:
        return "The run has no checkpoint yet: start it again, in an empty folder"
    newest = max(found, key=lambda name: int(name[11:]))
    return f"{newest} is whole: the same command with --resume_from_checkpoint true goes on from it"


def _number(text: str) -> int | None:
    """Return the errno that an error without one names in its text."""
    if found := RUST.search(text):
        return int(found[1])
    if TORCH_FOLDER.search(text):
        return errno.ENOENT
    found = TORCH_REASON.search(text)
    return next((number for number in REASONS if found and os.strerror(number) in found[1]), None)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
