"""The task of reinforcement learning: a policy is trained on rewards of its own samples."""

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from glm46.compute.distributed.collective_errors import read_on_first_rank, run_on_all_ranks
from glm46.compute.distributed.mesh import Cluster
from glm46.config.rl import ResolvedRL, StopConfig
from glm46.config.rl_data import WITHOUT_LABELS, PromptsConfig
from glm46.config.run_config import RunConfig
from glm46.engine.inference.decoder import describe_kernels
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.training.build import run
from glm46.engine.training.hf_weights import save_weights
from glm46.engine.training.network import Network, build_frozen_network, build_network
from glm46.engine.training.state import Progress
from glm46.engine.training.task import Objective, StepBatches, Task
from glm46.files.durable import hash_file
from glm46.run.plan import Plan
from glm46.storage.chats.chat_template import raise_for_model
from glm46.storage.data.batches import Batch
from glm46.storage.data.corpus import load_text
from glm46.storage.huggingface.tokenizer_files import stop_ids
from glm46.storage.prepare.equal_results import math_verify_version
from glm46.tasks.rl.engines import build_engine, last_values
from glm46.tasks.rl.environment import build_environment
from glm46.tasks.rl.episode_checks import require_episodes
from glm46.tasks.rl.journal import FOLDER, Journal
from glm46.tasks.rl.loop import RolloutLoop, RolloutStep
from glm46.tasks.rl.objectives import PolicyGradient, ValueLoss, critic_plan, reference_plan, reward_plan
from glm46.tasks.rl.prompts import Prompt, read_prompts, require_reachable_labels
from glm46.tasks.rl.rewards.function_pool import READ_LABELS, filter_pool, reward_pool, sandbox_lines
from glm46.tasks.rl.rollout.records import SamplingRules
from glm46.tasks.rl.rollouts import PromptSet, answered_lines, validate_sets
from glm46.tasks.rl.sampling import Sampler
from glm46.tasks.rl.stepping import StepBuilder, steps_per_rollout


