import math

import pytest
import torch

from turngrpo.trainer.objective.losses import clipped_surrogate, k3_kl, token_weights

# ratio, A -> loss, gradient of the loss to the current log-probability (-ratio * A where not clipped).
CASES = [
    (1.5, 2.0, -2.4, 0.0),  # A > 0, above: min(3, 1.2 * 2), clipped
    (1.5, -2.0, 3.0, 3.0),  # A < 0, above: min(-3, -2.4), kept: the far side still pulls back
    (0.5, 2.0, -1.0, -1.0),  # A > 0, below: min(1, 1.6), kept
    (0.5, -2.0, 1.6, 0.0),  # A < 0, below: min(-1, -1.6), clipped
    (1.1, 2.0, -2.2, -2.2),  # inside
    (1.1, -2.0, 2.2, 2.2),
    (1.0, 2.0, -2.0, -2.0),  # the first update: ratio 1, plain policy gradient
    (1.5, 0.0, 0.0, 0.0),  # A = 0 is outside but not clipped
]


def cases(dtype=torch.float64):
    ratio, advantage, loss, grad = torch.tensor(CASES, dtype=dtype).T
    behavior = torch.full_like(ratio, -1.5)
    logprobs = (behavior + ratio.log()).requires_grad_()
    return logprobs, behavior, advantage, loss, grad


