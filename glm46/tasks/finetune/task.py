"""Fine-tuning: trained weights learn the targets of conversations, or to prefer one of two answers."""

from typing import cast

import torch

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.compute.distributed.mesh import Cluster
from glm46.compute.model.cross_entropy import token_logprobs
from glm46.config.errors import UserError
from glm46.config.finetune import FineTuneConfig, PreferenceConfig
from glm46.engine.evaluation.network_rows import greedy_answers, tokens_at_once
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.training.network import Network, build_frozen_network
from glm46.engine.training.rank_sums import sum_over_all_ranks
from glm46.engine.training.state import Progress
from glm46.engine.training.task import StepBatches, Task
from glm46.run.curriculum import stage_at
from glm46.run.plan import Plan
from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.chat_template import raise_for_text
from glm46.storage.chats.conversation import Message
from glm46.storage.chats.pairs import BEGIN
from glm46.storage.data.batches import Batch
from glm46.storage.data.manifest import Manifest
from glm46.storage.huggingface.tokenizer_files import stop_ids
from glm46.tasks.finetune.halves import mismatch_completions, only_ends, split_pairs, with_fields
from glm46.tasks.finetune.preference_loss import KL, REFERENCE, PreferenceLoss
from glm46.tasks.pretrain.task import Pretraining
from glm46.tasks.pretrain.validation import held_out_batches

_VALIDATED = ("loss", "rewards/margins", "rewards/accuracies")


class FineTuning(Pretraining):
    """Trains on conversations, with text, loss and validation of pre-training. See `Task`.

    The difference lies in the data: the loader gives labels only to tokens that the model should learn to generate.
    """

    name = "finetune"

    def __init__(self, plan: Plan, cluster: Cluster):
        """Load the text and build the network. Collective.

        Raises:
            UserError: if the data, the samples or the layout do not match the configuration.
        """
        super().__init__(plan, cluster, check_text=raise_for_text)
        self._config: FineTuneConfig = cast(FineTuneConfig, plan.config.finetune)
        self._prompts = run_on_all_ranks(self._sample_prompts)

    def _sample_prompts(self) -> list[list[int]]:
        config = self._config
        prompts = [
            chat_prompt(self.tokenizer, [Message("user", text)], thinking=config.thinking) for text in config.samples
        ]
        max_len = max(map(len, prompts), default=0)
        positions = self.plan.shape.max_position_embeddings
        if max_len + config.max_new_tokens > positions:
            raise UserError(
                f"finetune.max_new_tokens = {config.max_new_tokens}: after a sample of {max_len} tokens the model has "
                f"{positions - max_len} of its {positions} positions (max_position_embeddings) left; lower it, or "
                "shorten finetune.samples"
            )
        exchange = self.plan.config.parallelism.expert_exchange
        limit = tokens_at_once(self.plan)
        if exchange == "deepep" and max_len + config.max_new_tokens > limit:
            raise UserError(
                f"finetune.max_new_tokens = {config.max_new_tokens}: after a sample of {max_len} tokens an answer is "
                f"longer than the {limit} tokens of a micro-batch, the most that DeepEP sends; lower it, shorten "
                'finetune.samples, or set parallelism.expert_exchange = "two_level"'
            )
        return prompts

    def sample(self, stop: StopRequest, progress: Progress) -> list[str]:
        """See `Task.sample`. Answers finetune.samples greedily and marks answers that did not end."""
        if not self._prompts:
            return []
        tokenizer = self.tokenizer
        network = self.network
        network.attend_as(self.plan.stage_after(progress.samples).shape)
        stop_tokens = frozenset(stop_ids(tokenizer))
        answers = greedy_answers(
            network,
            self._prompts,
            max_new_tokens=self._config.max_new_tokens,
            has_ended=lambda _, answer: answer[-1] in stop_tokens,
            is_stopped=lambda: stop.signal_name is not None,
        )
        finished = [bool(answer) and answer[-1] in stop_tokens for answer in answers]
        lines = [
            f"Greedy answers after step {progress.step}; {sum(finished)} of {len(finished)} ended with a stop marker:"
        ]
        for message, answer, has_ended in zip(self._config.samples, answers, finished, strict=True):
            state = "" if has_ended else f"│ not ended after {len(answer)} tokens"
            lines += ["", f"user: {message}", f"assistant: {tokenizer.decode(answer).strip()}{state}"]
        return [*lines, ""]


