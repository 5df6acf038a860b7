"""Loss-free balancing: after each optimizer step the selection bias moves towards the experts that got too little."""

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.config.model import ModelShape
from glm46.config.moe import MoE
from glm46.model.transformer import Transformer, router_names


class ExpertBalance:
    """The rule, and the moving averages that one of its forms keeps."""

    def __init__(self, shape: ModelShape, models: list[Transformer], config: MoE, device: torch.device):
        """``models`` are the model, or the parts of it that are here."""
        self.config = config
        names = router_names(shape)
        self.routers = {names.index(name): router for model in models for name, router in model.routers().items()}
        self._average_counts = torch.zeros(len(names), shape.n_routed_experts, dtype=torch.float32, device=device)

    @property
    def layers(self) -> int:
        """MoE layers of the whole model."""
        return self._average_counts.shape[0]

    @property
    def rows(self) -> list[int]:
        """Which of them are here."""
        return list(self.routers)

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
        for row, router in self.routers.items():
            router.e_score_correction_bias += shift[row]
            if self.config.balance == "proportional":
                router.e_score_correction_bias.clamp_(-self.config.bias_clamp, self.config.bias_clamp)

    def largest_bias(self, pipeline: dist.ProcessGroup | None) -> float:
        """Largest size of a bias in the whole model; collective of the ranks of a pipeline, waits for the device."""
        largest = torch.zeros((), device=self._average_counts.device)
        for router in self.routers.values():
            largest = torch.maximum(largest, router.e_score_correction_bias.abs().max())
        if pipeline is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=pipeline)
        return largest.item()  # sync: a row is for people

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold besides the biases, which are buffers of the model."""
        return {"average_counts": self._average_counts} if self.config.balance == "proportional" else {}
