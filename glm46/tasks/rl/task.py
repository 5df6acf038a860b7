"""Reinforcement learning: trains a policy on rewards of its own samples."""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from glm46.compute.distributed.collective_errors import read_on_first_rank, run_on_all_ranks
from glm46.compute.distributed.mesh import Cluster
from glm46.config.rl import ResolvedRL
from glm46.config.rl_data import WITHOUT_LABELS, PromptsConfig, PromptSetConfig
from glm46.engine.inference.decoder import describe_kernels
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.training.network import Network, build_frozen_network, build_network
from glm46.engine.training.objective import Objective
from glm46.engine.training.state import Progress
from glm46.engine.training.task import StepBatches, Task
from glm46.files.durable import hash_file
from glm46.run.plan import Plan
from glm46.storage.chats.chat_template import raise_for_model
from glm46.storage.data.batches import Batch
from glm46.storage.data.corpus import load_text
from glm46.storage.huggingface.tokenizer_files import stop_ids
from glm46.storage.judge.equal_results import math_verify_version
from glm46.tasks.rl.engines import build_engine, last_values
from glm46.tasks.rl.environment import build_environment
from glm46.tasks.rl.episode_checks import require_episodes
from glm46.tasks.rl.journal import Journal
from glm46.tasks.rl.journal_files import FOLDER
from glm46.tasks.rl.loop import RolloutLoop
from glm46.tasks.rl.objectives import PolicyGradient, ValueLoss, critic_plan, reference_plan, reward_plan
from glm46.tasks.rl.prompts import Prompt, read_prompts, require_reachable_labels
from glm46.tasks.rl.rewards.function_pool import READ_LABELS, reward_pool, sandbox_lines
from glm46.tasks.rl.rollout.records import SamplingRules
from glm46.tasks.rl.rollouts import answered_lines, validate_sets
from glm46.tasks.rl.sampling import Sampler
from glm46.tasks.rl.stepping import StepBuilder, steps_per_rollout


