"""The gradient of the policy: exact by enumeration, by finite differences, and the same however samples lie in
batches."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from glm46.config.rl import PRESETS, RLConfig
from tests.unit.tasks.rl.samples import batch_of, policy_step, prepared, value_step

SYMBOLS, LENGTH = 3, 2


def rl(algorithm: str, **keys) -> RLConfig:
    return RLConfig.model_validate({"algorithm": algorithm, "prompts_per_rollout": 1} | keys).resolved()


@pytest.mark.parametrize("algorithm", ["gspo", "grpo", "dapo", "dr_grpo", "cispo", "rloo", "tv", "glm5_agent"])
def test_expected_gradient_is_that_of_the_expected_reward(algorithm):
    """All 9 sequences of 2 tokens, each as often as its probability says: the mean of the estimates is the gradient of
    the mean reward, up to the factor that the reduction states. A wrong sign, baseline or reduction shows here."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(SYMBOLS, generator=generator, dtype=torch.float64).requires_grad_()
    second = torch.randn(SYMBOLS, SYMBOLS, generator=generator, dtype=torch.float64).requires_grad_()
    sequences = list(itertools.product(range(SYMBOLS), repeat=LENGTH))
    rewards = torch.randn(len(sequences), generator=generator, dtype=torch.float64)
    table = torch.stack([
        torch.stack([first.log_softmax(0)[a], second.log_softmax(1)[a, b]]) for a, b in sequences
    ])  # fmt: skip
    probability = table.sum(1).exp()
    exact = torch.autograd.grad((probability * rewards).sum(), (first, second), retain_graph=True)

    # Every ordered pair of sequences is a group; its weight is the probability of generating it.
    pairs = list(itertools.product(range(len(sequences)), repeat=2))
    config = rl(algorithm, advantage="group_mean", kl={"weight": 0.0}, overlong_share=0.0)
    found = [torch.zeros_like(first), torch.zeros_like(second)]
    for pair in pairs:
        logprobs = table[list(pair)]
        fixed = logprobs.detach()
        tokens = {"old_logprobs": fixed, "rollout_logprobs": fixed, "new": fixed}
        batch = batch_of(tokens, torch.tensor([[0, 0], [1, 1]]))
        batches = prepared([batch], rewards[list(pair)], torch.tensor([0, 0]), config)
        (gradient,) = policy_step(batches, config, seq_len=LENGTH)[2]
        weight = probability[list(pair)].prod().item()
        for sum_, part in zip(
            found, torch.autograd.grad(logprobs, (first, second), gradient, retain_graph=True), strict=True
        ):
            sum_ += weight * part
    # A group's own mean as baseline leaves (n - 1) / n of the gradient; every reduction here divides by 2 tokens.
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, -other / 2 / LENGTH, rtol=1e-6, atol=1e-8)


def test_distillation_descends_the_divergence_from_the_teacher():
    """All 9 sequences by their probabilities: the mean gradient is that of KL(policy | teacher) of each token, given
    the tokens before it, which are generated from the policy and are constants. Rewards of weight 0 change nothing."""
    generator = torch.Generator().manual_seed(5)
    first, second, other_first, other_second = (
        torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((SYMBOLS,), (SYMBOLS, SYMBOLS)) * 2
    )
    sequences = list(itertools.product(range(SYMBOLS), repeat=LENGTH))

    def table(start: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
        of = start.log_softmax(0), then.log_softmax(1)
        return torch.stack([torch.stack([of[0][a], of[1][a, b]]) for a, b in sequences])

    logprobs, teacher = table(first, second), table(other_first, other_second).detach()
    log_start, log_then = first.log_softmax(0), second.log_softmax(1)
    of_start = (log_start.exp() * (log_start - other_first.detach().log_softmax(0))).sum()
    of_then = (log_then.exp() * (log_then - other_second.detach().log_softmax(1))).sum(1)
    divergence = (of_start + (log_start.exp().detach() * of_then).sum()) / LENGTH
    exact = torch.autograd.grad(divergence, (first, second), retain_graph=True)

    config, found = rl("distillation"), [torch.zeros_like(first), torch.zeros_like(second)]
    for number in range(len(sequences)):
        own = logprobs[number].unsqueeze(0)
        fixed = own.detach()
        tokens = {"old_logprobs": fixed, "rollout_logprobs": fixed, "reference_logprobs": teacher[number].unsqueeze(0)}
        batches = [batch_of(tokens | {"new": fixed}, torch.tensor([[0, 0]]))]
        batches = prepared(batches, torch.zeros(1), torch.tensor([0]), config)
        (gradient,) = policy_step(batches, config, seq_len=LENGTH)[2]
        parts = torch.autograd.grad(own, (first, second), gradient, retain_graph=True)
        for sum_, part in zip(found, parts, strict=True):
            sum_ += fixed.sum().exp() * part
    for one, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-6, atol=1e-8)  # fields are FP32


