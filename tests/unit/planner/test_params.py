"""Counts of the published models, as derived from their shapes and confirmed by their index files."""

import pytest

from glm46.config.presets import PRESETS
from glm46.planner.params import count_parameters, dense_layer_kinds, moe_layer_kinds


def _sum(kinds):
    return sum(kind.count for kind in kinds), sum(kind.numel for kind in kinds)


@pytest.mark.parametrize("flavor", ["GLM-4.5", "GLM-4.6"])
def test_counts_of_the_355b_models(flavor):
    shape = PRESETS[flavor]
    count = count_parameters(shape)
    assert _sum(dense_layer_kinds(shape)) == (14, 325_083_392)
    assert _sum(moe_layer_kinds(shape)) == (496, 3_935_625_632)
    assert (count.main_tensors, count.main) == (44_189, 352_797_829_024)
    assert (count.mtp_tensors, count.mtp) == (500, 3_988_069_792)
    assert (count.tensors, count.total) == (44_689, 356_785_898_816)
    assert (count.tensors + count.copied_tensors, count.total + count.copies) == (44_691, 358_337_791_296)
    assert round(count.active / 1e9, 2) == 33.63
    assert round((count.active - count.embedding) / 1e9, 2) == 32.86
    assert round((count.active - count.embedding - count.head) / 1e9, 2) == 32.08
    assert round(count.mtp_active / 1e9, 3) == 0.402
    assert count.buffers == 90 * 160


def test_counts_of_air():
    shape = PRESETS["GLM-4.5-Air"]
    count = count_parameters(shape)
    assert _sum(dense_layer_kinds(shape)) == (12, 243_554_304)
    assert _sum(moe_layer_kinds(shape)) == (398, 2_341_492_864)
    assert (count.main_tensors, count.main) == (17_925, 106_852_251_264)
    assert (count.mtp_tensors, count.mtp) == (402, 2_375_059_584)
    assert (count.tensors, count.total) == (18_327, 109_227_310_848)
    assert (count.tensors + count.copied_tensors, count.total + count.copies) == (18_329, 110_468_824_832)
    assert round(count.active / 1e9, 2) == 13.42
    assert round((count.active - count.embedding) / 1e9, 2) == 12.80
    assert round((count.active - count.embedding - count.head) / 1e9, 2) == 12.18
    assert round(count.mtp_active / 1e9, 3) == 0.299


def test_scale_downs_have_the_size_of_their_name():
    # 10 %: the names are round numbers; the debug model's bounds are those of the issue.
    assert abs(count_parameters(PRESETS["100B"]).total / 100e9 - 1) < 0.1
    assert abs(count_parameters(PRESETS["15B"]).total / 15e9 - 1) < 0.1
    assert 5e6 <= count_parameters(PRESETS["debug"]).total <= 20e6
