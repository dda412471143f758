"""Next-token distributions of every policy after the same prefixes, kept whole, and the KL between them."""

from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from lib.output import write_json
from safetensors.torch import load_file, save_file

from turngrpo.trainer.warm_start import target_examples

from .config import LabConfig
from .training import load

PROBES, DIVERGENCES = "probes.safetensors", "divergences.json"


def probe(folder: Path, config: LabConfig, *, model: Path, examples: Path) -> None:
    """Write (P, V) float32 log-probabilities of the next token after every prefix of the first validation answers.

    A prefix is a prompt with the first tokens of its gold answer, none to all; `tokens` (P,) are the gold ones. No
    test problem is among them.
    """
    policy, tokenizer = load(model)
    rows, _ = target_examples(str(examples), tokenizer)
    found, tokens = [], []
    for row in rows.select(range(min(config.probe_rows, len(rows)))):
        ids, first = row["input_ids"], row["completion_mask"].index(1)
        with torch.no_grad():
            logits = policy(torch.tensor([ids], device=policy.device)).logits[0, first - 1 : -1]  # (T, V)
        found.append(logits.float().log_softmax(-1).cpu())
        tokens += ids[first:]
    save_file({"logprobs": torch.cat(found), "tokens": torch.tensor(tokens)}, folder / PROBES)


def divergences(folder: Path, config: LabConfig, **policies: Path) -> None:
    """Write the mean KL(first || second), over all prefixes and the whole vocabulary, of every two, in nats."""
    probes = {name: load_file(path) for name, path in policies.items()}
    one = next(iter(probes.values()))["tokens"]
    assert all(torch.equal(kept["tokens"], one) for kept in probes.values())  # the same prefixes
    result: dict[str, Any] = {"prefixes": len(one), "kl": {name: {} for name in probes}}
    for name, other in permutations(probes, 2):
        ours, theirs = (probes[which]["logprobs"].double() for which in (name, other))
        result["kl"][name][other] = float((ours.exp() * (ours - theirs)).sum(-1).mean())
    write_json(folder / DIVERGENCES, result)
