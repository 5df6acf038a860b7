"""The main loop of RL, one rollout after another: samples -> scores -> fields -> steps -> journal -> weights."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from glm46.compute.distributed.collective_errors import read_on_first_rank
from glm46.compute.model.routes import compact_routes
from glm46.engine.training.state import Progress
from glm46.engine.training.task import StepBatches
from glm46.run.plan import Plan
from glm46.tasks.rl.fields import corrections, training_fields
from glm46.tasks.rl.journal import Journal, read_fields
from glm46.tasks.rl.objectives import PolicyGradient
from glm46.tasks.rl.packing import collect, spread
from glm46.tasks.rl.rollout.background import begin_samples
from glm46.tasks.rl.rollout.server_engine import ServerEngine
from glm46.tasks.rl.rollouts import AheadSource, demonstrate, generate_rollout
from glm46.tasks.rl.samples import Samples
from glm46.tasks.rl.sampling import Sampler
from glm46.tasks.rl.stepping import StepBuilder, gathered, samples_per_step, step_ends, steps_per_rollout


class RolloutLoop:
    """Generates, reads and trains on the rollouts of a run. All methods are collective.

    Args:
        is_stopped: polled on the first rank while it waits for groups that are generated ahead.
    """

    def __init__(
        self,
        plan: Plan,
        sampler: Sampler,
        policy: PolicyGradient,
        builder: StepBuilder,
        journal: Journal,
        is_stopped: Callable[[], bool],
    ):
        self._plan = plan
        self._config = sampler.config
        self._sampler = sampler
        self._policy = policy
        self._builder = builder
        self._journal = journal
        self._is_on_policy = self._config.is_on_policy(plan.config.training.global_batch_size)
        self._unwritten: tuple[Samples, dict[str, torch.Tensor]] | None = None
        """A rollout whose only step computes the old log-probabilities, and its fields."""
        self.columns: dict[str, float] = {}
        """Metrics of the current rollout, by column."""
        self.next_prompt = 0
        """Number of the first prompt after the current rollout's."""
        self._version = -1
        self._waiting: list[tuple[int, int]] | None = None
        """`Samples.waiting` of the previous rollout; None at the start."""
        self._ahead = None
        self._staleness = sampler.section.max_staleness
        self._drops = sampler.section.when_stale == "drop"
        if isinstance(sampler.engine, ServerEngine):
            oldest = self._staleness * steps_per_rollout(plan)
            self._ahead = AheadSource(
                sampler,
                sampler.engine,
                oldest=oldest,
                version=lambda: self._version,
                is_stopped=is_stopped,
                drops=self._drops,
            )
            begin = begin_samples
            if sampler.environment is not None:
                begin = partial(sampler.environment.begin, sampler.prompt)
            sampler.engine.generate_ahead(journal.ahead_folder, begin, goes_on=oldest > 0)

    def steps(self, progress: Progress) -> Iterator[StepBatches | None]:
        """Yield the remaining steps of the run, or None if a stop was requested.

        The caller makes each step, which advances ``progress``, before it takes the next one.

        Raises:
            UserError: if files of the journal are damaged or missing, or too many rewards failed.
        """
        self._waiting = None
        self._journal.finish()
        steps_done = self._within(progress)
        prompts = progress.prompts
        if dist.get_rank() == 0 and (line := self._journal.outlook(progress.step, steps_done, prompts)):
            self._sampler.say(line)
        while True:
            yield from self.rollout(progress)

    def _within(self, progress: Progress) -> int:
        """Return how many steps of the current rollout have been made."""
        return progress.samples % self._config.samples_per_rollout // samples_per_step(self._plan)

    def rollout(self, progress: Progress) -> Iterator[StepBatches | None]:
        """Yield the steps of the current rollout that have not been made; see `steps`."""
        steps_done = self._within(progress)
        first_step = progress.step - steps_done
        self._journal.finish()
        self.write_fields()  # of the previous rollout, while this one is generated
        self._builder.route_at(progress.curriculum_tokens)

        # 1 samples, 2 scores
        read = partial(self._journal.read, first_step, is_inside=steps_done > 0, first_prompt=progress.prompts)
        samples = read_on_first_rank(read)
        if samples is None:
            samples = self._generate(progress, first_step)
            if samples is None:
                yield None
                return
            self._write(samples)
        else:
            samples.figures |= dict.fromkeys(samples.figures.keys() & {"rollout_seconds", "reward_seconds"}, 0.0)
        self._waiting = samples.waiting
        if self._ahead is not None and self._staleness and not samples.is_demonstration:
            self._generate_ahead(self._ahead, progress, samples)

        # 3 fields: network outputs for these tokens before the first step, and what follows from rewards
        batches = self._builder.batches(samples)
        seconds = 0.0
        if steps_done:
            model_fields = read_on_first_rank(partial(read_fields, self._journal.folder, first_step))
        else:
            model_fields, seconds = self._builder.evaluate(samples, batches)
        fields, columns = self._training_fields(samples, model_fields)
        fields = model_fields | fields
        self.columns = samples.figures | {"logprob_seconds": seconds} | columns
        self.next_prompt = samples.next_prompt
        seconds += self.columns.get("rollout_seconds", 0.0)

        # 4 steps, 5 journal
        if not steps_done and self._is_on_policy and not samples.is_demonstration:
            old_logprobs = torch.full((len(samples.logprobs),), -torch.inf)
            self._policy.record = partial(collect, into=old_logprobs)
            self._unwritten = samples, fields | {"old_logprobs": old_logprobs}
        elif not steps_done:
            self._journal.write_fields(first_step, fields)
        while (number := progress.step - first_step) < len(batches):
            step_batches: list[Any] = [
                {**batch, **{name: spread(x, batch) for name, x in fields.items()}} for batch in batches[number]
            ]
            yield StepBatches(
                step_batches,
                samples_per_step(self._plan),
                self._plan.config.training.seq_len,
                read_seconds=0.0,
                model_seconds=seconds if number == steps_done else 0.0,
                packed_tokens=self._plan.layout.dp_degree * sum(batch["input_ids"].numel() for batch in step_batches),
            )

    def update_weights(self, version: int) -> None:
        """Give the engine the policy's weights after ``version`` steps, unless it has them (6 weights)."""
        if version != self._version:
            self._sampler.engine.update(version)
            self._version = version

    def write_fields(self) -> None:
        """Start writing the fields of a rollout whose only step computed its old log-probabilities.

        They can be written this late because no resume reads them: it starts before that step or after it.
        """
        if self._unwritten is None:
            return
        samples, fields = self._unwritten
        self._unwritten = None
        gathered(fields["old_logprobs"])
        fields["correction"] = corrections(fields, samples, step_ends(self._plan, samples), self._config)
        self._journal.write_fields(samples.step, fields)

    def _training_fields(
        self, samples: Samples, model_fields: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        max_length = self._sampler.section.max_new_tokens
        ends = step_ends(self._plan, samples)
        fields, columns = training_fields(model_fields, samples, ends, self._config, max_length)
        if samples.is_demonstration:
            fields["advantages"] = torch.ones_like(fields["advantages"])
        return fields, columns

    def _generate(self, progress: Progress, first_step: int) -> Samples | None:
        """Create a rollout from labels (warm-up), with the current weights, or from groups generated ahead.

        Returns None if a stop was requested.
        """
        prompts = progress.prompts
        ahead = self._ahead
        if first_step < self._config.warm_up_rollouts:
            return demonstrate(self._sampler, first_step, prompts)
        if ahead is None or self._version < 0 or not self._staleness:
            self.update_weights(progress.step)
        if ahead is None:
            samples = generate_rollout(self._sampler, self._sampler.generate_groups, first_step, prompts)
        else:
            if self._waiting is None:
                self._waiting = read_on_first_rank(lambda: self._journal.waiting_before(first_step))
            ahead.begin(progress.step, prompts, self._waiting)
            groups = self._config.prompts_per_rollout
            rollouts_ahead = min(self._staleness, self._later_rollouts(progress))
            if self._drops:  # other groups may replace a slow one from the start
                self.update_weights(progress.step)
                ahead.hand_out((1 + rollouts_ahead) * groups)
            samples = generate_rollout(self._sampler, ahead.take, first_step, prompts)
            if samples is not None:
                self.update_weights(progress.step)
                ahead.hand_out(rollouts_ahead * groups)
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
        """Generate groups of later rollouts in the background, while this one trains."""
        next_step = samples.step + steps_per_rollout(self._plan)
        read_next = partial(self._journal.read, next_step, is_inside=False, first_prompt=samples.next_prompt)
        if read_on_first_rank(lambda: read_next() is not None):
            return  # the run was killed after the next rollout was written, so the groups on disk belong to that one
        self.update_weights(progress.step)
        if ahead.waiting != dict(samples.waiting):  # the rollout was read from the journal
            ahead.begin(samples.step, samples.next_prompt, samples.waiting)
        ahead.go_on()

    def _later_rollouts(self, progress: Progress) -> int:
        """Return how many rollouts the run has after the current one."""
        tokens_per_step = samples_per_step(self._plan) * self._plan.config.training.seq_len
        remaining_steps = (self._plan.budget_tokens - progress.tokens) / tokens_per_step
        steps = steps_per_rollout(self._plan)
        return math.ceil((progress.step % steps + math.ceil(remaining_steps)) / steps) - 1
