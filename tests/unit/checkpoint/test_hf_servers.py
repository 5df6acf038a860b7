"""The names of an export are those that SGLang's loader turns into the parameters of its model: all filled, none left.

No server can run here. What SGLang's loader does with a name is written down again, from what it says in
github.com/sgl-project/sglang, python/sglang/srt/models/glm4_moe.py (commit 005ffc65), `load_weights`. Expert names as
in the usual mapping of a FusedMoE, whose source was not read, nor was vLLM's loader.
"""

import re

import pytest

from glm46.checkpoint.hf_export import Layout, _lay_out_files
from glm46.checkpoint.hf_fp8 import SCHEMES
from glm46.checkpoint.hf_names import HFNames
from glm46.config.presets import PRESETS

TINY = dict(num_hidden_layers=3, n_routed_experts=4, first_k_dense_replace=1)
STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
STACKED["up_proj"] = "gate_up_proj"
OF_MTP = ("shared_head.norm", "eh_proj", "enorm", "hnorm")


def loaded_as(name: str, layers: int, *, draft: bool) -> str | None:
    """The parameter that a tensor goes to in the model, or in its draft model; None: skipped on purpose."""
    mtp = f"model.layers.{layers}."
    if name.startswith(mtp) != draft:
        return None
    if draft:
        if "shared_head.head" in name or "embed_tokens" in name:
            return None  # the draft takes the model's own
        name = name.replace(mtp, "model." if any(part in name for part in OF_MTP) else "model.decoder.")
    expert = re.sub(r"\.experts\.\d+\.(gate|up)_proj\.", ".experts.w13_", name)
    expert = re.sub(r"\.experts\.\d+\.down_proj\.", ".experts.w2_", expert)
    if expert != name:
        return expert
    for part, stacked in STACKED.items():
        if f".{part}." in name:
            return name.replace(part, stacked)
    return name


def parameters_of_layer(shape, *, dense: bool, fp8: bool) -> set[str]:
    """What its decoder layer registers, relative to the layer."""
    linear = ["self_attn.qkv_proj", "self_attn.o_proj"]
    names = {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.qkv_proj.bias"}
    if shape.use_qk_norm:
        names |= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    if dense:
        linear += ["mlp.gate_up_proj", "mlp.down_proj"]
    else:
        linear += ["mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj"]
        names |= {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"}
        names |= {
            f"mlp.experts.{which}_{kind}" for which in ("w13", "w2") for kind in ["weight", "weight_scale"][: 1 + fp8]
        }
    return names | {f"{name}.{kind}" for name in linear for kind in ["weight", "weight_scale"][: 1 + fp8]}


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("preset", ["GLM-4.6", "GLM-4.5-Air"])
def test_every_parameter_of_the_server_is_filled_and_no_tensor_left(preset, scheme):
    shape = PRESETS[preset].model_copy(update=TINY)
    is_fp8 = scheme is not None
    layout = Layout(fp8=SCHEMES.get(scheme), with_copies=preset != "GLM-4.6")
    files = _lay_out_files(HFNames(shape, with_copies=layout.with_copies), layout)
    exported = [name for file in files for name in file.records]
    main = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for i in range(shape.num_hidden_layers):
        of_layer = parameters_of_layer(shape, dense=i < shape.first_k_dense_replace, fp8=is_fp8)
        main |= {f"model.layers.{i}.{name}" for name in of_layer}
    draft = {f"model.decoder.{name}" for name in parameters_of_layer(shape, dense=False, fp8=is_fp8)}
    draft |= {"model.enorm.weight", "model.hnorm.weight", "model.eh_proj.weight", "model.shared_head.norm.weight"}
    layers = shape.num_hidden_layers
    assert {loaded_as(name, layers, draft=False) for name in exported} - {None} == main
    assert {loaded_as(name, layers, draft=True) for name in exported} - {None} == draft
    left = [n for n in exported if not (loaded_as(n, layers, draft=False) or loaded_as(n, layers, draft=True))]
    copies = [f"model.layers.{layers}.{name}.weight" for name in ("embed_tokens", "shared_head.head")]
    assert sorted(left) == (copies if layout.with_copies else [])
