"""Merged folders: equal to PEFT's merge, every other byte that of the base, in FP32, BF16 and FP8."""

import json
import re
import warnings

import pytest
import torch
from peft import PeftModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Glm4MoeForCausalLM

from glm46.cli import main
from glm46.compute.model.quantised_weights import in_compute_type
from glm46.config.errors import UserError
from glm46.config.presets import PRESETS
from glm46.files.tensor_file import TensorFile
from glm46.run.parameters import base_families, find_parameter
from glm46.storage.huggingface.adapter_origin import BASE_FORMAT
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.folder_tensors import find_tensors
from glm46.storage.huggingface.import_weights import FolderReader, import_weights, quantise_base
from glm46.storage.huggingface.int4 import Int4
from glm46.storage.huggingface.merge_adapter import merge_adapter
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.peft_export import export_adapter
from glm46.storage.huggingface.schemes import FP8_SCHEMES as SCHEMES
from glm46.storage.huggingface.schemes import config_of_scheme
from tests.unit.storage.huggingface.adapters import EOS, TINY, adapters, merged

SHAPE = PRESETS["GLM-4.5-Air"].model_copy(update=TINY)  # with a prediction layer, and repeats
WIDE = SHAPE.model_copy(  # whole FP8 blocks; two of them in the columns of the dense layer
    update={
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 3,
        "n_routed_experts": 2,
    }
)
MOST_ELEMENTS = 500


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Every matrix is merged in several pieces, FP8 ones in pieces of whole blocks."""
    monkeypatch.setattr("glm46.storage.huggingface.merge_adapter._MOST_ELEMENTS", MOST_ELEMENTS)


def base_folder(folder, shape=SHAPE, dtype=torch.bfloat16, fp8=None, weights=None):
    """A folder in several files, of random or of these weights, and what a reader gets, in FP32 by our names."""
    generator = torch.Generator().manual_seed(5)
    names = HFNames(shape, repeat_shared=True)
    if weights is None:
        weights = {name: torch.randn(entry.shape, generator=generator) * 0.1 for name, entry in names.entries.items()}
    options = ExportOptions(
        dtype=dtype, scheme=fp8, repeat_shared=True, max_file_bytes=30_000, other_files={"tokenizer.json": b"{}"}
    )
    config = config_of(shape, None, eos_ids=EOS, dtype=str(dtype).removeprefix("torch."))
    if fp8 is not None:
        config["quantization_config"] = config_of_scheme(fp8, names)
    export_weights(folder, shape, config, weights, options=options)
    return folder, read(folder, shape)


def read(folder, shape=SHAPE):
    """The values of a folder as its reader gets them."""
    tensors = {n: torch.full(e.shape, torch.nan) for n, e in HFNames(shape, repeat_shared=False).entries.items()}
    import_weights(folder, shape, tensors)
    return tensors


def stored(folder, shape=SHAPE):
    """Bytes and type of every tensor."""
    found = {}
    for name, (path, record) in find_tensors(folder).items():
        with TensorFile(path, {name: record}) as file:
            values = file.read(name, tuple((0, size) for size in record.shape))
        found[name] = (record.dtype, values.reshape(-1).view(torch.uint8))
    return found


def same(a, b):
    return a[0] == b[0] and torch.equal(a[1], b[1])


def adapter_folder(folder, base, shape=SHAPE, scale=1.0, size=1.0, **kind):
    tensors = {n: t if n.endswith("magnitude") else t * size**0.5 for n, t in adapters(**kind, shape=shape).items()}
    export_adapter(folder, shape, tensors, scale=scale, base=str(base))
    return tensors


KINDS = {
    "LoRA": dict(rank=4, expert_rank=2),
    "LoRA of attention in two layers": dict(targets=["attention"], layers=[0, 3]),
    "DoRA, experts too": dict(dora=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_merged_folder_is_base_plus_adapter_rounded_once_and_other_bytes_stay(kind, dtype, tmp_path):
    base, weights = base_folder(tmp_path / "base", dtype=dtype)
    tensors = adapter_folder(tmp_path / "adapter", base, scale=0.7, **kind)
    errors = merge_adapter(base, tmp_path / "adapter", tmp_path / "out")
    expected, found = merged(weights, tensors, 0.7), read(tmp_path / "out")
    changed = {name for name in weights if not torch.equal(weights[name], expected[name])}
    for name in changed:
        tolerance = 1e-6 if dtype == torch.float32 else 2**-8
        assert (found[name] - expected[name]).norm() < tolerance * expected[name].norm(), name
        if dtype == torch.bfloat16:  # rounded once: at most a step apart where FP32 sums differ in order
            assert (found[name] != expected[name].bfloat16().float()).float().mean() < 0.01
    names = HFNames(SHAPE, repeat_shared=True)
    parts = {part.hf_name for name in changed for part in names.entries[name].parts}
    assert set(errors) == parts == set(json.loads((tmp_path / "out/merge_errors.json").read_text()))
    before, after = stored(base), stored(tmp_path / "out")
    assert set(before) == set(after)
    assert {name for name in before if not same(before[name], after[name])} == parts
    assert {before[name][0] for name in parts} == {after[name][0] for name in parts} == {dtype}
    small = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert all(
        json.loads((base / name).read_text()) == json.loads((tmp_path / "out" / name).read_text()) for name in small
    )
    name = "model.layers.0.self_attn.o_proj.weight"
    whole, change = weights[name.removeprefix("model.")], expected[name.removeprefix("model.")]
    assert errors[name]["change"] == pytest.approx(((change - whole).norm() / whole.norm()).item(), rel=1e-4)
    assert not list(tmp_path.glob("*.tmp"))


class Largest(TorchDispatchMode):
    """Remembers the most bytes of a result of any operator."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.nbytes = max(self.nbytes, *sizes, 0)
        return result


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_merge_holds_pieces_of_matrices_only(kind, tmp_path):
    """So its memory does not grow with the model: matrices here have up to 1,152 elements, files 30 KB."""
    base, weights = base_folder(tmp_path / "base")
    adapter_folder(tmp_path / "adapter", base, scale=0.7, **kind)
    assert max(weight.numel() for weight in weights.values()) > 2 * MOST_ELEMENTS
    with Largest() as largest:
        merge_adapter(base, tmp_path / "adapter", tmp_path / "out")
    assert 2 * MOST_ELEMENTS < largest.nbytes <= 4 * MOST_ELEMENTS  # FP32


