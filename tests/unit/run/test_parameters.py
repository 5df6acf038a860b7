"""Parameters by the table, in the model and in `model_shape`; and FLOPs against numbers derived by hand."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import glm46
from glm46.compute.model.transformer import Transformer
from glm46.config.adapter import AdapterConfig
from glm46.config.errors import UserError
from glm46.config.presets import PRESETS
from glm46.run.flops import (
    attended_half_pairs,
    attention_flops,
    batch_flops,
    document_half_pairs,
    newton_schulz_flops,
    pair_flops,
    training_flops,
)
from glm46.run.parameters import (
    PARAMETERS,
    adapter_rows,
    count_parameters,
    find_parameter,
    layer_counts,
    layer_rows,
    named_rows,
)

SHAPES = {
    "debug": {}, "dense only": {"first_k_dense_replace": 4, "num_nextn_predict_layers": 0},
    "no dense layer": {"first_k_dense_replace": 0}, "no shared experts": {"n_shared_experts": 0},
    "two shared experts": {"n_shared_experts": 2}, "no MTP": {"num_nextn_predict_layers": 0},
    "two MTP layers": {"num_nextn_predict_layers": 2}, "no attention bias": {"attention_bias": False},
    "no QK norm": {"use_qk_norm": False}, "latent": PRESETS["debug-flash"].model_dump(),
    "sparse": PRESETS["debug-glm5"].model_dump(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "head"),
    [*((changes, "lm") for changes in SHAPES.values()), (SHAPES["no MTP"], "value")],
    ids=[*SHAPES, "value head"],
)
def test_the_rows_are_the_parameters_and_buffers_of_the_model(changes, head):
    shape = PRESETS["debug"].model_copy(update=changes)
    with torch.device("meta"):
        model = Transformer(shape, head)
    rows = named_rows(shape, head)
    assert {name: row.shape(shape) for name, row in rows.items() if row.optimizer is not None} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    assert {name: row.shape(shape) for name, row in rows.items() if row.optimizer is None} == {
        name: tuple(buffer.shape) for name, buffer in model.named_buffers()
    }
    assert all(find_parameter(name) is row for name, row in rows.items())


def test_every_name_of_the_table_is_there_once():
    rows = [
        row
        for changes in SHAPES.values()
        for head in ("lm", "value")
        for row in named_rows(PRESETS["debug"].model_copy(update=changes), head).values()
    ]
    assert set(PARAMETERS) == set(rows)
    hf_names = [(row.part, name) for row in PARAMETERS for name in row.hf_names]
    assert len(set(hf_names)) == len(hf_names)


@pytest.mark.parametrize(
    "name", ["layers.0.mlp.extra.weight", "layers.x.input_layernorm.weight", "layers.0.norm.weight"]
)
def test_a_name_without_a_row_is_an_error(name):
    with pytest.raises(KeyError):
        find_parameter(name)


def test_an_fp8_family_is_the_pattern_of_its_own_names_and_of_no_others():
    families = {row.fp8_family for row in PARAMETERS} - {None}
    assert len(families) == 8
    for row in PARAMETERS:
        for name in row.hf_names:
            matching = [family for family in families if re.fullmatch(family + "[.]weight", name)]
            assert matching == ([row.fp8_family] if row.fp8_family else []), name


def _sum(rows, shape):
    return sum(row.hf_tensors(shape) for row in rows), sum(row.numel(shape) for row in rows)


# Tensors and numbers of a dense layer, of one with experts, of all but the prediction layer, and of that; their sums;
# numbers as published, with repetitions in that layer; and billions that a token uses: of all but the prediction layer,
# without the embedding, without the head too, and of the prediction layer.
LARGE_COUNTS = [(14, 325_083_392), (496, 3_935_625_632), (44_189, 352_797_829_024), (500, 3_988_069_792),
         (44_689, 356_785_898_816), 358_337_791_296, (33.63, 32.86, 32.08, 0.402)]  # fmt: skip
AIR_COUNTS = [(12, 243_554_304), (398, 2_341_492_864), (17_925, 106_852_251_264), (402, 2_375_059_584),
       (18_327, 109_227_310_848), 110_468_824_832, (13.42, 12.80, 12.18, 0.299)]  # fmt: skip


@pytest.mark.parametrize(
    ("flavor", "counts"), [("GLM-4.5", LARGE_COUNTS), ("GLM-4.6", LARGE_COUNTS), ("GLM-4.5-Air", AIR_COUNTS)]
)
def test_counts_of_the_published_models(flavor, counts):
    shape = PRESETS[flavor]
    count = count_parameters(shape)
    used = count.active, count.active - count.embedding, count.active - count.embedding - count.head
    assert [
        _sum(layer_rows(shape, "dense"), shape), _sum(layer_rows(shape, "moe"), shape),
        (count.main_tensors, count.main), (count.mtp_tensors, count.mtp),
        (count.main_tensors + count.mtp_tensors, count.total), count.total + count.embedding + count.head,
        (*(round(number / 1e9, 2) for number in used), round(count.mtp_active / 1e9, 3)),
    ] == counts  # fmt: skip
    assert flavor == "GLM-4.5-Air" or count.buffers == 90 * 160


def test_counts_of_flash():
    shape = PRESETS["GLM-4.7-Flash"]
    count = count_parameters(shape)
    assert _sum(layer_rows(shape, "dense"), shape)[1] == 84_677_888
    assert _sum(layer_rows(shape, "moe"), shape) == (206, 635_311_424)
    assert sum(row.numel(shape) for row in layer_rows(shape, "dense") if row.group == "attention") == 21_757_952
    assert (count.main, count.mtp) == (29_943_393_920, 643_706_176)
    # Published with repetitions in the MTP layer: its tensors are 212, and all are 9,703.
    assert (count.mtp_tensors + 2, count.main_tensors + count.mtp_tensors + 2) == (212, 9_703)
    assert count.total + count.embedding + count.head == 31_221_488_576
    assert round((count.active - count.embedding) / 1e9, 2) == 3.58
    assert count.buffers == 47 * 64


def test_matrices_of_heads_are_matrices_of_their_own():
    shape = PRESETS["GLM-4.7-Flash"]
    blocks = {row.name: row.block_rows(shape) for row in layer_rows(shape, "moe") if row.is_matrix}
    assert blocks["self_attn.q_b_proj.weight"] == (256,) * 20
    assert blocks["self_attn.kv_b_proj.weight"] == (192, 256) * 20
    assert blocks["mlp.experts.gate_up"] == (1536, 1536)
    assert blocks["self_attn.kv_a_proj_with_mqa.weight"] == (576,)


def test_scale_downs_have_the_size_of_their_name():
    # 10 %: the names are round numbers; the debug model's bounds are those of the issue.
    assert abs(count_parameters(PRESETS["100B"]).total / 100e9 - 1) < 0.1
    assert abs(count_parameters(PRESETS["15B"]).total / 15e9 - 1) < 0.1
    assert 5e6 <= count_parameters(PRESETS["debug"]).total <= 20e6


def test_the_rows_of_adapters_have_the_sizes_of_their_weights():
    shape, air = PRESETS["debug"], PRESETS["GLM-4.5-Air"]
    rows = adapter_rows(shape, AdapterConfig(name="dora", rank=4, expert_rank=8, layers=(0, 1)))
    assert rows["layers.0.mlp.down_proj.lora_A"].shape(shape) == (4, shape.intermediate_size)
    assert rows["layers.1.mlp.experts.gate_up_magnitude"].shape(shape) == (16, 2 * shape.moe_intermediate_size)
    assert len(rows) == 3 * (7 + 9) and {name.split(".")[1] for name in rows} == {"0", "1"}
    assert all(find_parameter(name) == replace(row, rank=None) for name, row in rows.items())
    # Of the published model, counted by hand.
    for adapter, numbers in ((AdapterConfig(), 2.377), (AdapterConfig(expert_rank=8), 0.661)):
        assert round(sum(row.numel(air) for row in adapter_rows(air, adapter).values()) / 1e9, 3) == numbers
    few = AdapterConfig(targets=("attention", "dense", "shared_experts"))
    assert round(sum(row.numel(air) for row in adapter_rows(air, few).values()) / 1e9, 3) == 0.089


@pytest.mark.parametrize("flavor", PRESETS)
def test_a_shape_counts_its_parameters(flavor):
    shape, count = glm46.model_shape(flavor), count_parameters(PRESETS[flavor])
    assert (shape.total_parameters, shape.active_parameters) == (count.total, count.active)
    assert shape.model_dump() == PRESETS[flavor].model_dump()


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


GLM, AIR = PRESETS["GLM-4.6"], PRESETS["GLM-4.5-Air"]

# Half a unit of the last printed digit of the derivation.
_DIGIT = 0.0501e9


@pytest.mark.parametrize("shape, seq_len, attention, total", [
    (GLM, 4_096, 27.8e9, 224.9e9), (GLM, 32_768, 222.3e9, 419.4e9), (GLM, 131_072, 889.1e9, 1_086.2e9),
    (GLM, 196_608, 1_333.6e9, 1_530.7e9), (GLM, 202_752, 1_375.3e9, 1_572.4e9), (AIR, 4_096, 13.9e9, 90.7e9),
    (AIR, 32_768, 111.1e9, 188.0e9), (AIR, 131_072, 444.5e9, 521.3e9),
])  # fmt: skip
def test_main_model(shape, seq_len, attention, total):
    flops = training_flops(shape, seq_len)
    assert abs(flops.attention - attention) < _DIGIT
    assert abs(flops.matrices + flops.attention - total) < 2 * _DIGIT


def test_weights_cost_six_flops_per_active_parameter():
    assert abs(training_flops(GLM, 4096).matrices - 197.1e9) < _DIGIT
    assert abs(training_flops(AIR, 4096).matrices - 76.8e9) < _DIGIT


def test_mtp_is_counted_with_its_head():
    assert abs(training_flops(GLM, 4096).mtp - (7.07e9 + 0.30e9)) < 0.011e9
    assert abs(training_flops(AIR, 4096).mtp - (5.52e9 + 0.30e9)) < 0.011e9
    without = GLM.model_copy(update={"num_nextn_predict_layers": 0})
    assert training_flops(without, 4096).total < training_flops(GLM, 4096).total


def test_the_sliding_window_bounds_the_cost_of_attention():
    narrow = GLM.model_copy(update={"sliding_window": 512})
    exact = sum(min(position, 512) for position in range(8192)) / 8192
    full = sum(range(8192)) / 8192
    ratio = attention_flops(narrow, 8192) / attention_flops(GLM, 8192)
    # The formula integrates where this test sums: half a position of 512.
    assert ratio == pytest.approx(exact / full, rel=2e-3)
    assert attention_flops(narrow, 256) == attention_flops(GLM, 256)


def muon_flops(shape) -> int:
    """Of one update of every matrix but embedding and head, each expert's three matrices on their own."""
    layers = zip(layer_counts(shape), ("dense", "moe", "mtp"), strict=True)
    rows = [row for count, kind in layers for row in layer_rows(shape, kind) * count]
    matrices = [row for row in rows if row.is_matrix]
    return sum(row.hf_tensors(shape) * newton_schulz_flops(*row.hf_shape(shape), 5) for row in matrices)