class Reinforcement(Task):
    """A policy, with a critic and a frozen reference where the algorithm needs them. See `Task`."""

    name = "rl"
    has_loss_level = False
    identity_keys = (
        "rl.prompts", "rl.prompts_per_rollout", "rl.group_size", "rl.warm_up_rollouts", "training.global_batch_size",
        "debug.seed", "model.tokenizer_path",
    )  # fmt: skip
    other_text = "rl.prompts.file: holds other prompts than before"

    def __init__(self, plan: Plan, cluster: Cluster):
        """Read the prompts, load the rewards and build the networks. Collective.

        Raises:
            UserError: prompts, rewards or layout do not match the configuration.
        """
        self.plan, self.cluster = plan, cluster
        section, rollout = plan.config.reinforcement
        self._config: ResolvedRL = section.resolved()
        assert self._config.prompts is not None
        self._keys: PromptsConfig = self._config.prompts
        self.tokenizer, _ = run_on_all_ranks(lambda: load_text(plan))
        prompts, self._sets = run_on_all_ranks(self._read)
        table, name = self._config.environment, self._config.filter
        rewards = run_on_all_ranks(lambda: reward_pool(self._config))
        for some in (prompts, *(one.prompts for one in self._sets)):
            read_on_first_rank(partial(require_reachable_labels, some, rewards, thinking=self._keys.thinking))
        rules = SamplingRules(
            rollout.temperature, frozenset(stop_ids(self.tokenizer)), self.tokenizer.vocab_size,
            self._config.routing_replay,
        )  # fmt: skip
        failed = Path(plan.config.job.dump_folder, FOLDER, "failed")
        scores = any(one.name == "score" for one in self._config.rewards)
        environment = run_on_all_ranks(lambda: None if table is None else build_environment(
            table, self._keys, self.tokenizer, rules.stop, failed, scores
        ))  # fmt: skip
        if table is not None and table.kind != "function":
            every = [*prompts, *(one for some in self._sets for one in some.prompts)]
            read_on_first_rank(partial(require_episodes, table, self._keys, every))
        filter_ = run_on_all_ranks(lambda: None if name is None else filter_pool(name))
        self.networks: dict[str, Network] = {"policy": build_network(plan, cluster, on_samples=True)}
        policy = PolicyGradient(
            self.networks["policy"], self._config, rollout.temperature,
            is_on_policy=self._config.is_on_policy(plan.config.training.global_batch_size),
        )  # fmt: skip
        self.objectives: dict[str, Objective] = {"policy": policy}
        if self._config.has_reference and not plan.config.is_reference_in_policy:
            self.networks["reference"] = build_frozen_network(reference_plan(plan), cluster, on_samples=True)
        if (judged := self._config.reward_model) is not None:
            judge = reward_plan(plan, str(judged.options["load_path"]))
            self.networks["reward"] = build_frozen_network(judge, cluster, head="value", on_samples=True)
        if self._config.has_critic:
            self.networks["critic"] = build_network(critic_plan(plan), cluster, head="value", on_samples=True)
            self.objectives["critic"] = ValueLoss(self.networks["critic"], self._config)
        tokens = [one.tokens for some in (prompts, *(own for _, own in self._sets)) for one in some]
        self._stop: StopRequest | None = None
        self._progress: Progress | None = None
        self._step: RolloutStep | None = None
        engine = build_engine(self.networks["policy"], self.tokenizer, tokens, rules, self._is_stopped)
        self._sampler = Sampler(
            self._config, rollout, self.tokenizer, engine, prompts, rules, plan.config.debug.seed,
            rewards, environment, filter_,
            None if judged is None else partial(last_values, self.networks["reward"]), self._is_stopped,
        )  # fmt: skip
        self._journal = Journal(plan, self.fingerprint(), self.tokenizer.fingerprint)
        builder = StepBuilder(plan, cluster, self._config, self.networks, policy.form)
        self._loop = RolloutLoop(plan, self._sampler, policy, builder, self._journal, self._is_stopped)

    def _is_stopped(self) -> bool:
        return self._stop is not None and self._stop.signal_name is not None

    def _read(self) -> tuple[list[Prompt], list[PromptSet]]:
        config, (_, rollout) = self.plan.config, self.plan.config.reinforcement
        needs_label = any(reward.name in READ_LABELS for reward in self._config.rewards)
        most = config.training.seq_len - rollout.max_new_tokens
        if config.checkpoint.initial_load_in_hf:
            raise_for_model(config.checkpoint.initial_folder, self.tokenizer)

        def read(file: str) -> list[Prompt]:
            return read_prompts(Path(file), self._keys, self.tokenizer, most_tokens=most, needs_label=needs_label)

        return read(self._keys.file), [PromptSet(table, read(table.file)) for table in self._config.validation]

    def prepare(self, progress: Progress, stop: StopRequest) -> dict[str, float]:
        """See `Task.prepare`: at the first step of a rollout, the rollout of the journal, or a new one."""
        self._stop = stop
        if progress.step == 0 and "critic" in self.networks:
            self._start_critic()
        if progress is not self._progress:  # at the start
            self._progress, self._steps = progress, self._loop.steps(progress)
        self._step = next(self._steps)
        return {} if self._step is None else self._step.columns

    @torch.no_grad()
    def _start_critic(self) -> None:
        """The critic begins with the policy's weights, but for its head."""
        policy = self.networks["policy"].weights()
        for name, tensor in self.networks["critic"].weights().items():
            if name in policy:
                tensor.copy_(policy[name])

    def next(self, progress: Progress, sequences: int) -> StepBatches:
        """See `Task.next`; without batches if a stop was requested."""
        seq_len, step = self.plan.config.training.seq_len, self._step
        if step is None:
            return StepBatches([], sequences, seq_len, 0.0)
        tokens = self.plan.layout.dp_degree * sum(batch["input_ids"].numel() for batch in step.batches)
        return StepBatches(
            step.batches, sequences, seq_len, 0.0, packed_tokens=tokens, model_seconds=step.model_seconds
        )

    def complete(self, micro_batches: list[Batch]) -> list[Batch]:
        """See `Task.complete`: `prepare` has done it. Only now the rollout's prompts are handed out: at a stop before
        its first step, the checkpoint must lead to the same rollout again."""
        if self._progress is not None and self._step is not None:
            self._progress.prompts = self._step.next_prompt
        return micro_batches

    def fingerprint(self) -> str:
        """See `Task.fingerprint`."""
        config = self._config
        facts = [
            hash_file(Path(self._keys.file)).sha256, self._keys.model_dump(exclude={"file"}),
            config.prompts_per_rollout, config.group_size, config.warm_up_rollouts,
            self.plan.config.training.global_batch_size, self.plan.config.debug.seed, self.tokenizer.fingerprint,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def fault(self, row: Mapping[str, float]) -> str | None:
        """See `Task.fault`: the bounds of [rl.stop]."""
        return broken_bound(self._config.stop, row, self._loop.equal_rollouts)

    def state(self, progress: Progress) -> dict[str, Any]:
        """See `Task.state`: rollouts are in the journal. Collective."""
        self._loop.write_fields()
        self._journal.finish()
        return {}

    def validate(self, progress: Progress) -> dict[str, float]:
        """See `Task.validate`: rewards and pass@k of the answers to each set of prompts."""
        self._loop.update_weights(progress.step)
        return validate_sets(self._sampler, self._sets)

    def describe(self) -> list[str]:
        """See `Task.describe`."""
        config = self._config
        names = ", ".join(f"{reward.weight:g} {reward.name}" for reward in config.rewards)
        labelled = sum(prompt.label is not None for prompt in self._sampler.prompts)
        reads_none = WITHOUT_LABELS.issuperset(reward.name for reward in config.rewards)
        unread = [
            f"warning      rl.rewards: none of these reads labels, and {labelled:,} prompts have one under "
            f"'{self._keys.label_key}': right answers are worth no more than wrong ones"
        ]
        unjudged = [
            "warning      rl.rewards: math-verify is not installed, and math compares expressions as text; "
            "pip install 'glm46[rl]'"
        ]
        dtype = getattr(torch, self.plan.config.training.mixed_precision_param)
        generated = f"generation   {describe_kernels(self.cluster.device, dtype)}"
        has_judge = math_verify_version() is not None or all(reward.name != "math" for reward in config.rewards)
        return [
            f"prompts      {len(self._sampler.prompts):,} of {self._keys.file}; {config.prompts_per_rollout} x "
            f"{config.group_size} samples of a rollout in {steps_per_rollout(self.plan)} steps",
            f"algorithm    {config.algorithm}; reward {names}; networks {', '.join(self.networks)}",
            *(f"sandbox      {line}" for line in sandbox_lines(config)),
            *([generated] if self._sampler.section.kind == "local" else []),
            *(unread if labelled and reads_none and not config.warm_up_rollouts else []),
            *([] if has_judge else unjudged),
        ]

    def export(self, progress: Progress) -> str:
        """See `Task.export`: the policy."""
        return save_weights(self.networks["policy"], self.tokenizer, progress)

    def close(self) -> None:
        """See `Task.close`: the processes of rewards and environment, the engine, and the thread of the journal."""
        try:
            self._sampler.close()
        finally:
            self._journal.close()

    def sample(self, stop: StopRequest, progress: Progress) -> list[str]:
        """See `Task.sample`: answers to a few prompts with their rewards."""
        self._stop = stop
        self._loop.write_fields()
        self._journal.finish()  # at the end of a run without checkpoints
        self._loop.update_weights(progress.step)
        prompts = self._sets[0].prompts if self._sets else self._sampler.prompts
        return answered_lines(self._sampler, prompts, progress.step)


def broken_bound(stop: StopConfig, row: Mapping[str, float], equal_rollouts: int) -> str | None:
    """The bound of [rl.stop] that a step with a row of metrics breaks, with the remedy; None if none."""
    if stop.max_mismatch_kl and row["mismatch_kl"] > stop.max_mismatch_kl:
        return (
            f"mismatch_kl = {row['mismatch_kl']:.3g} is above rl.stop.max_mismatch_kl = {stop.max_mismatch_kl:g}: the "
            "engine samples from another policy than the trainer's; compare its type, version and options, or raise it"
        )
    if row["entropy"] < stop.min_entropy:
        return (
            f"entropy = {row['entropy']:.3g} is below rl.stop.min_entropy = {stop.min_entropy:g}: the policy hardly "
            "explores; set rl.entropy_weight or lower optimizer.lr and load an earlier checkpoint, or lower it"
        )
    if stop.equal_rollouts and equal_rollouts >= stop.equal_rollouts:
        return (
            f"in {equal_rollouts} rollouts in a row the rewards of each group are equal (rl.stop.equal_rollouts = "
            f"{stop.equal_rollouts}): there is nothing to learn; look at samples with python -m glm46 rl inspect, and "
            "correct rewards or prompts"
        )
    return None


def train(config: RunConfig, stop: StopRequest | None = None) -> int:
    """Train a policy as configured, on this rank; see `run`. Collective."""
    return run(config, Reinforcement, stop)
