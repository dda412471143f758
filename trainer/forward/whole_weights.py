"""Weights in parts, whole for a rollout and its passes: FSDP2 (torch 2.13) and DeepSpeed (0.19).

Our passes call the model itself, not what an engine puts around it, with as many micro-batches as each process has
turns for. The engines' hooks must see none of that, and every gradient once:

    DeepSpeed   its hooks reduce at every gradient that a parameter gets; passes run on leaves of their own
                (local_leaves), and engine_backward() hands the finished gradients over in one backward pass.
    FSDP2       whole weights stand in the place of its shards, without its hooks (whole_weights), and passes run on
                leaves; processes.sum_gradients() adds up, and every shard gets its part of the sum.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from trl.models.utils import add_hooks, remove_hooks

from turngrpo.trainer.processes import process_count


@contextlib.contextmanager
def whole_weights(model: nn.Module, engine: Any = None) -> Iterator[None]:
    """Hold the weights that ZeRO-3 or FSDP2 has cut into parts whole on every process, and its hooks off the modules.

    Any other model is left as it is. Every process must enter; contexts do not nest.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        with _hooks_off(model), _gathered_shards(model):
            yield
        return
    parameters = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not parameters:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        if engine is not None:
            remove_hooks(engine)
        try:
            yield
        finally:
            if engine is not None:
                add_hooks(engine)


@contextlib.contextmanager
def _hooks_off(model: nn.Module) -> Iterator[None]:
    """Take off the hooks with which FSDP2 gathers and cuts a module's weights around its forward pass."""
    tables = [table for module in model.modules() for table in (module._forward_pre_hooks, module._forward_hooks)]
    before = [dict(table) for table in tables]
    for table in tables:
        for key, hook in list(table.items()):
            if str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp"):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


@contextlib.contextmanager
def _gathered_shards(model: nn.Module) -> Iterator[None]:
    """Put whole parameters in the place of DTensors; the gradient that one holds in the end goes to its shards."""
    cut: list[Any] = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    shards = {p: nn.Parameter(p.detach().full_tensor(), requires_grad=p.requires_grad) for p in cut}
    try:
        with _in_place_of(model, shards):
            yield
    finally:
        for shard, whole in shards.items():
            if whole.grad is not None:  # every process has all of it: nothing is sent
                shard.grad = distribute_tensor(whole.grad, shard.device_mesh, shard.placements, src_data_rank=None)


@contextlib.contextmanager
def _in_place_of(model: nn.Module, others: Mapping[Any, nn.Parameter]) -> Iterator[None]:
    """Let every module that holds one of the parameters `others` hold the other in its place."""
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter in others
    ]
    try:
        for module, name, parameter in places:
            module._parameters[name] = others[parameter]
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


@contextlib.contextmanager
def local_leaves(model: nn.Module, gradients: dict[str, torch.Tensor]) -> Iterator[None]:
    """Put leaves over the same memory in the place of trainable parameters; add what they get to `gradients`, float32.

    No hook of the engine hangs on a leaf, so that backward passes stay on this process.
    """
    leaves = {p: nn.Parameter(p.data) for p in model.parameters() if p.requires_grad}
    names = {leaves[parameter]: name for name, parameter in model.named_parameters() if parameter in leaves}
    with _in_place_of(model, leaves):
        yield
    for leaf, name in names.items():
        if leaf.grad is not None:
            gradients[name] = leaf.grad.float() + gradients.get(name, 0.0)


def engine_backward(accelerator: Any, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
    """Hand the sum of all processes' gradients to a DeepSpeed engine, which clips and steps.

    The scalar sum of <p, g> over trainable parameters p has the gradient g at p: one ordinary backward pass of the
    engine, whose mean over processes is undone by their number. A parameter without a gradient counts as zero.
    """
    total = torch.zeros((), device=accelerator.device)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = gradients.get(name, torch.zeros_like(parameter)).to(parameter.dtype)
            total = total + torch.dot(parameter.reshape(-1), gradient.reshape(-1))
    accelerator.deepspeed_engine_wrapped.engine._backward_prologue()  # a forward pass of the engine would call it
    accelerator.backward(total * process_count(), scale_wrt_gas=False)