class PreferenceTuning(FineTuning):
    """Trains on pairs of answers, or on labelled answers.

    The reference is the policy without its adapters, or without adapters a second network, which each start loads from
    checkpoint.initial_load_path. Some losses need no reference.
    """

    keeps_prediction_layers = True

    def __init__(self, plan: Plan, cluster: Cluster):
        """See `FineTuning`. Also builds the reference. Collective."""
        super().__init__(plan, cluster)
        self._prefer(cast(PreferenceConfig, plan.config.preference))

    def _prefer(self, config: PreferenceConfig) -> None:
        self._preference = config
        self._begin_id = self.tokenizer.special[BEGIN]
        self._reference = cast(Network, self.network)
        if config.has_reference and self.plan.config.adapter is None:
            self._reference = build_frozen_network(self.plan, self.cluster)
            self._reference.attend_as(self.plan.stage_after(0).shape)
            self.networks = {**self.networks, "reference": self._reference}
        self.objectives = {"model": PreferenceLoss(self.network, config)}

    def describe(self) -> list[str]:
        """See `Task.describe`. Adds the loss and its reference."""
        config = self._preference
        start = self.plan.config.checkpoint.initial_load_path
        reference = start if self.plan.config.adapter is None else "the model without its adapters"
        suffix = f"; reference {reference}" if config.has_reference else ", without a reference"
        return [*super().describe(), f"preference   {config.loss_type}{suffix}"]

    def next(self, progress: Progress, sequences: int) -> StepBatches:
        """See `Task.next`."""
        step = super().next(progress, sequences)
        self._reference.attend_as(stage_at(self.plan.text_stages, progress.samples).shape)
        return step._replace(micro_batches=[self._split(batch) for batch in step.micro_batches])

    def _split(self, batch: Batch) -> Batch:
        """Split the pairs of a batch of the loader into halves; see `split_pairs`."""
        halves = split_pairs(batch, self._begin_id)
        return only_ends(halves) if self.plan.config.head == "value" else halves

    def complete(self, micro_batches: list[Batch]) -> list[Batch]:
        """See `Task.complete`. Add the reference's log-probabilities and, for KTO, the divergence from it."""
        field_names = self.objectives["model"].fields
        if REFERENCE not in field_names:
            return micro_batches
        reference_logprobs = self._logprobs(self._reference, micro_batches, adapted=False)
        extra_fields = [{REFERENCE: logprobs} for logprobs in reference_logprobs]
        if KL in field_names:
            divergence = self._divergence(micro_batches)
            extra_fields = [extra | {KL: torch.full_like(extra[REFERENCE], divergence)} for extra in extra_fields]
        self._reference.release()
        return [with_fields(batch, fields) for batch, fields in zip(micro_batches, extra_fields, strict=True)]

    def _divergence(self, micro_batches: list[Batch]) -> float:
        """Estimate KTO's divergence of the policy from the reference. Collective.

        It is the mean log-ratio of completions paired with prompts of other examples, over all ranks, and at least 0.
        """
        mismatched = [mismatch_completions(batch) for batch in micro_batches]
        rows = [rows for rows, _ in mismatched]
        layout = self.plan.layout
        reference_logprobs = self._logprobs(self._reference, rows, adapted=False)
        self._reference.release()  # before the policy runs, because with adapters both are the same network
        ratios = zip(self._logprobs(self.network, rows), reference_logprobs, strict=True)
        self.network.release()
        # Each rank has the values of whole rows, as do all ranks that read the same rows; the sums are divided below.
        log_ratios = torch.stack([(policy.double() - reference).sum() for policy, reference in ratios])
        count = torch.tensor(sum(count for _, count in mismatched) / layout.non_dp_degree, dtype=torch.float64)
        sums = sum_over_all_ranks({"total": log_ratios.sum() / layout.ranks_per_dp_rank, "count": count})
        return max((sums["total"] / sums["count"].clamp(min=1)).item(), 0.0)

    def _logprobs(self, network: Network, batches: list[Batch], *, adapted: bool = True) -> list[torch.Tensor]:
        """Evaluate log-probabilities of whole rows, FP32 [B, S] for each batch. Collective.

        Pipeline stages without the head compute no loss; they return zeros.
        """
        results = []
        for batch in batches:
            output = network.evaluate(batch, token_logprobs, adapted=adapted)
            logprobs = None
            if output is not None and output.logprobs is not None:  # sync: batches are on the CPU
                logprobs = network.whole_rows(output.logprobs.unsqueeze(0), batch)[0].cpu()
            results.append(torch.zeros(batch["labels"].shape) if logprobs is None else logprobs)
        return results

    def validate(self, progress: Progress) -> dict[str, float]:
        """See `Task.validate`. Computes loss and rewards of held-out pairs or examples with `PreferenceLoss`. KTO's
        divergence is estimated for each batch."""
        by_source = {name: self._held_out(manifest) for name, manifest in self.manifests.items()}
        names = next(iter(by_source.values()))
        total = {name: torch.stack([sums[name] for sums in by_source.values()]).sum(0) for name in names}
        self.network.release()
        columns: dict[str, float] = {}
        for suffix, sums in (("", total), *((f"/{name}", sums) for name, sums in by_source.items())):
            metrics = self.objectives["model"].metrics(sums, {name: value.tolist() for name, value in sums.items()}, 0)
            columns |= {f"validation_{key}{suffix}": metrics[key] for key in _VALIDATED if key in metrics}
        return columns

    def _held_out(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Compute sums and totals of the objective over a source's held-out pairs and all ranks, FP64. Collective."""
        objective = self.objectives["model"]
        network = self.network
        sums = objective.empty_sums()
        counts = dict.fromkeys(objective.count([]), 0.0)
        for batch in held_out_batches(network, manifest):
            halves = self._split(batch)
            # Every rank that reads the same rows adds these counts, so divide them. The sums need no division.
            for name, count in objective.count([halves]).items():
                counts[name] += count / network.plan.layout.non_dp_degree
            (batch,) = self.complete([halves])
            output = network.evaluate(batch, objective.form)
            if output is not None:
                for name, value in objective.sums(output, batch).items():
                    sums[name] += value.cpu()
        return sum_over_all_ranks(sums | {name: torch.tensor(n, dtype=torch.float64) for name, n in counts.items()})


def build_task(plan: Plan, cluster: Cluster) -> Task:
    """Build the task that [finetune] asks for. Collective."""
    task = FineTuning if plan.config.preference is None else PreferenceTuning
    return task(plan, cluster)
