"""FP8 folders: written, read back exactly, and refused if scales do not fit."""

import json
import re

import pytest
import torch

from glm46.cli import main
from glm46.compute.distributed.local_tensor import global_indices
from glm46.compute.model.transformer import Transformer
from glm46.config.errors import UserError
from glm46.config.model import ModelConfig
from glm46.config.presets import resolve_shape
from glm46.files.tensor_file import TensorFile, lay_out, read_records
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.folder_check import check_folder
from glm46.storage.huggingface.folder_tensors import SINGLE_FILE
from glm46.storage.huggingface.fp8 import Scheme
from glm46.storage.huggingface.import_weights import FolderReader
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.schemes import CONFIG_KEY, ERRORS_FILE, config_of_scheme, scheme_of
from glm46.storage.huggingface.schemes import FP8_SCHEMES as SCHEMES
from tests.builders import model_table
from tests.step_tensors import step_tensors

# Sizes that are not multiples of a block: dense layers, as the 10944 rows of GLM-4.5-Air, and queries, keys and values.
TABLE = ModelConfig(**model_table(
    flavor="debug", vocab_size=8192, hidden_size=256, num_hidden_layers=2, intermediate_size=272,
    moe_intermediate_size=128, n_routed_experts=2, num_experts_per_tok=1, num_attention_heads=4, head_dim=32,
))  # fmt: skip
ODD = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "layers.0.mlp.gate_proj.weight")
ODD += ("layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight")


def export(folder, fp8, tensors):
    shape = resolve_shape(TABLE)
    config = config_of(shape, None, eos_ids=[0], dtype="bfloat16")
    if fp8 is not None:
        config[CONFIG_KEY] = config_of_scheme(fp8, HFNames(shape, repeat_shared=False))
    export_weights(folder, shape, config, tensors, options=ExportOptions(scheme=fp8))
    return folder


def read(folder, dtype=torch.float32):
    shape = resolve_shape(TABLE)
    model = Transformer(shape).to(dtype)
    tensors = {n: t.detach() for n, t in model.named_parameters()}
    tensors |= {n: t.float() for n, t in model.named_buffers()}  # the selection biases stay FP32
    with FolderReader(folder, shape) as reader:
        for name, tensor in tensors.items():
            assert reader.fill(name, tensor, global_indices(tensor)) == []
    return tensors


@pytest.fixture(scope="module")
def tensors():
    torch.manual_seed(0)
    model = Transformer(resolve_shape(TABLE))
    for tensor in [*model.parameters(), *model.buffers()]:
        torch.nn.init.normal_(tensor, std=0.02)
    return {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_quantising_again_gives_the_same_bytes(scheme):
    torch.manual_seed(0)
    weight = torch.randn(200, 300) * torch.logspace(-30, 30, 200).unsqueeze(1)
    weight[:130, :128] = 0.0
    weight[150] = torch.linspace(-1, 1, 300) * 2.0**3  # extremes at powers of two and, below, at the limits of a scale
    weight[151:154] = torch.tensor([[464.0], [463.9], [232.0]]) * torch.linspace(-1, 1, 300)
    values, scales = scheme.quantise(weight).values()
    assert scales.shape == scheme.scale_shape(weight.shape) and (torch.frexp(scales)[0] == 0.5).all()
    box = ((0, 200), (0, 300))
    back = scheme.dequantise({"": values, "_scale": scales}, weight.shape, box)
    assert torch.equal(back, back.bfloat16().float())
    again, same = scheme.quantise(back).values()
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8)) and torch.equal(same, scales)
    # Half a step of E4M3 is 2**-4 of a number; below its normal range, 2**-10 of the scale.
    limit = weight.abs() / 16 + scheme.scales_of_columns({"_scale": scales}, weight.shape, box) * 2.0**-10
    assert ((back - weight).abs() <= limit).all()