def test_muon_of_the_published_sizes():
    assert muon_flops(GLM) == pytest.approx(13.6e15, abs=0.051e15)
    # Air was derived without its router and eh_proj: 0.3 %.
    assert muon_flops(AIR) == pytest.approx(3.86e15, rel=3e-3)


@pytest.mark.parametrize("window", [None, 700])
def test_attention_of_exponential_documents_is_that_of_drawn_ones(window):
    """A row of 4,096 tokens, cut out of documents of 500 tokens in the mean: means of the pairs of drawn rows."""
    shape, length, mean = GLM.model_copy(update={"sliding_window": window}), 4096, 500.0
    generator = np.random.default_rng(0)
    pairs, rows = 0, 2000
    for _ in range(rows):
        ends = generator.exponential(mean, 64).cumsum().astype(int)
        assert ends[-1] > length
        sizes = np.diff(np.unique(np.concatenate([[0], ends[ends < length], [length]])))
        pairs += sum(document_half_pairs(sizes, window)) / 2
    drawn = pairs / (rows * length) / (length / 2)
    planned = attention_flops(shape, length, mean) / attention_flops(GLM, length)
    assert planned == pytest.approx(drawn, rel=0.01)  # the draws' own error is 0.3 %
    assert attention_flops(shape, length, 1e12) == pytest.approx(attention_flops(shape, length), rel=1e-6)


