"""Generation with a cache, in batches, with drafts and by the command line, against generation without a cache."""

import base64
import io
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from glm46.cli import main
from glm46.compute.model.init import GAMMA, mixed, signed
from glm46.compute.model.transformer import Transformer
from glm46.config.model import ModelConfig
from glm46.config.presets import resolve_shape
from glm46.engine.inference import decoder as decoder_module
from glm46.engine.inference import few_tokens, sampling
from glm46.engine.inference.cache import CachedCore
from glm46.engine.inference.decoder import Decoder
from glm46.engine.inference.generation import Continuation, Generation, decoder_for
from glm46.engine.inference.sampling import Sampling, continue_tokens
from glm46.files import progress
from glm46.storage.huggingface.peft_export import export_adapter
from tests.builders import model_folder, model_table, step_folder
from tests.unit.storage.huggingface.adapters import adapters

TABLE = dict(
    flavor="debug", hidden_size=32, num_hidden_layers=3, intermediate_size=48, moe_intermediate_size=16,
    n_routed_experts=4, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
)  # fmt: skip
LATENT = dict(
    flavor="debug-flash", num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=12, qk_nope_head_dim=5,
    qk_rope_head_dim=4, head_dim=9, v_head_dim=9,
)  # fmt: skip
SPARSE = LATENT | dict(num_hidden_layers=4, index_n_heads=4, index_head_dim=6, index_topk=5,
    indexer_types=["full", "full", "shared", "full"])  # fmt: skip
PROMPTS = [[5, 1, 4, 1, 3], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12], [3, 3]]


