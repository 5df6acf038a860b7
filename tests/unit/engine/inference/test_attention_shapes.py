"""Kernels that are planned for each shape must meet few shapes: counted at `scaled_dot_product_attention` itself."""

import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.plan import initialise
from glm46.config.presets import PRESETS
from glm46.engine.inference.decoder import KERNELS, describe_kernels
from glm46.engine.inference.generation import Continuation, Generation, decoder_for
from glm46.engine.inference.sampling import Sampling


@pytest.fixture
def calls(monkeypatch):
    """Counts calls of attention by shapes and strides of q and k, the shape of the mask, and `enable_gqa`."""
    found, attention = Counter(), F.scaled_dot_product_attention

    def counted(q, k, v, attn_mask=None, **options):
        mask = None if attn_mask is None else (*attn_mask.shape, attn_mask.stride())
        key = (q.shape, q.stride(), k.shape, k.stride(), mask, options.get("enable_gqa", False))
        found[key] += 1
        enabled = torch.backends.cuda
        assert not enabled.cudnn_sdp_enabled()
        assert enabled.flash_sdp_enabled() and enabled.mem_efficient_sdp_enabled() and enabled.math_sdp_enabled()
        return attention(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return found


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("lengths", [(8, 8, 8), (5, 14, 30)])
def test_a_long_generation_meets_few_shapes_and_no_groups_of_heads_with_a_mask(calls, lengths, drafts, window):
    """1,000 tokens a row. Without rounding there is a shape for each token. 16: powers of two up to 256, then four for
    each up to 1,030, and those of fewer rows when others have ended."""
    shape = PRESETS["debug"].model_copy(
        update={"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16,
                "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": window}
    )  # fmt: skip
    model = Transformer(shape)
    initialise(model, 0)
    model.requires_grad_(False).eval()
    generator = random.Random(0)
    rows = [Continuation([generator.randrange(5, 200) for _ in range(n)], 1000, seed=i) for i, n in enumerate(lengths)]
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    Generation(
        decoder_for(model, rows, drafts=drafts), rows, sampling=Sampling(1.0), stop=frozenset(), vocab_size=300
    ).run()
    assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn, "the choice ends with the decoder"
    assert all(len(row.tokens) == 1000 for row in rows) and sum(calls.values()) >= 300
    assert len(calls) <= 16
    assert not [key for key in calls if key[4] is not None and key[5]]
    assert {kernel.name for kernel in KERNELS} == {"FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"}


@pytest.mark.parametrize(("device", "dtype", "named"), [
    ("cpu", torch.float32, "new tokens by torch's CPU kernel"),
    ("cuda", torch.bfloat16, "prompts by variable-length flash attention, new tokens by memory-efficient"),
    ("cuda", torch.float32, "prompts by blocks of 128 queries by matrix products, new tokens by memory-efficient"),
])  # fmt: skip
def test_the_kernels_of_a_decoder_are_named(device, dtype, named):
    assert named in describe_kernels(torch.device(device), dtype)
