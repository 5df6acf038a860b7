"""SGLang's and vLLM's loaders map the names of an export to all parameters of their models, and use every tensor; they
switch quantisation on for exactly the modules that are stored in FP8.

No server runs in a test. The rules of their loaders are repeated here, from their sources:
SGLang in github.com/sgl-project/sglang, python/sglang/srt/models/glm4_moe.py (commit 005ffc65), `load_weights`;
vLLM in github.com/vllm-project/vllm, vllm/model_executor/models/glm4_moe.py (commits a4cd9d0d and 002d6073) and
glm4_moe_mtp.py (docs.vllm.ai of 2026-05), layers/quantization/compressed_tensors/{compressed_tensors,utils}.py (docs of
2026-09; commit 008014e8) and utils/fp8_utils.py, `validate_fp8_block_shape`; what a FusedMoE takes, in
compressed_tensors_moe_w8a8_fp8.py (commit 045d7575).
"""

import re

import pytest

from glm46.config.presets import PRESETS
from glm46.storage.huggingface.export_weights import ExportOptions, _lay_out_files
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.schemes import FP8_SCHEMES as SCHEMES
from glm46.storage.huggingface.schemes import config_of_scheme, scheme_of

TINY = dict(num_hidden_layers=3, n_routed_experts=4, first_k_dense_replace=1)
PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
STACKED = {part: stacked for stacked, parts in PARTS.items() for part in parts}
LAYER = 3  # of the prediction layer
REPEATS = [f"model.layers.{LAYER}.{name}.weight" for name in ("embed_tokens", "shared_head.head")]


def stacked_or_plain(name: str) -> str:
    expert = re.sub(r"\.experts\.\d+\.(gate|up)_proj\.", ".experts.w13_", name)
    expert = re.sub(r"\.experts\.\d+\.down_proj\.", ".experts.w2_", expert)
    if expert != name:
        return expert
    for part, stacked in STACKED.items():
        if f".{part}." in name:
            return name.replace(part, stacked)
    return name


def in_sglang(name: str, *, draft: bool) -> str | None:
    """Name of the parameter of SGLang's model, or of its draft model, that a tensor fills; None: skipped on purpose."""
    mtp = f"model.layers.{LAYER}."
    if name.startswith(mtp) != draft:
        return None
    if draft:
        if "shared_head.head" in name or "embed_tokens" in name:
            return None  # the draft uses those of the model
        of_mtp = any(part in name for part in ("shared_head.norm", "eh_proj", "enorm", "hnorm"))
        name = name.replace(mtp, "model." if of_mtp else "model.decoder.")
    return stacked_or_plain(name)


def in_vllm(name: str, *, draft: bool) -> str | None:
    """The same for vLLM, whose draft model has its own embedding and head, filled from the model's or a repeat."""
    mtp = f"model.layers.{LAYER}."
    if not draft:
        return None if mtp in name else stacked_or_plain(name)
    if name == "lm_head.weight":
        return f"{mtp}shared_head.head.weight"
    if mtp not in name:
        return name if name == "model.embed_tokens.weight" else None
    if "embed_tokens" in name:
        return name.replace(mtp, "model.")
    if any(part in name for part in ("enorm", "hnorm", "eh_proj", "shared_head")):
        return name
    return stacked_or_plain(name.replace(mtp, f"{mtp}mtp_block."))


def vllm_ignores(module: str, ignore: list[str]) -> bool:
    """`should_ignore_layer`: an equal name or a matching regular expression; parts of a fused module must agree."""
    leaf = module.rsplit(".", 1)[-1]
    names = [module.removesuffix(leaf) + part for part in PARTS.get(leaf, [leaf])]
    ignored = {any(re.match(t[3:], n) if t.startswith("re:") else t == n for t in ignore) for n in names}
    assert len(ignored) == 1, f"{module}: vLLM requires its parts to have one scheme"
    return ignored.pop()


