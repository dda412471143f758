"""The head in one pass over tiles of the vocabulary: log-probability, entropy and exact KL, without logits.

Blocks of rows of hidden states meet tiles of the head; every row keeps a running maximum and a few running sums, from
which values and gradients follow. Nothing keeps more than its inputs and a few numbers per row, or per row the
gradient at its hidden state.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_ROWS = 512  # of a block: more make no matrix product faster, but narrower tiles
CPU_TILE_ELEMENTS = 2**20  # 4 MiB in float32, which the caches hold: 1.4 times as fast as 2**24
LARGEST_CENTRE = 1e30  # finite: where the reference excludes a token of the policy, d and the KL are inf, not NaN
TILE_ELEMENTS = 2**24  # 64 MiB in float32; smaller tiles would leave an accelerator waiting for its launches


def work_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where an input is, else float32: sums over a vocabulary lose too much in half precision."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def weighted(probs: Tensor, values: Tensor) -> Tensor:
    """p * v with 0 * inf = 0: a token that cannot be sampled (logit -inf) contributes nothing."""
    return (probs * values).where(probs != 0, 0.0)


class HeadOptions(NamedTuple):
    temperature: float
    logit_scale: float
    softcap: float | None
    tile_elements: int


class HeadTensors(NamedTuple):
    policy_hidden: Tensor  # (M, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    targets: Tensor  # (M,)
    reference_hidden: Tensor | None  # (M, H)
    reference_weight: Tensor | None  # (V, H)
    reference_bias: Tensor | None  # (V,)


class _Head:
    """Logits of a block of rows, a tile of columns at a time: z = y, or cap * tanh(y); y = gain * (h W^T + b)."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions):
        self.gain = options.logit_scale / (options.softcap or options.temperature)
        self.cap = options.softcap / options.temperature if options.softcap else None
        self.hidden, self.weight, self.bias = hidden * self.gain, weight, bias  # (n, H) in the work dtype

    def tile(self, columns: slice) -> tuple[Tensor, Tensor]:
        """Return z (n, v) and the rows of W behind it (v, H) in the work dtype."""
        weight = self.weight[columns].to(self.hidden.dtype)
        logits = self.hidden @ weight.T
        if self.bias is not None:
            logits += self.bias[columns].to(logits.dtype) * self.gain
        return logits if self.cap is None else logits.tanh_().mul_(self.cap), weight

    def slope(self, logits: Tensor) -> Tensor | None:
        """Return dz/dy = cap (1 - tanh(y)^2) at `logits`, None for the 1 of a head without softcap."""
        return None if self.cap is None else self.cap - logits.square() / self.cap


class _Softmax:
    """Online softmax of a block of rows: top = max z and total = sum exp(z - top) over the tiles so far, (n, 1)."""

    def __init__(self, hidden: Tensor):
        self.total = hidden.new_zeros(len(hidden), 1)
        self.top = torch.full_like(self.total, torch.finfo(hidden.dtype).min)  # finite: -inf - -inf would be NaN

    def add(self, logits: Tensor) -> Tensor:
        """Take up a tile, turned into z - top in place, and return exp(z - top) (n, v).

        `decay` rescales what was summed under the former top, `drop` is its logarithm, `before` the former total.
        """
        top = torch.maximum(self.top, logits.amax(-1, keepdim=True))
        self.drop, self.top = self.top - top, top  # (n, 1) at most 0
        self.decay = self.drop.exp()
        exponentials = logits.sub_(top).exp()
        self.before = self.total * self.decay
        self.total = self.before + exponentials.sum(-1, keepdim=True)
        return exponentials