def samples(generator: torch.Generator) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor, torch.Tensor]:
    """Tokens of samples of unequal lengths, their rewards and groups."""
    lengths = [5, 2, 7, 1, 3, 6, 4, 2]
    names = ("old_logprobs", "rollout_logprobs", "reference_logprobs", "new", "old_values", "new_values")
    tokens = []
    for length in lengths:
        base = -torch.rand(length, generator=generator, dtype=torch.float64) * 3
        noise = {name: torch.randn(length, generator=generator, dtype=torch.float64) * 0.2 for name in names}
        tokens.append({name: noise[name] + (0 if "values" in name else base) for name in names})
    rewards = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return tokens, rewards, torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])


def packed(tokens: list[dict[str, torch.Tensor]], rows: list[list[int]], width: int) -> dict[str, torch.Tensor]:
    """A batch with these samples one after another in each row, with a gap behind each."""
    sample = torch.full((len(rows), width), -1)
    fields = {name: torch.full((len(rows), width), 9.0, dtype=torch.float64) for name in tokens[0]}
    for row, numbers in enumerate(rows):
        start = 0
        for number in numbers:
            end = start + len(tokens[number]["new"])
            sample[row, start:end] = number
            for name, values in tokens[number].items():
                fields[name][row, start:end] = values
            start = end + 1
    return batch_of(fields, sample)


