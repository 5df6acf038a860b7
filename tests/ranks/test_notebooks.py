"""The notebooks run from their first to their last cell, with a small model in the place of the one that they name."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from glm46.compute.model.transformer import Transformer
from glm46.config.loader import load_config
from glm46.config.presets import resolve_shape
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids
from tests.processes import PROGRAM_SECONDS
from tests.ranks.test_verbs import SMALL_SHAPE

_REASON = "not installed; pip install '.[test]'"
nbformat = pytest.importorskip("nbformat", reason=_REASON)
NotebookClient = pytest.importorskip("nbclient", reason=_REASON).NotebookClient
pytest.importorskip("ipykernel", reason=_REASON)

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PICTURES = {"inside_a_router": 4, "lora_in_ten_minutes": 2, "plan_a_cluster": 3}
PRINTED = {
    "inside_a_router": ["parameters"],
    "lora_in_ten_minutes": ["chat format of GLM-4.5", "checkpoint/step-000020", "adapted:"],
    "plan_a_cluster": ["GLM-4.5-Air", "H200", "days", "smallest cluster that fits"],
}
LORA = {
    "num_nextn_predict_layers": f"num_nextn_predict_layers = 0\n{SMALL_SHAPE}",
    "tokens": "10_240", "local_batch_size": "1", "global_batch_size": "2",
    "warmup_tokens": "1_024", "max_new_tokens": "4",
}  # fmt: skip


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A folder like the repository, with the models that the notebooks read, of random weights."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    shutil.copytree(ROOT / "train_configs", folder / "train_configs")
    recipe = folder / "train_configs" / "lora_debug.toml"
    text = recipe.read_text(encoding="utf-8")
    for key, value in LORA.items():
        text, count = re.subn(rf"(?m)^{key} = .*", value if "=" in value else f"{key} = {value}", text)
        assert count == 1, key
    recipe.write_text(text, encoding="utf-8")
    shape, tokenizer = resolve_shape(load_config(recipe).model), load_tokenizer("builtin")
    torch.manual_seed(0)
    model = Transformer(shape)
    tensors = {name: x.detach() for name, x in [*model.named_parameters(), *model.named_buffers()]}
    for name, tensor in tensors.items():
        torch.nn.init.normal_(tensor, 1.0 if name.endswith("norm.weight") else 0.0, 0.05)
    config = config_of(shape, None, eos_ids=stop_ids(tokenizer), dtype="float32")
    files = files_beside_weights(tokenizer, max_length=shape.max_position_embeddings)
    for place in ("outputs/debug/huggingface/step-000100", "outputs/sft_debug/huggingface/step-000160"):
        options = ExportOptions(torch.float32, other_files=files)
        export_weights(folder / place, shape, config, tensors, options=options)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("name", [file.stem for file in NOTEBOOKS])
def test_every_cell_runs_and_draws(name, checkout, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = checkout / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(file, as_version=4)
    NotebookClient(
        notebook, timeout=PROGRAM_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(file.parent)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [one for one in outputs if "image/png" in one.get("data", {})]
    text = "\n".join(one.get("text", "") or one.get("data", {}).get("text/plain", "") for one in outputs)
    assert len(pictures) == PICTURES[name]
    assert [words for words in PRINTED[name] if words not in text] == [], text


def test_notebooks_are_stored_without_outputs_and_their_links_lead_to_files():
    assert {file.stem for file in NOTEBOOKS} == set(PICTURES)
    for file in NOTEBOOKS:
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), file.name
        links = [target for cell in cells for target in re.findall(r"\]\(([^)#\s]+)", "".join(cell["source"]))]
        assert links and [target for target in links if not (file.parent / target).exists()] == []
