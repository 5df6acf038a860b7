"""`model_shape`, the torch-free half of the Python API."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import glm46
from glm46.config.errors import UserError
from glm46.config.presets import PRESETS
from glm46.run.parameters import count_parameters


@pytest.mark.parametrize("flavor", PRESETS)
def test_a_shape_counts_its_parameters(flavor):
    shape, count = glm46.model_shape(flavor), count_parameters(PRESETS[flavor])
    assert (shape.total_parameters, shape.active_parameters) == (count.total, count.active)
    assert shape.model_dump() == PRESETS[flavor].model_dump()


def test_published_sizes():
    """GLM-4.6: 355B and 32B; Air: 106B and 12B, which the paper counts without embedding and head."""
    full, air = glm46.model_shape("GLM-4.6"), glm46.model_shape("GLM-4.5-Air")
    assert (full.total_parameters, full.active_parameters) == (356_785_898_816, 33_632_266_144)
    assert (round(air.total_parameters / 1e9), round(air.active_parameters / 1e9, 1)) == (109, 13.4)


def test_changes_and_json():
    shape = glm46.model_shape("GLM-4.6", num_hidden_layers=24, n_routed_experts=32)
    assert (shape.num_hidden_layers, shape.n_routed_experts, shape.hidden_size) == (24, 32, 5120)
    assert shape.total_parameters < glm46.model_shape("GLM-4.6").total_parameters / 10
    assert type(shape).model_validate_json(shape.model_dump_json()) == shape


@pytest.mark.parametrize(("arguments", "message"), [
    ({"flavor": "GLM-4.8"}, r"model.flavor = \"GLM-4.8\": no such preset; did you mean 'GLM-4.[567]'"),
    ({"flavor": "15B", "num_hidden_layer": 3}, "model.shape.num_hidden_layer: unknown key; did you mean 'num_hidden_"),
    ({"flavor": "15B", "head_dim": "64"}, 'model.shape.head_dim = "64"'),
    ({"flavor": "15B", "num_attention_heads": 33}, "model.shape.num_attention_heads = 33: must be a multiple of"),
])  # fmt: skip
def test_faults_have_the_messages_of_a_file(arguments, message):
    with pytest.raises(UserError, match=message):
        glm46.model_shape(**arguments)


def test_importing_the_package_loads_nothing():
    program = """
import sys
import glm46
assert not [name for name in sys.modules if name.startswith("glm46.")], sys.modules
assert {"model_shape", "MuonWithAdamW"} <= set(dir(glm46))
glm46.model_shape("15B").total_parameters
assert "torch" not in sys.modules
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr


def test_editors_and_python_find_the_same_names():
    tree = ast.parse(Path(glm46.__file__).read_text(encoding="utf-8"))
    for_editors = {node.names[0].name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert for_editors.items() >= glm46._HOMES.items() and len(for_editors) == len(glm46._HOMES) + 2
    assert all(getattr(glm46, name).__module__ == home for name, home in glm46._HOMES.items())


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'glm46' has no attribute 'Muon'"):
        glm46.Muon  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Muon'"):
        exec("from glm46 import Muon")
