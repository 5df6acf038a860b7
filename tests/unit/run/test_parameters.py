"""The table of parameters against the model, and counts of the published models against their index files."""

import re
from dataclasses import replace

import pytest
import torch

from glm46.compute.model.transformer import Transformer
from glm46.config.adapter import AdapterConfig
from glm46.config.presets import PRESETS
from glm46.run.parameters import PARAMETERS, adapter_rows, count_parameters, find_parameter, layer_rows, named_rows

SHAPES = {
    "debug": {}, "dense only": {"first_k_dense_replace": 4, "num_nextn_predict_layers": 0},
    "no dense layer": {"first_k_dense_replace": 0}, "no shared experts": {"n_shared_experts": 0},
    "two shared experts": {"n_shared_experts": 2}, "no MTP": {"num_nextn_predict_layers": 0},
    "two MTP layers": {"num_nextn_predict_layers": 2}, "no attention bias": {"attention_bias": False},
    "no QK norm": {"use_qk_norm": False}, "latent": PRESETS["debug-flash"].model_dump(),
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
LARGE = [(14, 325_083_392), (496, 3_935_625_632), (44_189, 352_797_829_024), (500, 3_988_069_792),
         (44_689, 356_785_898_816), 358_337_791_296, (33.63, 32.86, 32.08, 0.402)]  # fmt: skip
AIR = [(12, 243_554_304), (398, 2_341_492_864), (17_925, 106_852_251_264), (402, 2_375_059_584),
       (18_327, 109_227_310_848), 110_468_824_832, (13.42, 12.80, 12.18, 0.299)]  # fmt: skip


@pytest.mark.parametrize(("flavor", "counts"), [("GLM-4.5", LARGE), ("GLM-4.6", LARGE), ("GLM-4.5-Air", AIR)])
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