class _Rows:
    """A block of rows on its way over the vocabulary, tile by tile, in one pass.

    With e = exp(z - top), f = exp(r - reference top) and d = (z - top) - (r - reference top), summed over the tiles so
    far: logit = sum e (z - top), ratio = sum e (d - centre), excess = sum (f - e), all (n, 1); and for the gradient at
    the hidden states slope = sum e dz/dy W, product = sum e (d - centre) dz/dy W, (n, H) both. `centre` follows the
    mean of d under p: nearly equal policies and logits that differ by a constant cancel before they are summed.
    """

    def __init__(self, tensors: HeadTensors, options: HeadOptions, rows: slice, with_gradient: bool = False):
        hidden, weight, bias, targets, reference_hidden, reference_weight, reference_bias = tensors
        dtype = work_dtype(hidden, weight)
        self.policy, self.reference = _Head(hidden[rows].to(dtype), weight, bias, options), None
        if reference_hidden is not None:
            head = (weight, bias) if reference_weight is None else (reference_weight, reference_bias)
            self.reference = _Head(reference_hidden[rows].to(dtype), *head, options)
        self.targets = targets[rows, None]  # (n, 1)
        self.may_exclude = bias is not None or reference_bias is not None  # only a bias can be -inf
        self.p, self.q = _Softmax(self.policy.hidden), _Softmax(self.policy.hidden)
        self.target = self.logit = self.ratio = self.excess = self.centre = torch.zeros_like(self.p.total)
        self.slope = torch.zeros_like(self.policy.hidden) if with_gradient else None
        self.product = torch.zeros_like(self.policy.hidden if with_gradient else self.target)

    def in_tile(self, columns: slice) -> tuple[Tensor, Tensor]:
        """Return which targets lie in the tile, and where in it (0 for the others), (n, 1) both."""
        inside = (self.targets >= columns.start) & (self.targets < columns.stop)
        return inside, (self.targets - columns.start).where(inside, 0)

    def add(self, columns: slice) -> None:
        """Take up a tile of the vocabulary."""
        z, weight = self.policy.tile(columns)  # (n, v), (v, H)
        inside, index = self.in_tile(columns)
        self.target = z.gather(-1, index).where(inside, self.target)
        slope = None if self.slope is None else self.policy.slope(z)
        p, q, former_total = self.p, self.q, self.q.total
        e = p.add(z)  # (n, v)
        excluded = e == 0 if self.may_exclude else None
        if excluded is not None:
            z.masked_fill_(excluded, 0.0)  # 0 * inf = 0: what cannot be sampled contributes nothing
        self.logit = self.logit * p.decay + p.drop * p.before + (e * z).sum(-1, keepdim=True)
        if self.reference is not None:
            r, _ = self.reference.tile(columns)  # (n, v)
            f = q.add(r)  # (n, v)
            shift = p.drop - q.drop  # what the new tops add to every former d
            change = torch.maximum(p.decay, q.decay) * shift.sign() * torch.expm1(-shift.abs())  # q.decay - p.decay
            self.excess = self.excess * p.decay + former_total * change + (f - e).sum(-1, keepdim=True)
            d = torch.sub(z, r, out=r)
            if excluded is not None:
                d.masked_fill_(excluded, 0.0)
            former_centre = self.centre + shift
            weighted = torch.mul(e, d, out=f).sum(-1, keepdim=True)
            mean = (weighted + p.before * former_centre) / p.total.clamp_min(torch.finfo(e.dtype).tiny)
            self.centre = mean.clamp_max(LARGEST_CENTRE)
            moved = former_centre - self.centre
            d.sub_(self.centre).mul_(e)
            self.ratio = self.ratio * p.decay + p.before * moved + d.sum(-1, keepdim=True)
            if self.slope is not None:
                d = d if slope is None else d.mul_(slope)
                self.product.addcmul_(self.slope, moved).mul_(p.decay).addmm_(d, weight)
        if self.slope is not None:
            self.slope.mul_(p.decay).addmm_(e if slope is None else e.mul_(slope), weight)

    def values(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return log p[target], KL = E_p[d] + log(sum f / sum e) and the entropy, (n,) each."""
        log_total, excess = self.p.total.log(), self.excess / self.p.total
        far = (self.q.total / self.p.total).log()  # near 0, log1p of the summed differences keeps more digits
        kl = self.centre + self.ratio / self.p.total + torch.where(excess.abs() < 0.5, excess.log1p(), far)
        logprobs, entropy = self.target - self.p.top - log_total, log_total - self.logit / self.p.total
        return logprobs.squeeze(-1), kl.squeeze(-1), entropy.squeeze(-1)

    def kept(self) -> list[Tensor]:
        """Return what backward needs, a row each: the gradients at h where wanted, else statistics (n, 5).

        d log p[t]/dh = z'_t w_t - E_p[z' w];   dKL/dh = Cov_p(d, z' w), with z' = dz/dy
        """
        rest = self.ratio / self.p.total  # E_p[d] - centre
        if self.slope is None:
            return [torch.cat([self.p.top, self.p.total, self.q.top, self.centre, rest], -1)]  # (n, 5)
        weight = self.policy.weight[self.targets.squeeze(-1)].to(self.slope.dtype)  # (n, H)
        slope = self.policy.slope(self.target)
        mean = self.slope / self.p.total
        towards_target = ((weight if slope is None else weight * slope) - mean) * self.policy.gain
        if self.reference is None:
            return [towards_target]
        return [towards_target, (self.product / self.p.total - mean * rest) * self.policy.gain]

    def logits_gradient(
        self, columns: slice, statistics: Tensor, grad_logprobs: Tensor, grad_kl: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient at y of a tile (n, v), and the rows of W behind it (v, H).

        d log p[t]/dz = onehot(t) - p;   dKL/dz = p (d - E_p[d])
        """
        top, total, reference_top, centre, rest = statistics.split(1, -1)  # (n, 1) each
        z, weight = self.policy.tile(columns)
        slope = self.policy.slope(z)
        p = z.sub_(top).exp().div_(total)
        if self.reference is None or grad_kl is None:
            grad = p.mul_(-grad_logprobs)
        else:
            d = z.sub_(self.reference.tile(columns)[0].sub_(reference_top))
            if self.may_exclude:
                d.masked_fill_(p == 0, 0.0)
            grad = d.sub_(centre).sub_(rest).mul_(grad_kl).sub_(grad_logprobs).mul_(p)
        inside, index = self.in_tile(columns)
        grad.scatter_add_(-1, index, grad_logprobs.where(inside, 0.0))
        return grad if slope is None else grad.mul_(slope), weight


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def _tiling(tensors: HeadTensors, options: HeadOptions) -> tuple[list[slice], list[slice]]:
    """Return equal blocks of rows and tiles of columns: `tile_elements` bounds a tile's logits, and its part of W."""
    count, most = max(1, len(tensors.policy_hidden)), min(MAX_ROWS, options.tile_elements)
    height = -(-count // -(-count // most))
    width = max(1, options.tile_elements // max(height, tensors.weight.shape[-1]))
    return _slices(len(tensors.policy_hidden), height), _slices(len(tensors.weight), width)


def _walk(tensors: HeadTensors, options: HeadOptions, with_gradient: bool) -> tuple[Tensor, ...]:
    """Take every block of rows over the vocabulary: log p[target], KL, entropy, (M,) each, and what backward needs."""
    blocks, tiles = _tiling(tensors, options)
    parts = []
    with torch.autocast(tensors.policy_hidden.device.type, enabled=False):
        for block in blocks:
            rows = _Rows(tensors, options, block, with_gradient)
            for columns in tiles:
                rows.add(columns)
            parts.append((*rows.values(), *rows.kept()))
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


class FrozenHead(torch.autograd.Function):
    """Only the policy's hidden states need a gradient: the pass that finds the values finds it too."""

    @staticmethod
    def forward(ctx: Any, options: HeadOptions, *args: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        tensors = HeadTensors(*args)
        logprobs, kl, entropy, *gradients = _walk(tensors, options, with_gradient=True)
        ctx.save_for_backward(*gradients)  # (M, H) each
        ctx.dtype = tensors.policy_hidden.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, None if tensors.reference_hidden is None else kl, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_kl: Tensor | None, _: Tensor) -> tuple[Tensor | None, ...]:
        grad = ctx.saved_tensors[0] * grad_logprobs[:, None]  # (M, H)
        if grad_kl is not None:
            grad.addcmul_(ctx.saved_tensors[1], grad_kl[:, None])
        return None, grad.to(ctx.dtype), *(None,) * 6


class TrainedHead(torch.autograd.Function):
    """The head needs a gradient, or nothing does: backward walks over the vocabulary again."""

    @staticmethod
    def forward(ctx: Any, options: HeadOptions, *args: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        tensors = HeadTensors(*args)
        logprobs, kl, entropy, statistics = _walk(tensors, options, with_gradient=False)
        ctx.save_for_backward(statistics, *tensors)
        ctx.options = options
        ctx.mark_non_differentiable(entropy)
        return logprobs, None if tensors.reference_hidden is None else kl, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_kl: Tensor | None, _: Tensor) -> tuple[Tensor | None, ...]:
        statistics, tensors = ctx.saved_tensors[0], HeadTensors(*ctx.saved_tensors[1:])
        leaves = [x if needed else None for x, needed in zip(tensors, ctx.needs_input_grad[1:], strict=True)][:3]
        sums = [None if x is None else torch.zeros_like(x, dtype=statistics.dtype) for x in leaves]
        grad_hidden, grad_weight, grad_bias = sums  # (M, H), (V, H), (V,)
        blocks, tiles = _tiling(tensors, ctx.options)
        with torch.autocast(statistics.device.type, enabled=False):
            for block in blocks:
                rows = _Rows(tensors, ctx.options, block)
                gain = rows.policy.gain
                grads = grad_logprobs[block, None], None if grad_kl is None else grad_kl[block, None]
                for columns in tiles:
                    grad, weight = rows.logits_gradient(columns, statistics[block], *grads)  # (n, v), (v, H)
                    if grad_hidden is not None:
                        grad_hidden[block].addmm_(grad, weight, alpha=gain)
                    if grad_weight is not None:
                        grad_weight[columns].addmm_(grad.T, rows.policy.hidden)  # already times gain
                    if grad_bias is not None:
                        grad_bias[columns].add_(grad.sum(0), alpha=gain)
        cast = [None if x is None or leaf is None else x.to(leaf.dtype) for x, leaf in zip(sums, leaves, strict=True)]
        return None, *cast, *(None,) * 4
