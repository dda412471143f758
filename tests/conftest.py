"""One thread for every test: on busy cores two threads that wait for each other took tiny models ten times as long."""

import torch

torch.set_num_threads(1)
