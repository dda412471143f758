"""Which models can share prefixes: one probe, whose results are compared with plain passes of the model itself."""

import inspect
import sys

import torch

from turngrpo.trainer.forward.decoding import start_decoding
from turngrpo.trainer.forward.policy import Policy, evaluating
from turngrpo.trainer.forward.shared_prefix import (
    UnsupportedAttention,
    compute_prefix,
)

PROBE_PREFIXES: list[list[int]] = [[1, 2, 3, 4, 5], [], [6, 7]]
PROBE_SUFFIXES, PROBE_CLUSTERS = [[8, 9, 10], [11], [12, 13], [14, 1, 2]], [0, 0, 1, 2]


def why_unsupported(policy: Policy, longest: int = sys.maxsize) -> str | None:
    """Say why this model cannot share a prefix in rows of up to `longest` tokens, or None: its results are compared.

    Callers that get a reason compute prompts apart, and say so once.
    """
    config, name = policy.causal.config.get_text_config(), type(policy.causal).__name__
    types = set(getattr(config, "layer_types", None) or ["full_attention", "sliding_attention"])
    window = getattr(config, "sliding_window", None)
    if types - {"full_attention", "sliding_attention"}:
        return f"{name} has layers of the types {sorted(types)}, expected attention to all tokens"
    if window is not None and window < longest and "sliding_attention" in types:
        return f"{name} has a sliding window of {window} tokens, shorter than the rows"
    if "position_ids" not in inspect.signature(policy.causal.base_model.forward).parameters:
        return f"{name} takes no position_ids"
    try:
        gap = _probe(policy)
    except UnsupportedAttention as error:
        return str(error)
    tolerance = 1e-3 if policy.dtype in (torch.float32, torch.float64) else 0.1
    return None if gap <= tolerance else f"{name}: hidden states differ from a plain pass by {gap:.3g} of the largest"


def _probe(policy: Policy) -> float:
    """Return the largest difference of hidden states from those of plain passes, over the largest of these."""
    device = next(policy.model.parameters()).device
    suffixes, clusters = PROBE_SUFFIXES, PROBE_CLUSTERS
    with evaluating(policy.model):
        prefix = compute_prefix(policy, PROBE_PREFIXES)
        decoder, together = start_decoding(policy, PROBE_PREFIXES, suffixes, clusters, 2)
        steps = [decoder.step(torch.full((len(suffixes),), token, device=device)) for token in (3, 5)]
        packed = prefix.suffix_hidden(suffixes, clusters).split([len(suffix) for suffix in suffixes])
        gaps, sizes = [], []
        for row, (suffix, cluster) in enumerate(zip(suffixes, clusters, strict=True)):
            ids = torch.tensor([[*PROBE_PREFIXES[cluster], *suffix, 3, 5]], device=device)
            plain = policy.backbone(input_ids=ids, use_cache=False).last_hidden_state[0, -len(suffix) - 2 :]
            ours = torch.cat([packed[row], *(step[row, None] for step in steps)])
            gaps += [float((ours - plain).abs().max()), float((together[row] - plain[-3]).abs().max())]
            sizes.append(float(plain.abs().max()))
    return max(gaps) / max(sizes)
