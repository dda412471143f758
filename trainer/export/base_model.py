"""How others are told of a base model: by its name on the Hub, or by its folder's name and its weights' digest."""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from turngrpo.trainer.files import sha256

REPOSITORY_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
SNAPSHOT = re.compile(r"models--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})$")  # as the Hub's client keeps it
LOCAL = re.compile(r"(?P<name>.*) \(local(?:, SHA-256 (?P<digest>[0-9a-f]{64}))?\)")
WEIGHT_FILES = "model*.safetensors"


def public_name(base: Any, revision: str | None) -> tuple[str, str | None]:
    """Return a name for a base model that says nothing of this machine, and its revision.

    A folder of the Hub's cache is a model on the Hub; any other is "NAME (local, SHA-256 ...)", which no program takes
    for a model on the Hub, and so is a folder that is not here any more, without the digest.
    """
    text = str(base or "")
    folder = Path(text)
    if not text:
        return "unnamed (local)", None
    if not folder.is_dir() and REPOSITORY_NAME.fullmatch(text):
        return text, revision
    if LOCAL.fullmatch(text):
        return text, None
    if found := SNAPSHOT.search(folder.absolute().as_posix()):
        return found["name"].replace("--", "/"), found["revision"]
    digest = weights_digest(folder)
    return f"{' '.join(folder.resolve().name.split())} (local{f', SHA-256 {digest}' if digest else ''})", None


def is_on_hub(name: str) -> bool:
    """Whether a public name is that of a model on the Hub."""
    return REPOSITORY_NAME.fullmatch(name) is not None


def is_public(name: str) -> bool:
    """Whether a name is a public one, and no path."""
    return is_on_hub(name) or LOCAL.fullmatch(name) is not None


def weights_digest(folder: str | os.PathLike[str]) -> str | None:
    """Return the SHA-256 of what `sha256sum` prints of a model's weight files, None where there are none."""
    files = sorted(Path(folder).glob(WEIGHT_FILES))
    lines = "".join(f"{sha256(file)}  {file.name}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest() if files else None


def digest_command(name: str) -> str | None:
    """Return a sentence that says how the digest in a public name is checked, None where it has none."""
    found = LOCAL.fullmatch(name)
    if found is None or found["digest"] is None:
        return None
    return "`sha256sum model*.safetensors | sha256sum` in its folder prints the digest"
