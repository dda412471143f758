"""The laboratory's optimizer: AdamW with weight decay on every parameter, and its schedule."""

from typing import Any

import torch


def learning_rate_factor(update: int, updates: int, warmup: float, final: float) -> float:
    """Return the learning rate of an update (from 0) over its peak: up to 1 in the warm-up, then linear to `final`.

    (k + 1) / w for k < w = max(1, int(warmup * updates)), then 1 - (1 - final) * min(1, (k - w) / max(1, updates - w
    - 1)): the first update moves, the last of the warm-up and the one after it have the peak, the last of all `final`.

    >>> [round(learning_rate_factor(k, 20, 0.1, 0.1), 3) for k in (0, 1, 2, 3, 19)]
    [0.5, 1.0, 1.0, 0.947, 0.1]
    """
    rising = max(1, int(warmup * updates))
    if update < rising:
        return (update + 1) / rising
    return 1 - (1 - final) * min(1, (update - rising) / max(1, updates - rising - 1))


def adamw(
    model: torch.nn.Module, peak: float, updates: int, weight_decay: float, warmup: float = 0.1, final: float = 0.1
) -> tuple[Any, Any]:
    """Return AdamW with weight decay on every trained parameter, and the schedule of a run of so many updates."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=peak, weight_decay=weight_decay)
    factor = lambda update: learning_rate_factor(update, updates, warmup, final)  # noqa: E731
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
