"""Scores of continuations against a forward of each request alone; what is computed once, and in which shapes."""

import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.plan import initialise
from glm46.config.presets import PRESETS
from glm46.engine.inference import scoring
from glm46.engine.inference.decoder import KERNELS, Decoder, describe_kernels
from glm46.engine.inference.generation import Continuation, Generation, decoder_for
from glm46.engine.inference.model_mesh import ModelMesh
from glm46.engine.inference.sampling import Sampling
from glm46.engine.inference.scoring import ContinuationRequest, score
from tests.builders import random_model, tiny_shape


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model(tiny_shape(num_hidden_layers=3, vocab_size=50), seed=1).eval()


@torch.no_grad()
def one_alone(model: Transformer, request: ContinuationRequest) -> tuple[float, bool]:
    logits = model(torch.tensor([request.inputs]))[0, -len(request.continuation) :]
    labels = torch.tensor(request.continuation)
    logprobs = logits.double().log_softmax(-1).gather(1, labels.unsqueeze(1))
    return logprobs.sum().item(), bool((logits.argmax(-1) == labels).all())


def answers(model, requests) -> list[scoring.ContinuationScore]:
    found = dict(pair for batch in score(model, ModelMesh(), requests) for pair in batch)
    assert sorted(found) == list(range(len(requests)))
    return [found[number] for number in range(len(requests))]


def make_requests(draw: random.Random, model: Transformer) -> list[ContinuationRequest]:
    """Questions behind examples, some with answers that begin alike, texts alone, repeats and greedy continuations."""

    def words(length):
        return tuple(draw.randrange(50) for _ in range(length))

    requests = []
    for examples in (words(40), words(23)):
        for question in (words(19), words(30), words(1)):
            answers = [words(1), words(1), words(2), words(25), ()]
            answers[4] = answers[3][:20] + words(3)
            requests += [ContinuationRequest(examples + question, answer) for answer in answers]
    requests += [ContinuationRequest(words(1), words(length)) for length in (1, 2, 60, 61)]
    requests += [requests[7], ContinuationRequest(requests[3].context, requests[3].continuation[:18])]
    with torch.no_grad():
        for request in requests[:3]:
            greedy = model(torch.tensor([request.context]))[0, -1].argmax().item()
            requests.append(ContinuationRequest(request.context, (greedy,)))
    draw.shuffle(requests)
    return requests


@pytest.mark.parametrize("slots", [scoring.MOST_SLOTS, 150, 1])
def test_scores_are_those_of_each_request_alone(model, monkeypatch, slots):
    monkeypatch.setattr(scoring, "MOST_SLOTS", slots)
    requests = make_requests(random.Random(slots), model)
    wanted = [one_alone(model, request) for request in requests]
    found = answers(model, requests)
    assert [one.is_greedy for one in found] == [is_greedy for _, is_greedy in wanted]
    assert sum(one.is_greedy for one in found) >= 3
    # FP32 sums in another order.
    assert [one.logprob for one in found] == pytest.approx([logprob for logprob, _ in wanted], rel=1e-5)


def test_what_requests_share_is_computed_once(model, monkeypatch):
    computed = []
    real = Decoder.hidden
    monkeypatch.setattr(
        Decoder, "hidden", lambda self, tokens, starts: (computed.append(tokens.numel()), real(self, tokens, starts))[1]
    )
    examples, questions = tuple(range(40)), [(7 * i % 50,) * 20 for i in range(6)]
    requests = [ContinuationRequest(examples + question, (1, 2, last)) for question in questions for last in range(4)]
    requests += [ContinuationRequest(examples + question, (3, 4, 5)) for question in questions]
    answers(model, requests)
    # The examples, six questions without their end, and two different ends of two tokens for each.
    assert sum(computed) == 40 + 6 * 20 + 6 * 2 * 2


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
