"""Decoding on a CUDA device: keys and values in a cache, drafts, few shapes of attention."""

import pytest
import torch
import torch.nn.functional as F

from glm46.engine.inference.generation import Continuation, Generation, decoder_for
from glm46.engine.inference.sampling import Sampling
from tests.gpu.test_model_on_gpu import debug_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
TOKENS = 60


def generate(model, drafts: bool) -> list[Continuation]:
    """Four prompts of different lengths, at temperature 1."""
    prompts = [[(7 * i + n) % model.shape.vocab_size for i in range(n)] for n in (5, 9, 33, 120)]
    continuations = [Continuation(prompt, TOKENS, seed=n) for n, prompt in enumerate(prompts)]
    decoder = decoder_for(model, continuations, cpu_kernels=False, drafts=drafts)
    for _ in Generation(
        decoder, continuations, sampling=Sampling(1.0), stop=frozenset(), vocab_size=model.shape.vocab_size
    ):
        pass
    return continuations


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("drafts", [False, True], ids=["tokens", "drafts"])
def test_a_token_has_the_probability_that_the_whole_row_gives_it(dtype, bound, drafts, monkeypatch):
    """Its logarithm, in natural units; in BF16 the roundings of eight layers. With few shapes of attention: a library
    may build a kernel for each."""
    model, shapes, real = debug_model(dtype).requires_grad_(False).eval(), set(), F.scaled_dot_product_attention

    def counted(q, k, v, **options):
        has_mask = options.get("attn_mask") is not None
        assert not (has_mask and options.get("enable_gqa"))  # no fast kernel has both
        shapes.add((q.shape, q.stride(), k.shape, k.stride(), has_mask))
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    continuations = generate(model, drafts)
    assert len(shapes) <= 16
    for one in continuations:
        row = torch.tensor([[*one.prompt, *one.tokens]], device=model.lm_head.weight.device)
        logits = model(row).float().log_softmax(-1)[0, len(one.prompt) - 1 : -1]
        wanted = logits.gather(1, row[0, len(one.prompt) :, None]).squeeze(1).tolist()
        assert one.logprobs == pytest.approx(wanted, abs=bound)
