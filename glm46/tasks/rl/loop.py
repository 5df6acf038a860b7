"""The story of a run, one rollout after another: samples -> scores -> fields -> steps -> journal -> weights."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from glm46.compute.distributed.collective_errors import read_on_first_rank
from glm46.compute.model.routes import compact_routes
from glm46.engine.training.state import Progress
from glm46.run.plan import Plan
from glm46.storage.data.batches import Batch
from glm46.tasks.rl.fields import corrections, training_fields
from glm46.tasks.rl.journal import Journal, read_fields
from glm46.tasks.rl.objectives import PolicyGradient
from glm46.tasks.rl.packing import spread
from glm46.tasks.rl.rollout.background import begin_samples
from glm46.tasks.rl.rollout.server_engine import ServerEngine
from glm46.tasks.rl.rollouts import AheadSource, demonstrate, generate_rollout
from glm46.tasks.rl.samples import Samples
from glm46.tasks.rl.sampling import Sampler
from glm46.tasks.rl.stepping import StepBuilder, TokenRecord, samples_per_step, step_ends, steps_per_rollout


class RolloutStep(NamedTuple):
    """An optimizer step on a rollout."""

    batches: list[Batch]
    """This rank's micro-batches, with all fields."""
    next_prompt: int
    """Number of the prompts that are handed out once this step is made."""
    columns: dict[str, float]
    """Of metrics, of the rollout."""
    model_seconds: float
    """Of networks, for the rollout; 0 but in its first step."""