@torch.no_grad()
@pytest.mark.parametrize(
    "kind", [dict(rank=4, expert_rank=2), dict(targets=["attention"], dora=True)], ids=["lora", "dora"]
)
def test_it_equals_the_merge_of_peft(kind, tmp_path):
    shape = SHAPE.model_copy(update={"num_nextn_predict_layers": 0})
    base, _ = base_folder(tmp_path / "base", shape, torch.float32)
    adapter_folder(tmp_path / "adapter", base, shape, scale=0.7, **kind)
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PeftModel.from_pretrained(
            Glm4MoeForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "adapter"
        ).merge_and_unload()
    ours = dict(Glm4MoeForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).named_parameters())
    for name, parameter in theirs.named_parameters():
        assert (ours[name] - parameter).norm() <= 1e-6 * parameter.norm(), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_fp8_base_stays_fp8_and_keeps_what_has_no_adapter(scheme, tmp_path):
    base, weights = base_folder(tmp_path / "base", WIDE, fp8=SCHEMES[scheme])
    tensors = adapter_folder(tmp_path / "adapter", base, WIDE, targets=["experts"], layers=[1, 2])
    errors = merge_adapter(base, tmp_path / "adapter", tmp_path / "out")
    before, after = stored(base), stored(tmp_path / "out")
    changed = {name for name in before if not same(before[name], after[name])}
    assert set(before) == set(after) and {name.removesuffix("_scale") for name in changed} == set(errors)
    assert all(after[name][0] == torch.float8_e4m3fn for name in errors)
    expected, found = merged(weights, tensors, 1.0), read(tmp_path / "out", WIDE)
    for name in weights:
        assert (found[name] - expected[name]).norm() <= 0.04 * expected[name].norm(), name
    worst = max(of["rounding"] / of["change"] for of in errors.values())
    assert worst > 0 and json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_an_fp8_base_becomes_a_plain_folder(target, tmp_path):
    base, weights = base_folder(tmp_path / "base", WIDE, fp8=SCHEMES["fp8-channel"])
    tensors = adapter_folder(tmp_path / "adapter", base, WIDE, targets=["experts"])
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", target=getattr(torch, target))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == target
    expected, found = merged(weights, tensors, 1.0), read(tmp_path / "out", WIDE)
    for name in weights:
        tolerance = 1e-6 if target == "float32" else 2**-8
        assert (found[name] - expected[name]).norm() <= tolerance * expected[name].norm(), name
    untouched = "layers.0.self_attn.q_proj.weight"
    assert torch.equal(found[untouched], weights[untouched])  # scales of powers of two are exact in BF16


