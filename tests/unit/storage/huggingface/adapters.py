"""Small models with random adapters under our names, for tests of PEFT folders."""

from collections.abc import Collection

import torch
from torch import Tensor

from glm46.config.model import ModelShape
from glm46.config.presets import PRESETS
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.peft_export import is_adaptable

EOS = [40, 41, 42]
TINY = dict(
    vocab_size=48, hidden_size=24, num_hidden_layers=4, first_k_dense_replace=1, intermediate_size=40,
    moe_intermediate_size=12, n_routed_experts=4, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=64,
)  # fmt: skip
SHAPE = PRESETS["GLM-4.5"].model_copy(update=TINY)
LATENT = dict(
    num_key_value_heads=4, head_dim=8, q_lora_rank=10, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4,
    v_head_dim=8,
)  # fmt: skip
TARGETS = {
    "attention": lambda name: ".self_attn." in name,
    "dense": lambda name: ".mlp." in name and "experts" not in name,
    "shared_experts": lambda name: ".shared_experts." in name,
    "experts": lambda name: ".mlp.experts." in name,
}


def adapters(
    targets: Collection[str] = tuple(TARGETS),
    *,
    rank: int = 4,
    expert_rank: int | None = None,
    layers: Collection[int] = range(99),
    dora: bool = False,
    shape: ModelShape = SHAPE,
) -> dict[str, Tensor]:
    """Random adapters of the named targets, none of them zero."""
    tensors = {}
    generator = torch.Generator().manual_seed(3)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * 0.3

    for name, entry in HFNames(shape, repeat_shared=False).entries.items():
        if not is_adaptable(entry) or not any(TARGETS[target](name) for target in targets):
            continue
        if int(name.split(".")[1]) not in layers:
            continue
        of_expert = entry.row.is_expert
        r = expert_rank or rank if of_expert else rank
        *experts, rows, columns = entry.shape
        stem = name + "_" if of_expert else name.removesuffix("weight")
        tensors[stem + "lora_A"] = draw(*experts, r, columns)
        tensors[stem + "lora_B"] = draw(*experts, rows, r)
        if dora:
            tensors[stem + "magnitude"] = 1 + draw(*experts, rows).abs()
    return tensors


def merged(weights: dict[str, Tensor], adapters: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Our weights, FP32, with the adapters added by the definition of LoRA and DoRA."""
    out = dict(weights)
    for name, a in adapters.items():
        if not name.endswith("lora_A"):
            continue
        stem = name.removesuffix("lora_A")
        weight = stem.removesuffix("_") if stem.endswith("_") else stem + "weight"
        value = weights[weight].float() + scale * (adapters[stem + "lora_B"] @ a)
        if stem + "magnitude" in adapters:
            value = adapters[stem + "magnitude"].unsqueeze(-1) * value / value.norm(dim=-1, keepdim=True)
        out[weight] = value
    return out