def test_attention_of_glm_52_is_that_of_chosen_keys_and_scores_of_indexers():
    """For one document of 131,072 tokens: each query attends to at most 2,048 keys, and 22 of 79 layers score all."""
    shape = PRESETS["GLM-5.2"]
    length = 131_072
    all_keys = length / 2
    chosen = 2048 - 2048**2 / (2 * length)
    per_layer = 3 * 4 * 64 * 256 * chosen + 22 / 79 * 2 * 32 * 128 * all_keys
    assert attention_flops(shape, length) == pytest.approx(per_layer)
    # With as few tokens as are chosen, attention costs what dense attention does, and indexers score every key.
    dense = shape.model_copy(update={"index_topk": None})
    scores = attention_flops(shape, 2048) - attention_flops(dense, 2048)
    assert scores == pytest.approx(22 / 79 * 2 * 32 * 128 * 1024)
    # A frozen indexer costs one forward.
    matrices = training_flops(shape, length).matrices - training_flops(dense, length).matrices
    assert matrices == pytest.approx(21 * 2 * (4096 * 2048 + 128 * 6144 + 32 * 6144))
    lengths = np.array([5, 3000])
    pairs = attended_half_pairs(lengths, shape).sum()
    tokens = training_flops(shape, 0).total * lengths.sum()
    expected = sum(length * training_flops(shape, int(length)).total for length in lengths)
    assert tokens + 79 * pair_flops(shape) * pairs / 2 == pytest.approx(expected)


def test_a_frozen_weight_has_no_gradient_of_its_own():
    """Attention has no weights: forward and backward of scores and values cost what they do in full training."""
    shape = PRESETS["GLM-4.5-Air"].model_copy(update={"num_nextn_predict_layers": 0})
    full, lora = training_flops(shape, 4096), training_flops(shape, 4096, adapter=AdapterConfig(rank=32))
    assert lora.matrices == pytest.approx(full.matrices * 2 / 3) and lora.attention == full.attention
    active = sum(row.active_numel(shape) for row in adapter_rows(shape, AdapterConfig(rank=32)).values())
    assert lora.adapters == 6 * active
    assert training_flops(shape, 4096, adapter=AdapterConfig(name="dora", rank=32)).adapters == lora.adapters
    assert batch_flops(shape, 4096, 4096**2, AdapterConfig(rank=32)) == pytest.approx(4096 * lora.total)