CONFIGS = {name: {"algorithm": name} for name in PRESETS} | {
    "mis": {
        "algorithm": "gspo",
        "correction": {
            "level": "sequence", "reject_level": "token", "reject_high": 1.4,
        },
    },
    "icepop": {"algorithm": "grpo", "correction": {"level": "token", "mode": "mask", "high": 1.2}},
    "penalised": {"algorithm": "ppo", "kl": {"weight": 0.1, "where": "reward"}, "entropy_weight": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_do_not_depend_on_packing(name):
    """One sample per row in one batch, against rows and micro-batches of several samples in another order."""
    config = rl(**CONFIGS[name])
    if config.ratio == "sequence":  # these samples are too far from the old policy for the clip of GSPO
        config = rl(**CONFIGS[name] | {"clip": {"low": 0.1, "high": 0.1}})
    tokens, rewards, groups = samples(torch.Generator().manual_seed(2))
    apart = prepared([packed(tokens, [[n] for n in range(8)], 8)], rewards, groups, config)
    together = prepared(
        [packed(tokens, [[6, 1], [7, 3, 0]], 12), packed(tokens, [[5], [2, 4]], 12), packed(tokens, [[]], 12)],
        rewards, groups, config,
    )  # fmt: skip
    results = []
    for batches in (apart, together):
        loss, metrics, gradients = policy_step(batches, config, seq_len=16)
        by_sample = [
            torch.cat([g[batch["sample"] == n] for g, batch in zip(gradients, batches, strict=True)]) for n in range(8)
        ]
        assert not any(g[batch["sample"] < 0].any() for g, batch in zip(gradients, batches, strict=True))
        results.append((loss, metrics, by_sample))
    (loss, metrics, expected), (other_loss, other_metrics, found) = results
    assert loss.item() == pytest.approx(other_loss.item(), rel=1e-6) and metrics["loss"] == pytest.approx(loss.item())
    assert other_metrics == pytest.approx(metrics, rel=1e-6)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)  # fields are FP32, in another order of sums
    assert torch.cat(found).abs().max() > 1e-4
    if name == "mis":
        assert 0 < metrics["correction_dropped"] < 1


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo", "penalised", "rloo"])
def test_gradient_is_the_finite_difference_of_the_loss(name):
    config = rl(**CONFIGS[name] | {"kl": {"weight": 0.2, "where": "loss", "estimator": "k3"}})
    tokens, rewards, groups = samples(torch.Generator().manual_seed(3))
    (batch,) = prepared([packed(tokens, [[n] for n in range(8)], 8)], rewards, groups, config)
    _, _, (gradient,) = policy_step([batch], config, seq_len=16)
    direction = torch.randn(8, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * (
        batch["sample"] >= 0
    )
    step = 1e-6
    ahead, behind = (
        policy_step([batch | {"new": batch["new"] + sign * step * direction}], config, seq_len=16)[0]
        for sign in (1, -1)
    )
    assert ((ahead - behind) / (2 * step)).item() == pytest.approx((gradient * direction).sum().item(), rel=1e-6)
    if name == "ppo":
        _, _, gradient = value_step(batch, config)
        ahead, behind = (
            value_step(batch | {"new_values": batch["new_values"] + sign * step * direction}, config)[0]
            for sign in (1, -1)
        )
        assert ((ahead - behind) / (2 * step)).item() == pytest.approx((gradient * direction).sum().item(), rel=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm": "gspo", "correction": {"high": 1.1}}, {"algorithm": "ppo", "entropy_weight": 0.1},
        {
            "algorithm": "cispo",
            "correction": {"level": "geometric", "high": 1.05, "reject_level": "sequence", "reject_high": 1.2},
        },
        {"algorithm": "tv", "old_policy": "trainer", "kl": {"weight": 0.1, "where": "loss"}},
        {"algorithm": "grpo", "kl": {"weight": 0.1, "where": "loss", "estimator": "k3"}},
    ],
    ids=lambda keys: keys["algorithm"],
)  # fmt: skip
def test_a_single_step_needs_no_old_logprobs(keys):
    """Batches without them give the loss, gradients and metrics, mismatch with the engine too, of those with them, and
    the weights of what the engine generated."""
    config = rl(**keys)
    assert config.is_on_policy(config.samples_per_rollout)
    tokens, rewards, groups = samples(torch.Generator().manual_seed(7))
    batch = packed(tokens, [[6, 1], [7, 3, 0], [5], [2, 4]], 12)
    with_old = prepared([batch | {"old_logprobs": batch["new"]}], rewards, groups, config)
    without = prepared([{k: v for k, v in batch.items() if k != "old_logprobs"}], rewards, groups, config)
    assert "correction" not in without[0]
    loss, metrics, gradients = policy_step(with_old, config, seq_len=16)
    assert gradients[0].abs().max() > 1e-4 and metrics["mismatch_kl"] > 1e-4
    other_loss, other_metrics, others = policy_step(without, config, seq_len=16, is_on_policy=True)
    assert torch.equal(gradients[0], others[0]) and torch.equal(loss, other_loss) and metrics == other_metrics
    torch.testing.assert_close(without[0]["old_logprobs"], batch["new"], rtol=1e-6, atol=0)  # for the journal
    weights = with_old[0]["correction"][batch["sample"] >= 0]
    assert metrics["correction_mean"] == pytest.approx(weights.double().mean().item())
    assert (weights.unique().numel() > 1) == config.correction.is_used
    assert 0 < metrics["correction_dropped"] < 1 or config.correction.reject_level == "none"


def test_glm5_s_loss_of_agents_weighs_each_token_by_its_ratio_to_the_rollout():
    """Without an old policy, and 0 outside of both bounds for either sign of the advantage."""
    config = rl("glm5_agent", clip={"low": 0.3, "high": 0.25})
    assert config.old_policy == "rollout" and not config.is_on_policy(config.samples_per_rollout)
    tokens, rewards, groups = samples(torch.Generator().manual_seed(11))
    batch = dict(packed(tokens, [[6, 1], [7, 3, 0], [5], [2, 4]], 12))
    del batch["old_logprobs"], batch["reference_logprobs"]
    batch["rollout_logprobs"] = batch["rollout_logprobs"].float().double()  # fields are FP32
    batches = prepared([batch], rewards, groups, config)
    loss, metrics, (gradient,) = policy_step(batches, config, seq_len=16)

    is_token = batch["sample"] >= 0
    sample = batch["sample"][is_token]
    means = torch.stack([rewards[groups == group].double().mean() for group in groups])
    advantages = (rewards - means)[sample]
    logprobs = batch["new"][is_token].clone().requires_grad_()
    ratio = (logprobs.detach() - batch["rollout_logprobs"][is_token]).exp()
    is_inside = (ratio > 0.7) & (ratio < 1.25)
    expected = -(ratio.where(is_inside, 0.0) * advantages * logprobs).sum() / len(logprobs)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient[is_token], logprobs.grad, rtol=1e-6, atol=0)
    assert not gradient[~is_token].any()
    assert metrics["clip_fraction"] == pytest.approx((~is_inside).double().mean().item())
    for is_far in (ratio <= 0.7, ratio >= 1.25):
        assert {-1.0, 1.0} <= set(advantages[is_far].sign().tolist())


