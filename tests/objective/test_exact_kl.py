import math
from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import kl_div
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from turngrpo.trainer.objective.exact_kl import exact_prefix_kl, fused_logprobs_and_kl

F64 = torch.float64


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small only lose time to threads waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def normal(*shape, seed=0, dtype=F64, scale=2.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).mul(scale).to(dtype)


def by_torch(policy_logits, reference_logits):
    """torch's kl_div(input=log q, target=log p) is KL(p || q)."""
    logp, logq = policy_logits.log_softmax(-1), reference_logits.log_softmax(-1)
    return kl_div(logq, logp, reduction="none", log_target=True).sum(-1)


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation computed."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func not in (torch.ops.aten.empty_like.default, torch.ops.aten.detach.default):
            sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            self.elements = max([self.elements, *sizes])
        return out


@contextmanager
def memory_watched():
    """Yield (tensors saved for backward, largest tensor computed)."""
    saved: list[torch.Tensor] = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), LargestTensor() as largest:
        yield saved, largest


# ---- on logits ----


def test_value_gradient_and_direction_by_hand():
    # p = (1/2, 1/2), q = (1/4, 3/4): KL(p || q) = (ln 2 + ln 2/3) / 2 = (0.6931471806 - 0.4054651081) / 2. Gradient
    # p_j (log p_j/q_j - KL): (0.6931471806 - 0.1438410362) / 2. The direction q || p would give 0.1308120359.
    policy = torch.tensor([0.5, 0.5], dtype=F64).log().requires_grad_()
    reference = torch.tensor([0.25, 0.75], dtype=F64).log()
    kl = exact_prefix_kl(policy, reference)
    assert kl.item() == pytest.approx(0.1438410362)
    assert torch.autograd.grad(kl, policy)[0].tolist() == pytest.approx([0.2746530722, -0.2746530722])


@pytest.mark.parametrize("block_size", [1, 2, 3, 4096])
def test_normalisers_are_those_of_the_full_vocabulary(block_size):
    # p = (.1, .2, .3, .4) against uniform: ln 4 - entropy(p) = 1.3862943611 - 1.2798542258. With each block of two
    # normalised by itself the sum is 0.0566330123 + 0.0102391305 = 0.0668721428, and blocks of one give 0.
    policy = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64).log() + 5
    kl = exact_prefix_kl(policy, torch.full((4,), -3.0, dtype=F64), block_size)
    assert kl.item() == pytest.approx(0.1064401353)


@pytest.mark.parametrize("block_size", [1, 7, 100, 300, 301, 4096])
def test_agrees_with_torch_in_float64(block_size):
    policy, reference = normal(3, 2, 301).requires_grad_(), normal(3, 2, 301, seed=1)
    weights = normal(3, 2, seed=2)
    kl = exact_prefix_kl(policy, reference, block_size)
    expected = by_torch(policy, reference)
    assert kl.dtype == F64
    torch.testing.assert_close(kl, expected, rtol=1e-12, atol=0)
    grads = [torch.autograd.grad((x * weights).sum(), policy)[0] for x in (kl, expected)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-16)


def test_agrees_with_torch_in_float32_over_more_than_one_block():
    policy = normal(2, 5000, dtype=torch.float32).requires_grad_()
    reference = normal(2, 5000, seed=1, dtype=torch.float32)
    kl = exact_prefix_kl(policy, reference)
    truth = policy.detach().double().requires_grad_()
    expected = by_torch(truth, reference.double())
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(kl, by_torch(policy, reference), rtol=1e-5, atol=0)
    (grad,) = torch.autograd.grad(kl.sum(), policy)
    torch.testing.assert_close(grad.double(), torch.autograd.grad(expected.sum(), truth)[0], rtol=1e-4, atol=1e-8)


