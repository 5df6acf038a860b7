"""The task of fine-tuning: trained weights learn the targets of conversations, or to prefer one of two answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.compute.distributed.mesh import Cluster
from glm46.config.errors import UserError
from glm46.config.finetune import FineTuneConfig
from glm46.config.run_config import RunConfig
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.training.build import run
from glm46.engine.training.state import Progress
from glm46.engine.training.task import StepBatches
from glm46.run.plan import Plan
from glm46.storage.data.batches import Batch
from glm46.storage.data.chat import chat_prompt
from glm46.storage.data.conversation import Message
from glm46.storage.huggingface.tokenizer_files import stop_ids
from glm46.tasks.finetune.preferences import Preferences
from glm46.tasks.pretrain.network_rows import greedy_answers
from glm46.tasks.pretrain.task import Pretraining


class FineTuning:
    """Text, loss and validation are those of pre-training: the loader gives a label to each token that the model shall
    learn to sample, and to no other. Under [finetune.preference] loss and validation are those of `Preferences`. See
    `Task`."""

    identity_keys = Pretraining.identity_keys

    def __init__(self, plan: Plan, cluster: Cluster):
        """Load the text and build the network. Collective.

        Raises:
            UserError: the data, the samples or the layout do not match the configuration.
        """
        self.plan, self.cluster, self._config = plan, cluster, plan.config.finetune
        self._text, preference = Pretraining(plan, cluster), plan.config.preference
        self._learner = self._text if preference is None else Preferences(self._text, preference)
        self.networks, self.objectives = self._learner.networks, self._learner.objectives
        self._prompts = run_on_all_ranks(self._sample_prompts)

    def _sample_prompts(self) -> list[list[int]]:
        config: FineTuneConfig = self._config
        prompts = [
            chat_prompt(self._text.tokenizer, [Message("user", text)], thinking=config.thinking)
            for text in config.samples
        ]
        longest, positions = max(map(len, prompts), default=0), self.plan.shape.max_position_embeddings
        if longest + config.max_new_tokens > positions:
            raise UserError(
                f"finetune.max_new_tokens = {config.max_new_tokens}: after a sample of {longest} tokens the model has "
                f"{positions - longest} of its {positions} positions (max_position_embeddings) left; lower it, or "
                "shorten finetune.samples"
            )
        return prompts

    def prepare(self, progress: Progress, stop: StopRequest) -> dict[str, float]:
        """See `Task.prepare`: nothing to do."""
        return {}

    def next(self, progress: Progress, sequences: int) -> StepBatches:
        """See `Task.next`."""
        return self._learner.next(progress, sequences)

    def complete(self, micro_batches: list[Batch]) -> list[Batch]:
        """See `Task.complete`."""
        return self._learner.complete(micro_batches)

    def fault(self, row: Mapping[str, float]) -> str | None:
        """See `Task.fault`: no row ends a run."""
        return None

    def fingerprint(self) -> str:
        """See `Task.fingerprint`."""
        return self._text.fingerprint()

    def state(self, progress: Progress) -> dict[str, Any]:
        """See `Task.state`."""
        return self._text.state(progress)

    def validate(self, progress: Progress) -> dict[str, float]:
        """See `Task.validate`."""
        return self._learner.validate(progress)

    def describe(self) -> list[str]:
        """See `Task.describe`."""
        return self._text.describe()

    def load_exported(self, folder: Path) -> None:
        """See `Task.load_exported`."""
        self._text.load_exported(folder)

    def export(self, progress: Progress) -> str:
        """See `Task.export`."""
        return self._text.export(progress)

    def close(self) -> None:
        """See `Task.close`: nothing to end."""

    def sample(self, stop: StopRequest, progress: Progress) -> list[str]:
        """See `Task.sample`: the greedy answers to the samples, and which of them ended."""
        if not self._prompts:
            return []
        tokenizer, network = self._text.tokenizer, self._text.network
        network.attend_as(self.plan.stage_after(progress.samples).shape)
        ends = frozenset(stop_ids(tokenizer))
        answers = greedy_answers(
            network,
            self._prompts,
            max_new_tokens=self._config.max_new_tokens,
            has_ended=lambda _, answer: answer[-1] in ends,
            is_stopped=lambda: stop.signal_name is not None,
        )
        ended = [bool(answer) and answer[-1] in ends for answer in answers]
        lines = [f"Greedy answers after step {progress.step}; {sum(ended)} of {len(ended)} ended with a stop marker:"]
        for message, answer, has_ended in zip(self._config.samples, answers, ended, strict=True):
            state = "" if has_ended else f"│ not ended after {len(answer)} tokens"
            lines += ["", f"user: {message}", f"assistant: {tokenizer.decode(answer).strip()}{state}"]
        return [*lines, ""]


def train(config: RunConfig, stop: StopRequest | None = None) -> int:
    """Fine-tune as configured, on this rank; see `run`. Collective."""
    return run(config, FineTuning, stop)