@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", ["int4", "nf4"])
def test_a_base_that_was_quantised_for_training_is_merged_so(base_dtype, tmp_path):
    """Each projection has the values that training computed with, also where no adapter is; all else stays."""
    base, weights = base_folder(tmp_path / "base", WIDE)
    tensors = adapter_folder(tmp_path / "adapter", base, WIDE, targets=["experts"])
    (tmp_path / "adapter" / BASE_FORMAT).write_text(json.dumps({"base_dtype": base_dtype}))
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", target=torch.float32)
    for name, weight in weights.items():
        if find_parameter(name).fp8_family in base_families(WIDE, base_dtype) and not name.startswith("mtp."):
            rows = weight.view(-1, weight.shape[-1])
            # Experts are matrices of their own, which changes nothing: no group belongs to two rows.
            rows.copy_(in_compute_type(*quantise_base(rows, base_dtype), torch.float32))
    expected, found = merged(weights, tensors, 1.0), read(tmp_path / "out", WIDE)
    for name in weights:
        assert (found[name] - expected[name]).norm() <= 1e-6 * expected[name].norm(), name
    (tmp_path / "adapter" / BASE_FORMAT).write_text('{"base_dtype": "int2"}')
    with pytest.raises(UserError, match="base_format.json: base_dtype = 'int2' is unknown"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "other")


def test_an_int4_base_becomes_bf16_and_int4_again(tmp_path):
    base, weights = base_folder(tmp_path / "base", WIDE, fp8=Int4())
    tensors = adapter_folder(tmp_path / "adapter", base, WIDE, targets=["experts"])
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert set(stored(tmp_path / "out")) == set(stored(base_folder(tmp_path / "plain", WIDE)[0]))
    expected, found = merged(weights, tensors, 1.0), read(tmp_path / "out", WIDE)
    for name in weights:
        assert (found[name] - expected[name]).norm() <= 2**-8 * expected[name].norm(), name
    _, last = base_folder(tmp_path / "int4", WIDE, fp8=Int4(), weights=found)
    assert all((last[name] - found[name]).norm() <= 0.12 * found[name].norm() for name in weights)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.slow
def test_a_merge_into_an_fp8_base_is_that_into_the_dequantised_one(scheme, tmp_path, monkeypatch):
    """To the bit, each weight that the adapter changes, in FP32."""
    # The pieces of FP8 and of other matrices differ, and so would the last bit of their products.
    monkeypatch.setattr("glm46.storage.huggingface.merge_adapter._MOST_ELEMENTS", 2**20)
    base, weights = base_folder(tmp_path / "base", WIDE, fp8=SCHEMES[scheme])
    plain, _ = base_folder(tmp_path / "plain", WIDE, torch.float32, weights=weights)
    merges = []
    for folder in (base, plain):
        adapter, output = tmp_path / f"{folder.name}_adapter", tmp_path / f"{folder.name}_merged"
        adapter_folder(adapter, folder, WIDE, rank=4, scale=0.7)
        changed = merge_adapter(folder, adapter, output, target=torch.float32)
        merges.append({name: value for name, value in stored(output).items() if name in changed})
    ours, expected = merges
    assert set(ours) == set(expected) and len(ours) > 20
    assert all(same(ours[name], expected[name]) for name in ours)


