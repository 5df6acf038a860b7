"""FLOPs per token against the numbers derived by hand from the published shapes."""

import numpy as np
import pytest

from glm46.config.adapter import AdapterConfig
from glm46.config.presets import PRESETS
from glm46.run.flops import (
    attention_flops,
    batch_flops,
    document_half_pairs,
    newton_schulz_flops,
    training_flops,
)
from glm46.run.parameters import adapter_rows, layer_counts, layer_rows

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


def test_a_frozen_weight_has_no_gradient_of_its_own():
    """Attention has no weights: forward and backward of scores and values cost what they do in full training."""
    shape = PRESETS["GLM-4.5-Air"].model_copy(update={"num_nextn_predict_layers": 0})
    full, lora = training_flops(shape, 4096), training_flops(shape, 4096, adapter=AdapterConfig(rank=32))
    assert lora.matrices == pytest.approx(full.matrices * 2 / 3) and lora.attention == full.attention
    active = sum(row.active_numel(shape) for row in adapter_rows(shape, AdapterConfig(rank=32)).values())
    assert lora.adapters == 6 * active
    assert training_flops(shape, 4096, adapter=AdapterConfig(name="dora", rank=32)).adapters == lora.adapters
    assert batch_flops(shape, 4096, 4096**2, AdapterConfig(rank=32)) == pytest.approx(4096 * lora.total)