def random_model(**changes):
    torch.manual_seed(1)
    model = Transformer(resolve_shape(ModelConfig(**model_table(**TABLE | changes))))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        torch.nn.init.normal_(tensor, 1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    return model.eval()


@pytest.fixture(scope="module", params=[{}, LATENT], ids=["grouped", "latent"])
def predictable(request):
    """A model trained to count in steps of one and two, so that its drafts are often accepted."""
    torch.manual_seed(0)
    changes = dict(vocab_size=24, num_hidden_layers=2, num_nextn_predict_layers=2)
    model = Transformer(resolve_shape(ModelConfig(**model_table(**TABLE | request.param | changes))))
    for name, parameter in model.named_parameters():
        torch.nn.init.constant_(parameter, 1.0) if name.endswith("norm.weight") else torch.nn.init.normal_(
            parameter, 0, 0.1
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        step = torch.randint(1, 3, (16, 1))
        text = (torch.randint(0, 24, (16, 1)) + step * torch.arange(28)) % 24
        ahead = torch.stack([text[:, k : k + 24] for k in range(1, 4)], 1)
        sums = model(text[:, :24], labels=ahead[:, 0], mtp_input_ids=ahead[:, :2], mtp_labels=ahead[:, 1:])
        ((sums.loss + sums.mtp_losses.sum()) / text.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def generate(model, prompts, *, new=20, stop=(), speculative=False, seed=0, **sampling):
    rows, rounds = [Continuation(prompt, new, seed) for prompt in prompts], 0
    generation = Generation(
        decoder_for(model, rows, drafts=speculative), rows, sampling=Sampling(**sampling),
        stop=frozenset(stop), vocab_size=model.shape.vocab_size - 3,
    )  # fmt: skip
    for _ in generation:
        rounds += 1
    return [row.text(frozenset(stop)) for row in rows], rounds, rows


def without_cache(model, prompt, *, new=20, stop=()):
    """Generation without a cache."""
    return continue_tokens(
        model, prompt, max_new_tokens=new, temperature=0.0, stop=frozenset(stop),
        vocab_size=model.shape.vocab_size - 3, device=torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"use_qk_norm": False}, {"sliding_window": 4}, {"num_nextn_predict_layers": 3}, LATENT,
        LATENT | {"sliding_window": 4}, SPARSE, SPARSE | {"index_topk": 300},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("speculative", [False, True])
def test_cache_batch_and_drafts_do_not_change_greedy_tokens(changes, speculative):
    model = random_model(vocab_size=61, **changes)
    want = [without_cache(model, prompt, stop=(13, 14)) for prompt in PROMPTS]
    batched, _, _ = generate(model, PROMPTS, stop=(13, 14), speculative=speculative)
    alone = [generate(model, [prompt], stop=(13, 14), speculative=speculative)[0][0] for prompt in PROMPTS]
    assert batched == alone == want
    assert any(len(row) == 20 for row in want)


@pytest.mark.parametrize("speculative", [False, True])
def test_the_kept_tokens_of_each_place_are_those_of_the_whole_sequence(predictable, speculative):
    """As the filters choose them, accepted drafts included."""
    rule = Sampling(4.0, top_k=5, top_p=0.9, records_kept=True)
    rows = [Continuation([start, start + 1], 12, seed=start) for start in range(6)]
    decoder = decoder_for(predictable, rows[:4], drafts=speculative)
    Generation(decoder, rows, sampling=rule, stop=frozenset({3}), vocab_size=21).run()
    counts = [len(ids) for row in rows for ids in row.kept]
    assert min(counts) < max(counts) == 5 and (sum(row.accepted for row in rows) > 0) == speculative
    for row in rows:
        with torch.no_grad():
            logits = predictable(torch.tensor([[*row.prompt, *row.tokens]]))[0, len(row.prompt) - 1 : -1, :21]
        kept = sampling.scores(logits, rule) > -torch.inf
        assert [ids.tolist() for ids in row.kept] == [places.nonzero().flatten().tolist() for places in kept]
        assert all(token in ids for token, ids in zip(row.tokens, row.kept, strict=True))


@pytest.mark.parametrize("changes", [{}, LATENT, SPARSE], ids=["grouped", "latent", "sparse"])
def test_hidden_states_with_a_cache_equal_those_of_the_whole_sequence(changes):
    model = random_model(vocab_size=61, num_nextn_predict_layers=2, **changes)
    tokens = torch.randint(0, 61, (2, 15))
    with torch.inference_mode(), Decoder(model, batch=2, max_length=16) as decoder:
        whole = decoder.hidden(tokens, [0, 0])
    with torch.no_grad():
        torch.testing.assert_close(model.lm_head(whole), model(tokens), rtol=0, atol=2e-5)  # FP32, logits of order 1
    with torch.inference_mode(), Decoder(model, batch=2, max_length=16) as decoder:
        # Rows of different length: 3 and 5 tokens, then pieces of 4, with wrong tokens after the shorter row's end.
        first = decoder.hidden(torch.stack([tokens[0, :5], tokens[1, :5]]), [0, 0])
        torch.testing.assert_close(first, whole[:, :5], rtol=0, atol=2e-5)
        second = decoder.hidden(torch.stack([tokens[0, 3:7], tokens[1, 5:9]]), [3, 5])
        torch.testing.assert_close(second[0], whole[0, 3:7], rtol=0, atol=2e-5)
        torch.testing.assert_close(second[1], whole[1, 5:9], rtol=0, atol=2e-5)
    assert model.layers["0"].self_attn.core.__name__.startswith("attend")  # the decoder restored the model
    assert getattr(model.layers["0"].self_attn, "cached_core", None) is None


@pytest.mark.parametrize("length", [3, 20])  # few tokens attend to latents, more to the keys and values made of them
def test_latents_in_a_cache_give_the_keys_of_the_whole_sequence(length):
    model = random_model(vocab_size=61, **LATENT)
    first, second = torch.randint(0, 61, (2, 2, length))
    with torch.inference_mode(), Decoder(model, batch=2, max_length=48) as decoder:
        for _ in range(2):
            pieces = decoder.hidden(first, [0] * 2), decoder.hidden(second, [length] * 2)
            whole = decoder.hidden(torch.cat([first, second], 1), [0] * 2)
            torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=2e-5)
            for parameter in model.parameters():  # in place, as a step of reinforcement learning makes them
                parameter.mul_(1.1)
            decoder.take_weights()


def test_a_cached_token_of_flash_takes_1152_bytes_in_each_layer():
    shape = resolve_shape(
        ModelConfig(**model_table(flavor="GLM-4.7-Flash", num_hidden_layers=2, first_k_dense_replace=2))
    )
    with torch.device("meta"):
        model = Transformer(shape).to(torch.bfloat16)
    assert Decoder(model, batch=3, max_length=10).cache_bytes == 3 * 10 * 2 * 1152
    assert decoder_for(model, [Continuation([1], 4)], drafts=True).cache_bytes % 1152 == 0


def first_logits(model, tokens, **options):
    rows = len(tokens)
    with torch.inference_mode(), Decoder(model, batch=rows, max_length=4, **options) as decoder:
        return decoder.logits(decoder.hidden(tokens, [0] * rows))


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 65])
@pytest.mark.parametrize("packed_from", [0, 2**16])
def test_the_cpu_kernel_equals_the_general_path(rows, packed_from, monkeypatch):
    model = random_model(vocab_size=61)
    tokens = torch.randint(0, 61, (rows, 1))
    monkeypatch.setattr(few_tokens, "_PACKED_FROM", packed_from)
    monkeypatch.setattr(few_tokens, "_PACKED_FROM_ROWS", 3)
    outcome = [first_logits(model, tokens, cpu_kernels=kernels) for kernels in (True, False)]
    torch.testing.assert_close(*outcome, rtol=0, atol=2e-5)  # FP32, logits of order 1


