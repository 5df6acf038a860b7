"""Learning from pairs by direct preference optimisation: their batches, the reference, and validation."""

from collections.abc import Mapping

import torch

from glm46.compute.model.cross_entropy import token_logprobs
from glm46.config.finetune import PreferenceConfig
from glm46.engine.training.named_sums import sum_over_all_ranks
from glm46.engine.training.network import build_frozen_network
from glm46.engine.training.state import Progress
from glm46.engine.training.task import StepBatches
from glm46.run.curriculum import stage_at
from glm46.storage.data.batches import Batch
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.pairs import BEGIN
from glm46.tasks.finetune.preference_loss import REFERENCE, PreferenceLoss, split_pairs
from glm46.tasks.pretrain.task import Pretraining
from glm46.tasks.pretrain.validation import held_out_batches

_VALIDATED = ("loss", "reward_margin", "reward_accuracy")


class Preferences:
    """The parts of a `Task` that differ from pre-training on the same text.

    The reference is the policy without its adapters, or else a network of its own, which each start fills from
    checkpoint.initial_load_path.
    """

    def __init__(self, text: Pretraining, config: PreferenceConfig):
        """Build the reference. Collective."""
        self._text, self._begin_id = text, text.tokenizer.special[BEGIN]
        self._policy, adapter = text.network, text.plan.config.adapter
        self.networks, self._reference = dict(text.networks), self._policy
        if adapter is None:
            self._reference = self.networks["reference"] = build_frozen_network(text.plan, text.cluster)
            self._reference.attend_as(text.plan.stage_after(0).shape)
        self.objectives = {name: PreferenceLoss(self._policy, config) for name in text.networks}

    def next(self, progress: Progress, sequences: int) -> StepBatches:
        """See `Task.next`."""
        step = self._text.next(progress, sequences)
        self._reference.attend_as(stage_at(self._text.plan.text_stages, progress.samples).shape)
        return step._replace(micro_batches=[split_pairs(batch, self._begin_id) for batch in step.micro_batches])

    def complete(self, micro_batches: list[Batch]) -> list[Batch]:
        """See `Task.complete`: the log-probabilities of the reference."""
        completed = [batch | {REFERENCE: self._reference_logprobs(batch)} for batch in micro_batches]
        self._reference.release()
        return completed

    def _reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """FP32 [B, S] of whole rows; zeros on pipeline stages without the head, which compute no loss. Collective."""
        output = self._reference.evaluate(batch, token_logprobs, adapted=False)
        if output is None:
            return torch.zeros(batch["labels"].shape)
        return self._reference.whole_rows(output.logprobs.unsqueeze(0), batch)[0].cpu()  # sync: batches are on the CPU

    def validate(self, progress: Progress) -> dict[str, float]:
        """See `Task.validate`: the loss of held-out pairs and what `PreferenceLoss` says of their rewards."""
        of_sources = {name: self._held_out(manifest) for name, manifest in self._text.manifests.items()}
        total = {key: sum(sums[key] for sums in of_sources.values()) for key in next(iter(of_sources.values()))}
        self._policy.release()
        columns = {}
        for suffix, sums in (("", total), *((f"/{name}", sums) for name, sums in of_sources.items())):
            found = self.objectives["model"].metrics(sums, {name: value.tolist() for name, value in sums.items()}, 0)
            columns |= {f"validation_{key}{suffix}": found[key] for key in _VALIDATED}
        return columns

    def _held_out(self, manifest: Manifest) -> Mapping[str, torch.Tensor]:
        """Sums and totals of a source's held-out pairs over all ranks, FP64. Collective."""
        objective, network = self.objectives["model"], self._policy
        sums = objective.empty_sums()
        counts = dict.fromkeys(objective.count([]), 0.0)
        for batch in held_out_batches(network, manifest):
            (batch,) = self.complete([split_pairs(batch, self._begin_id)])
            # Counted by every rank that reads the same rows; the sums are not.
            for name, count in objective.count([batch]).items():
                counts[name] += count / network.plan.layout.non_dp_degree
            output = network.evaluate(batch, token_logprobs)
            if output is not None:
                for name, value in objective.sums(output, batch).items():
                    sums[name] += value.cpu()
        return sum_over_all_ranks(sums | {name: torch.tensor(n, dtype=torch.float64) for name, n in counts.items()})