def test_bfloat16_is_computed_in_float32_and_rounded_once():
    policy = normal(4, 999, dtype=torch.bfloat16).requires_grad_()
    reference = normal(4, 999, seed=1, dtype=torch.bfloat16)
    same = policy.detach().float().requires_grad_()
    kl, exact = exact_prefix_kl(policy, reference, 100), exact_prefix_kl(same, reference.float(), 100)
    assert torch.equal(kl, exact.bfloat16())
    grads = [torch.autograd.grad(x.sum(), z)[0] for x, z in ((kl, policy), (exact, same))]
    assert torch.equal(grads[0], grads[1].bfloat16())


def test_passes_gradcheck():
    policy, reference = normal(2, 3, 11).requires_grad_(), normal(2, 3, 11, seed=1)
    assert torch.autograd.gradcheck(lambda z: exact_prefix_kl(z, reference, 4), (policy,))


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_equal_logits_give_exactly_zero(dtype):
    policy = normal(3, 50, dtype=dtype).requires_grad_()
    kl = exact_prefix_kl(policy, policy.detach(), 7)
    assert kl.eq(0).all()
    assert torch.autograd.grad(kl.sum(), policy)[0].eq(0).all()


def test_excluded_tokens():
    # Both exclude token 2, the first block of the policy holds nothing else: (1/2, 1/2) against (1/4, 3/4) remains.
    policy = torch.tensor([[-math.inf, 0.0, 0.0], [-math.inf, 0.0, 0.0]], dtype=F64, requires_grad=True)
    reference = torch.tensor([[-math.inf, 0.0, math.log(3)], [2.0, 0.0, math.log(3)]], dtype=F64)
    kl = exact_prefix_kl(policy, reference, 1)
    # Where the reference allows it (e^2 more mass): 0.1438410362 + ln((4 + e^2) / 4) = 0.1438410362 + 1.0463585419
    assert kl.tolist() == pytest.approx([0.1438410362, 1.1901995781])
    (grad,) = torch.autograd.grad(kl.sum(), policy)
    assert grad[:, 0].tolist() == [0, 0]
    assert grad[:, 1].tolist() == pytest.approx([0.2746530722] * 2)
    # Excluded by the reference alone: infinite. A NaN is not hidden.
    assert exact_prefix_kl(torch.zeros(2), torch.tensor([0.0, -math.inf])) == math.inf
    assert exact_prefix_kl(torch.tensor([0.0, math.nan]), torch.zeros(2)).isnan()


def test_keeps_nothing_of_the_vocabulary_but_inputs_and_the_gradient():
    policy, reference = normal(64, 1000).requires_grad_(), normal(64, 1000, seed=1)
    with memory_watched() as (saved, largest):
        kl = exact_prefix_kl(policy, reference, 10)
        torch.autograd.grad(kl.sum(), policy)
    assert sorted(x.numel() for x in saved) == [64, 64, 64, 64000, 64000]
    assert {x.data_ptr() for x in saved if x.numel() > 64} == {policy.data_ptr(), reference.data_ptr()}
    assert largest.elements == 640  # one block of ten columns


def test_reference_gets_no_gradient_and_errors():
    policy, reference = normal(2, 5).requires_grad_(), normal(2, 5).requires_grad_()
    exact_prefix_kl(policy, reference).sum().backward()
    assert policy.grad is not None and reference.grad is None
    assert exact_prefix_kl(torch.empty(0, 5), torch.empty(0, 5)).tolist() == []
    with pytest.raises(ValueError, match=r"\(2, 5\) and reference_logits \(2, 4\), expected the same"):
        exact_prefix_kl(policy, reference[:, :4])
    with pytest.raises(ValueError, match="block_size is 0, expected at least 1"):
        exact_prefix_kl(policy, reference, 0)


# ---- fused from hidden states ----

M, H, V = 7, 5, 23
HEADS: dict[str, dict[str, float]] = {
    "plain": {},
    "scaled": {"temperature": 0.7, "logit_scale": 0.3},
    "capped": {"temperature": 1.3, "logit_scale": 1.7, "softcap": 4.0},
}