@pytest.mark.parametrize(
    "where",
    [
        "layers.0.self_attn.v_proj", "layers.1.self_attn.o_proj", "layers.0.mlp.down_proj", "layers.1.mlp.experts",
        "layers.2.mlp.shared_experts.up_proj", "lm_head", "layers.1.self_attn.kv_b_proj",
        "layers.0.self_attn.q_b_proj",
    ],
)  # fmt: skip
def test_decoding_uses_a_replaced_product(where):
    model = random_model(vocab_size=61, **LATENT if "_b_" in where else {})
    tokens = torch.randint(0, 61, (3, 3))

    def logits():
        with torch.inference_mode(), Decoder(model, batch=3, max_length=4) as decoder:
            first, last = decoder.hidden(tokens[:, :2], [0] * 3), decoder.hidden(tokens[:, 2:], [2] * 3)
            return decoder.logits(torch.cat([first, last], 1))

    before = logits()
    module = model.get_submodule(where)
    own = module.product
    module.product = lambda *arguments: 1.5 * own(*arguments)
    after = logits()
    with torch.no_grad():
        torch.testing.assert_close(after, model(tokens), rtol=0, atol=2e-5)  # FP32, logits of order 1
    assert (after - before).abs().max() > 1e-2


@pytest.mark.parametrize("packed_from", [0, 2**16])
@pytest.mark.parametrize("biases", [0, 2])
def test_a_product_equals_that_of_the_concatenated_weights(packed_from, biases, monkeypatch):
    monkeypatch.setattr(few_tokens, "_PACKED_FROM", packed_from)
    weights = [torch.randn(size, 24) for size in (5, 12)]
    added = [torch.randn(5), torch.randn(12)] if biases else [None, None]
    product = few_tokens.Product(*weights, biases=added)
    for rows in (1, 2, 3, 8, 9):
        x = torch.randn(rows, 24)
        want = torch.cat([F.linear(x, weight, bias) for weight, bias in zip(weights, added, strict=True)], 1)
        got = product(x)
        assert got.is_contiguous()
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)  # FP32 sums of 24 numbers of order 1


@pytest.mark.slow
@pytest.mark.parametrize("depths", [None, 3])
def test_drafts_equal_the_predictions_in_training(predictable, depths):
    """Also if a layer drafts more than one token: each of its depths has its own keys and values."""
    count = depths or 2
    text = torch.randint(0, 24, (1, 12 + count))
    ahead = torch.stack([text[:, k : k + 11] for k in range(1, count + 2)], 1)
    sums = predictable(text[:, :11], labels=ahead[:, 0], mtp_input_ids=ahead[:, :count], mtp_labels=ahead[:, 1:])
    with torch.inference_mode(), Decoder(predictable, batch=1, max_length=16, drafts=depths or True) as decoder:
        assert decoder.depth == (depths or 2)
        hidden = decoder.hidden(text[:, :11], [0])
        for k in range(decoder.depth):
            hidden = torch.cat(
                [decoder.draft_hidden(k, hidden[:, i : i + 1], text[:, i + k + 1 : i + k + 2], [i]) for i in range(11)],
                1,
            )
            assert torch.equal(decoder.logits(hidden).argmax(-1), sums.predictions[k + 1])
    layers = [*predictable.layers.values(), *(layer.block for layer in predictable.mtp.values())]
    assert not any(isinstance(layer.self_attn.core, CachedCore) for layer in layers)