class Reinforcement(Task):
    """Trains a policy, with a critic and a frozen reference if the algorithm needs them. See `Task`."""

    name = "rl"
    has_loss_level = False
    identity_keys = (
        "rl.prompts",
        "rl.prompts_per_rollout",
        "rl.group_size",
        "rl.warm_up_rollouts",
        "training.global_batch_size",
        "debug.seed",
        "model.tokenizer_path",
    )
    other_text = "rl.prompts.file: holds other prompts than before"

    def __init__(self, plan: Plan, cluster: Cluster):
        """Read the prompts, load the rewards and build the networks. Collective.

        Raises:
            UserError: if prompts, rewards or layout do not match the configuration.
        """
        self.plan = plan
        self.cluster = cluster
        section, rollout = plan.config.reinforcement
        self._config: ResolvedRL = section.resolved()
        assert self._config.prompts is not None
        self._keys: PromptsConfig = self._config.prompts
        self.tokenizer, _ = run_on_all_ranks(lambda: load_text(plan))
        prompts, self._sets = run_on_all_ranks(self._read)
        environment_config = self._config.environment
        rewards = run_on_all_ranks(lambda: reward_pool(self._config))
        for candidates in (prompts, *(group for _, group in self._sets)):
            read_on_first_rank(partial(require_reachable_labels, candidates, rewards, thinking=self._keys.thinking))
        rules = SamplingRules(
            rollout.temperature,
            frozenset(stop_ids(self.tokenizer)),
            self.tokenizer.vocab_size,
            self._config.routing_replay,
            rollout.top_p,
            rollout.top_k,
        )
        failed_folder = Path(plan.config.job.dump_folder, FOLDER, "failed")
        needs_score = any(reward.name == "score" for reward in self._config.rewards)
        environment = run_on_all_ranks(
            lambda: (
                None
                if environment_config is None
                else build_environment(
                    environment_config, self._keys, self.tokenizer, rules.stop, failed_folder, needs_score
                )
            )
        )
        if environment_config is not None and environment_config.kind != "function":
            all_prompts = [*prompts, *(prompt for _, group in self._sets for prompt in group)]
            read_on_first_rank(partial(require_episodes, environment_config, self._keys, all_prompts))
        self.networks: dict[str, Network] = {"policy": build_network(plan, cluster, on_samples=True)}
        policy = PolicyGradient(
            self.networks["policy"],
            self._config,
            rollout.temperature,
            is_on_policy=self._config.is_on_policy(plan.config.training.global_batch_size),
            is_restricted=rollout.is_filtered,
        )
        self.objectives: dict[str, Objective] = {"policy": policy}
        if self._config.has_reference and not plan.config.is_reference_in_policy:
            self.networks["reference"] = build_frozen_network(reference_plan(plan), cluster, on_samples=True)
        if (reward_model := self._config.reward_model) is not None:
            judge_plan = reward_plan(plan, str(reward_model.options["load_path"]))
            self.networks["reward"] = build_frozen_network(judge_plan, cluster, head="value", on_samples=True)
        if self._config.has_critic:
            self.networks["critic"] = build_network(critic_plan(plan), cluster, head="value", on_samples=True)
            self.objectives["critic"] = ValueLoss(self.networks["critic"])
        tokens = [prompt.tokens for group in (prompts, *(group for _, group in self._sets)) for prompt in group]
        self._stop: StopRequest | None = None
        self._progress: Progress | None = None
        self._step: StepBatches | None = None
        engine = build_engine(self.networks["policy"], self.tokenizer, tokens, rules, self._is_stopped)
        self._sampler = Sampler(
            self._config,
            rollout,
            self.tokenizer,
            engine,
            prompts,
            rules,
            plan.config.debug.seed,
            rewards,
            environment,
            None if reward_model is None else partial(last_values, self.networks["reward"]),
            self._is_stopped,
        )
        self._journal = Journal(plan, self.fingerprint(), self.tokenizer.fingerprint)
        builder = StepBuilder(plan, cluster, self._config, self.networks, policy.form)
        self._loop = RolloutLoop(plan, self._sampler, policy, builder, self._journal, self._is_stopped)

    def _is_stopped(self) -> bool:
        return self._stop is not None and self._stop.signal_name is not None

    def _read(self) -> tuple[list[Prompt], list[tuple[PromptSetConfig, list[Prompt]]]]:
        config = self.plan.config
        _, rollout = config.reinforcement
        needs_label = any(reward.name in READ_LABELS for reward in self._config.rewards)
        max_prompt_tokens = config.training.seq_len - rollout.max_new_tokens
        if config.checkpoint.initial_load_in_hf:
            raise_for_model(config.checkpoint.initial_folder, self.tokenizer)

        def read(file: str) -> list[Prompt]:
            return read_prompts(
                Path(file), self._keys, self.tokenizer, most_tokens=max_prompt_tokens, needs_label=needs_label
            )

        return read(self._keys.file), [(table, read(table.file)) for table in self._config.validation]

    def prepare(self, progress: Progress, stop: StopRequest) -> dict[str, float]:
        """See `Task.prepare`. At the first step of a rollout, read it from the journal or generate it."""
        self._stop = stop
        if progress.step == 0 and "critic" in self.networks:
            self._start_critic()
        if progress is not self._progress:  # first call of this run
            self._progress = progress
            self._steps = self._loop.steps(progress)
        self._step = next(self._steps)
        return {} if self._step is None else self._loop.columns

    @torch.no_grad()
    def _start_critic(self) -> None:
        """Copy the policy's weights into the critic, except the head."""
        policy = self.networks["policy"].weights()
        for name, tensor in self.networks["critic"].weights().items():
            if name in policy:
                tensor.copy_(policy[name])

    def next(self, progress: Progress, sequences: int) -> StepBatches:
        """See `Task.next`. No batches if a stop was requested."""
        if self._step is None:
            return StepBatches([], sequences, self.plan.config.training.seq_len, 0.0)
        return self._step._replace(sequences=sequences)

    def complete(self, micro_batches: list[Batch]) -> list[Batch]:
        """See `Task.complete`. `prepare` has already filled the fields; this only advances the prompt counter.

        The counter advances as late as this so that, after a stop before the rollout's first step, a resume from the
        checkpoint generates the same rollout.
        """
        if self._progress is not None and self._step is not None:
            self._progress.prompts = self._loop.next_prompt
        return micro_batches

    def fingerprint(self) -> str:
        """See `Task.fingerprint`."""
        config = self._config
        facts = [
            hash_file(Path(self._keys.file)).sha256,
            self._keys.model_dump(exclude={"file"}),
            config.prompts_per_rollout,
            config.group_size,
            config.warm_up_rollouts,
            self.plan.config.training.global_batch_size,
            self.plan.config.debug.seed,
            self.tokenizer.fingerprint,
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def state(self, progress: Progress) -> dict[str, Any]:
        """See `Task.state`. Empty, because rollouts are stored in the journal; waits until they are. Collective."""
        self._loop.write_fields()
        self._journal.finish()
        return {}

    def validate(self, progress: Progress) -> dict[str, float]:
        """See `Task.validate`. Computes rewards and pass@k for each set of prompts."""
        self._loop.update_weights(progress.step)
        return validate_sets(self._sampler, self._sets)

    def describe(self) -> list[str]:
        """See `Task.describe`."""
        config = self._config
        names = ", ".join(f"{reward.weight:g} {reward.name}" for reward in config.rewards)
        labelled_count = sum(prompt.label is not None for prompt in self._sampler.prompts)
        ignores_labels = WITHOUT_LABELS.issuperset(reward.name for reward in config.rewards)
        labels_warning = [
            f"warning      rl.rewards: none of these reads labels, and {labelled_count:,} prompts have one under "
            f"'{self._keys.label_key}': right answers are worth no more than wrong ones"
        ]
        math_warning = [
            "warning      rl.rewards: math-verify is not installed, and math compares expressions as text; "
            "pip install 'glm46[rl]'"
        ]
        dtype = getattr(torch, self.plan.config.training.mixed_precision_param)
        kernels_line = f"generation   {describe_kernels(self.cluster.device, dtype)}"
        can_judge = math_verify_version() is not None or all(reward.name != "math" for reward in config.rewards)
        return [
            f"prompts      {len(self._sampler.prompts):,} of {self._keys.file}; {config.prompts_per_rollout} x "
            f"{config.group_size} samples of a rollout in {steps_per_rollout(self.plan)} steps",
            f"algorithm    {config.algorithm}; reward {names}; networks {', '.join(self.networks)}",
            *(f"sandbox      {line}" for line in sandbox_lines(config)),
            *([kernels_line] if self._sampler.section.kind == "local" else []),
            *(labels_warning if labelled_count and ignores_labels and not config.warm_up_rollouts else []),
            *([] if can_judge else math_warning),
        ]

    def close(self) -> None:
        """See `Task.close`. Ends reward and environment processes, the engine, and the journal's thread."""
        try:
            self._sampler.close()
        finally:
            self._journal.close()

    def sample(self, stop: StopRequest, progress: Progress) -> list[str]:
        """See `Task.sample`. Answers a few prompts and shows the rewards."""
        self._stop = stop
        self._loop.write_fields()
        self._journal.finish()  # at the end of a run without checkpoints
        self._loop.update_weights(progress.step)
        prompts = self._sets[0][1] if self._sets else self._sampler.prompts
        return answered_lines(self._sampler, prompts, progress.step)


def build_task(plan: Plan, cluster: Cluster) -> Task:
    """Build the task of reinforcement learning. Collective."""
    return Reinforcement(plan, cluster)
