"""Fixed samples as batches, and objectives without a model, for the tests of this room."""

from types import SimpleNamespace

import torch
from torch import Tensor

from glm46.compute.model.cross_entropy import IGNORE
from glm46.config.rl import RLConfig
from glm46.tasks.rl.fields import training_fields
from glm46.tasks.rl.objectives import PolicyGradient, ValueLoss

LAYOUT = SimpleNamespace(ranks_per_dp_rank=1, non_dp_degree=1)


def network(seq_len: int) -> SimpleNamespace:
    """What an objective asks of a network with one rank, whose outputs are given."""
    config = SimpleNamespace(training=SimpleNamespace(seq_len=seq_len), mtp=SimpleNamespace(loss_weight=0.0))
    plan = SimpleNamespace(config=config, shape=SimpleNamespace(), mtp_depths=0)
    cluster = SimpleNamespace(meshes=SimpleNamespace(sequence=None), layout=LAYOUT)
    return SimpleNamespace(plan=plan, cluster=cluster, whole_rows=lambda values, batch: values.detach())


def output(logprobs: Tensor, entropy: Tensor | None = None, values: Tensor | None = None) -> SimpleNamespace:
    """As far as an objective reads `LossSums`."""
    entropy = torch.zeros_like(logprobs) if entropy is None else entropy
    return SimpleNamespace(logprobs=logprobs, entropy=entropy, values=values, mtp_losses=[])


def batch_of(tokens: dict[str, Tensor], sample: Tensor) -> dict[str, Tensor]:
    """A batch with these fields [B, S] and labels where ``sample`` is not negative; other positions are 0."""
    is_token = sample >= 0
    fields = {name: torch.where(is_token, value, 0.0) for name, value in tokens.items()}
    return fields | {"labels": torch.where(is_token, 1, IGNORE), "sample": sample, "episode": sample}


class Judged:
    """As far as `training_fields` reads `Samples`."""

    def __init__(self, of_targets: Tensor, episode: Tensor, reward: Tensor, group: Tensor):
        self.of_targets, self.episode = of_targets, episode.numpy()
        self.reward, self.group = reward.numpy(), group.numpy()

    def __len__(self) -> int:
        return len(self.episode)


def prepared(
    batches: list[dict[str, Tensor]],
    rewards: Tensor,
    groups: Tensor,
    config: RLConfig,
    longest: int = 6,
    episodes: Tensor | None = None,
) -> list[dict[str, Tensor]]:
    """The same batches, of one optimizer step, with all fields."""
    is_target = [batch["labels"] != IGNORE for batch in batches]

    def flat(name: str) -> Tensor:
        return torch.cat([batch[name][here] for batch, here in zip(batches, is_target, strict=True)])

    order = flat("sample").argsort(stable=True)
    names = {"old_logprobs", "rollout_logprobs", "reference_logprobs", "old_values"} & batches[0].keys()
    given = {name: flat(name)[order] for name in names}
    episodes = torch.arange(len(rewards)) if episodes is None else episodes
    is_first = episodes.diff(prepend=torch.tensor([-1])) != 0
    samples = Judged(flat("sample")[order], episodes, rewards[is_first].double(), groups[is_first])
    fields, _ = training_fields(given, samples, [len(rewards)], config, longest)
    found = [dict(batch) for batch in batches]
    for name, values in fields.items():
        parts = torch.empty_like(values).scatter(0, order, values).split([int(here.sum()) for here in is_target])
        for batch, here, part in zip(found, is_target, parts, strict=True):
            batch[name] = torch.zeros(here.shape).masked_scatter(here, part)
    return found


def policy_step(
    batches: list[dict[str, Tensor]],
    config: RLConfig,
    seq_len: int,
    entropy: Tensor | None = None,
    *,
    is_on_policy: bool = False,
) -> tuple[Tensor, dict[str, float], list[Tensor]]:
    """Loss, metrics and gradients of the log-probabilities ``new`` of each batch."""
    objective = PolicyGradient(network(seq_len), config, temperature=1.0, is_on_policy=is_on_policy)
    objective.record = lambda logprobs, batch: batch.update(old_logprobs=logprobs)
    totals, sums, parts, gradients = objective.count(batches), objective.empty_sums(), [], []
    for batch in batches:
        new = batch["new"].clone().requires_grad_()
        loss = objective.loss(output(new, entropy), batch, totals, 0)
        (gradient,) = torch.autograd.grad(loss, new)
        gradients.append(gradient)
        parts.append(loss.detach())
        for name, value in objective.sums(output(new.detach(), entropy), batch).items():
            sums[name] = sums[name] + value
    return torch.stack(parts).sum(), objective.metrics(sums, totals, 0), gradients


def value_step(batch: dict[str, Tensor], config: RLConfig) -> tuple[Tensor, dict[str, float], Tensor]:
    """Loss, metrics and gradient of the values ``new_values``."""
    objective = ValueLoss(network(1))
    values, totals = batch["new_values"].clone().requires_grad_(), objective.count([batch])
    loss = objective.loss(output(values, values=values), batch, totals, 0)
    sums = objective.sums(output(values.detach(), values=values.detach()), batch)
    return loss.detach(), objective.metrics(sums, totals, 0), torch.autograd.grad(loss, values)[0]


class InRounds:
    """Serves by `generate`: what comes is a round. As `LocalEngine.serve` it ends early at a stop."""

    def serve(self, exchange, rules) -> None:
        ended = {}
        while (given := exchange(ended)) is not None:
            (numbers, requests), _ = zip(*given[0], strict=True) if given[0] else ((), ()), given[1]
            completions = self.generate(requests, rules) if requests else []
            if any(one.finish == "abort" for one in completions):
                return
            ended = dict(zip(numbers, completions, strict=True))
