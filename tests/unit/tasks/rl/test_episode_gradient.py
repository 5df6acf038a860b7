"""Random episodes of several samples, packed, through a network: the weights get the gradient of one sample with all
tokens of the episode, in which those that were not generated are masked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm46.compute.model.cross_entropy import IGNORE
from glm46.compute.model.init import fill_parameter
from glm46.compute.model.transformer import Transformer
from glm46.config.model import ModelConfig
from glm46.config.presets import resolve_shape
from glm46.config.rl import ResolvedRL, RLConfig
from glm46.tasks.rl.fields import training_fields
from glm46.tasks.rl.objectives import PolicyGradient
from glm46.tasks.rl.packing import PackShape, build_batch, items_of, pack, spread
from glm46.tasks.rl.rollout.records import Completion, Episode
from glm46.tasks.rl.samples import to_samples
from tests.builders import TINY, model_table
from tests.unit.tasks.rl.samples import network, output

LENGTH, VOCABULARY = 64, 40


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    made = Transformer(
        resolve_shape(ModelConfig(**model_table(**TINY, vocab_size=VOCABULARY, num_nextn_predict_layers=0)))
    )
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            places = [torch.arange(size) for size in tensor.shape]
            fill_parameter(tensor, places, tensor.shape, seed=0, name=name, std=0.1)
    return made


def gradient_of(model: Transformer, ends: list[Episode], config: ResolvedRL) -> tuple[float, dict, int]:
    """Loss and gradients of an optimizer step with these episodes, and the number of their samples."""
    samples = to_samples(ends, ["exact"], step=0, first_prompt=0, next_prompt=2)
    rollout = torch.from_numpy(samples.logprobs)
    given = {"rollout_logprobs": rollout}
    given |= {"old_logprobs": rollout + 0.1 * (50 * rollout).sin(), "reference_logprobs": 0.9 * rollout}
    given |= training_fields(given, samples, [len(samples)], config, LENGTH)[0]
    shape = PackShape(LENGTH, 2, 1, None, 0)
    items = items_of(samples, range(len(samples)), shape)
    batches = [build_batch(samples, rows, 0, shape, items, LENGTH) for rows in pack(items, shape)[0]]
    objective = PolicyGradient(network(LENGTH), config, temperature=1.0)
    totals, loss = objective.count(batches), torch.zeros(())
    for batch in batches:
        logits = model(batch["input_ids"], positions=batch["positions"], document_ids=batch["document_ids"])
        labels = batch["labels"].where(batch["labels"] != IGNORE, 0).unsqueeze(-1)
        logprobs = logits.float().log_softmax(-1).gather(-1, labels).squeeze(-1)
        fields = batch | {name: spread(values.float(), batch) for name, values in given.items()}
        loss = loss + objective.loss(output(logprobs), fields, totals, 0)
    names, weights = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return loss.item(), dict(zip(names, gradients, strict=True)), len(samples)


@settings(deadline=None, max_examples=15)
@given(data=st.data())
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "rloo", "cispo"])
def test_samples_of_an_episode_give_the_weights_the_gradient_of_one_with_a_mask(algorithm, model, data):
    tokens, logprobs = (
        st.lists(values, min_size=1, max_size=3)
        for values in (st.integers(0, VOCABULARY - 1), st.floats(-4.25, -3.25, width=32))
    )
    whole, apart = [], []
    for number in range(data.draw(st.integers(2, 5), "episodes")):
        prompt, read, given_, replies, starts = data.draw(tokens), [], [], [], []
        for turn in range(data.draw(st.integers(1, 5), "turns")):
            if turn:
                reply = data.draw(tokens)
                replies.append((len(read), len(read) + len(reply)))
                read, given_ = read + reply, given_ + [0.0] * len(reply)
            own = data.draw(logprobs)
            starts.append(len(read))
            read = read + [data.draw(st.integers(0, VOCABULARY - 1)) for _ in own]
            given_ = given_ + own

        def sample(end: int, first: int, prompt=prompt, read=read, given_=given_, replies=replies) -> Completion:
            """The conversation up to an end, of which the policy learns from a token on."""
            masked = ((0, first),) if first else ()
            behind = [reply for reply in replies if first <= reply[0] and reply[1] <= end]
            values = [0.0] * first + given_[first:end]
            return Completion(read[:end], values, "stop", [0] * end, None, (*masked, *behind), prompt=prompt)

        cuts = [0, *sorted(data.draw(st.sets(st.sampled_from(starts[1:])), "cuts") if starts[1:] else ())]
        ends = [replies[starts.index(cut) - 1][0] for cut in cuts[1:]] + [len(read)]
        of = {"group": number % 2, "reward": data.draw(st.integers(0, 2), "reward"), "parts": {"exact": 1.0}}
        whole.append(Episode([sample(len(read), 0)], **of))
        apart.append(Episode([sample(end, cut) for cut, end in zip(cuts, ends, strict=True)][::-1], **of))

    config = RLConfig.model_validate({"algorithm": algorithm, "prompts_per_rollout": 2, "overlong_share": 0.0})
    loss, expected, _ = gradient_of(model, whole, config.resolved())
    other, found, count = gradient_of(model, apart, config.resolved())
    assert count == sum(len(end.samples) for end in apart)
    assert other == pytest.approx(loss, rel=1e-5, abs=1e-6)
    # Gradients of episodes with equal tokens cancel, down to the rounding of parts of about 0.1.
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * largest + 2e-6, msg=name)
