"""verify_published.py on small folders: it accepts a right one, and finds a changed byte and a wrong weight."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.plan import initialise
from glm46.config.model import ModelConfig
from glm46.config.presets import resolve_shape
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids

TABLE = ModelConfig(
    flavor="debug", hidden_size=64, num_hidden_layers=3, intermediate_size=96, moe_intermediate_size=32,
    n_routed_experts=4, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).resolve().parents[4] / "scripts/measure/verify_published.py"
    spec = importlib.util.spec_from_file_location("verify_published", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["bfloat16, repeats", "float32"])
def folder(request, tmp_path_factory) -> Path:
    """As GLM-4.5 with repeats in BF16, or as GLM-4.6 without."""
    shape, tokenizer = resolve_shape(TABLE), load_tokenizer("builtin")
    with torch.device("meta"):
        model = Transformer(shape)
    model.to_empty(device="cpu")
    initialise(model, 0)
    name, _, repeats = request.param.partition(",")
    files = files_beside_weights(tokenizer, max_length=shape.max_position_embeddings)
    options = ExportOptions(
        dtype=getattr(torch, name), repeat_shared=bool(repeats), max_file_bytes=300_000, other_files=files
    )
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    target = tmp_path_factory.mktemp("published") / "folder"
    export_weights(
        target, shape, config_of(shape, None, eos_ids=stop_ids(tokenizer), dtype=name), tensors, options=options
    )
    return target


@pytest.mark.slow
def test_a_folder_passes_and_nothing_is_left_of_the_round_trip(script, folder, tmp_path, capsys):
    assert script.main([str(folder), "--scratch", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "with the names, shapes and types of config.json" in said and "round trip: 0 of" in said
    assert "most likely tokens equal" in said and not list(tmp_path.iterdir())


def test_a_weight_that_transformers_reads_otherwise_is_found(script, folder, tmp_path, monkeypatch, capsys):
    right = script.read_weight

    def wrong(reader, name):
        return right(reader, name) * (1.01 if name.endswith("layers.1.self_attn.o_proj.weight") else 1)

    monkeypatch.setattr(script, "read_weight", wrong)
    monkeypatch.setattr(script, "converted_twice", lambda folder, *_: folder)
    assert script.main([str(folder)]) == 1
    assert "round trip: 0 of" in capsys.readouterr().out


def test_a_changed_byte_is_found_by_its_tensor_and_a_wrong_config_before_a_weight_is_read(
    script, folder, tmp_path, capsys
):
    changed = shutil.copytree(folder, tmp_path / "changed")
    file = sorted(changed.glob("*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert len(script.differing_tensors(folder, changed)) == 1
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 16}))
    assert script.main([str(changed)]) == 2
    assert "gate_proj" in capsys.readouterr().err