@pytest.mark.parametrize(("keys", "steps"), [
    ({"algorithm": "grpo"}, 2), 
    ({"algorithm": "ppo", "kl": {"weight": 0.1, "where": "reward"}}, 1),
    ({"algorithm": "grpo", "old_policy": "rollout"}, 1),
    ({"algorithm": "glm5_agent"}, 1),
], ids=["steps", "reward", "engine", "agent"])  # fmt: skip
def test_what_needs_old_logprobs_before_the_step(keys, steps):
    config = RLConfig.model_validate({"prompts_per_rollout": 2} | keys).resolved()
    assert not config.is_on_policy(config.samples_per_rollout // steps)


def test_the_critic_learns_alone_at_first():
    config = rl("ppo", critic={"warmup_tokens": 1})
    tokens, rewards, groups = samples(torch.Generator().manual_seed(3))
    batches = prepared([packed(tokens, [[n] for n in range(8)], 8)], rewards, groups, config)
    assert not policy_step(batches, config, seq_len=16)[2][0].any()
    assert value_step(batches[0], config)[2].any()


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "rloo", "cispo"])
def test_an_episode_of_two_samples_learns_as_one_of_all_its_tokens(algorithm):
    """Baselines and denominators count episodes; with a ratio of each token the rows do not matter."""
    generator = torch.Generator().manual_seed(3)
    config = rl(algorithm, overlong_share=0.0)
    names = ("old_logprobs", "rollout_logprobs", "new")
    tokens = {name: -torch.rand(3, 4, generator=generator, dtype=torch.float64) for name in names}
    joined = {name: torch.cat([torch.cat([of[:1], of[1:2]], 1), F.pad(of[2:], (0, 4))]) for name, of in tokens.items()}
    sample = torch.tensor([[0] * 8, [1] * 4 + [-1] * 4])
    whole = prepared([batch_of(joined, sample)], torch.tensor([1.0, 0.0]), torch.tensor([7, 7]), config)
    apart = batch_of(tokens, torch.arange(3).unsqueeze(1).expand(3, 4))
    apart["episode"] = torch.where(apart["sample"] == 1, -1, apart["sample"])
    episodes = torch.tensor([0, 0, 1])
    split = prepared([apart], torch.tensor([1.0, 1.0, 0.0]), torch.tensor([7, 7, 7]), config, episodes=episodes)
    (loss, metrics, (one,)), (other_loss, others, (two,)) = (policy_step(of, config, 8) for of in (whole, split))
    assert loss == pytest.approx(other_loss) and loss != 0
    torch.testing.assert_close(one[0], torch.cat([two[0], two[1]]))
    torch.testing.assert_close(one[1, :4], two[2])
    assert others == pytest.approx(metrics)