def test_a_plain_base_becomes_fp8(tmp_path):
    base, weights = base_folder(tmp_path / "base", WIDE, torch.float32)
    tensors = adapter_folder(tmp_path / "adapter", base, WIDE)
    merge_adapter(base, tmp_path / "adapter", tmp_path / "out", target=SCHEMES["fp8-block"])
    with FolderReader(tmp_path / "out", WIDE) as reader:
        assert reader.scheme == SCHEMES["fp8-block"]
        kinds = {record.dtype for name, (_, record) in reader.found.items() if ".experts." in name}
    assert kinds == {torch.float8_e4m3fn, torch.float32}
    expected, found = merged(weights, tensors, 1.0), read(tmp_path / "out", WIDE)
    assert all((found[n] - expected[n]).norm() <= 0.04 * expected[n].norm() for n in weights)


def run(*arguments):
    return main(["convert", "merge", *map(str, arguments)])


def test_the_command_warns_when_rounding_takes_the_adapter(tmp_path, capsys):
    """A change of 1e-3 of a weight is lost for the most part in BF16, and kept in FP32."""
    base, weights = base_folder(tmp_path / "base")
    tensors = adapter_folder(tmp_path / "adapter", base, size=3e-4, targets=["attention"])
    common = ["--base", base, "--adapter", tmp_path / "adapter"]
    assert run(*common, "--output", tmp_path / "bf16") == 0
    out, err = capsys.readouterr()
    assert "16 adapted weights" in out and "warning: in 16 weights" in err and "--dtype float32" in err
    errors = json.loads((tmp_path / "bf16/merge_errors.json").read_text())
    assert all(0.5 < of["rounding"] < 2 and 1e-4 < of["change"] < 3e-3 for of in errors.values())
    assert run(*common, "--output", tmp_path / "fp32", "--dtype", "float32") == 0
    assert "warning" not in capsys.readouterr().err
    found, expected = read(tmp_path / "fp32"), merged(weights, tensors, 1.0)
    assert all((found[n] - expected[n]).norm() <= 1e-6 * expected[n].norm() for n in weights)
    before, after = stored(base), stored(tmp_path / "fp32")
    assert {name for name in before if not same(before[name], after[name])} == set(errors)


def test_mistakes_have_exit_code_2_and_leave_nothing(tmp_path, capsys):
    base, _ = base_folder(tmp_path / "base")
    adapter_folder(tmp_path / "adapter", base, targets=["attention"])
    other = SHAPE.model_copy(update={"num_attention_heads": 2})
    adapter_folder(tmp_path / "other", base, other, targets=["attention"])
    given = {"--base": base, "--adapter": tmp_path / "adapter", "--output": tmp_path / "out"}
    for change, words in (
        ({"--adapter": tmp_path / "other"}, ["q_proj", "[16, 4]", "[32, 4]"]),
        ({"--adapter": base}, ["this is a Hugging Face folder", "give a PEFT folder"]),
        ({"--base": tmp_path / "adapter"}, ["this is a PEFT folder", "give a Hugging Face folder"]),
        ({"--output": base}, ["exists already", "new folder"]),
        ({"--dtype": "fp8-block"}, ["fp8-channel"]),
    ):
        assert run(*(word for pair in (given | change).items() for word in pair)) == 2
        err = capsys.readouterr().err
        assert all(word in err for word in words), err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.tmp"))


def test_a_base_of_another_shape_is_named_in_one_line(tmp_path):
    """Instead of a line for each tensor whose shape differs."""
    base, _ = base_folder(tmp_path / "base")
    other, _ = base_folder(tmp_path / "other", SHAPE.model_copy(update={"hidden_size": 32}))
    adapter_folder(tmp_path / "adapter", base)
    with pytest.raises(UserError) as error:
        merge_adapter(other, tmp_path / "adapter", tmp_path / "out")
    (fault,) = error.value.faults
    assert re.search(r"; \d+ more tensors have other shapes too; give the model that", fault)
    assert not (tmp_path / "out").exists()
