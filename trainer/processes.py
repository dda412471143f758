"""What processes tell each other: their shares of a rollout, records and tensors of all, and one sum of gradients.

DDP's hooks wait for a forward pass of its own and stay idle, since ours call the model itself, with as many
micro-batches as each process has turns for. So nothing is reduced while gradients gather, and everything once per
optimizer step.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import nn

Record = TypeVar("Record")
BUCKET_ELEMENTS = 2**25  # 128 MiB of float32: few calls, and a small copy beside the gradients


def process_count() -> int:
    return PartialState().num_processes


def is_main_process() -> bool:
    return PartialState().is_main_process


def own_rows(rows: int, before: int = 0) -> range:
    """Return the global positions of this process's `rows` rows, where `before` rows of all processes came earlier.

    accelerate gives process r the r-th part of a global batch, so a position says group and member of a row whatever
    the number of processes.
    """
    start = before + PartialState().process_index * rows
    return range(start, start + rows)


def own_share(count: int) -> range:
    """Return which of `count` things this process does: a part of like size for each, in the order of processes."""
    state = PartialState()
    first, end = (count * process // state.num_processes for process in (state.process_index, state.process_index + 1))
    return range(first, end)


def gather_parts(own: Sequence[Record], outlines: Callable[[], Sequence[Any]]) -> tuple[list[Any], range]:
    """Return the records of all processes in global order, those of others as their `outlines`, and which are own.

    Every process must bring equally many. Outlines are made only where there is another process to send them to.
    """
    places = own_rows(len(own))
    if process_count() == 1:
        return list(own), places
    everyone = [record for part in gather_object([list(outlines())]) for record in part]
    everyone[places.start : places.stop] = own
    return everyone, places


def gather_tensors(own: torch.Tensor) -> torch.Tensor:
    """Return the rows of all processes in global order, also where they hold unequally many."""
    return own if process_count() == 1 else torch.cat(gather_object([own]))


@torch.no_grad()
def sum_gradients(model: nn.Module, gathered: dict[str, torch.Tensor]) -> None:
    """Add up the gradients of all processes, in place; a parameter without one counts as zero and gets the sum.

    Called once per optimizer step by every process. `gathered` are gradients that passes left, by name; used up here.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for name, parameter in model.named_parameters():
        if name in gathered:
            parameter.grad = gathered.pop(name).to(parameter.dtype)
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