@pytest.mark.parametrize("prompts", [[[0, 1, 2, 3]], [[0, 1, 2, 3], [4, 6, 8, 10, 12, 14], [20, 22, 0]]])
@pytest.mark.parametrize("depths", [None, 5])
def test_good_drafts_save_rounds_and_keep_all_tokens(predictable, prompts, depths):
    plain, rounds, _ = generate(predictable, prompts, new=24)
    fast, fewer, rows = generate(predictable, prompts, new=24, speculative=depths or True)
    assert fast == plain and plain[0][:4] == [4, 5, 6, 7]
    assert rounds == 24 and fewer <= 16
    assert all(0 < row.accepted <= row.drafted for row in rows)
    if depths is None:  # the layers have not learned to draft more than one token each
        assert 0.4 * sum(row.drafted for row in rows) < sum(row.accepted for row in rows)


@pytest.mark.parametrize(
    "options", [{}, dict(top_k=5), dict(top_p=0.7), dict(min_p=0.1), dict(top_k=20, top_p=0.9, min_p=0.02)], ids=str
)
def test_filters_equal_transformers(options):
    logits = 3 * torch.randn(50, generator=torch.Generator().manual_seed(0))
    ours = sampling.scores(logits, Sampling(temperature=0.8, **options)).softmax(-1)
    theirs = TemperatureLogitsWarper(0.8)(None, logits[None])
    for key, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if key in options:
            theirs = warper(options[key])(None, theirs)
    torch.testing.assert_close(ours, theirs.softmax(-1)[0], rtol=1e-5, atol=1e-7)


def test_random_numbers_are_those_of_splitmix64():
    # The first output of seed 0 in the implementation by its author; a state of 0 then adds the constant of one step.
    assert mixed(torch.tensor([GAMMA])).item() % 2**64 == 0xE220A8397B1DCDAF
    assert [signed(seed) for seed in (0, 2**63 - 1, 2**63, 2**64 - 1, -1)] == [0, 2**63 - 1, -(2**63), -1, -1]
    seeds, positions = torch.arange(200).unsqueeze(1), torch.arange(200)
    numbers = sampling.uniform(seeds, positions)
    assert numbers.min() >= 0 and numbers.max() < 1 and numbers.unique().numel() == numbers.numel()
    # Four standard errors: of the mean of 40,000 numbers, and of the correlation of neighbours in either direction.
    assert abs(numbers.mean() - 0.5) < 4 * 12**-0.5 / 200
    for lines in (numbers, numbers.t()):
        pair = torch.stack([lines[:, :-1].flatten(), lines[:, 1:].flatten()])
        assert abs(torch.corrcoef(pair)[0, 1]) < 4 / 200


@pytest.mark.parametrize("speculative", [False, True])
def test_frequencies_are_the_probabilities_of_the_model(predictable, speculative):
    """The first two tokens after a prompt, together, by a chi-square test; their log-probabilities exactly."""
    rows = [Continuation([3, 4], 2, seed) for seed in range(2_500)]
    rules = {"sampling": Sampling(2.0), "stop": frozenset(), "vocab_size": 21}
    decoder = Decoder(predictable, batch=64, max_length=8, drafts=speculative)
    Generation(decoder, rows, **rules).run()
    with torch.no_grad():
        ahead = torch.tensor([[3, 4, token] for token in range(21)])
        logprobs = (predictable(ahead)[..., :21] / 2.0).log_softmax(-1)
    wanted = (logprobs[0, 1].unsqueeze(1) + logprobs[:, 2]).exp()
    drawn = torch.zeros(21, 21)
    for row in rows:
        drawn[row.tokens[0], row.tokens[1]] += 1
        exact = [logprobs[0, 1, row.tokens[0]], logprobs[row.tokens[0], 2, row.tokens[1]]]
        assert row.logprobs == pytest.approx(
            [x.item() for x in exact], abs=5e-5
        )  # FP32, logits of order 1; processors differ
    common = wanted * len(rows) >= 5  # the approximation holds for expected counts from about 5 on
    found = torch.cat([drawn[common], drawn[~common].sum()[None]])
    expected = torch.cat([wanted[common], wanted[~common].sum()[None]]) * len(rows)
    chi_square, freedom = ((found - expected) ** 2 / expected).sum(), len(found) - 1
    assert freedom > 20 and chi_square < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations


def test_a_continuation_does_not_depend_on_rows_neighbours_or_drafts_and_can_be_resumed():
    model = random_model(vocab_size=61, num_nextn_predict_layers=1)
    requests = [(PROMPTS[i % 4], 5 + 3 * i % 11, 100 + i) for i in range(23)]
    rules = {"sampling": Sampling(0.8), "stop": frozenset({13, 14, 20, 31}), "vocab_size": 58}

    def drawn(numbers, rows, drafts=False):
        found = [Continuation(*requests[number]) for number in numbers]
        decoder = Decoder(model, batch=rows, max_length=40, drafts=drafts)
        Generation(decoder, found, **rules).run()
        return dict(zip(numbers, found, strict=True))

    alone = {number: drawn([number], 1)[number] for number in range(23)}
    assert {one.finish for one in alone.values()} == {"stop", "length"}
    assert all((one.tokens[-1] in rules["stop"]) == (one.finish == "stop") for one in alone.values())
    for numbers, rows, drafts in ((range(23), 16, False), (range(22, -1, -1), 5, False), (range(23), 6, True)):
        for number, one in drawn(list(numbers), rows, drafts).items():
            assert (one.tokens, one.finish) == (alone[number].tokens, alone[number].finish)
            assert one.logprobs == pytest.approx(
                alone[number].logprobs, abs=5e-5
            )  # FP32, logits of order 1; processors differ
    for prompt, new, seed in requests[:4]:
        first = Continuation(prompt, 3, seed)
        Generation(Decoder(model, batch=1, max_length=40), [first], **rules).run()
        rest = Continuation([*prompt, *first.tokens], new - 3, seed)
        Generation(Decoder(model, batch=1, max_length=40), [rest], **rules).run()
        whole = next(one for one in alone.values() if one.seed == seed)
        assert first.finish == "stop" or first.tokens + rest.tokens == whole.tokens


@pytest.mark.parametrize("drafts", [False, True])
def test_continuations_that_come_while_others_are_written_are_those_written_alone(drafts):
    """At other tokens in each run; those that are not wanted any more lose their rows, or never get one."""
    model = random_model(vocab_size=61, num_nextn_predict_layers=1)
    rules = {"sampling": Sampling(0.8), "stop": frozenset({13, 14, 20, 31}), "vocab_size": 58}
    requests = [(PROMPTS[i % 4], 5 + 3 * i % 11, 100 + i) for i in range(23)]
    alone = [Continuation(*request) for request in requests]
    for one in alone:
        Generation(Decoder(model, batch=1, max_length=40), [one], **rules).run()
    for gap, rows in ((0, 4), (1, 4), (2, 8), (3, 4)):
        found, calls = [Continuation(*request) for request in requests], 0
        dropped = [Continuation(prompt, 20, seed) for seed, prompt in enumerate(PROMPTS)]

        def arriving(gap=gap, found=found, dropped=dropped):
            nonlocal calls
            number, calls = calls, calls + 1
            if number == 5:
                for one in dropped:
                    one.finish = "abort"
            if number > 22 * gap and all(one.finish for one in found):
                return None
            if gap == 0:
                return [*dropped[:1], *found, *dropped[1:]] if number == 0 else []
            new = [] if number % gap or number // gap >= 23 else [found[number // gap]]
            return [*new, *(() if number else dropped)]

        decoder = Decoder(model, batch=rows, max_length=40, drafts=drafts)
        rounds = sum(1 for _ in Generation(decoder, [], **rules, arriving=arriving))
        assert [(one.tokens, one.finish) for one in found] == [(one.tokens, one.finish) for one in alone]
        for one, other in zip(found, alone, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=5e-5)  # FP32, logits of order 1; processors differ
        if gap == 0:
            assert 0 < len(dropped[0].tokens) <= 5 * (1 + drafts) and not dropped[-1].tokens
        assert rounds < sum(len(one.tokens) for one in alone) / 2, "they share rounds"


