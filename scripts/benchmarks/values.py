"""Largest errors of the fused head and of attention to shared prefixes, against float64 with the same inputs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from turngrpo.trainer.forward.joined_attention import Layout, Span, joined_attention
from turngrpo.trainer.objective.exact_kl import exact_prefix_kl, fused_logprobs_and_kl

BOUNDS = {"float32": 1e-4, "bfloat16": 3e-2}  # of an error over the largest number; bfloat16 rounds by 4e-3
OWN = [40, 64, 17, 33]  # tokens of the members' own, the first two after one prefix, the others after another
PREFIXES = [300, 200]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compare(
    ours: Callable[..., Sequence[Tensor]],
    reference: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    names: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, float]:
    """Return the error of every output, and of the gradients of a fixed mixture of all outputs in the inputs.

    An error is the largest difference over the largest number of the reference.
    """
    results = []
    for function, where, kind in ((reference, torch.device("cpu"), torch.float64), (ours, device, dtype)):
        leaves = [x.to(dtype).to(where, kind).requires_grad_() for x in inputs]
        outputs = function(*leaves)
        mixed = [(normal(seed, *y.shape).to(where, y.dtype) * y).sum() for seed, y in enumerate(outputs)]
        grads = torch.autograd.grad(torch.stack([x.double() for x in mixed]).sum(), leaves)
        results.append([x.detach().double().cpu() for x in (*outputs, *grads)])
    expected, found = results
    errors = [float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True)]
    return dict(zip(names, errors, strict=True))


def fused_errors(
    dtype: torch.dtype, device: torch.device, rows: int, hidden: int, vocabulary: int
) -> dict[str, float]:
    """Return the errors of log-probabilities, exact KL and entropy (M,), and of the hidden states' gradient (M, H)."""
    against = normal(0, rows, hidden)  # (M, H)
    states = against + 0.3 * normal(1, rows, hidden)  # (M, H)
    weight = 3 / hidden**0.5 * normal(2, vocabulary, hidden)  # (V, H)
    targets = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(3))  # (M,)

    def ours(x: Tensor) -> Sequence[Tensor]:
        head, reference = weight.to(dtype).to(device), against.to(dtype).to(device)
        logprobs, kl, entropy = fused_logprobs_and_kl(
            x, reference, head, targets.to(device), reference_lm_head_weight=head
        )
        assert kl is not None
        return logprobs, kl, entropy.detach().requires_grad_()  # logged, without a gradient

    def exact(x: Tensor) -> Sequence[Tensor]:
        head, reference = weight.to(dtype).double(), against.to(dtype).double()
        logits = linear(x, head)  # (M, V)
        logprobs = logits.log_softmax(-1)
        kl = exact_prefix_kl(logits, linear(reference, head), vocabulary)
        entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), kl, entropy.requires_grad_()

    names = ["head: log-probability", "head: exact KL", "head: entropy", "head: gradient"]
    return compare(ours, exact, [states], names, dtype, device)


def attention_errors(
    dtype: torch.dtype, device: torch.device, heads: int = 16, key_heads: int = 2, size: int = 128
) -> dict[str, float]:
    """Return the errors of attention to two shared prefixes and of its gradients in all five inputs."""
    ends = torch.tensor(OWN).cumsum(0).tolist()
    own = [slice(end - length, end) for end, length in zip(ends, OWN, strict=True)]
    first, both = PREFIXES[0], sum(PREFIXES)
    spans = [Span(slice(0, ends[1]), slice(0, first)), Span(slice(ends[1], ends[3]), slice(first, both))]
    layout, scale = Layout(own, spans), size**-0.5
    shapes = [(heads, ends[-1]), (key_heads, ends[-1]), (key_heads, ends[-1]), (key_heads, both), (key_heads, both)]
    inputs = [normal(seed, 1, *shape, size) for seed, shape in enumerate(shapes)]  # (1, h or kv, T or P, d)
    seen = torch.zeros(ends[-1], both + ends[-1], dtype=torch.bool)  # (T, P + T)
    for rows, keys in spans:
        seen[rows, keys] = True
    for rows in own:
        columns = slice(both + rows.start, both + rows.stop)
        seen[rows, columns] = torch.ones(rows.stop - rows.start, rows.stop - rows.start).tril().bool()

    def ours(query: Tensor, key: Tensor, value: Tensor, *prefix: Tensor) -> Sequence[Tensor]:
        return [joined_attention(query, key, value, layout, scale, (prefix[0], prefix[1]))]

    def dense(query: Tensor, key: Tensor, value: Tensor, *prefix: Tensor) -> Sequence[Tensor]:
        keys, values = (
            torch.cat(pair, dim=2).repeat_interleave(heads // key_heads, dim=1)
            for pair in ((prefix[0], key), (prefix[1], value))
        )
        scores = (query @ keys.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)  # (1, h, T, P + T)
        return [scores.softmax(-1) @ values]

    names = ["output", *(f"gradient of {x}" for x in ("query", "key", "value", "prefix key", "prefix value"))]
    return compare(ours, dense, inputs, [f"attention: {name}" for name in names], dtype, device)
