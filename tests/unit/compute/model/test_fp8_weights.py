"""A base that stays in FP8: bit for bit the model of a base that holds the converted weights, and less memory."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from glm46.compute.model.adapters import add_adapters, without_adapters
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.magnitudes import Magnitudes
from glm46.config.adapter import AdapterConfig
from glm46.config.errors import UserError
from glm46.config.model import ModelConfig
from glm46.config.presets import PRESETS, resolve_shape
from glm46.files.tensor_file import TensorFile, read_records
from glm46.run.parameters import fp8_families, in_float8, named_rows
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.folder_check import check_fp8_folder
from glm46.storage.huggingface.folder_tensors import SINGLE_FILE
from glm46.storage.huggingface.import_weights import import_weights
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.schemes import CONFIG_KEY, FP8_SCHEMES, config_of_scheme, quantised_names
from tests.unit.compute.model.test_adapters import randomise_adapters
from tests.unit.storage.huggingface.test_hf_fp8 import rewrite, stored_in

# Keys and values are narrower than a block, so attention's first three matrices are not in FP8.
SHAPE = resolve_shape(
    ModelConfig(
        flavor="debug", vocab_size=512, hidden_size=256, num_hidden_layers=2, intermediate_size=256,
        moe_intermediate_size=128, n_routed_experts=4, num_experts_per_tok=2, num_attention_heads=4, head_dim=64,
        num_key_value_heads=1, num_nextn_predict_layers=0,
    )
)  # fmt: skip


def write_folder(folder, scheme: str | None, shape=SHAPE):
    """A folder of random weights; scales of rows are made numbers that are not powers of two, as published ones."""
    torch.manual_seed(0)
    tensors = Transformer(shape).state_dict()
    for tensor in tensors.values():
        torch.nn.init.normal_(tensor, std=0.05)
    config = config_of(shape, None, eos_ids=[0], dtype="bfloat16")
    if scheme is not None:
        config[CONFIG_KEY] = config_of_scheme(FP8_SCHEMES[scheme], HFNames(shape, repeat_shared=False))
    export_weights(folder, shape, config, tensors, options=ExportOptions(scheme=FP8_SCHEMES.get(scheme)))
    if scheme == "fp8-channel":
        records = read_records(folder / SINGLE_FILE)
        file = TensorFile(folder / SINGLE_FILE, records, writable=True)
        for name, record in records.items():
            if name.endswith("_scale"):
                box = tuple((0, size) for size in record.shape)
                file.write(name, box, file.read(name, box) * torch.empty(record.shape).uniform_(1, 1.9))
        file.close()
    return folder


def build(folder, adapter: AdapterConfig, dtype: torch.dtype) -> Transformer:
    model = Transformer(SHAPE).cast(dtype)
    add_adapters(model, adapter)
    base = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    import_weights(folder, SHAPE, base | dict(model.named_buffers()))
    randomise_adapters(model)
    magnitudes = Magnitudes(model, adapter, None)
    magnitudes.start(new_adapters=True)
    return model


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
    ("scheme", "adapter"),
    [
        ("fp8-block", {}),
        ("fp8-channel", {"name": "dora"}),
        ("fp8-block", {"layers": (1, 1), "targets": ("attention",)}),  # most weights in FP8 have no adapter
    ],
    ids=["lora", "dora-rows", "few"],
)
def test_a_base_in_fp8_is_the_converted_base_bit_for_bit(scheme, adapter, dtype, tmp_path, random_batch):
    folder, batch = write_folder(tmp_path / "base", scheme), random_batch(SHAPE)
    adapter = AdapterConfig(rank=8, **adapter)
    in_fp8 = adapter.model_copy(update={"base_dtype": "float8"})
    converted, stored = (build(folder, one, dtype) for one in (adapter, in_fp8))
    kept = [p for n, p in stored.named_parameters() if n.endswith(("o_proj.weight", "experts.down"))]
    assert {p.dtype for p in kept} == {torch.uint8}
    expected, found = (gradients(model, batch) for model in (converted, stored))
    assert set(expected) == set(found)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    with torch.no_grad(), without_adapters([converted, stored]):
        assert torch.equal(stored(batch["input_ids"]), converted(batch["input_ids"]))


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_forward_keeps_no_converted_weight(is_compiled, tmp_path, random_batch):
    """What forward saves shrinks by the bytes of the weights: 3 of 4, less a thirty-second for the scales."""
    folder, batch = write_folder(tmp_path / "base", "fp8-block"), random_batch(SHAPE)
    saved = []
    for base_dtype in (None, "float8"):
        sizes: dict[int, int] = {}
        model = build(folder, AdapterConfig(rank=8, base_dtype=base_dtype), torch.float32)
        for layer in model.layers.values() if is_compiled else ():
            layer.forward = torch.compile(layer.forward, backend="aot_eager")
        gradients(model, batch, sizes)
        saved.append(sum(sizes.values()))
    rows = in_float8(list(named_rows(SHAPE).values()), SHAPE)
    weights = sum(row.numel(SHAPE) for row in rows if row.stored_bytes == 1)
    assert saved[0] - saved[1] == pytest.approx(weights * (3 - 1 / 32), rel=0.02)  # some of layer 0 are not saved


@pytest.mark.parametrize("preset", PRESETS)
def test_what_stays_in_fp8_is_what_a_folder_of_blocks_has(preset):
    shape = PRESETS[preset].model_copy(update={"num_nextn_predict_layers": 0})
    names = HFNames(shape, repeat_shared=False)
    families = fp8_families(shape)
    ours = {name for name, (entry, _) in names.places.items() if entry.row.fp8_family in families}
    assert ours == quantised_names(names, FP8_SCHEMES["fp8-block"])


@pytest.mark.parametrize("scheme", [None, "fp8-block"])
def test_a_folder_without_the_weights_in_fp8_is_refused(scheme, tmp_path):
    folder = write_folder(tmp_path / "base", scheme)
    if scheme is not None:
        check_fp8_folder(folder, SHAPE)
        name, stored = "model.layers.1.self_attn.o_proj.weight", stored_in(folder)
        stored[name] = stored[name].to(torch.bfloat16)
        rewrite(folder, {key: tensor for key, tensor in stored.items() if key != f"{name}_scale"})
    with pytest.raises(UserError, match=f"{folder}.*convert to-hf --dtype fp8-block"):
        check_fp8_folder(folder, SHAPE)