def test_equal_prompts_are_computed_once_and_long_ones_in_portions(monkeypatch):
    model = random_model(vocab_size=61)
    rows = [Continuation(PROMPTS[i // 6], 4, i) for i in range(24)]
    decoder, computed = Decoder(model, batch=5, max_length=40), []
    fill = decoder.fill
    monkeypatch.setattr(decoder_module, "PREFILL_TOKENS", 12)
    monkeypatch.setattr(decoder, "fill", lambda prompts, rows: computed.extend(prompts) or fill(prompts, rows))
    Generation(decoder, rows, sampling=Sampling(1.0), stop=frozenset(), vocab_size=58).run()
    assert computed == [prompt for prompt in PROMPTS if len(prompt) > 1]


@pytest.mark.parametrize("cpu_kernels", [False, True])
def test_recorded_experts_are_those_that_the_model_chooses(cpu_kernels):
    model = random_model(vocab_size=61, num_nextn_predict_layers=1)
    rows = [Continuation(PROMPTS[i % 4], 3 + i % 5, i) for i in range(11)]
    decoder = Decoder(model, batch=4, max_length=24, drafts=True, record=True, cpu_kernels=cpu_kernels)
    Generation(decoder, rows, sampling=Sampling(1.0), stop=frozenset(), vocab_size=58).run()
    chosen = []
    for layer in model.layers.values():
        if not layer.is_dense:
            layer.mlp.router.register_forward_hook(lambda module, inputs, routing: chosen.append(routing.experts))
    for row in rows:
        chosen.clear()
        with torch.no_grad():
            model(torch.tensor([[*row.prompt, *row.tokens[:-1]]]))
        assert torch.equal(row.routes.long().sort(-1).values, torch.stack(chosen, 1).sort(-1).values)


def test_a_stop_request_ends_all_continuations_with_what_they_have():
    model, asked = random_model(vocab_size=61), iter(range(100))
    rows = [Continuation(PROMPTS[0], new, 0) for new in (2, 30, 30, 30)]
    rules = {"sampling": Sampling(), "stop": frozenset(), "vocab_size": 58}
    generation = Generation(decoder_for(model, rows[:3]), rows, **rules, is_stopped=lambda: next(asked) == 5)
    assert sum(1 for _ in generation) == 5
    assert [(one.finish, len(one.tokens), len(one.logprobs)) for one in rows] == [
        ("length", 2, 2), ("abort", 5, 5), ("abort", 5, 5), ("abort", 3, 3),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same random model as a step folder and as a Hugging Face folder."""
    folder, model = tmp_path_factory.mktemp("models"), random_model()
    return step_folder(folder, model, model=model_table(**TABLE)), model_folder(folder / "hf", model), model


def test_greedy_tokens_equal_transformers_generate(folders):
    _, hf, model = folders
    check_greedy_tokens(AutoModelForCausalLM.from_pretrained(hf), model)


def check_greedy_tokens(theirs, model):
    """With and without drafts."""
    for prompt in PROMPTS[:2]:
        want = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        for speculative in (False, True):
            (row,) = rows = [Continuation(prompt, 24)]
            decoder = decoder_for(model, rows, drafts=speculative)
            Generation(decoder, rows, sampling=Sampling(), stop=frozenset(), vocab_size=8192).run()
            assert prompt + row.tokens == want[0].tolist()


def test_greedy_tokens_of_flash_equal_transformers_generate(tmp_path):
    model = random_model(**LATENT)
    theirs = AutoModelForCausalLM.from_pretrained(model_folder(tmp_path / "hf", model))
    assert type(theirs).__name__ == "Glm4MoeLiteForCausalLM"
    check_greedy_tokens(theirs, model)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--speculative"], ["--temperature", "0.9", "--top-p", "0.8"], ["--chat"]])
def test_command_gives_the_same_text_from_both_kinds_of_folder(options, folders, capsys):
    step, hf, _ = folders
    texts = []
    for source in (["--checkpoint", str(step)], ["--model", str(hf)]):
        assert main(["generate", *source, "--prompt", "def f(", "--max-new-tokens", "12", *options]) == 0
        out = capsys.readouterr()
        texts.append(out.out)
        assert "12 tokens" in out.err and "tokens/s" in out.err
    assert texts[0] == texts[1] and texts[0].strip()
    assert main(["generate", *source, "--prompt", "def f(", "--prompt", "x", "--max-new-tokens", "12", *options]) == 0
    assert texts[0].strip("\n") in capsys.readouterr().out


def test_an_adapter_in_memory_gives_the_text_of_the_merged_folder(folders, tmp_path, capsys):
    step, hf, model = folders
    adapter, out = str(tmp_path / "adapter"), str(tmp_path / "merged")
    export_adapter(tmp_path / "adapter", model.shape, adapters(shape=model.shape, dora=True), scale=1.0, base=str(hf))
    assert main(["convert", "merge", "--base", str(hf), "--adapter", adapter, "--output", out]) == 0
    capsys.readouterr()
    texts = []
    for source in (["--model", out], ["--checkpoint", str(step), "--adapter", adapter], ["--model", str(hf)]):
        assert main(["generate", *source, "--prompt", "def f(", "--max-new-tokens", "6"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.slow
@pytest.mark.parametrize("where", ["terminal", "log"])
def test_progress_of_a_batch_is_shown_and_does_not_change_its_text(where, folders, capsys, monkeypatch):
    command = ["generate", "--model", str(folders[1]), "--max-new-tokens", "12", "--seed", "3", "--temperature", "2"]
    command += [word for text in ("def f(", "x", "中文") for word in ("--prompt", text)]
    assert main(command) == 0
    plain = capsys.readouterr()
    assert plain.err.count("\n") == 2 and plain.out.count("--- prompt ") == 3
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    stream = Terminal() if where == "terminal" else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(command) == 0
    shown = stream.getvalue()
    assert capsys.readouterr().out == plain.out
    assert "36 tokens, first after " in shown.splitlines()[-1]
    if where == "terminal":
        assert "generating" in shown and "\x1b" in shown
    else:
        assert "generating: 6 of 36 tokens, " in shown and "generating: 36 of 36 tokens, " in shown
        assert "\x1b" not in shown


@pytest.mark.slow
def test_a_row_ends_at_a_stop_token(folders, capsys):
    command = ["generate", "--model", str(folders[1]), "--prompt", "def f(", "--max-new-tokens"]
    assert main([*command, "1"]) == 0
    first = capsys.readouterr().out[:-1]
    assert first and main([*command, "12", "--stop-token", "<think>", "--stop-token", first]) == 0
    said = capsys.readouterr()
    assert said.out == "\n" and said.err.splitlines()[1].startswith("0 tokens")


@pytest.mark.parametrize("arguments, words", [
    (["--temperature", "-1", "--top-p", "0"], ["--temperature -1.0", "--top-p 0.0"]),
    (["--top-k", "5"], ["set a --temperature"]), (["--system", "x"], ["belong to --chat"]),
    (["--chat", "--reasoning-effort", "high"], ["--reasoning-effort belongs to --chat --thinking"]),
    (["--chat", "--thinking", "--reasoning-effort", "high"], ["format of GLM-4.5 or 4.6, which states no effort"]),
    (["--prompt", ""], ["--prompt 2 of 2 is empty"]), (["--temperature", "nan"], ["--temperature nan"]),
    (["--temperature", "inf"], ["--temperature inf"]), (["--chat", "--prompt", " "], ["--prompt 2 of 2 is empty"]),
    (["--prompt", "a\udcffb"], [r"--prompt 'a\udcffb'", "not UTF-8"]),
    (["--chat", "--system", "\udcff"], ["--system", "not UTF-8"]), (["--tokenizer", "nowhere"], ["no such file"]),
    (["--max-new-tokens", "2048"], ["2048 after a prompt of 1 token", "2048 positions"]),
    (["--stop-token", "two tokens"], ["--stop-token 'two tokens'", "give a text that is one"]),
    (["--device", "nonsense"], ["--device nonsense: unknown device; use cpu"]),
    (["--device", "meta"], ["--device meta: unknown device"]),
    (["--device", "cuda:99"], ["--device cuda:99: this machine has"]),
    (["--prompt", "x" * 20_000], ["positions (max_position_embeddings)"]),
])  # fmt: skip
def test_mistakes_are_named_with_exit_code_2(arguments, words, folders, capsys):
    assert main(["generate", "--model", str(folders[1]), "--prompt", "x", *arguments]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words)


def test_a_tokenizer_of_another_text_is_warned_of_once(folders, tmp_path, capsys):
    other = tmp_path / "other.tiktoken"
    other.write_text("".join(f"{base64.b64encode(bytes([byte])).decode()} {255 - byte}\n" for byte in range(256)))
    for folder, option in ((folders[1], "--model"), (folders[0], "--checkpoint")):
        command = ["generate", option, str(folder), "--prompt", "x", "--max-new-tokens", "1"]
        assert main([*command, "--tokenizer", str(other)]) == 0
        warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
        assert len(warnings) == 1 and warnings[0].startswith(f"warning: --tokenizer {other}: is not the tokenizer")
        assert main([*command, "--tokenizer", "builtin"]) == 0
        assert "warning" not in capsys.readouterr().err


def test_processes_without_a_prompt_are_told(folders, monkeypatch, capsys):
    monkeypatch.setattr("glm46.operate.models.generate_start.start_ranks", lambda *_: 0)
    command = ["generate", "--model", str(folders[1]), "--prompt", "x", "--max-new-tokens", "1"]
    assert main([*command, "--nproc", "3"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("3 processes hold 3 copies of the model, for 1 prompt: 2 of them have nothing to do; ")
    assert main([*command, "--nproc", "2", "--tensor-parallel-degree", "2"]) == 0
    assert main([*command, "--prompt", "y", "--nproc", "2"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "width, dtype, words",
    [(18, "float32", ["multiple of 4", "can be converted"]), (20, "bfloat16", ["multiple of 8", "use float32"])],
)
def test_widths_that_grouped_mm_refuses_are_named_and_still_converted(width, dtype, words, tmp_path, capsys):
    model_folder(tmp_path / "hf", random_model(moe_intermediate_size=width))
    assert main(["convert", "from-hf", "--model", str(tmp_path / "hf"), "--output", str(tmp_path / "in")]) == 0
    for source in (["--model", str(tmp_path / "hf")], ["--checkpoint", str(tmp_path / "in/step-000000")]):
        assert main(["generate", *source, "--prompt", "x", "--dtype", dtype]) == 2
        error = capsys.readouterr().err
        assert all(word in error for word in (source[1], f"moe_intermediate_size = {width}", *words))


def test_speculation_needs_prediction_layers(tmp_path, capsys):
    folder = model_folder(tmp_path / "hf", random_model(num_nextn_predict_layers=0))
    command = ["generate", "--model", str(folder), "--prompt", "x"]
    assert main([*command, "--speculative"]) == 2
    assert "no prediction layers" in capsys.readouterr().err
    assert main([*command, "--max-new-tokens", "1"]) == 0


def test_chat_refuses_a_folder_with_the_template_of_another_model(folders, tmp_path, capsys):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folders[1] / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    command = ["generate", "--model", str(folders[1]), "--tokenizer", str(tmp_path), "--prompt", "x"]
    assert main([*command, "--max-new-tokens", "1"]) == 0
    assert main([*command, "--chat"]) == 2
    assert "chat_template.jinja: this chat template is not that of GLM-4.5" in capsys.readouterr().err
