"""TorchTitan's MoE layer in the place of ours, with the same weights. No model of TorchTitan has GLM's attention."""

import copy
from types import ModuleType

import torch
from torch import Tensor, nn

from glm46.compute.model.moe import MoE
from glm46.compute.model.transformer import Transformer
from glm46.config.errors import UserError
from glm46.config.model import ModelShape


def import_configs() -> ModuleType:
    """The functions of TorchTitan that make configs of layers.

    Raises:
        UserError: torchtitan cannot be imported.
    """
    try:
        from torchtitan.models.common import config_utils
    except ImportError as error:
        raise UserError(f"torchtitan (0.3 is known to work) cannot be imported: {error}; install it") from error
    return config_utils


class TitanMoE(nn.Module):
    """TorchTitan's `MoE` with the arguments of ours. Its products of experts are in BF16, whatever the dtype.

    Raises:
        UserError: torchtitan cannot be imported.
    """

    def __init__(self, shape: ModelShape):
        super().__init__()
        configs = import_configs()
        dim, width, experts = shape.hidden_size, shape.moe_intermediate_size, shape.n_routed_experts
        chosen = {"dim": dim, "num_experts": experts, "top_k": shape.num_experts_per_tok}
        self.moe = configs.make_moe_config(
            num_experts=experts,
            router=configs.make_router_config(
                **chosen, gate_param_init={}, route_norm=True, route_scale=shape.routed_scaling_factor
            ),
            routed_experts=configs.make_routed_experts_config(
                **chosen, hidden_dim=width, param_init={}, comm_backend="standard"
            ),
            shared_experts=configs.make_ffn_config(
                dim=dim, hidden_dim=width * shape.n_shared_experts, w1_param_init={}, w2w3_param_init={}
            ),
        ).build()

    def forward(self, x: Tensor, *_) -> tuple[Tensor, None]:
        """Map [B, S, D] to [B, S, D], without statistics."""
        return self.moe(x), None

    @torch.no_grad()
    def take_weights(self, ours: MoE) -> None:
        """Copy the weights of our layer."""
        experts, shared = self.moe.routed_experts.inner_experts, self.moe.shared_experts
        gate, up = ours.experts.gate_up.chunk(2, dim=1)
        for to, of in {
            self.moe.router.gate.weight: ours.router.weight,
            self.moe.expert_bias_E: ours.router.e_score_correction_bias,
            experts.w1_EFD: gate,
            experts.w3_EFD: up,
            experts.w2_EDF: ours.experts.down,
            shared.w1.weight: ours.shared_experts.gate_proj.weight,
            shared.w3.weight: ours.shared_experts.up_proj.weight,
            shared.w2.weight: ours.shared_experts.down_proj.weight,
        }.items():
            to.copy_(of)


def with_titan_moe(ours: Transformer) -> Transformer:
    """A copy of our model with TorchTitan's MoE layers.

    Raises:
        UserError: torchtitan cannot be imported, or the model is not in BF16.
    """
    weight = ours.embed_tokens.weight
    if weight.dtype != torch.bfloat16:
        raise UserError("benchmark: torchtitan computes experts in bfloat16; add --dtype bfloat16, or leave it out")
    model = copy.deepcopy(ours)
    for block in model.layers.values():
        if isinstance(block.mlp, MoE):
            with torch.device(weight.device):
                theirs = TitanMoE(ours.shape)
            for parameter in theirs.parameters():
                parameter.data = parameter.data.to(weight.dtype)
            theirs.take_weights(block.mlp)
            block.mlp = theirs
    return model
