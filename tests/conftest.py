"""One thread for every test and its processes: two that wait for each other on busy cores take ten times as long."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmarks")]

import torch  # noqa: E402

torch.set_num_threads(1)
