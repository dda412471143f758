"""The floor of a GRPO step: the arithmetic and the reading that no implementation saves, at this machine's own rates.

    forward      2 x layer weights x tokens, and 4 x query width x layers for every (query, key) pair of attention
    backward     the same again under LoRA, whose frozen weights need no gradient of their own (twice it where all are
                 trained), and twice the attention's
    head         2 x vocabulary x hidden per response token, for policy and reference; backward as above
    decoding     per step one reading of all weights and of the keys and values so far, or its arithmetic where slower

A group's prompt counts once and so does every response token; the last one of a response is never read.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

TRIES = 5


class Shape(NamedTuple):
    """What the arithmetic of a model depends on."""

    layer_weights: int  # of matrices outside embeddings and head
    head_weights: int  # V x H
    layers: int
    query_width: int  # heads x head size
    key_width: int  # key heads x head size


class Work(NamedTuple):
    """Groups of `members` responses of `response` tokens; each member reads `own` prompt tokens after `prefix`."""

    prefix: int
    response: int
    members: int
    own: int = 0
    groups: int = 1

    @property
    def tokens(self) -> int:
        """Tokens that the model has to read once each."""
        return self.groups * (self.prefix + self.members * (self.own + self.response - 1))

    @property
    def pairs(self) -> int:
        """(query, key) pairs of causal attention, those of the shared prefix once."""
        own = self.own + self.response - 1
        within = lambda n: n * (n + 1) // 2  # noqa: E731
        return self.groups * (within(self.prefix) + self.members * (own * self.prefix + within(own)))


class Rates(NamedTuple):
    flops: float  # per second, of a matrix product
    bandwidth: float  # bytes per second, read


def shape_of(config: Any, model_class: Any) -> tuple[Shape, int]:
    """Return the Shape of a config's model and the number of its parameters, without its weights."""
    with torch.device("meta"):
        model = model_class.from_config(config)
    head = model.get_output_embeddings().weight
    inside = [module.weight for module in model.base_model.modules() if isinstance(module, nn.Linear)]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    widths = (config.num_attention_heads * size, config.num_key_value_heads * size)
    shape = Shape(sum(weight.numel() for weight in inside), head.numel(), config.num_hidden_layers, *widths)
    return shape, sum(parameter.numel() for parameter in model.parameters())


def forward_flops(shape: Shape, work: Work) -> tuple[int, int]:
    """Return the operations of the layers' matrices and of attention, without the head."""
    return 2 * shape.layer_weights * work.tokens, 4 * shape.query_width * shape.layers * work.pairs


def training_flops(shape: Shape, work: Work, frozen: bool = True) -> int:
    """Return the operations of the policy's forward and backward and of the reference's forward."""
    matrices, attention = forward_flops(shape, work)
    head = 2 * shape.head_weights * work.groups * work.members * work.response
    policy = 2 if frozen else 3  # forward, gradient of the inputs, gradient of the weights
    return (policy + 1) * (matrices + head) + (3 + 1) * attention


def decoding_seconds(shape: Shape, work: Work, rates: Rates, number: int) -> float:
    """Return the seconds of prefill and decoding, `number` bytes to a number.

    The first response token comes from the prefill: response - 1 steps read all weights and what is cached.
    """
    rows, steps = work.groups * work.members, work.response - 1
    prefill = 2 * shape.layer_weights * work.groups * (work.prefix + work.members * work.own)
    weights = shape.layer_weights + shape.head_weights
    cached = work.groups * work.prefix + rows * work.own  # tokens, before the first step
    cache = 2 * shape.layers * shape.key_width * (steps * cached + rows * steps * (steps + 1) // 2)
    reading = number * (steps * weights + cache) / rates.bandwidth
    arithmetic = 2 * weights * rows * steps / rates.flops
    return (prefill + 2 * shape.head_weights * rows) / rates.flops + max(reading, arithmetic)


def step_floor(shape: Shape, work: Work, rates: Rates, number: int = 4, frozen: bool = True) -> dict[str, float]:
    """Return the least seconds of one step: generation, training (with reference), and their sum."""
    generation = decoding_seconds(shape, work, rates, number)
    training = training_flops(shape, work, frozen) / rates.flops
    return {"generation": generation, "training": training, "seconds": generation + training}


def best_seconds(function: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    """Return the shortest of a few runs after one that is not counted."""
    function()
    found = []
    for _ in range(TRIES):
        synchronize()
        started = time.perf_counter()
        function()
        synchronize()
        found.append(time.perf_counter() - started)
    return min(found)


def measure_rates(
    device: torch.device, dtype: torch.dtype, synchronize: Callable[[], None], size: int = 2048
) -> Rates:
    """Return the rate of a size x size product in `dtype`, and that of reading 32 * size^2 float32 numbers."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = best_seconds(lambda: left @ right, synchronize)
    vector = torch.ones(32 * size * size, device=device)
    reading = best_seconds(vector.sum, synchronize)
    return Rates(2 * size**3 / product, 4 * vector.numel() / reading)