def inputs(dtype=F64):
    """Leaves: hidden states, weight, bias; the reference's own; and targets."""
    leaves = {
        "hidden": normal(M, H, dtype=dtype, scale=1),
        "weight": normal(V, H, seed=1, dtype=dtype, scale=1),
        "bias": normal(V, seed=2, dtype=dtype, scale=1),
    }
    reference = normal(M, H, seed=3, dtype=dtype), normal(V, H, seed=4, dtype=dtype), normal(V, seed=5, dtype=dtype)
    return {k: v.requires_grad_() for k, v in leaves.items()}, reference, torch.arange(M) * 3 % V


def freeze_head(leaves):
    """The same with hidden states as the only leaf: forward then finds the gradients, backward walks nowhere."""
    return {k: v.detach().requires_grad_(k == "hidden") for k, v in leaves.items()}


def fused(leaves, reference, targets, **options):
    return fused_logprobs_and_kl(
        leaves["hidden"], reference[0], leaves["weight"], targets, bias=leaves["bias"],
        reference_lm_head_weight=reference[1], reference_bias=reference[2], **options,
    )  # fmt: skip


def unfused(leaves, reference, targets, temperature=1.0, logit_scale=1.0, softcap=None):
    """The same on whole logits, by torch's own linear, log_softmax, kl_div and Categorical."""

    def logits(hidden, weight, bias):
        z = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
        return (z if softcap is None else torch.tanh(z / softcap) * softcap) / temperature

    policy = logits(leaves["hidden"], leaves["weight"], leaves["bias"])
    distribution = torch.distributions.Categorical(logits=policy)
    return distribution.log_prob(targets), by_torch(policy, logits(*reference)), distribution.entropy()


def gradients(outputs, leaves):
    """Gradients of one mixture of both differentiable outputs, of unequal weights."""
    logprobs, kl, _ = outputs
    mixture = (logprobs * torch.linspace(-1, 2, M)).sum() + (kl * torch.linspace(3, -1, M)).sum()
    return torch.autograd.grad(mixture, [leaf for leaf in leaves.values() if leaf.requires_grad])


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("tile_elements", [1, 10, 2 * V, 3 * V + 1, 2**24])  # rows x columns: 1x1, 7x1, 7x6, 7x10, all
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_fused_equals_unfused(options, tile_elements, frozen):
    leaves, reference, targets = inputs()
    leaves = freeze_head(leaves) if frozen else leaves
    ours = fused(leaves, reference, targets, tile_elements=tile_elements, **options)
    theirs = unfused(leaves, reference, targets, **options)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    for actual, expected in zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)
    assert not ours[2].requires_grad


def test_fused_by_hand():
    # Logits (h, 0) with h = ln 3 give p = (3/4, 1/4); the reference's h = 0 gives (1/2, 1/2).
    # log p[1] = -ln 4; KL = 3/4 ln 3/2 + 1/4 ln 1/2 = 0.3040988311 - 0.1732867951; entropy = ln 2 - KL.
    # d log p[1]/dh = -3/4; dKL/dh = p_0 (ln 3/2 - KL) = 3/4 (0.4054651081 - 0.1308120359).
    # At temperature 2 the policy is (sqrt 3, 1) / (1 + sqrt 3): log p[1] = -ln 2.7320508076.
    weight = torch.tensor([[1.0], [0.0]], dtype=F64)
    hidden = torch.tensor([[math.log(3)]], dtype=F64, requires_grad=True)
    target = torch.tensor([1])
    outputs = fused_logprobs_and_kl(hidden, torch.zeros(1, 1, dtype=F64), weight, target)
    assert [x.item() for x in outputs if x is not None] == pytest.approx([-1.3862943611, 0.1308120359, 0.5623351446])
    for output, slope in zip(outputs[:2], (-0.75, 0.2059898041), strict=True):
        assert output is not None and torch.autograd.grad(output, hidden, retain_graph=True)[
            0
        ].item() == pytest.approx(slope)
    assert fused_logprobs_and_kl(hidden, None, weight, target, temperature=2.0)[0].item() == pytest.approx(-1.0050525)


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_fused_passes_gradcheck(options):
    rows, vocabulary = 3, 8  # in tiles of 3 x 3
    leaves, (hidden, *head), targets = inputs()
    small = [leaves["hidden"][:rows], leaves["weight"][:vocabulary], leaves["bias"][:vocabulary]]
    reference = hidden[:rows], *(x[:vocabulary] for x in head)

    def function(*tensors):
        new = dict(zip(leaves, tensors, strict=True))
        return fused(new, reference, targets[:rows], tile_elements=3 * H, **options)[:2]

    assert torch.autograd.gradcheck(function, [x.detach().requires_grad_() for x in small])
    assert torch.autograd.gradcheck(function, [x.detach().requires_grad_(x is small[0]) for x in small])


