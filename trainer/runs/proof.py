"""The proof of a checkpoint: size and SHA-256 of every file, written last and checked before anything is read."""

import hashlib
import importlib
import json
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from turngrpo.trainer.faults import UserFault
from turngrpo.trainer.files import digests, read_json, sha256, sync_below

PROOF, FORMAT = "turngrpo_checkpoint.json", "turngrpo-checkpoint/1"
STATE_FILE = "turngrpo_state_{rank}.pt"
# What the torch files of a checkpoint hold beside tensors: NumPy's generator, a process's share of the trajectories.
PLAIN_TYPES: list[Any] = [
    range,
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    np.empty(0).__reduce__()[0],  # how an array is put together again
]


class ResumeError(UserFault):
    """A checkpoint that this run cannot go on from."""


def _types_of_deepspeed(path: Path) -> list[Any]:
    """Return the plain records that DeepSpeed (0.19) keeps in its own files, which lie in a folder global_stepN."""
    if not path.parent.name.startswith("global_step"):
        return []
    try:
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum

        # A class of the same name stands in front of this module.
        fragments = importlib.import_module("deepspeed.utils.tensor_fragment")
    except ImportError:
        return []
    return [LossScaler, ZeroStageEnum, fragments.fragment_address]


def read_torch(path: Path) -> Any:
    """Return what a torch file holds, tensors and plain values alone; nothing in it can run.

    Raises ResumeError for one that holds code or is broken.
    """
    try:
        with torch.serialization.safe_globals(PLAIN_TYPES + _types_of_deepspeed(path)):
            return torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
        text = str(error).strip().splitlines()
        reason = next((line for line in text if "GLOBAL" in line), text[0] if text else type(error).__name__)
        raise ResumeError(
            f"{path} cannot be read ({reason.strip()}): expected tensors and plain values as a run saves them; it was "
            "damaged, or holds code, which is never run"
        ) from error


def write_proof(folder: Path, step: int, processes: int) -> None:
    """Write down every file of a checkpoint that is whole, and wait until all is on disk."""
    files = {
        name: {"sha256": digest, "bytes": (folder / name).stat().st_size}
        for name, digest in digests(folder, PROOF).items()
    }
    content = {"format": FORMAT, "step": step, "processes": processes, "files": files}
    text = json.dumps(content | {"sha256": _own_digest(content)}, indent=1)
    (folder / PROOF).write_text(text, encoding="utf-8")  # its last byte counts too
    sync_below(folder)


def _own_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def faults(checkpoint: Path) -> list[str]:
    """Return a line for every file of a checkpoint that is not as it was saved; nothing is loaded.

    Of a checkpoint without a proof this says only whether it had one.
    """
    if not checkpoint.is_dir():
        return [f"{checkpoint} is no folder"]
    if not (checkpoint / PROOF).is_file():
        return [f"{PROOF} is missing"] if _had_proof(checkpoint) else []
    try:
        content = read_json(checkpoint / PROOF)
        own = content.pop("sha256")
        listed, step = content["files"], content["step"]
    except (ValueError, KeyError) as error:
        return [f"{PROOF} is damaged ({error})"]
    if own != _own_digest(content) or content["format"] != FORMAT:
        return [f"{PROOF} was changed since it was saved"]
    lines = [_fault(checkpoint / name, name, listed[name]) for name in listed]
    unlisted = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    lines += [f"{name} was not saved with it: take it out" for name in sorted(unlisted - {PROOF, *listed})]
    told = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", checkpoint.name)
    if told and int(told[1]) != step:
        lines.append(f"{PROOF} says that it was saved after update {step}, its name says {told[1]}")
    return [line for line in lines if line]


def _fault(path: Path, name: str, saved: dict[str, Any]) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    if size != saved["bytes"]:
        return f"{name} has {size} bytes, saved were {saved['bytes']}"
    found = sha256(path)
    return None if found == saved["sha256"] else f"{name} has SHA-256 {found}, saved was {saved['sha256']}"


def _had_proof(checkpoint: Path) -> bool:
    """Whether a checkpoint without a proof was saved with one, or cannot say."""
    state = checkpoint / STATE_FILE.format(rank=0)
    if not state.is_file():
        return False
    try:
        return bool(read_torch(state).get("proof"))
    except ResumeError:
        return True


def proof_fault(checkpoint: str | Path) -> str | None:
    """Return why a checkpoint must not be read, with the remedy; None for one that is proved, or older than proofs.

    For the latter, a folder checkpoint-N of a run, there is a warning.
    """
    folder = Path(checkpoint)
    lines = faults(folder)
    if lines:
        whole = newest_whole(folder)
        remedy = f"go on from {whole}, the newest one that is whole" if whole else "no other of its run is whole"
        return f"{folder} is not as it was saved:\n  " + "\n  ".join(lines) + f"\nrestore it, or {remedy}"
    if not (folder / PROOF).is_file() and folder.name.startswith(PREFIX_CHECKPOINT_DIR):
        warnings.warn(f"{folder} holds no {PROOF}, so that nothing of it can be proved to be whole", stacklevel=2)
    return None


def prove(checkpoint: str | Path) -> None:
    """Raise ResumeError where a checkpoint's files are not those that were saved, naming each and what to do."""
    fault = proof_fault(checkpoint)
    if fault:
        raise ResumeError(fault)


def newest_whole(checkpoint: Path) -> Path | None:
    """Return the newest other checkpoint of a run that is proved to be whole, None where there is none."""
    numbered = {
        int(path.name.rpartition("-")[2]): path
        for path in checkpoint.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if path.name.rpartition("-")[2].isdigit() and path.resolve() != checkpoint.resolve()
    }
    proved = (numbered[step] for step in sorted(numbered, reverse=True) if (numbered[step] / PROOF).is_file())
    return next((path for path in proved if not faults(path)), None)
