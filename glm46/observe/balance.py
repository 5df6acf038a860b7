"""How evenly tokens are spread over experts."""

import torch
from torch import Tensor


def balance_metrics(tokens_per_expert: Tensor, overflow: Tensor) -> dict[str, float]:
    """Figures of the balance, with one copy from the device.

    Args:
        tokens_per_expert: int64 [layers, E], assignments kept in a step, summed over all ranks.
        overflow: int64 [layers], assignments lost to the capacity in the same step.

    Returns:
        Columns of metrics.jsonl; none when the model has no experts. Ratios are relative to an even share in the same
        layer; layers that saw no token count as even.
    """
    if tokens_per_expert.numel() == 0:
        return {}
    tokens_LE = tokens_per_expert.double()
    mean_L = tokens_LE.mean(1)
    # An idle layer has neither share nor deviation; 1 keeps the division defined and its numerators are 0.
    share_L = mean_L.clamp(min=1.0 / tokens_LE.shape[1])
    cv_L = tokens_LE.std(1, correction=0) / share_L
    is_used_L = mean_L > 0
    lost, kept = overflow.double().sum(), tokens_LE.sum()
    figures = torch.stack(
        [
            cv_L.mean(),
            cv_L.max(),
            torch.where(is_used_L, tokens_LE.amax(1) / share_L, 1.0).max(),
            torch.where(is_used_L, tokens_LE.amin(1) / share_L, 1.0).min(),
            lost / (lost + kept).clamp(min=1.0),
            (tokens_LE == 0).sum().double(),
        ]
    ).tolist()  # sync: one copy of six numbers
    names = (
        "expert_balance_cv",
        "expert_balance_cv_max",
        "expert_load_max_ratio",
        "expert_load_min_ratio",
        "expert_overflow_ratio",
        "dead_experts",
    )
    return dict(zip(names, figures, strict=True))