def test_shared_head_is_the_references_as_a_constant():
    leaves, (reference, _, _), targets = inputs()
    head = leaves["weight"], leaves["bias"]
    shared = fused_logprobs_and_kl(leaves["hidden"], reference, head[0], targets, bias=head[1])
    shared_gradients = gradients(shared, leaves)
    for detached in ((head[0].detach(), head[1].detach()), (head[0].detach().clone(), head[1].detach().clone())):
        own = fused(leaves, (reference, *detached), targets)
        for actual, expected in zip(own, shared, strict=True):
            assert actual is not None and expected is not None and torch.equal(actual, expected)
        for actual, expected in zip(gradients(own, leaves), shared_gradients, strict=True):
            assert torch.equal(actual, expected)
    # The same hidden states under the same head: exactly no divergence.
    _, kl, _ = fused_logprobs_and_kl(leaves["hidden"], leaves["hidden"].detach(), head[0], targets, bias=head[1])
    assert kl is not None and kl.eq(0).all()


def test_without_reference_and_with_a_frozen_head():
    leaves, reference, targets = inputs()
    weight, bias = leaves["weight"].detach(), leaves["bias"].detach()
    logprobs, kl, entropy = fused_logprobs_and_kl(leaves["hidden"], None, weight, targets, bias=bias)
    with_reference = fused(leaves, reference, targets)
    assert kl is None
    assert torch.equal(logprobs, with_reference[0]) and torch.equal(entropy, with_reference[2])
    ours, theirs = (torch.autograd.grad(x.sum(), leaves["hidden"])[0] for x in (logprobs, with_reference[0]))
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)  # found in forward, and in backward
    with torch.no_grad():
        nothing = fused_logprobs_and_kl(leaves["hidden"], None, leaves["weight"], targets, bias=leaves["bias"])
    assert torch.equal(nothing[0], logprobs) and not nothing[0].requires_grad


def test_fused_in_half_precision_is_that_of_the_cast_inputs():
    leaves, reference, targets = inputs(torch.bfloat16)
    floats = {k: v.detach().float().requires_grad_() for k, v in leaves.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):  # switched off inside, backward too
        ours = fused(leaves, reference, targets, tile_elements=2 * V)
        our_gradients = gradients(ours, leaves)
    exact = fused(floats, [x.float() for x in reference], targets, tile_elements=2 * V)
    for actual, expected in zip(ours, exact, strict=True):
        assert actual.dtype == torch.float32 and torch.equal(actual, expected)
    for actual, expected in zip(exact, unfused(floats, [x.float() for x in reference], targets), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    # The head's gradients too are summed over the tiles in float32 and rounded once.
    for actual, expected in zip(our_gradients, gradients(exact, floats), strict=True):
        assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected.bfloat16())
    frozen = fused(freeze_head(leaves), reference, targets, tile_elements=2 * V)
    assert all(torch.equal(actual, expected) for actual, expected in zip(frozen, exact, strict=True))
    # Rounding the logits to bfloat16 instead misses the log-probabilities by far more than 2e-4.
    rounded = torch.nn.functional.linear(*leaves.values()).float().log_softmax(-1)[torch.arange(M), targets]
    assert (rounded - ours[0]).abs().max() > 2e-3


