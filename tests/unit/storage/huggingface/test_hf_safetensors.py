"""Import and export of Hugging Face folders: equal bytes, readable by other tools, refused if anything is wrong."""

import json
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Glm4MoeLiteForCausalLM

from glm46.compute.distributed.ranks import CheckpointError
from glm46.compute.model.transformer import Transformer
from glm46.config.errors import UserError
from glm46.config.presets import PRESETS
from glm46.files.tensor_file import TensorFile, lay_out, read_records
from glm46.storage.checkpoint import boxes
from glm46.storage.checkpoint.boxes import intervals_of, overlaps
from glm46.storage.huggingface.config_json import config_of, read_config, shape_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.folder_check import check_folder, stored_shape
from glm46.storage.huggingface.folder_tensors import find_tensors
from glm46.storage.huggingface.import_weights import import_weights
from glm46.storage.huggingface.names import HFNames, HFPart
from tests.unit.storage.huggingface import adapters
from tests.unit.storage.huggingface.adapters import EOS, LATENT

TINY = adapters.TINY | {"num_hidden_layers": 3, "n_routed_experts": 6}
MODELS = {  # shape, whether the folder repeats embedding and head
    "4.5-like": (PRESETS["GLM-4.5"].model_copy(update=TINY), True),
    "4.6-like": (PRESETS["GLM-4.6"].model_copy(update=TINY), False),
    "Air-like": (PRESETS["GLM-4.5-Air"].model_copy(update=TINY), True),
    "4.7-Flash-like": (PRESETS["GLM-4.7-Flash"].model_copy(update=TINY | LATENT), True),
}


def empty_model(shape, dtype=torch.float32):
    with torch.device("cpu"):
        model = Transformer(shape)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return model, {
        name: t.detach().fill_(torch.nan).to(torch.float32 if name.endswith("_bias") else dtype)
        for name, t in tensors.items()
    }


def zeros_of(shape):
    return {name: torch.zeros_like(tensor) for name, tensor in empty_model(shape)[1].items()}