def parameters_of_layer(shape, prefix: str, module: str, quantization, *, dense: bool) -> set[str]:
    """Parameters that a decoder layer registers under a prefix; vLLM's quantisation config knows it as `module`."""

    def is_fp8(name: str) -> bool:
        return quantization is not None and not vllm_ignores(f"{module}.{name}", quantization["ignore"])

    linear = ["self_attn.qkv_proj", "self_attn.o_proj"]
    names = {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.qkv_proj.bias"}
    if shape.use_qk_norm:
        names |= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    if dense:
        linear += ["mlp.gate_up_proj", "mlp.down_proj"]
    else:
        linear += ["mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj"]
        names |= {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"}
        of_expert = {is_fp8(f"mlp.experts.0.{part}_proj") for part in ("gate", "up", "down")}
        assert len(of_expert) == 1, "vLLM requires all projections of experts to have one scheme"
        kinds = ["weight", "weight_scale"] if of_expert.pop() else ["weight"]
        names |= {f"mlp.experts.{which}_{kind}" for which in ("w13", "w2") for kind in kinds}
    for name in linear:
        names |= {f"{name}.{kind}" for kind in (["weight", "weight_scale"] if is_fp8(name) else ["weight"])}
    return {f"{prefix}.{name}" for name in names}


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("preset", ["GLM-4.6", "GLM-4.5-Air", "debug"])
def test_servers_fill_every_parameter_and_use_every_tensor(preset, scheme, repeats):
    shape = PRESETS[preset].model_copy(update=TINY)
    names = HFNames(shape, repeat_shared=repeats)
    files = _lay_out_files(names, ExportOptions(scheme=SCHEMES.get(scheme), repeat_shared=repeats))
    exported = [name for file in files for name in file.records]
    quantization = config_of_scheme(SCHEMES[scheme], names) if scheme else None
    main = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for i in range(shape.num_hidden_layers):
        layer = f"model.layers.{i}"
        main |= parameters_of_layer(shape, layer, layer, quantization, dense=i < shape.first_k_dense_replace)
    mtp = f"model.layers.{LAYER}"
    own = [f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]
    drafts = {
        in_sglang: {f"model.{name}" for name in own}
        | parameters_of_layer(shape, "model.decoder", mtp, quantization, dense=False),
        in_vllm: {f"{mtp}.{name}" for name in (*own, "shared_head.head.weight")}
        | {"model.embed_tokens.weight"}
        | parameters_of_layer(shape, f"{mtp}.mtp_block", mtp, quantization, dense=False),
    }
    for server, draft in drafts.items():
        assert {server(name, draft=False) for name in exported} - {None} == main
        assert {server(name, draft=True) for name in exported} - {None} == draft
        left = [n for n in exported if not (server(n, draft=False) or server(n, draft=True))]
        assert sorted(left) == (REPEATS if repeats and server is in_sglang else [])


def sizes_refused(shape, scheme: str, parts: int) -> list[str]:
    """Weights that vLLM refuses in this many tensor-parallel parts: `validate_fp8_block_shape`, rule of FusedMoE."""
    names = HFNames(shape, repeat_shared=False)
    if SCHEMES[scheme].block is None:
        return []
    fp8 = {name for file in _lay_out_files(names, ExportOptions(scheme=SCHEMES[scheme])) for name in file.records}
    refused = []
    for name in sorted(fp8):
        if not name.endswith("_proj.weight_scale"):
            continue
        rows, columns = names.places[name.removesuffix("_scale")][1].hf_shape
        is_row_parallel = name.split(".")[-2] in ("o_proj", "down_proj")
        is_merged = not is_row_parallel  # q, k and v, or gate and up
        if (is_row_parallel and parts > 1 and columns // parts % 128) or (is_merged and rows // parts % 128):
            refused.append(name)
    return refused


@pytest.mark.parametrize(
    "preset, scheme, fit, unfit",
    [
        ("GLM-4.6", "fp8-block", (1, 2, 4), (8,)),  # 1536 rows of an expert in 8 parts are 1.5 blocks
        ("GLM-4.5-Air", "fp8-block", (1,), (2, 4, 8)),  # 1408 rows are 11 blocks
        ("GLM-4.6", "fp8-channel", (1, 2, 4, 8), ()),
        ("GLM-4.5-Air", "fp8-channel", (1, 2, 4, 8), ()),
        ("100B", "fp8-block", (1, 2), ()),
        ("15B", "fp8-block", (1, 2), ()),
        ("debug", "fp8-block", (1,), ()),
    ],
)
def test_tensor_parallel_degrees_of_vllm(preset, scheme, fit, unfit):
    shape = PRESETS[preset].model_copy(update=TINY)
    assert {parts: sizes_refused(shape, scheme, parts) for parts in fit} == {parts: [] for parts in fit}
    assert all(sizes_refused(shape, scheme, parts) for parts in unfit)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["GLM-4.5", "GLM-4.5-Air"])
def test_our_fp8_folders_keep_the_same_tensors_in_bf16_as_the_published_ones(preset):
    """`ignore` in config.json of zai-org/GLM-4.5-FP8 and GLM-4.5-Air-FP8 lists the tensors that are not in FP8;
    here they are built by kind. `shared_head.head` is not listed: they quantise that repeat, we do not."""
    shape = PRESETS[preset]
    ignore = {"model.embed_tokens", "model.norm", "lm_head"}
    for i in range(shape.num_hidden_layers + 1):
        kinds = ["input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}_proj.bias" for x in "qkv")]
        if shape.use_qk_norm:
            kinds += ["self_attn.q_norm", "self_attn.k_norm"]
        if i >= shape.first_k_dense_replace:
            kinds += ["mlp.gate", "mlp.gate.e_score_correction_bias"]
        if i == shape.num_hidden_layers:
            kinds += ["embed_tokens", "eh_proj", "enorm", "hnorm", "shared_head.norm"]
        ignore |= {f"model.layers.{i}.{kind}" for kind in kinds}
    names = HFNames(shape, repeat_shared=True)
    files = _lay_out_files(names, ExportOptions(scheme=SCHEMES["fp8-channel"], repeat_shared=True))
    stored = {name for file in files for name in file.records}
    plain = {name.removesuffix(".weight") for name in names.places if f"{name}_scale" not in stored}
    assert plain - ignore == {f"model.layers.{shape.num_hidden_layers}.shared_head.head"} and ignore <= plain
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
    weights |= {"actorder": None, "block_structure": None, "group_size": None, "observer": "minmax"}
    published = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": sorted(ignore)}
    published["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    assert scheme_of({"quantization_config": published}, "") == SCHEMES["fp8-channel"]