def test_fused_with_excluded_tokens_and_without_rows():
    leaves, reference, targets = inputs()
    bias = leaves["bias"].detach().clone()
    bias[1] = -math.inf  # never a target here
    outputs = fused({**leaves, "bias": bias}, (*reference[:2], bias), targets)
    assert all(x.isfinite().all() for x in outputs)
    hidden_grad, weight_grad = torch.autograd.grad(sum(outputs[:2]).sum(), [leaves["hidden"], leaves["weight"]])
    assert hidden_grad.isfinite().all() and weight_grad[1].eq(0).all()

    leaves, reference, targets = inputs()
    none = {**leaves, "hidden": torch.empty(0, H, dtype=F64, requires_grad=True)}
    outputs = fused(none, (reference[0][:0], *reference[1:]), targets[:0])
    assert [x.tolist() for x in outputs] == [[], [], []]
    grads = torch.autograd.grad(sum(outputs[:2]).sum(), list(none.values()))
    assert grads[0].shape == (0, H) and grads[1].eq(0).all() and grads[2].eq(0).all()


@pytest.mark.parametrize("tile_elements", [1, 2, 2**20])
def test_fused_with_tokens_that_one_side_excludes(tile_elements):
    # Logits (-inf, 0, 0): p = (0, 1/2, 1/2). Against (e^2, 1, 3) / (4 + e^2): 0.1438410362 + ln((4 + e^2) / 4). The
    # first tiles hold nothing that the policy could sample. The other way round the KL is infinite, as is log p[0].
    zero, weight, target = torch.zeros(1, 1, dtype=F64, requires_grad=True), torch.zeros(3, 1, dtype=F64), [1]
    some = torch.tensor([-math.inf, 0.0, 0.0], dtype=F64)
    every = torch.tensor([2.0, 0.0, math.log(3)], dtype=F64)
    options = {"reference_lm_head_weight": weight, "tile_elements": tile_elements}
    logprobs, kl, entropy = fused_logprobs_and_kl(
        zero, zero.detach(), weight, torch.tensor(target), bias=some, reference_bias=every, **options
    )
    assert kl is not None
    assert [x.item() for x in (logprobs, kl, entropy)] == pytest.approx([-math.log(2), 1.1901995781, math.log(2)])
    assert torch.autograd.grad((logprobs + kl).sum(), zero)[0].tolist() == [[0.0]]
    reverse = fused_logprobs_and_kl(
        zero, zero.detach(), weight, torch.tensor(target), bias=every, reference_bias=some, **options
    )
    assert reverse[1] is not None and reverse[1].item() == math.inf
    assert fused_logprobs_and_kl(zero, None, weight, torch.tensor([0]), bias=some)[0].item() == -math.inf


@pytest.mark.parametrize("tile_elements", [1000, 4096, 2**20])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_fused_equal_policies_give_exactly_zero(options, tile_elements):
    hidden = normal(9, 16, dtype=torch.float32).requires_grad_()
    weight = normal(1001, 16, seed=1, dtype=torch.float32)
    targets = torch.arange(9)
    _, kl, _ = fused_logprobs_and_kl(hidden, hidden.detach(), weight, targets, tile_elements=tile_elements, **options)
    assert kl is not None and kl.eq(0).all()
    assert torch.autograd.grad(kl.sum(), hidden)[0].eq(0).all()


# Standard deviation of the logits, the reference's distance, its bias; bounds on the errors of KL and its gradient.
HARD = {
    "nearly equal": (3.0, 0.01, 0.0, 1e-7, 1e-6),  # KL 4e-5; log_softmax of whole logits is wrong by 1e-6
    "shifted by a constant": (3.0, 0.01, -1000.0, 1e-6, 1e-5),  # logits there are multiples of 6e-5
    "peaked": (25.0, 0.1, 0.0, 1e-5, 2e-5),  # logits up to 80
    "far apart": (3.0, 3.0, 0.0, 2e-5, 5e-6),  # KL 8
}


