"""A base in 8 or 4 bits: bit for bit the model of a base that holds the converted weights, and less memory."""

from functools import partial
from statistics import NormalDist

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch.autograd.graph import saved_tensors_hooks
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

from glm46.compute.model import quantised_weights
from glm46.compute.model.adapters import add_adapters, without_adapters
from glm46.compute.model.quantised_weights import (
    NF4_LEVELS,
    in_compute_type,
    in_one_kernel,
    let_conversions_compile,
)
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.magnitudes import Magnitudes
from glm46.config.adapter import BASE_FORMATS, AdapterConfig
from glm46.config.errors import UserError
from glm46.config.model import ModelConfig
from glm46.config.presets import PRESETS, resolve_shape
from glm46.files.tensor_file import TensorFile, read_records
from glm46.run.parameters import base_families, describe_base, in_base_dtype, named_rows, scales_name
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.folder_check import check_base
from glm46.storage.huggingface.folder_tensors import SINGLE_FILE
from glm46.storage.huggingface.import_weights import FolderReader, encode_nf4, import_weights, quantise_base
from glm46.storage.huggingface.int4 import Int4
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.schemes import CONFIG_KEY, FP8_SCHEMES, config_of_scheme, quantised_names
from tests.builders import model_table
from tests.unit.compute.model.test_adapters import randomise_adapters
from tests.unit.storage.huggingface.test_hf_fp8 import rewrite, stored_in

SCHEMES = FP8_SCHEMES | {"int4": Int4(), "int4-32": Int4(32)}
# Keys and values are narrower than a block, so attention's first three matrices are not in FP8.
SHAPE = resolve_shape(
    ModelConfig(**model_table(
        flavor="debug", vocab_size=512, hidden_size=256, num_hidden_layers=2, intermediate_size=256,
        moe_intermediate_size=128, n_routed_experts=4, num_experts_per_tok=2, num_attention_heads=4, head_dim=64,
        num_key_value_heads=1, num_nextn_predict_layers=0,
    ))
)  # fmt: skip


def write_folder(folder, scheme: str | None, shape=SHAPE):
    """A folder of random weights; scales of rows are made numbers that are not powers of two, as published ones."""
    torch.manual_seed(0)
    tensors = Transformer(shape).state_dict()
    for tensor in tensors.values():
        torch.nn.init.normal_(tensor, std=0.05)
    config = config_of(shape, None, eos_ids=[0], dtype="bfloat16")
    if scheme is not None:
        config[CONFIG_KEY] = config_of_scheme(SCHEMES[scheme], HFNames(shape, repeat_shared=False))
    export_weights(folder, shape, config, tensors, options=ExportOptions(scheme=SCHEMES.get(scheme)))
    if scheme == "fp8-channel":
        records = read_records(folder / SINGLE_FILE)
        file = TensorFile(folder / SINGLE_FILE, records, writable=True)
        for name, record in records.items():
            if name.endswith("_scale"):
                box = tuple((0, size) for size in record.shape)
                file.write(name, box, file.read(name, box) * torch.empty(record.shape).uniform_(1, 1.9))
        file.close()
    return folder


def build(folder, adapter: AdapterConfig, dtype: torch.dtype, weights=None) -> Transformer:
    """``weights``: those to have in place of the folder's, by name."""
    model = Transformer(SHAPE).cast(dtype)
    add_adapters(model, adapter)
    base = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    import_weights(folder, SHAPE, base | dict(model.named_buffers()))
    for name, weight in (weights or {}).items():
        base[name].copy_(weight)
    randomise_adapters(model)
    magnitudes = Magnitudes(model, adapter, None)
    magnitudes.start(new_adapters=True)
    return model


