"""Exact comparison of two checkpoints, field by field; durations, folders and repeated work are left out."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from turngrpo.trainer.runs.proof import read_torch

# What two runs of the same numbers may differ in: how long things took, where they were written, and that a run
# resumed within a rollout's updates scores the reference once more. The ledger's files hold seconds too.
LEFT_OUT = ("time", "runtime", "per_second", "tokens/reference", "best_model_checkpoint", "ledger_files")
STATE = "trainer_state.json"
FSDP_FILES = ("pytorch_model_fsdp.bin", "optimizer.bin")


def checkpoint_fields(folder: str | Path) -> dict[str, Any]:
    """Return every value of a checkpoint by a path of its file and keys: tensors, numbers and text.

    Reads safetensors, the run's own torch files and JSON; raises FileNotFoundError for a folder that is no checkpoint,
    ResumeError for a torch file that holds more than tensors and plain values.
    """
    folder = Path(folder)
    if not (folder / STATE).is_file():
        raise FileNotFoundError(f"{folder} holds no {STATE}: expected a checkpoint folder")
    fields: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        elif path.suffix in (".pt", ".pth") or path.name in FSDP_FILES:
            content = read_torch(path)
        elif path.name == STATE:
            content = json.loads(path.read_text(encoding="utf-8"))
        else:
            continue
        fields.update(_flatten(content, name))
    return {name: value for name, value in fields.items() if not any(part in name for part in LEFT_OUT)}


def _flatten(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _flatten(one, f"{name}/{key}")
    elif isinstance(value, list | tuple) and any(
        isinstance(one, dict | list | tuple | torch.Tensor | np.ndarray) for one in value
    ):
        for index, one in enumerate(value):
            yield from _flatten(one, f"{name}/{index}")
    else:
        yield name, list(value) if isinstance(value, tuple) else value  # FSDP2 loads AdamW's betas as a list


def compare_states(first: str | Path, second: str | Path) -> list[str]:
    """Return one line per field that differs in its last bit, is missing on one side, or has another type or shape."""
    ours, theirs = checkpoint_fields(first), checkpoint_fields(second)
    lines = [f"{name}: only in {first}" for name in ours.keys() - theirs.keys()]
    lines += [f"{name}: only in {second}" for name in theirs.keys() - ours.keys()]
    for name in ours.keys() & theirs.keys():
        difference = _difference(ours[name], theirs[name])
        if difference:
            lines.append(f"{name}: {difference}")
    return sorted(lines)


def _difference(ours: Any, theirs: Any) -> str | None:
    if isinstance(ours, np.ndarray):
        ours = torch.from_numpy(ours)
    if isinstance(theirs, np.ndarray):
        theirs = torch.from_numpy(theirs)
    if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        same = type(ours) is type(theirs) and (ours == theirs or repr(ours) == repr(theirs))  # repr: NaN equals NaN
        return None if same else f"{str(ours)[:80]} against {str(theirs)[:80]}"
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{ours.dtype} {tuple(ours.shape)} against {theirs.dtype} {tuple(theirs.shape)}"
    differs = ours.contiguous().view(-1).view(torch.uint8) != theirs.contiguous().view(-1).view(torch.uint8)
    if not differs.any():
        return None
    largest = (ours.double() - theirs.double()).abs().max()
    return f"{ours.numel()} values differ by up to {float(largest):.3g}"
