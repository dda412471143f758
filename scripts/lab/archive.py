"""Lossless archives of training states: tar compressed by zstd, with measured sizes."""

import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa


def archive_state(checkpoint: Path, path: Path) -> dict[str, Any]:
    """Pack a checkpoint folder into `path` (.tar.zst) and return its sizes in bytes, their ratio and the seconds."""
    started = time.perf_counter()
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    with pa.output_stream(path, compression="zstd") as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
        for file in files:
            tar.add(file, arcname=f"{checkpoint.name}/{file.relative_to(checkpoint)}")
    raw, packed = sum(file.stat().st_size for file in files), path.stat().st_size
    return {
        "checkpoint": checkpoint.name,
        "bytes": raw,
        "archived_bytes": packed,
        "ratio": packed / raw,
        "seconds": time.perf_counter() - started,
    }


@contextmanager
def unpacked_state(path: Path, scratch: Path) -> Iterator[Path]:
    """Unpack an archive of `archive_state` under `scratch` and yield the checkpoint folder, removed afterwards."""
    with TemporaryDirectory(dir=scratch, prefix="unpacked-") as folder:
        with pa.input_stream(path, compression="zstd") as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            tar.extractall(folder, filter="data")
        (checkpoint,) = Path(folder).iterdir()
        yield checkpoint
