"""Training in several processes: what they tell each other of a rollout, and the sum of their gradients."""

from collections.abc import Iterator, Sequence

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from .metrics import trajectory_measures
from .rollout import Trajectory, outline

BUCKET_ELEMENTS = 2**25  # 128 MiB of float32: few calls, and a small copy beside the gradients


def process_count() -> int:
    return PartialState().num_processes


def own_rows(rows: int, before: int = 0) -> range:
    """Return the global positions of this process's `rows` rows, where `before` rows of all processes came earlier.

    accelerate gives process r the r-th part of a global batch, so a position says group and member of a row whatever
    the number of processes.
    """
    start = before + PartialState().process_index * rows
    return range(start, start + rows)


def gather_rollout(
    trajectories: list[Trajectory], turn_rewards: torch.Tensor
) -> tuple[list[Trajectory], torch.Tensor, range]:
    """Return the trajectories of all processes in global order, their turn rewards (N, F_turn), and which are own.

    Others' trajectories come in outline: places, lengths and measures, no token and no text. Every process must bring
    equally many.
    """
    own = own_rows(len(trajectories))
    if process_count() == 1:
        return trajectories, turn_rewards, own
    outlines = [outline(trajectory, trajectory_measures(trajectory)) for trajectory in trajectories]
    parts = gather_object([(outlines, turn_rewards)])
    everyone = [trajectory for part, _ in parts for trajectory in part]
    everyone[own.start : own.stop] = trajectories
    return everyone, torch.cat([rewards for _, rewards in parts]), own


@torch.no_grad()
def sum_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Add up the gradients of all processes, in place; a parameter without one counts as zero and gets the sum.

    Called once per optimizer step by every process with the same parameters in the same order.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if process_count() == 1:
        return
    for bucket in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        torch.distributed.all_reduce(flat)
        for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut tensors in their order into lists of one dtype and device of about BUCKET_ELEMENTS elements."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        other = bucket and (bucket[0].dtype, bucket[0].device) != (tensor.dtype, tensor.device)
        if other or sum(part.numel() for part in bucket) > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