def converted_weights(model: Transformer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The frozen weights of a quantised base, in the type that products take them in."""
    base = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    scales = {name: base.get(scales_name(name)) for name in base}
    return {name: in_compute_type(p, scales[name], dtype) for name, p in base.items() if not name.endswith("_scale")}


def gradients(model, batch, sizes: dict[int, int] | None = None):
    """Loss and gradients of a batch; ``sizes`` gets the bytes of what forward saves, by address."""

    def pack(tensor):
        if sizes is not None:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("scheme", "base_dtype", "adapter"),
    [
        ("fp8-block", "float8", {}),
        ("fp8-channel", "float8", {"name": "dora"}),
        ("fp8-block", "float8", {"layers": (1, 1), "targets": ("attention",)}),  # most weights have no adapter
        ("int4", "int4", {}), ("int4-32", "int4", {"name": "dora"}), (None, "int4", {}),
        (None, "nf4", {"name": "dora"}), ("fp8-channel", "nf4", {}),
        ("int4", "nf4", {"layers": (1, 1), "targets": ("attention",)}),
    ],
)  # fmt: skip
def test_a_quantised_base_is_the_converted_base_bit_for_bit(scheme, base_dtype, adapter, dtype, tmp_path, random_batch):
    folder, batch = write_folder(tmp_path / "base", scheme), random_batch(SHAPE)
    adapter = AdapterConfig(rank=8, **adapter)
    stored = build(folder, adapter.model_copy(update={"base_dtype": base_dtype}), dtype)
    is_as_stored = scheme is not None and base_dtype in {"f": ["float8"], "i": ["int4"]}[scheme[0]]
    converted = build(folder, adapter, dtype, None if is_as_stored else converted_weights(stored, dtype))
    kept = [p for n, p in stored.named_parameters() if n.endswith(("o_proj.weight", "experts.down"))]
    assert {p.dtype for p in kept} == {torch.uint8}
    expected, found = (gradients(model, batch) for model in (converted, stored))
    assert set(expected) == set(found)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with torch.no_grad(), without_adapters([converted, stored]):
        assert torch.equal(stored(batch["input_ids"]), converted(batch["input_ids"]))


@pytest.mark.parametrize("quantised", BASE_FORMATS)
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_forward_keeps_no_converted_weight(is_compiled, quantised, tmp_path, random_batch):
    """What forward saves shrinks by what the weights take less: 4 bytes, less their own and those of the scales."""
    folder, batch = write_folder(tmp_path / "base", "fp8-block"), random_batch(SHAPE)
    saved = []
    for base_dtype in (None, quantised):
        sizes: dict[int, int] = {}
        model = build(folder, AdapterConfig(rank=8, base_dtype=base_dtype), torch.float32)
        for layer in model.layers.values() if is_compiled else ():
            layer.forward = torch.compile(layer.forward, backend="aot_eager")
        gradients(model, batch, sizes)
        saved.append(sum(sizes.values()))
    # The input of layer 0 has no gradient: a graph saves none of its first weights.
    unsaved = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkv"] if is_compiled else []
    rows = in_base_dtype([row for name, row in named_rows(SHAPE).items() if name not in unsaved], SHAPE, quantised)
    weights = sum(row.numel(SHAPE) for row in rows if row.is_quantised)
    stored = sum(row.numel(SHAPE) * row.stored_bytes for row in rows if row.stored_bytes)
    assert saved[0] - saved[1] == pytest.approx(4 * weights - stored, rel=0.02)  # some of layer 0 are not saved


@pytest.mark.parametrize("preset", PRESETS)
def test_what_stays_in_fp8_is_what_a_folder_of_blocks_has(preset):
    shape = PRESETS[preset].model_copy(update={"num_nextn_predict_layers": 0})
    names = HFNames(shape, repeat_shared=False)
    families = base_families(shape, "float8")
    ours = {name for name, (entry, _) in names.places.items() if entry.row.fp8_family in families}
    assert ours == quantised_names(names, FP8_SCHEMES["fp8-block"])


@pytest.mark.parametrize("scheme", [None, "fp8-block"])
def test_a_folder_without_the_weights_in_fp8_is_refused(scheme, tmp_path):
    folder = write_folder(tmp_path / "base", scheme)
    if scheme is not None:
        check_base(folder, SHAPE, "float8")
        name, stored = "model.layers.1.self_attn.o_proj.weight", stored_in(folder)
        stored[name] = stored[name].to(torch.bfloat16)
        rewrite(folder, {key: tensor for key, tensor in stored.items() if key != f"{name}_scale"})
    with pytest.raises(UserError, match=f"{folder}.*convert to-hf --dtype fp8-block"):
        check_base(folder, SHAPE, "float8")


@pytest.mark.parametrize("base_dtype", ["int4", "nf4"])
def test_a_base_is_quantised_from_any_folder_as_from_its_weights(base_dtype, tmp_path):
    """As of the whole tensor at once; what a folder in INT4 holds is compared above."""
    adapter = AdapterConfig(rank=8, base_dtype=base_dtype)
    for scheme in (None, "fp8-block", "int4-32"):
        folder = write_folder(tmp_path / str(scheme), scheme)
        found, part = dict(build(folder, adapter, torch.float32).named_parameters()), "layers.1.self_attn.o_proj.weight"
        with FolderReader(folder, SHAPE) as reader:
            weight = torch.empty(256, 256)
            reader.read(f"model.{part}", ((0, 256), (0, 256)), weight)
        if (scheme, base_dtype) != ("int4-32", "int4"):
            values, scales = quantise_base(weight, base_dtype)
            assert torch.equal(found[part], values)
            assert torch.equal(found[scales_name(part)], scales.view(found[scales_name(part)].dtype))


def test_values_of_int4_are_those_that_compressed_tensors_unpacks(tmp_path):
    folder = write_folder(tmp_path / "base", "int4")
    model, stored = build(folder, AdapterConfig(rank=8, base_dtype="int4"), torch.float32), stored_in(folder)
    name = "layers.1.self_attn.o_proj.weight"
    theirs = unpack_from_int32(stored[f"model.{name}_packed"], 4, torch.Size((256, 256)))
    theirs = theirs.float() * stored[f"model.{name}_scale"].float().repeat_interleave(128, dim=1)
    assert torch.equal(converted_weights(model, torch.float32)[name], theirs)


def test_values_of_nf4_are_those_of_qlora():
    """The levels by its formula, as quantiles; and of codes of torchao its values, whose levels have four decimals.
    The largest value of each block is 1, which its double quantisation keeps."""
    quantile, end = NormalDist().inv_cdf, 0.9677083
    below, above = ([end + (0.5 - end) * i / n for i in range(n)] for n in (7, 8))
    levels = torch.tensor([*(-quantile(p) for p in below), 0.0, *(quantile(p) for p in reversed(above))])
    assert torch.allclose(levels / levels.max(), torch.tensor(NF4_LEVELS), atol=1e-6)
    torch.manual_seed(0)
    weight = torch.empty(128, 512).uniform_(-1, 1)
    weight[:, ::64] = 1.0
    theirs = to_nf4(weight, 64, 256)
    codes = theirs.quantized_data.view(128, 256)
    swapped, scales = codes >> 4 | codes << 4, torch.full((128, 8), 0x3C00 >> 7, dtype=torch.uint8)
    found = in_compute_type(swapped, scales, torch.float32)
    assert torch.allclose(found, theirs.get_original_weight(), rtol=0, atol=6e-5)


@pytest.mark.parametrize("degrees", [3.0, 1e6])
def test_nf4_loses_less_than_with_the_published_double_quantisation(degrees):
    """Of weights with heavy tails and of normal ones; and zeros, tiny and large weights are held."""
    torch.manual_seed(0)
    weight = torch.distributions.StudentT(degrees).sample((256, 4096)) * 0.02
    theirs = to_nf4(weight, 64, 256).get_original_weight()
    ours = in_compute_type(*encode_nf4(weight), torch.float32)
    assert (ours - weight).norm() < 0.99 * (theirs - weight).norm()
    edges = torch.stack([torch.zeros(64), torch.full((64,), 1e-9), torch.full((64,), -3e4)])
    found = in_compute_type(*encode_nf4(edges), torch.float32)
    assert torch.equal(found[0], edges[0]) and found[1].abs().max() < 1e-5
    assert torch.allclose(found[2], edges[2], rtol=0.07)


# Guards and the traced operators do not depend on the back end. Whether the kernel of Inductor has the same bits does.
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.thorough])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base_dtype", ["int4", "nf4"])
def test_one_kernel_converts_to_the_same_bits_and_is_compiled_once(base_dtype, dtype, backend, monkeypatch):
    monkeypatch.setattr(quantised_weights, "_one_kernel", None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    torch.manual_seed(0)
    weights = [quantise_base(torch.randn(shape) * 0.05, base_dtype) for shape in ((64, 128), (4, 96, 256), (3, 64))]
    every_byte, groups = torch.arange(256, dtype=torch.uint8).view(4, 64), 128 // BASE_FORMATS[base_dtype].columns
    weights.append((every_byte, weights[0][1][:4, :groups].contiguous()))
    if base_dtype == "int4":  # scales that a folder may hold
        scales = torch.tensor([torch.inf, -0.0, 1e-39, -3e38], dtype=torch.bfloat16).view(torch.int16)
        weights.append((every_byte, scales.repeat(4, 1)))
    plain = [in_compute_type(*weight, dtype) for weight in weights]
    let_conversions_compile()
    for call, (weight, expected) in enumerate(zip(weights, plain, strict=True)):
        with torch.compiler.set_stance("default" if call == 0 else "fail_on_recompile"):
            found = in_one_kernel(*weight, dtype)
        width = {4: torch.int32, 2: torch.int16}[found.element_size()]
        both_nan = found.isnan() & expected.isnan()
        assert found.shape == expected.shape
        assert ((found.view(width) == expected.view(width)) | both_nan).all()


def test_projections_that_do_not_fit_are_named():
    said = describe_base(SHAPE.model_copy(update={"intermediate_size": 272}), "nf4")
    assert said.endswith("used; not mlp.gate_proj, mlp.up_proj, mlp.down_proj, which have no groups of 64"), said
    assert "; not" not in describe_base(SHAPE, "nf4")


@pytest.mark.parametrize(
    ("scheme", "scales", "said"),
    [
        (Int4(16), torch.bfloat16, "groups of 16, not of a multiple of 32"),
        (Int4(), torch.float16, "float16, those of a base are BF16"),
    ],
)
def test_an_int4_folder_that_cannot_stay_as_it_is_is_refused(scheme, scales, said, tmp_path, monkeypatch):
    monkeypatch.setitem(SCHEMES, "int4", scheme)
    folder = write_folder(tmp_path / "base", "int4")
    rewrite(folder, {n: t.to(scales) if n.endswith("_scale") else t for n, t in stored_in(folder).items()})
    with pytest.raises(UserError, match=f'{folder}.*{said}.*adapter.base_dtype = "nf4"'):
        check_base(folder, SHAPE, "int4")
    check_base(folder, SHAPE, "nf4")
