"""Kernels of an MoE layer and the bytes that they move, on the meta device at the published shapes."""

import pytest
import torch

from glm46.compute.model.attention_layout import attention_layout
from glm46.compute.model.moe import MoE
from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.transformer import Transformer
from glm46.config.presets import PRESETS
from scripts.measure.count_kernels import REST, EagerCount, count_chained, count_eager, floor

TOKENS = 4096
KIB = 1024 * TOKENS

# KB per token and kernels, forward and backward. A change that lowers a number writes the lower one here and into
# docs/results/kernels.md (`python scripts/measure/count_kernels.py --flavor ...`); none may raise one.
# One kernel of each sort makes its keys shorter; a sort is counted as one kernel, whatever its passes.
MOST = {
    ("GLM-4.5-Air", "experts"): (4426, 42), ("GLM-4.5-Air", "experts eager"): (4938, 94),
    ("GLM-4.5-Air", "experts eager, 8 ranks"): (3191, 125), ("GLM-4.5-Air", "layer"): (5283, 68),
    ("GLM-4.5-Air", "layer eager"): (6934, 187), ("GLM-4.6", "experts"): (6910, 42),
    ("GLM-4.6", "experts eager"): (7478, 94), ("GLM-4.6", "experts eager, 8 ranks"): (4035, 125),
    ("GLM-4.6", "layer"): (7949, 70), ("GLM-4.6", "layer eager"): (11500, 235),
}  # fmt: skip
# The same KB of GLM-4.5-Air by kind, in the order of MOST.
MOST_BY_KIND = {
    "experts": (3751, 3751, 979, 3751, 3751), "products": (149, 149, 149, 557, 557), "attention": (0, 0, 0, 157, 157),
    "rows by index": (1, 290, 802, 1, 290), "exchange": (0, 0, 513, 0, 0), "copies and casts": (1, 5, 5, 1, 301),
    "reductions": (2, 24, 24, 46, 132), REST: (525, 721, 722, 774, 1749),
}  # fmt: skip
AIR = [form for flavor, form in MOST if flavor == "GLM-4.5-Air"]
SLOW = {case for case in MOST if "eager" not in case[1]}
# MB per token of three layers of Air and its prediction layer with both heads, eager; 70.5 at commit 7bb1fd4.
MOST_OF_A_MODEL = 48.51


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in MOST], ids=" ".join
)
def test_bytes_and_kernels_only_fall(case):
    flavor, form = case
    options = {"whole": form.startswith("layer")} | ({"ranks": 8} if "ranks" in form else {})
    count = (count_eager if "eager" in form else count_chained)(PRESETS[flavor], TOKENS, **options)
    kilobytes, kernels = MOST[case]
    assert count.bytes.total() / KIB <= kilobytes and count.kernels <= kernels, (count.bytes.total() / KIB, count)
    assert count.bytes.total() / KIB > 0.99 * kilobytes, f"lower the number of {case}"
    assert count.bytes.total() > floor(PRESETS[flavor], TOKENS, **options)
    if flavor == "GLM-4.5-Air":
        assert count.bytes.keys() <= MOST_BY_KIND.keys()
        for kind, of_forms in MOST_BY_KIND.items():
            most, found = of_forms[AIR.index(form)], count.bytes[kind] / KIB
            assert 0.99 * most - 1 <= found <= most, f"{kind} of {case}: {found}; lower what fell, none may rise"
    shape = PRESETS[flavor]
    assert count.largest == TOKENS * shape.num_experts_per_tok * shape.hidden_size * 2  # the rows of the experts
    assert count.host_copies == (1 if "ranks" in form else 0)  # the sizes of the exchange


WAYS = {(False, 1): (3191, 513, 125), (True, 1): (2864, 343, 165), (True, 2): (3688, 343, 275)}
"""By two levels and chunks: KB per token, those of the exchange, and kernels, of one of 8 ranks on a host."""


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_experts_move_what_is_documented(way):
    two_level, chunks = way
    count = count_eager(PRESETS["GLM-4.5-Air"], TOKENS, ranks=8, two_level=two_level, chunks=chunks)
    kilobytes, exchanged, kernels = WAYS[way]
    assert kilobytes - 1 <= count.bytes.total() / KIB <= kilobytes
    assert exchanged - 1 <= count.bytes["exchange"] / KIB <= exchanged
    assert count.kernels == kernels and count.host_copies == 1


def test_one_rank_copies_nothing_to_the_host_with_everything_on():
    """Padding, capacity, both losses, a temperature: on the meta device every read of a value fails."""
    options = RoutingOptions(torch.empty((), device="meta"), 1.2, balance_loss=True, z_loss=True)
    with torch.device("meta"):
        moe = MoE(PRESETS["debug"])
        x, is_real = torch.empty(2, 64, 256, requires_grad=True), torch.empty(2, 64, dtype=torch.bool)
        with EagerCount() as mode:
            y, statistics = moe(x, is_real, options)
            torch.autograd.backward([y, statistics.aux_losses], [torch.empty_like(y), torch.empty(2)])
    assert mode.count.host_copies == 0 and x.grad is not None


def test_a_whole_model_copies_nothing_to_the_host():
    """The tensors of a batch and of its layout are the only ones that come from the host."""
    shape = PRESETS["GLM-4.5-Air"].model_copy(update={"num_hidden_layers": 3})
    documents = torch.arange(TOKENS).div(TOKENS // 4, rounding_mode="floor").unsqueeze(0)
    with torch.device("meta"):
        model = Transformer(shape).cast(torch.bfloat16)
        tokens, ahead = torch.empty(1, TOKENS, dtype=torch.int64), torch.empty(1, 1, TOKENS, dtype=torch.int64)
    batch = dict(positions=tokens, labels=tokens, mtp_input_ids=ahead, mtp_labels=ahead)
    with EagerCount() as mode:
        layout = attention_layout(documents, (1, TOKENS), None).to(torch.device("meta"))
        sums = model(tokens, layout=layout, is_real=tokens > 0, **batch)
        (sums.loss + sums.mtp_losses.sum()).backward()
    assert mode.count.host_copies == 0
    assert 0.99 * MOST_OF_A_MODEL < mode.count.bytes.total() / TOKENS / 1e6 <= MOST_OF_A_MODEL
    assert mode.count.largest == shape.vocab_size * shape.hidden_size * 4  # the gradient of the head