def make_folder(folder, shape, repeat_shared, files=3, seed=0):
    """Write a small published checkpoint with the `safetensors` library; returns its tensors."""
    generator = torch.Generator().manual_seed(seed)
    names = HFNames(shape, repeat_shared=repeat_shared)
    tensors = {}
    for hf_name, (entry, part) in names.places.items():
        values = torch.randn(part.hf_shape, generator=generator) * (part.hf_shape[-1] ** -0.5)
        tensors[hf_name] = values if entry.is_fp32 else values.bfloat16()
    for entry in names.entries.values():
        for part in entry.parts:
            if part.is_repeat:
                tensors[part.hf_name] = tensors[entry.parts[0].hf_name].clone()
    folder.mkdir()
    config = config_of(shape, None, eos_ids=EOS, dtype="bfloat16") | {"unknown_field": [1, {"a": None}]}
    (folder / "config.json").write_text(json.dumps(config))
    shuffled = sorted(tensors, key=lambda name: name[::-1])  # neighbours in the model are in different files
    weight_map = {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = {name: tensors[name] for name in shuffled[i::files]}
        safetensors.torch.save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def read_folder(folder):
    """All tensors of a folder through the `safetensors` library."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(file)
    return tensors


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("shape, repeat_shared", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_round_trip_keeps_every_byte_and_the_config(shape, repeat_shared, dtype, tmp_path):
    published = make_folder(tmp_path / "in", shape, repeat_shared)
    _, tensors = empty_model(shape, dtype)
    read = import_weights(tmp_path / "in", shape, tensors)
    assert read == sum(t.nbytes for t in published.values())
    raw = read_config(tmp_path / "in")
    config = config_of(shape_of(raw), raw, eos_ids=EOS, dtype="bfloat16")
    options = ExportOptions(repeat_shared=repeat_shared, max_file_bytes=20_000)
    written = export_weights(tmp_path / "out", shape, config, tensors, options=options)
    assert written == read
    again = read_folder(tmp_path / "out")
    assert set(again) == set(published)
    assert all(same_bits(again[name], published[name]) for name in published)
    assert json.loads((tmp_path / "out/config.json").read_text()) == raw
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(published) and index["metadata"]["total_size"] == read
    sizes = [file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) >= 3
    assert not list(tmp_path.glob("*.tmp"))


def model_of(folder, shape):
    """Our model with the weights of a folder, and its tensors."""
    model, _ = empty_model(shape)
    tensors = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    import_weights(folder, shape, tensors)
    return model, tensors


def require_equal_logits(ours, theirs):
    tokens = torch.randint(0, 48, (2, 17))
    # FP32, another order of sums.
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("files", [1, 3])
def test_transformers_computes_the_same_logits_from_the_export(files, tmp_path):
    shape, _ = MODELS["4.6-like"]
    make_folder(tmp_path / "in", shape, False)
    model, tensors = model_of(tmp_path / "in", shape)
    config = config_of(shape, read_config(tmp_path / "in"), eos_ids=EOS, dtype="float32")
    options = ExportOptions(dtype=torch.float32, max_file_bytes=10**9 // (1 if files == 1 else 10**5))
    export_weights(tmp_path / "out", shape, config, tensors, options=options)
    assert (tmp_path / "out/model.safetensors").exists() == (files == 1)
    theirs = Glm4MoeForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.float32
    require_equal_logits(model, theirs)


def test_a_folder_that_transformers_saved_is_read_without_prediction_layers(tmp_path):
    shape, _ = MODELS["4.6-like"]
    make_folder(tmp_path / "in", shape, False)
    theirs = Glm4MoeForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "saved")
    stored = stored_shape(tmp_path / "saved")
    assert stored == shape.model_copy(update=dict(num_nextn_predict_layers=0))
    assert stored_shape(tmp_path / "in") == shape
    model, _ = model_of(tmp_path / "saved", stored)
    require_equal_logits(model, theirs)
    with pytest.raises(UserError, match="num_nextn_predict_layers = 1; set it to 0"):
        import_weights(tmp_path / "saved", shape, {})


@pytest.mark.parametrize(
    "change",
    [
        dict(n_shared_experts=0), dict(first_k_dense_replace=0), dict(first_k_dense_replace=3),
        dict(first_k_dense_replace=9), dict(attention_bias=False), dict(use_qk_norm=False),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_models_without_a_part_go_from_transformers_and_back(change, tmp_path):
    shape = MODELS["4.6-like"][0].model_copy(update=dict(num_nextn_predict_layers=0) | change)
    config = Glm4MoeConfig(**config_of(shape, None, eos_ids=EOS, dtype="float32"))
    theirs = Glm4MoeForCausalLM(config)
    theirs.save_pretrained(tmp_path / "saved")
    assert stored_shape(tmp_path / "saved") == shape
    model, tensors = model_of(tmp_path / "saved", shape)
    require_equal_logits(model, theirs)
    raw = config_of(shape, read_config(tmp_path / "saved"), eos_ids=EOS, dtype="float32")
    export_weights(tmp_path / "out", shape, raw, tensors, options=ExportOptions(dtype=torch.float32))
    saved, again = read_folder(tmp_path / "saved"), read_folder(tmp_path / "out")
    assert set(again) == set(saved) and all(same_bits(again[name], saved[name]) for name in saved)
    _, report = Glm4MoeForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())


def test_flash_goes_to_transformers_and_back(tmp_path):
    shape = MODELS["4.7-Flash-like"][0].model_copy(update={"num_nextn_predict_layers": 0, "first_k_dense_replace": 2})
    make_folder(tmp_path / "in", shape, False)
    theirs, report = Glm4MoeLiteForCausalLM.from_pretrained(
        tmp_path / "in", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    theirs.save_pretrained(tmp_path / "saved")
    assert stored_shape(tmp_path / "saved") == shape
    model, tensors = model_of(tmp_path / "saved", shape)
    for layer in theirs.model.layers:  # not that of the config
        layer.self_attn.q_a_layernorm.variance_epsilon = layer.self_attn.kv_a_layernorm.variance_epsilon = 1e-5
    require_equal_logits(model, theirs)
    raw = config_of(shape, read_config(tmp_path / "saved"), eos_ids=EOS, dtype="float32")
    export_weights(tmp_path / "out", shape, raw, tensors, options=ExportOptions(dtype=torch.float32))
    saved, again = read_folder(tmp_path / "saved"), read_folder(tmp_path / "out")
    assert set(again) == set(saved) and all(same_bits(again[name], saved[name]) for name in saved)
    assert read_config(tmp_path / "out") == raw == read_config(tmp_path / "saved") | {"dtype": "float32"}


def test_repeats_may_be_dropped_by_an_export(tmp_path):
    shape, _ = MODELS["4.5-like"]
    published = make_folder(tmp_path / "in", shape, True)
    _, tensors = empty_model(shape)
    import_weights(tmp_path / "in", shape, tensors)
    config = read_config(tmp_path / "in")
    export_weights(tmp_path / "out", shape, config, tensors, options=ExportOptions(repeat_shared=False))
    repeats = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
    assert set(published) - set(read_folder(tmp_path / "out")) == repeats
    _, again = empty_model(shape)
    import_weights(tmp_path / "out", shape, again)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_a_run_may_have_fewer_prediction_layers_than_the_folder(tmp_path):
    shape, _ = MODELS["4.5-like"]
    make_folder(tmp_path / "in", shape, True)
    without = shape.model_copy(update=dict(num_nextn_predict_layers=0))
    _, tensors = empty_model(without)
    import_weights(tmp_path / "in", without, tensors)
    assert not any(t.isnan().any() for t in tensors.values())
    more = shape.model_copy(update=dict(num_nextn_predict_layers=2))
    with pytest.raises(
        UserError, match="num_nextn_predict_layers = 1, but .* model.shape.num_nextn_predict_layers = 2; set it"
    ):
        import_weights(tmp_path / "in", more, {})


@st.composite
def cut_tensor(draw):
    """A tensor, one box of it as a Hugging Face tensor, and the indices that a rank holds."""
    rows, columns, experts = draw(st.integers(1, 7)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    held = []
    for size in (experts, 2 * rows, columns):
        places = draw(st.lists(st.integers(0, size - 1), unique=True))
        held.append(torch.tensor(sorted(places), dtype=torch.int64))
    part = HFPart("x", (rows, columns), (draw(st.integers(0, experts - 1)), draw(st.sampled_from([0, rows])), 0))
    return (experts, 2 * rows, columns), part, held


@pytest.mark.slow
@given(cut_tensor(), st.integers(1, 6))
@settings(max_examples=300)
def test_boxes_of_a_rank_are_what_indexing_gives(tmp_path_factory, case, most):
    """For any held indices, read and write move exactly the values that both sides hold, each once."""
    size, part, held = case
    reference = torch.arange(float(torch.Size(size).numel())).view(size)
    local = reference[held[0]][:, held[1]][:, :, held[2]]
    hf = reference[part.index()].contiguous()
    file = tmp_path_factory.getbasetemp() / "boxes.safetensors"
    header, records = lay_out([("x", torch.float32, part.hf_shape)])
    file.write_bytes(header + hf.numpy().tobytes())
    inside = torch.zeros(size, dtype=torch.bool)
    inside[part.index()] = True
    kept = inside[held[0]][:, held[1]][:, :, held[2]]
    before, boxes._MOST_ELEMENTS = boxes._MOST_ELEMENTS, most
    try:
        found = list(overlaps(part.start, part.hf_shape, [intervals_of(index) for index in held]))
    finally:
        boxes._MOST_ELEMENTS = before
    got, times = torch.full_like(local, -1.0), torch.zeros_like(local)
    with TensorFile(file, records) as opened:
        for overlap in found:
            got[overlap.local] = opened.read("x", overlap.box)
            times[overlap.local] += 1
        assert opened.bytes_moved == 4 * int(kept.sum())
    assert torch.equal(times, kept.float()) and torch.equal(got[kept], local[kept]) and (got[~kept] == -1).all()
    file.write_bytes(header + bytes(hf.nbytes))
    with TensorFile(file, records, writable=True) as opened:
        for overlap in found:
            opened.write("x", overlap.box, local[overlap.local].contiguous())
    blank = torch.zeros(size)
    blank[held[0].view(-1, 1, 1), held[1].view(-1, 1), held[2]] = local
    assert torch.equal(safetensors.torch.load_file(file)["x"], blank[part.index()])


TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8]


def test_files_of_ours_and_of_the_library_are_the_same_format(tmp_path):
    tensors = {f"t{i}": torch.randint(0, 100, (3, i + 1)).to(dtype) for i, dtype in enumerate(TYPES)}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    header, records = lay_out((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
    path = tmp_path / "ours.safetensors"
    path.write_bytes(header + bytes(sum(t.nbytes for t in tensors.values())))
    with TensorFile(path, records, writable=True) as file:
        for name, t in tensors.items():
            file.write(name, tuple((0, n) for n in t.shape), t)
    assert all(record.offset % record.dtype.itemsize == 0 for record in records.values())
    theirs = safetensors.torch.load_file(path)
    assert all(same_bits(theirs[name], t) and theirs[name].shape == t.shape for name, t in tensors.items())
    assert read_records(path) == records
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors")
    records = read_records(tmp_path / "theirs.safetensors")
    with TensorFile(tmp_path / "theirs.safetensors", records) as file:
        for name, t in tensors.items():
            assert same_bits(file.read(name, tuple((0, n) for n in t.shape)), t)


def damage(path, change):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["b"].update(data_offsets=[8, 24]),  # overlaps a
        lambda h: h["b"].update(data_offsets=[20, 36]),  # a hole
        lambda h: h["b"].update(shape=[5]),
        lambda h: h["b"].update(shape=[-4]),
        lambda h: h["b"].update(dtype="F33"),
        lambda h: h["b"].pop("dtype"),
        lambda h: h["b"].update(data_offsets=[16, "32"]),
        lambda h: h.pop("b"),
        *(0, 5, 8, 40, -1, -16),  # what is kept of the file
    ],
)
def test_headers_that_do_not_fit_their_file_and_truncated_files_are_refused(change, tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(4), "b": torch.ones(4)}, path)
    assert set(read_records(path)) == {"a", "b"}
    damage(path, change) if callable(change) else path.write_bytes(path.read_bytes()[:change])
    with pytest.raises(UserError, match="x.safetensors"):
        read_records(path)


def _cut_last_file(folder):
    path = max(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-10])


def _remove_file(folder):
    max(folder.glob("*.safetensors")).unlink()


def _change_index(folder, change):
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content["weight_map"])
    path.write_text(json.dumps(content))


def _change_file(folder, change):
    path = max(folder.glob("*.safetensors"))
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)
    names = set(tensors)
    _change_index(
        folder,
        lambda m: ([m.pop(n) for n in [n for n in m if m[n] == path.name and n not in names]],
                   m.update(dict.fromkeys(names, path.name))),
    )  # fmt: skip


def _change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _only_pickle(folder):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


HEAD, EMBEDDING = "model.layers.3.shared_head.head.weight", "model.layers.3.embed_tokens.weight"


@pytest.mark.parametrize(
    "break_it, words",
    [
        (_cut_last_file, ": truncated: "),
        (_remove_file, "-of-00003.safetensors: missing"),
        (lambda f: _change_index(f, lambda m: m.update(ghost="model-00001-of-00003.safetensors")), "lacks ghost"),
        (lambda f: _change_index(f, lambda m: m.pop("model.norm.weight")), "holds model.norm.weight"),
        (lambda f: _change_file(f, lambda t: t.update(extra=torch.zeros(2))), ": extra; take a folder of"),
        (lambda f: _change_file(f, lambda t: t.pop(sorted(t)[0])), "1 tensors are missing: "),
        (lambda f: _change_file(f, lambda t: t.update({n: t[n].to(torch.int8) for n in sorted(t)[:1]})), "is int8"),
        (lambda f: _change_file(f, lambda t: t.update({n: t[n][:-1] for n in sorted(t)[:1]})), "the model has"),
        (lambda f: _change_config(f, num_experts_per_tok=3), "num_experts_per_tok = 3, but"),
        (lambda f: _change_config(f, routed_scaling_factor=1.0), "routed_scaling_factor = 1.0, but"),
        (lambda f: _change_config(f, model_type="llama"), "model_type = 'llama'"),
        (lambda f: _change_config(f, quantization_config={}), "quantization_config"),
        (_only_pickle, "pytorch_model.bin is a pickle"),
    ],
)  # fmt: skip
def test_a_broken_folder_is_refused_before_a_weight_is_touched(break_it, words, tmp_path):
    shape, repeat_shared = MODELS["4.5-like"]
    make_folder(tmp_path / "in", shape, repeat_shared)
    break_it(tmp_path / "in")
    _, tensors = empty_model(shape)
    with pytest.raises(UserError) as error:
        import_weights(tmp_path / "in", shape, tensors)
    assert words in str(error.value)
    assert all(t.isnan().all() for t in tensors.values())


@pytest.mark.parametrize("repeat, first", [(HEAD, "lm_head"), (EMBEDDING, "embed_tokens")])
def test_a_repeat_that_differs_is_refused(repeat, first, tmp_path):
    shape, _ = MODELS["4.5-like"]
    make_folder(tmp_path / "in", shape, True)
    path = find_tensors(tmp_path / "in")[repeat][0]
    tensors = safetensors.torch.load_file(path)
    tensors[repeat][3, 4] += 1
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(UserError, match=f"tensor {repeat} differs from {first}.weight"):
        import_weights(tmp_path / "in", shape, empty_model(shape)[1])


def test_a_run_may_stretch_positions(tmp_path):
    shape, _ = MODELS["4.6-like"]
    make_folder(tmp_path / "in", shape, False)
    longer = shape.model_copy(update=dict(rope_theta=1e4, max_position_embeddings=128, sliding_window=8))
    _, tensors = empty_model(longer)
    assert import_weights(tmp_path / "in", longer, tensors) > 0


def test_a_failed_export_leaves_nothing_and_none_overwrites_a_folder(tmp_path):
    shape, _ = MODELS["4.6-like"]
    tensors = zeros_of(shape)
    config = config_of(shape, None, eos_ids=EOS, dtype="bfloat16")
    del tensors["norm.weight"]
    with pytest.raises(CheckpointError, match="norm.weight: 0 of 24 elements were written"):
        export_weights(tmp_path / "out", shape, config, tensors)
    with pytest.raises(CheckpointError, match="norm.adapter"):
        export_weights(tmp_path / "out", shape, config, tensors | {"norm.adapter": torch.zeros(2)})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        export_weights(tmp_path / "out", shape, config, tensors)
    huge = shape.model_copy(update=dict(vocab_size=10**12))
    with pytest.raises(UserError, match="free"):
        export_weights(tmp_path / "new", huge, config, {})


def test_other_files_are_written_with_the_weights(tmp_path):
    shape, _ = MODELS["4.6-like"]
    tensors = zeros_of(shape)
    config = config_of(shape, None, eos_ids=EOS, dtype="bfloat16")
    options = ExportOptions(other_files={"tokenizer.json": b"{}"})
    export_weights(tmp_path / "a/b/out", shape, config, tensors, options=options)
    assert (tmp_path / "a/b/out/tokenizer.json").read_bytes() == b"{}"


def test_a_wrong_config_gives_a_short_message(tmp_path):
    shape, repeat_shared = MODELS["4.6-like"]
    make_folder(tmp_path / "hf", shape, repeat_shared)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"moe_intermediate_size": 16}))
    with pytest.raises(UserError) as caught:
        check_folder(tmp_path / "hf", stored_shape(tmp_path / "hf"))
    # Three matrices of each routed and shared expert, in two layers and a prediction layer.
    assert len(caught.value.faults) == 11
    assert "53 more tensors" in caught.value.faults[-1]