class RolloutLoop:
    """The rollouts of a run. All methods are collective.

    Args:
        is_stopped: asked on the first rank while it waits for groups that are generated ahead.
    """

    def __init__(
        self, plan: Plan, sampler: Sampler, policy: PolicyGradient, builder: StepBuilder, journal: Journal,
        is_stopped: Callable[[], bool],
    ):  # fmt: skip
        self._plan, self._config, self._sampler = plan, sampler.config, sampler
        self._policy, self._builder, self._journal = policy, builder, journal
        self._is_on_policy = self._config.is_on_policy(plan.config.training.global_batch_size)
        self._unwritten: tuple[Samples, dict[str, torch.Tensor], TokenRecord] | None = None
        """A rollout whose only step computes the old log-probabilities, its fields, and the record of these."""
        self._version = -1
        self.equal_rollouts = 0
        """In a row up to now, whose groups all have equal rewards."""
        self._waiting: list[tuple[int, int]] | None = None
        """`Samples.waiting` of the rollout before; None at the start."""
        section, engine, self._ahead = sampler.section, sampler.engine, None
        self._staleness, self._drops = section.max_staleness, section.when_stale == "drop"
        if isinstance(engine, ServerEngine):
            oldest = self._staleness * steps_per_rollout(plan)
            self._ahead = AheadSource(
                sampler, engine, oldest=oldest, version=lambda: self._version, is_stopped=is_stopped, drops=self._drops
            )
            begin = begin_samples
            if sampler.environment is not None:
                begin = partial(sampler.environment.begin, sampler.prompt)
            engine.generate_ahead(journal.ahead_folder, begin, goes_on=oldest > 0)

    def steps(self, progress: Progress) -> Iterator[RolloutStep | None]:
        """Yield each step, from the one that comes next on; the caller makes it, which moves ``progress``, before it
        asks for another one. None: a stop was requested.

        Raises:
            UserError: files of the journal are damaged or missing, or too many rewards failed.
        """
        self._waiting = None
        self._journal.finish()
        within, prompts = self._within(progress), progress.prompts
        if dist.get_rank() == 0 and (line := self._journal.outlook(progress.step, within, prompts)):
            self._sampler.say(line)
        while True:
            yield from self.rollout(progress)

    def _within(self, progress: Progress) -> int:
        """Steps that are made of a rollout that is begun."""
        return progress.samples % self._config.samples_per_rollout // samples_per_step(self._plan)

    def rollout(self, progress: Progress) -> Iterator[RolloutStep | None]:
        """See `steps`: those of one rollout that are not made yet."""
        within = self._within(progress)
        first = progress.step - within
        self._journal.finish()
        self.write_fields()  # of the rollout before, while the next one is generated
        self._builder.route_at(progress.curriculum_tokens)

        # 1 samples, 2 scores
        read = partial(self._journal.read, first, is_inside=within > 0, first_prompt=progress.prompts)
        samples = read_on_first_rank(read)
        if samples is None:
            samples = self._generate(progress, first)
            if samples is None:
                yield None
                return
            self._write(samples)
        else:
            samples.figures |= dict.fromkeys(samples.figures.keys() & {"rollout_seconds", "reward_seconds"}, 0.0)
        self._waiting = samples.waiting
        if self._ahead is not None and self._staleness and not samples.is_demonstration:
            self._generate_ahead(self._ahead, progress, samples)

        # 3 fields: what networks say of these tokens before the first step, and what follows from rewards
        batches, seconds = self._builder.batches(samples), 0.0
        if within:
            given = read_on_first_rank(partial(read_fields, self._journal.folder, first))
        else:
            given, seconds = self._builder.evaluate(samples, batches)
        fields, columns = self._training_fields(samples, given)
        fields = given | fields
        columns = samples.figures | {"logprob_seconds": seconds} | columns
        self.equal_rollouts = self.equal_rollouts + 1 if columns.get("equal_groups_ratio") == 1.0 else 0
        seconds += columns.get("rollout_seconds", 0.0)

        # 4 steps, 5 journal
        if not within and self._is_on_policy and not samples.is_demonstration:
            self._policy.record = TokenRecord(len(samples.logprobs))
            self._unwritten = samples, fields, self._policy.record
        elif not within:
            self._journal.write_fields(first, fields)
        while (number := progress.step - first) < len(batches):
            own: list[Any] = [
                {**batch, **{name: spread(x, batch) for name, x in fields.items()}} for batch in batches[number]
            ]
            yield RolloutStep(own, samples.next_prompt, columns, 0.0 if number > within else seconds)

    def update_weights(self, version: int) -> None:
        """6 weights: give the engine those of the policy, which has made so many steps, if it has others."""
        if version != self._version:
            self._sampler.engine.update(version)
            self._version = version

    def write_fields(self) -> None:
        """Begin to write the fields of a rollout that waited for the old log-probabilities of its only step. No resume
        reads them: it begins before that step or behind it."""
        if self._unwritten is None:
            return
        (samples, fields, record), self._unwritten = self._unwritten, None
        fields["old_logprobs"] = record.of_all_ranks()
        fields["correction"] = corrections(fields, samples, step_ends(self._plan, samples), self._config)
        self._journal.write_fields(samples.step, fields)

    def _training_fields(
        self, samples: Samples, given: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        longest, ends = self._sampler.section.max_new_tokens, step_ends(self._plan, samples)
        fields, columns = training_fields(given, samples, ends, self._config, longest)
        if samples.is_demonstration:
            fields["advantages"] = torch.ones_like(fields["advantages"])
        return fields, columns

    def _generate(self, progress: Progress, first: int) -> Samples | None:
        """The rollout of a step: labels, samples of the present weights, or groups that are on their way."""
        prompts, ahead = progress.prompts, self._ahead
        if first < self._config.warm_up_rollouts:
            return demonstrate(self._sampler, first, prompts)
        if ahead is None or self._version < 0 or not self._staleness:
            self.update_weights(progress.step)
        if ahead is None:
            samples = generate_rollout(self._sampler, self._sampler.generate_groups, first, prompts)
        else:
            if self._waiting is None:
                self._waiting = read_on_first_rank(lambda: self._journal.waiting_before(first))
            ahead.begin(progress.step, prompts, self._waiting)
            each, later = self._config.prompts_per_rollout, min(self._staleness, self._later_rollouts(progress))
            if self._drops:  # a slow group is overtaken from the begin on
                self.update_weights(progress.step)
                ahead.hand_out((1 + later) * each)
            samples = generate_rollout(self._sampler, ahead.take, first, prompts)
            if samples is not None:
                self.update_weights(progress.step)
                ahead.hand_out(later * each)
                ahead.describe(samples)
        if samples is not None and samples.routes is not None:
            routes = torch.from_numpy(samples.routes)
            samples.routes = compact_routes(routes, (len(routes),), self._plan.shape).numpy()
        return samples

    def _write(self, samples: Samples) -> None:
        if self._ahead is not None and not self._staleness:
            self._journal.write(samples, self._ahead.forget_taken)
            return
        self._journal.write(samples)
        if self._staleness:  # `_generate_ahead` forgets the groups of this rollout
            self._journal.finish()

    def _generate_ahead(self, ahead: AheadSource, progress: Progress, samples: Samples) -> None:
        """Generate what later rollouts need, while this one trains."""
        following = samples.step + steps_per_rollout(self._plan)
        find = partial(self._journal.read, following, is_inside=False, first_prompt=samples.next_prompt)
        if read_on_first_rank(lambda: find() is not None):
            return  # the run was killed after it: what waits on the disk was handed out with it, or after it
        self.update_weights(progress.step)
        if ahead.waiting != dict(samples.waiting):  # it was read from the journal
            ahead.begin(samples.step, samples.next_prompt, samples.waiting)
        ahead.go_on()

    def _later_rollouts(self, progress: Progress) -> int:
        """Rollouts of the run after the one of this step."""
        per_step = samples_per_step(self._plan) * self._plan.config.training.seq_len
        left, per_rollout = (self._plan.budget_tokens - progress.tokens) / per_step, steps_per_rollout(self._plan)
        return math.ceil((progress.step % per_rollout + math.ceil(left)) / per_rollout) - 1