@pytest.mark.parametrize("scheme", [*SCHEMES.values(), Scheme((48, 64))], ids=str)
def test_a_dequantised_box_equals_that_of_the_whole_weight(scheme):
    values, scales = scheme.quantise(torch.randn(200, 300)).values()
    back = scheme.dequantise({"": values, "_scale": scales}, (200, 300), ((0, 200), (0, 300)))
    for box in (((0, 200), (0, 300)), ((127, 2), (120, 140)), ((199, 1), (299, 1)), ((128, 72), (256, 44))):
        (row, rows), (column, columns) = box
        (first, count), (left, width) = scheme.boxes((200, 300), box)["_scale"]
        parts = {"": values[row : row + rows, column : column + columns]}
        parts["_scale"] = scales[first : first + count, left : left + width]
        piece = scheme.dequantise(parts, (200, 300), box)
        assert torch.equal(piece, back[row : row + rows, column : column + columns])


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_read_and_written_again_byte_for_byte(name, dtype, tensors, tmp_path):
    first = export(tmp_path / "a", SCHEMES[name], tensors)
    records = read_records(first / SINGLE_FILE)
    quantised = {key for key, record in records.items() if record.dtype == torch.float8_e4m3fn}
    projections = {key for key in records if key.endswith("_proj.weight") and "eh_proj" not in key}
    assert quantised == {key for key in projections if name == "fp8-channel" or not key.endswith(ODD)}
    assert len(quantised) > 8
    assert {key + "_scale" for key in quantised} == {key for key in records if key.endswith("_scale")}
    assert records["model.layers.1.mlp.gate.weight"].dtype == records["lm_head.weight"].dtype == torch.bfloat16
    assert scheme_of(json.loads((first / "config.json").read_text()), "") == SCHEMES[name]
    errors = json.loads((first / ERRORS_FILE).read_text())
    assert set(errors) == quantised
    # Rounding to 4 significant bits: uniform in +-2**-4 of a number at most, so well under 2**-4 in the norm.
    assert all(0.01 < error["relative"] < 0.04 for error in errors.values())
    back = read(first, dtype)
    assert torch.equal(back["layers.1.mlp.router.weight"], tensors["layers.1.mlp.router.weight"].bfloat16().to(dtype))
    second = export(tmp_path / "b", SCHEMES[name], back)
    assert (second / SINGLE_FILE).read_bytes() == (first / SINGLE_FILE).read_bytes()


def stored_in(folder):
    records = read_records(folder / SINGLE_FILE)
    with TensorFile(folder / SINGLE_FILE, records) as file:
        return {n: file.read(n, tuple((0, size) for size in record.shape)) for n, record in records.items()}


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_folders_of_other_tools_are_read(suffix, tensors, tmp_path):
    """Incomplete blocks, and scales in BF16 that are not powers of two, under either name."""
    folder = export(tmp_path / "a", None, tensors)
    stored = stored_in(folder)
    quantised = [name for name in stored if name.endswith("_proj.weight") and "eh_proj" not in name]
    want = {}
    for name in quantised:
        rows, columns = stored[name].shape
        _, scales = Scheme().quantise(stored[name].float()).values()
        stored[name + suffix] = (scales * 0.7).bfloat16()
        each = stored[name + suffix].float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        stored[name] = (stored[name].float() / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        want[name] = stored[name].float() * each
    rewrite(folder, stored)
    if suffix == "_scale":
        change_config(folder, config_of_scheme(Scheme(), HFNames(resolve_shape(TABLE), repeat_shared=False)))
    else:
        change_config(folder, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})
    places, ours = HFNames(resolve_shape(TABLE), repeat_shared=False).places, read(folder)
    got = {hf_name: ours[entry.name][part.index()] for hf_name, (entry, part) in places.items()}
    assert all(torch.equal(got[name], want[name]) for name in quantised)
    assert torch.equal(got["lm_head.weight"], stored["lm_head.weight"].float())