@pytest.mark.parametrize(("scale", "distance", "shift", "kl_bound", "gradient_bound"), HARD.values(), ids=HARD)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_fused_float32_against_float64_where_digits_cancel(
    scale, distance, shift, kl_bound, gradient_bound, frozen, vocabulary=5003
):
    rows, width = 16, 64
    hidden = normal(rows, width, scale=scale, dtype=torch.float32).requires_grad_()
    reference = hidden.detach() + normal(rows, width, seed=1, scale=distance, dtype=torch.float32)
    weight = normal(vocabulary, width, seed=2, scale=1 / 8, dtype=torch.float32).requires_grad_(not frozen)
    bias, constant = torch.zeros(vocabulary), torch.full((vocabulary,), shift)
    targets = torch.arange(rows)
    truth = hidden.detach().double().requires_grad_()
    expected = by_torch(truth @ weight.detach().double().T, reference.double() @ weight.detach().double().T)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), truth)
    for tile_elements in (2**12, 2**14, 2**20):
        _, kl, _ = fused_logprobs_and_kl(
            hidden, reference, weight, targets, bias=bias, reference_lm_head_weight=weight.detach(),
            reference_bias=constant, tile_elements=tile_elements,
        )  # fmt: skip
        assert kl is not None
        (gradient,) = torch.autograd.grad(kl.sum(), hidden)
        torch.testing.assert_close(kl.double(), expected, rtol=0, atol=kl_bound)
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=0, atol=gradient_bound)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_fused_never_holds_all_logits(frozen):
    rows, vocabulary, tile = 60, 500, 5000  # 60 rows x 83 columns; all logits are six times a tile
    hidden, reference = normal(rows, H).requires_grad_(), normal(rows, H, seed=1)
    weight, targets = normal(vocabulary, H).requires_grad_(not frozen), torch.arange(rows)
    leaves = [hidden] if frozen else [hidden, weight]
    with memory_watched() as (saved, largest):
        logprobs, kl, _ = fused_logprobs_and_kl(hidden, reference, weight, targets, tile_elements=tile)
        assert kl is not None
        torch.autograd.grad((logprobs + kl).sum(), leaves)
    # Frozen: both gradients at the hidden states. Trained: hidden states, weight, targets and five numbers a row.
    expected = [rows * H] * 2 if frozen else [rows, rows * 5, rows * H, rows * H, vocabulary * H]
    assert sorted(x.numel() for x in saved) == expected
    assert largest.elements == 60 * 83


def test_fused_casts_a_half_precision_head_tile_by_tile():
    hidden = normal(2, 50, dtype=torch.bfloat16).requires_grad_()
    weight = normal(400, 50, seed=1, dtype=torch.bfloat16)
    with LargestTensor() as largest:
        logprobs, _, _ = fused_logprobs_and_kl(hidden, None, weight, torch.arange(2), tile_elements=1000)
        torch.autograd.grad(logprobs.sum(), hidden)
    assert largest.elements == 1000  # 20 columns of the head, of 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.zeros(3, dtype=torch.long)}, r"\(7, 5\), \(7, 5\), \(3,\)\], expected \(M, H\) and \(M,\)"),
        ({"policy_hidden": torch.zeros(1, M, H)}, r"\(1, 7, 5\)"),
        ({"temperature": 0.0}, "temperature=0.0, .* expected above 0"),
        ({"tile_elements": 0}, "tile_elements=0, expected above 0 and at least 1"),
        ({"targets": torch.arange(M) - 1}, "targets are from -1 to 5, expected 0 to 22: pass response tokens alone"),
        ({"targets": torch.arange(M) + V - M + 1}, "targets are from 17 to 23, expected 0 to 22"),
        ({"reference_bias": torch.zeros(V)}, "reference_bias is given without reference_lm_head_weight"),
    ],
)
def test_fused_errors_say_what_was_found_and_expected(change, message):
    arguments = {
        "policy_hidden": torch.zeros(M, H),
        "reference_hidden": torch.zeros(M, H),
        "lm_head_weight": torch.zeros(V, H),
        "targets": torch.zeros(M, dtype=torch.long),
    }
    with pytest.raises(ValueError, match=message):
        fused_logprobs_and_kl(**{**arguments, **change})
