"""The same model in `transformers` with the same weights: the peer of speed measurements."""

import torch
from torch import nn

from glm46.compat import quiet_libraries
from glm46.compute.model.transformer import Transformer
from glm46.config.errors import UserError
from glm46.config.model import ModelShape

# Our name -> the one that transformers 5 uses in memory. Experts are fused there as they are here.
_RENAMED = {
    ".mlp.router.": ".mlp.gate.",
    ".experts.gate_up": ".experts.gate_up_proj",
    ".experts.down": ".experts.down_proj",
}


def build_peer(ours: Transformer, experts: str) -> nn.Module:
    """`Glm4MoeForCausalLM`, or `Glm4MoeLiteForCausalLM` for latent attention, with a copy of our weights. It has no
    multi-token prediction layers.

    Args:
        experts: implementation of the experts: "grouped_mm", or "eager", a loop.

    Raises:
        UserError: transformers is not installed.
    """
    quiet_libraries()  # transformers imports torchao where it is installed
    try:
        from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM
    except ImportError as error:
        raise UserError("benchmark: transformers is not installed; pip install 'glm46[hf]'") from error
    shape = ours.shape
    weight, latent = ours.embed_tokens.weight, (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM)
    config, model = latent if shape.is_latent else (Glm4MoeConfig, Glm4MoeForCausalLM)
    default = torch.get_default_dtype()
    torch.set_default_dtype(weight.dtype)  # FP32 would need twice the memory, and its cast rounds the rotation too
    try:
        with torch.device(weight.device):
            peer = model(_peer_config(config, shape))
    finally:
        torch.set_default_dtype(default)
    peer.set_experts_implementation(experts)
    for module in peer.modules():
        if hasattr(module, "variance_epsilon"):  # the norms of latents have another one there
            module.variance_epsilon = shape.rms_norm_eps
    targets = peer.state_dict()
    sources = {_peer_name(name): tensor for name, tensor in ours.state_dict().items() if not name.startswith("mtp.")}
    assert set(sources) == set(targets), sorted(set(sources) ^ set(targets))
    with torch.no_grad():
        for name, source in sources.items():
            targets[name].copy_(source)
    return peer


def _peer_config(config_class: type, shape: ModelShape):
    """The peer's config for our shape. pad_token_id stays unset: its embedding would get no gradient."""
    excluded = {"rope_scaling", "sliding_window", "rope_theta", "partial_rotary_factor"}
    rope = {
        "rope_type": "default",
        "rope_theta": shape.rope_theta,
        "partial_rotary_factor": shape.partial_rotary_factor,
    }
    sizes = shape.model_dump(exclude=excluded)
    if shape.is_latent:
        sizes["head_dim"] = shape.qk_rope_head_dim  # the part of a head that is rotated
    config = config_class(**sizes, rope_parameters=rope, use_cache=False)
    config._attn_implementation = "sdpa"
    return config


def _peer_name(name: str) -> str:
    for ours, theirs in _RENAMED.items():
        name = name.replace(ours, theirs)
    return name if name.startswith("lm_head.") else f"model.{name}"
