"""One thread for every test and its processes: two that wait for each other on busy cores take ten times as long."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

torch.set_num_threads(1)
