"""Loss-free balancing: after each optimizer step the selection bias moves towards the experts that got too little."""

import torch
from torch import Tensor

from glm46.config.moe import MoE
from glm46.model.transformer import Transformer


class ExpertBalance:
    """The rule, and the moving averages that one of its forms keeps."""

    def __init__(self, model: Transformer, config: MoE, device: torch.device):
        self.config = config
        self.routers = model.routers()
        experts = model.shape.n_routed_experts
        self._average_counts = torch.zeros(len(self.routers), experts, dtype=torch.float32, device=device)

    @torch.no_grad()
    def update(self, tokens_per_expert: Tensor, rate: float) -> None:
        """Move the biases once.

        Args:
            tokens_per_expert: int64 [MoE layers, E], summed over the micro-batches of the step and over every rank
                that saw other tokens, so that all copies of a bias move alike.
            rate: step of the bias.

        Source: sign, arXiv 2408.15664 algorithm 1; proportional, docs/model.md.
        """
        if self.config.balance == "none":
            return
        counts = tokens_per_expert.float()
        if self.config.balance == "sign":
            shift = rate * (counts.mean(1, keepdim=True) - counts).sign()
        else:
            decay = self.config.bias_ema_decay
            self._average_counts.mul_(decay).add_(counts, alpha=1.0 - decay)
            mean = self._average_counts.mean(1, keepdim=True)
            shift = -rate * (self._average_counts / (mean + 1e-6) - 1.0)
        for router, router_shift in zip(self.routers.values(), shift, strict=True):
            router.e_score_correction_bias += router_shift
            if self.config.balance == "proportional":
                router.e_score_correction_bias.clamp_(-self.config.bias_clamp, self.config.bias_clamp)

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold besides the biases, which are buffers of the model."""
        return {"average_counts": self._average_counts} if self.config.balance == "proportional" else {}