def test_both_clipping_sides_and_the_zero_gradient_of_clipped_branches():
    logprobs, behavior, advantage, expected, expected_grad = cases()
    loss, _ = clipped_surrogate(logprobs[None], behavior[None], advantage[None], torch.ones(1, len(CASES)))
    torch.testing.assert_close(loss[0], expected)
    (grad,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(grad, expected_grad)
    assert grad[[0, 3]].eq(0).all()


def test_statistics_by_hand():
    logprobs, behavior, advantage, _, _ = cases()
    _, stats = clipped_surrogate(logprobs[:, None], behavior[:, None], advantage, torch.ones(len(CASES), 1).bool())
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(
        {
            "ratio/mean": 1.0875,  # (3 * 1.5 + 2 * 0.5 + 2 * 1.1 + 1) / 8
            "ratio/max": 1.5,
            "clip/active": 2 / 8,  # only where the clipped branch was taken
            "clip/outside": 5 / 8,  # also (1.5, -2), (0.5, 2) and (1.5, 0)
            # (3 ln 1.5 + 2 ln 2 + 2 ln 1.1) / 8 = (1.2163953243 + 1.3862943611 + 0.1906203596) / 8
            "behavior_gap/mean": 0.3491637556,
            "behavior_gap/max": 0.6931471806,  # ln 2
            "tokens": 8,
        }
    )
    assert not any(value.requires_grad or value.dim() for value in stats.values())


def test_unequal_clip_bounds():
    # ratio 1.25 under high 0.3 is inside, under high 0.2 clipped at 1.2; ratio 0.85 under low 0.1 clipped at 0.9.
    logprobs = torch.tensor([[1.25, 0.85]], dtype=torch.float64).log()
    advantages = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    loss, stats = clipped_surrogate(logprobs, torch.zeros(1, 2), advantages, torch.ones(1, 2), 0.1, 0.3)
    assert loss[0].tolist() == pytest.approx([-1.25, 0.9])
    assert stats["clip/active"] == 0.5
    loss, _ = clipped_surrogate(logprobs, torch.zeros(1, 2), advantages, torch.ones(1, 2))
    assert loss[0].tolist() == pytest.approx([-1.2, 0.85])


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e4])
def test_what_stands_off_the_mask_reaches_neither_value_nor_gradient(junk):
    mask = torch.tensor([[1, 0], [0, 0]])
    logprobs = torch.tensor([[-0.5, junk], [junk, junk]], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([[-0.6, junk], [-junk, 0.0]], dtype=torch.float64)
    for advantages in (
        torch.tensor([2.0, junk], dtype=torch.float64),
        torch.tensor([[2.0, junk], [junk, junk]], dtype=torch.float64),
    ):
        loss, stats = clipped_surrogate(logprobs, behavior, advantages, mask)
        # exp(0.1) = 1.1051709181, times -2
        assert loss.flatten().tolist() == pytest.approx([-2.2103418362, 0, 0, 0])
        (grad,) = torch.autograd.grad(loss.sum(), logprobs)
        assert grad.flatten().tolist() == pytest.approx([-2.2103418362, 0, 0, 0])
        assert stats["tokens"] == 1
        assert [stats[f"ratio/{x}"].item() for x in ("mean", "max")] == pytest.approx([1.1051709181] * 2)
        assert [stats[f"behavior_gap/{x}"].item() for x in ("mean", "max")] == pytest.approx([0.1] * 2)
        assert stats["clip/outside"] == stats["clip/active"] == 0


def test_statistics_of_no_token_are_zero():
    for shape in ((2, 3), (0, 3), (2, 0)):
        x = torch.full(shape, math.nan)
        loss, stats = clipped_surrogate(x, x, torch.zeros(shape[0]), torch.zeros(shape))
        assert loss.eq(0).all() and all(value == 0 for value in stats.values())


# Rows (turns) by group, trajectory, tokens; the last two have none. The trajectory numbers repeat across groups.
ROWS = [(10, 0, 2), (20, 0, 5), (10, 0, 4), (10, 1, 1), (20, 1, 0), (30, 0, 0)]
WEIGHTS = {
    # 1/2 groups * 1/(2, 1) trajectories * 1/(2, 1, 2, 1) turns * 1/tokens
    "grpo": [1 / 16, 1 / 10, 1 / 32, 1 / 4],
    # 1/2 groups * 1/(7 or 5 tokens of the group)
    "group": [1 / 14, 1 / 10, 1 / 14, 1 / 14],
    # 12 tokens of the step
    "dapo": [1 / 12] * 4,
}


def step_of(rows, width=6):
    groups, trajectories, lengths = (torch.tensor(column) for column in zip(*rows, strict=True))
    return torch.arange(width)[None] < lengths[:, None], trajectories, groups


@pytest.mark.parametrize("loss_type", WEIGHTS)
def test_weights_by_hand(loss_type):
    mask, trajectories, groups = step_of(ROWS)
    weights = token_weights(mask, trajectories, groups, loss_type, dtype=torch.float64)
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for row, value in enumerate(WEIGHTS[loss_type]):
        expected[row, : ROWS[row][2]] = value
    torch.testing.assert_close(weights, expected, rtol=1e-14, atol=0)
    assert weights.sum().item() == pytest.approx(1, abs=1e-14)
    # A mean over rows alone, blind to trajectories and groups, gives 1/8, 1/20, 1/16, 1/4 at the first tokens.
    assert weights[:4, 0].tolist() != pytest.approx([1 / 8, 1 / 20, 1 / 16, 1 / 4])


def test_weights_dtype_and_a_step_without_tokens():
    mask, trajectories, groups = step_of(ROWS)
    assert token_weights(mask, trajectories, groups, "grpo").dtype == torch.float32
    assert token_weights(mask.double(), trajectories, groups, "grpo").dtype == torch.float64
    assert token_weights(mask.long(), trajectories, groups, "dapo", torch.float16).dtype == torch.float16
    for loss_type in WEIGHTS:
        assert token_weights(mask & False, trajectories, groups, loss_type).eq(0).all()


def random_step():
    """Seven turns of four trajectories in two groups, unequal everywhere."""
    rows = [(0, 0, 3), (0, 0, 1), (0, 1, 6), (1, 2, 2), (1, 2, 4), (1, 2, 5), (1, 3, 1)]
    mask, trajectories, groups = step_of(rows)
    noise = torch.Generator().manual_seed(0)
    behavior = -torch.rand(mask.shape, generator=noise, dtype=torch.float64)
    current = behavior + torch.randn(mask.shape, generator=noise, dtype=torch.float64) / 3
    advantages = torch.randn(len(rows), generator=noise, dtype=torch.float64)
    return current.requires_grad_(), behavior, advantages, mask, trajectories, groups


@pytest.mark.parametrize("loss_type", WEIGHTS)
def test_cutting_the_step_into_micro_batches_changes_nothing(loss_type):
    current, behavior, advantages, mask, trajectories, groups = random_step()
    weights = token_weights(mask, trajectories, groups, loss_type, dtype=torch.float64)

    def gradient(size, weights_of):
        total = torch.zeros_like(current)
        for start in range(0, len(mask), size):
            rows = slice(start, start + size)
            loss, _ = clipped_surrogate(current[rows], behavior[rows], advantages[rows], mask[rows])
            total += torch.autograd.grad((weights_of(rows) * loss).sum(), current)[0]
        return total

    whole = gradient(7, lambda rows: weights[rows])
    for size in (1, 2, 5):
        torch.testing.assert_close(gradient(size, lambda rows: weights[rows]), whole, rtol=1e-14, atol=1e-16)

    # The wrong way: weights of each micro-batch by itself, then their mean.
    def own_weights(rows):
        count = math.ceil(len(mask) / 2)
        return token_weights(mask[rows], trajectories[rows], groups[rows], loss_type, torch.float64) / count

    assert (gradient(2, own_weights) - whole).abs().max() > 1e-3


@pytest.mark.parametrize("loss_type", WEIGHTS)
def test_padding_and_row_order_change_nothing(loss_type):
    current, behavior, advantages, mask, trajectories, groups = random_step()
    loss, stats = clipped_surrogate(current, behavior, advantages, mask)
    objective = (token_weights(mask, trajectories, groups, loss_type, torch.float64) * loss).sum()
    order = torch.tensor([4, 0, 6, 2, 5, 1, 3])

    def padded(x, value):
        return torch.nn.functional.pad(x.detach()[order], (0, 3, 0, 2), value=value)

    def longer(ids, value):
        return torch.cat([ids[order], torch.tensor([value] * 2)])

    wide_mask = padded(mask, False)
    wide_loss, wide_stats = clipped_surrogate(
        padded(current, math.nan), padded(behavior, math.inf), longer(advantages, math.nan), wide_mask
    )
    weights = token_weights(wide_mask, longer(trajectories, 9), longer(groups, 9), loss_type, torch.float64)
    torch.testing.assert_close((weights * wide_loss).sum(), objective.detach(), rtol=1e-13, atol=0)
    for name, value in stats.items():
        torch.testing.assert_close(wide_stats[name], value, rtol=1e-13, atol=0)


def test_k3_by_hand():
    # current 1/2, reference 1/4: q/p = 1/2, 1/2 + ln 2 - 1 = 0.1931471806; reversed: 2 - ln 2 - 1 = 0.3068528194.
    current = torch.tensor([0.5, 0.25, 0.3], dtype=torch.float64).log().requires_grad_()
    reference = torch.tensor([0.25, 0.5, 0.3], dtype=torch.float64).log()
    kl = k3_kl(current, reference)
    assert kl.tolist() == pytest.approx([0.1931471806, 0.3068528194, 0])
    # d/d logp_current = 1 - q/p
    assert torch.autograd.grad(kl.sum(), current)[0].tolist() == pytest.approx([0.5, -1, 0])
    # Its expectation over current = (1/4, 3/4) against reference = (1/2, 1/2) is the exact
    # KL(current || reference) = ln(1/2)/4 + 3 ln(3/2)/4 = 0.1308120359; the other direction would be 0.1438410362.
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert (p * k3_kl(p.log(), torch.full((2,), math.log(0.5)))).sum().item() == pytest.approx(0.1308120359)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, m, i: token_weights(m, i, i, "bnpo"), "loss_type is 'bnpo', expected one of .*'dapo'"),
        (lambda x, m, i: token_weights(m, i[:1], i, "grpo"), r"\(1,\), \(2,\)\], expected \(N, T\)"),
        (lambda x, m, i: clipped_surrogate(x, x[:, :2], x[:, 0], m), r"\(2, 2\).*expected the same \(N, T\)"),
        (lambda x, m, i: clipped_surrogate(x, x, x[0], m), r"expected the same \(N, T\)"),
    ],
)
def test_errors_say_what_was_found_and_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 3), torch.ones(2, 3), torch.tensor([0, 1]))