@pytest.mark.parametrize("change", [None, "embed_tokens is missing", "another head"])
def test_a_repeated_head_in_fp8_is_read_as_in_the_published_folders(change, tensors, tmp_path):
    """GLM-4.5-FP8: a scale for each row; the prediction layer repeats the head in FP8 and the embedding in BF16."""
    shape = resolve_shape(TABLE)
    folder = tmp_path / "a"
    names = HFNames(shape, repeat_shared=True)
    scheme = SCHEMES["fp8-channel"]
    config = config_of(shape, None, eos_ids=[0], dtype="bfloat16") | {CONFIG_KEY: config_of_scheme(scheme, names)}
    export_weights(folder, shape, config, tensors, options=ExportOptions(scheme=scheme, repeat_shared=True))
    stored = stored_in(folder)
    repeat = f"model.layers.{shape.num_hidden_layers}.shared_head.head.weight"
    head = stored["lm_head.weight"].roll(1, 0) if change == "another head" else stored["lm_head.weight"]
    scales = head.abs().amax(1, keepdim=True) / 448  # in BF16, as in the published folders
    stored[repeat], stored[repeat + "_scale"] = (head / scales).to(torch.float8_e4m3fn), scales
    if change == "embed_tokens is missing":
        del stored[f"model.layers.{shape.num_hidden_layers}.embed_tokens.weight"]
    rewrite(folder, stored)
    with FolderReader(folder, shape) as reader:
        faults = [fault for n, t in tensors.items() for fault in reader.fill(n, torch.empty_like(t), global_indices(t))]
    assert faults == (
        [f"tensor {repeat} differs from lm_head.weight, which it must repeat"] if change == "another head" else []
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_fp8_tensors_without_elements_are_omitted(name, tmp_path):
    """Some tools write the shared experts of a model that has none."""
    shape, scheme = resolve_shape(TABLE).model_copy(update={"n_shared_experts": 0}), SCHEMES[name]
    model = Transformer(shape)
    tensors = {n: torch.nn.init.normal_(t.detach()) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    config = config_of(shape, None, eos_ids=[0], dtype="bfloat16")
    config |= {CONFIG_KEY: config_of_scheme(scheme, HFNames(shape, repeat_shared=False))}
    export_weights(tmp_path / "a", shape, config, tensors, options=ExportOptions(scheme=scheme))
    stored = stored_in(tmp_path / "a")
    for projection, size in (("gate", (0, 256)), ("up", (0, 256)), ("down", (256, 0))):
        empty = f"model.layers.1.mlp.shared_experts.{projection}_proj.weight"
        stored[empty] = torch.empty(size, dtype=torch.float8_e4m3fn)
        stored[f"{empty}_scale"] = torch.ones(scheme.scale_shape(size)) if scheme.block else torch.ones(size[0], 1)
    rewrite(tmp_path / "a", stored)
    with FolderReader(tmp_path / "a", shape) as reader:
        assert not any(reader.fill(n, torch.empty_like(t), global_indices(t)) for n, t in tensors.items())


def test_a_model_without_whole_blocks_is_refused():
    shape = resolve_shape(TABLE).model_copy(update={"hidden_size": 200})
    with pytest.raises(UserError, match="--dtype fp8-block.* fp8-channel"):
        config_of_scheme(SCHEMES["fp8-block"], HFNames(shape, repeat_shared=False))


def rewrite(folder, stored):
    header, records = lay_out((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items())
    path = folder / SINGLE_FILE
    path.write_bytes(header + bytes(sum(record.nbytes for record in records.values())))
    with TensorFile(path, records, writable=True) as file:
        for name, tensor in stored.items():
            file.write(name, tuple((0, size) for size in tensor.shape), tensor)


def change_config(folder, quantization):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {CONFIG_KEY: quantization}))


@pytest.mark.parametrize("name, change, words", [
    ("model.layers.0.self_attn.o_proj.weight_scale", lambda t: None, "is FP8, but"),
    ("model.layers.0.self_attn.o_proj.weight_scale", lambda t: t[:1].contiguous(), "it must be [2, 1]"),
    ("model.layers.0.self_attn.o_proj.weight", lambda t: t.to(torch.bfloat16), "not part of this model"),
    ("model.layers.1.mlp.gate.weight", lambda t: t.to(torch.float8_e4m3fn), "only projections"),
])  # fmt: skip
def test_scales_that_do_not_fit_are_refused(name, change, words, tensors, tmp_path):
    folder = export(tmp_path / "a", SCHEMES["fp8-block"], tensors)
    stored = stored_in(folder)
    stored[name] = change(stored[name])
    rewrite(folder, {key: tensor for key, tensor in stored.items() if tensor is not None})
    with pytest.raises(UserError, match=words.replace("[", "\\[").replace("]", "\\]")):
        check_folder(folder, resolve_shape(TABLE))


GLM5 = resolve_shape(ModelConfig(**model_table(
    flavor="debug-glm5", vocab_size=512, num_hidden_layers=2, indexer_types=["full", "shared"], hidden_size=128,
    q_lora_rank=128, kv_lora_rank=128, intermediate_size=128, moe_intermediate_size=128, n_routed_experts=2,
    num_experts_per_tok=1,
)))  # fmt: skip


def glm5_folder(folder, scheme):
    """A folder of the small GLM-5, and its weights."""
    torch.manual_seed(0)
    model = Transformer(GLM5)
    weights = dict([*model.named_parameters(), *model.named_buffers()])
    weights = {name: torch.randn_like(tensor) * 0.02 for name, tensor in weights.items()}
    config = config_of(GLM5, None, eos_ids=[0], dtype="bfloat16")
    if scheme is not None:
        config[CONFIG_KEY] = config_of_scheme(scheme, HFNames(GLM5, repeat_shared=False))
    export_weights(folder, GLM5, config, weights, options=ExportOptions(scheme=scheme))
    return folder, weights


def filled(folder, weights):
    tensors = {name: torch.empty_like(weight) for name, weight in weights.items()}
    with FolderReader(folder, GLM5) as reader:
        for name, tensor in tensors.items():
            assert reader.fill(name, tensor, global_indices(tensor)) == []
    return tensors


@pytest.mark.parametrize("name", SCHEMES)
def test_indexers_and_what_the_published_folders_except_stay_in_bf16(name, tmp_path):
    folder, weights = glm5_folder(tmp_path / "a", SCHEMES[name])
    records = read_records(folder / SINGLE_FILE)
    quantised = {key for key, record in records.items() if record.dtype == torch.float8_e4m3fn}
    assert len(quantised) > 10
    assert not any(part in key for key in quantised for part in ("indexer", "mlp.gate.", "lm_head", "eh_proj"))
    ignored = json.loads((folder / "config.json").read_text())[CONFIG_KEY]["ignore"]
    patterns = [pattern.removeprefix("re:") for pattern in ignored if pattern.startswith("re:")]
    linear = {key.removesuffix(".weight") for key, record in records.items() if len(record.shape) == 2}
    linear -= {key.removesuffix(".weight") for key in quantised} | {"lm_head"}
    linear = {key for key in linear if not key.endswith("_scale")}
    # What is not in FP8 is excepted, as servers read the list, and nothing that is in FP8.
    assert all(any(re.match(pattern, module) for pattern in patterns) for module in linear)
    assert any(re.match(pattern, "model.layers.0.self_attn.indexers_proj") for pattern in patterns)
    modules = {key.removesuffix(".weight") for key in quantised}
    assert not any(re.match(pattern, module) for pattern in patterns for module in modules)
    back = filled(folder, weights)
    for key, weight in back.items():
        if "indexer" in key:
            assert torch.equal(weight, weights[key].bfloat16().float()), key
    export_weights(
        tmp_path / "b", GLM5, json.loads((folder / "config.json").read_text()), back,
        options=ExportOptions(scheme=SCHEMES[name]),
    )  # fmt: skip
    assert (tmp_path / "b" / SINGLE_FILE).read_bytes() == (folder / SINGLE_FILE).read_bytes()


def test_index_keys_are_read_in_fp8_and_weights_of_index_heads_are_not(tmp_path):
    folder, weights = glm5_folder(tmp_path / "a", SCHEMES["fp8-block"])
    stored = stored_in(folder)
    prefix = "model.layers.0.self_attn.indexer"
    wanted = {}
    for part in ("wk", "wq_b"):
        key = f"{prefix}.{part}.weight"
        values = Scheme().quantise(stored[key].float())
        box = tuple((0, size) for size in stored[key].shape)
        wanted[part] = Scheme().dequantise(values, tuple(stored[key].shape), box)
        stored |= {key + suffix: tensor for suffix, tensor in values.items()}
    rewrite(folder, stored)
    back = filled(folder, weights)
    for part, weight in wanted.items():
        assert torch.equal(back[f"layers.0.self_attn.indexer.{part}.weight"], weight)
    key = f"{prefix}.weights_proj.weight"
    stored |= {key + suffix: tensor for suffix, tensor in Scheme().quantise(stored[key].float()).items()}
    rewrite(folder, stored)
    with pytest.raises(UserError, match="weights_proj.weight is FP8; only projections"):
        check_folder(folder, GLM5)


@pytest.mark.slow
def test_convert_writes_fp8_and_a_plain_export_of_it_drops_the_quantization_config(tensors, tmp_path, capsys):
    plain = export(tmp_path / "plain", None, tensors)
    step = tmp_path / "steps"
    assert main(["convert", "from-hf", "--model", str(plain), "--output", str(step)]) == 0
    command = ["convert", "to-hf", "--checkpoint", str(step / "step-000000"), "--tokenizer", "builtin"]
    assert main([*command, "--output", str(tmp_path / "fp8"), "--dtype", "fp8-block"]) == 0
    assert "largest relative error 0.0" in capsys.readouterr().out
    assert main(["convert", "from-hf", "--model", str(tmp_path / "fp8"), "--output", str(tmp_path / "again")]) == 0
    back, want = step_tensors(tmp_path / "again/step-000000"), read(tmp_path / "fp8")
    assert all(torch.equal(back[name], want[name]) for name in want)
    command[3] = str(tmp_path / "again/step-000000")
    assert main([*command, "--output", str(tmp_path / "bf16")]) == 0
    assert CONFIG_KEY not in json.loads((tmp_path / "bf16/config.json").read_text())
    got = read(tmp_path / "bf16")
    assert all(torch.equal(got[name], want[name]) for name in want)  # powers of two: exact in BF16
