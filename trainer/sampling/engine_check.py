"""Whether an engine records what the model itself computes: a few tokens of made-up prompts against plain passes."""

from collections.abc import Sequence

import torch

from turngrpo.trainer.forward.policy import Policy, evaluating
from turngrpo.trainer.reading.rollout import Engine, NoiseKey, Request


def probe_requests(vocabulary: int) -> list[Request]:
    """Return short prompts of made-up tokens: two groups, whose members are of unequal length and share a prefix."""
    lengths = {0: (1, 2, 4), 1: (3, 5)}  # of what is a member's own, after group + 2 shared tokens
    return [
        Request(
            [
                [(5 * i + group + 1) % vocabulary for i in range(group + 2)],
                [(7 * i + 3 * member + 2) % vocabulary for i in range(length)],
            ],
            NoiseKey(0, 0, group, member, 0),
        )
        for group, members in lengths.items()
        for member, length in enumerate(members)
    ]


def recorded_gaps(engine: Engine, policy: Policy, requests: Sequence[Request]) -> torch.Tensor:
    """Return |recorded - the policy's own in a plain pass per row| of every token an engine samples, inf for NaN."""
    gaps = []
    device = next(policy.model.parameters()).device
    completions = engine.generate(requests)
    with evaluating(policy.model), policy.autocast():
        for request, completion in zip(requests, completions, strict=True):
            count = len(completion.ids)
            ids = torch.tensor([[*request.prompt_ids, *completion.ids]], device=device)
            logits = policy.model(input_ids=ids, use_cache=False).logits[0, -count - 1 : -1]
            expected = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
            recorded = torch.tensor(completion.behavior_logprobs, device=device)
            gaps.append((expected[torch.arange(count), ids[0, -count:]] - recorded).abs())
    return torch.cat(gaps).nan_to_num(nan=torch.inf, posinf=torch.inf)
