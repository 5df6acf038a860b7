"""The task of fine-tuning: trained weights learn the targets of conversations, or to prefer one of two answers."""

import hashlib
import json
from pathlib import Path
from typing import cast

import torch

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.compute.distributed.mesh import Cluster
from glm46.compute.model.cross_entropy import token_logprobs
from glm46.config.errors import UserError
from glm46.config.finetune import DistillationConfig, FineTuneConfig, PreferenceConfig
from glm46.config.run_config import RunConfig
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.training.build import run
from glm46.engine.training.named_sums import sum_over_all_ranks
from glm46.engine.training.network import Network, build_frozen_network
from glm46.engine.training.state import Progress
from glm46.engine.training.task import StepBatches
from glm46.run.curriculum import stage_at
from glm46.run.plan import Plan, resolve_plan
from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.conversation import Message
from glm46.storage.chats.pairs import BEGIN
from glm46.storage.data.batches import Batch
from glm46.storage.data.manifest import Manifest
from glm46.storage.huggingface.tokenizer_files import stop_ids
from glm46.tasks.finetune.distillation import DistillationLoss, check_teacher, with_values
from glm46.tasks.finetune.halves import mismatch_completions, only_ends, split_pairs, with_fields
from glm46.tasks.finetune.preference_loss import KL, REFERENCE, PreferenceLoss
from glm46.tasks.finetune.teacher_values import TeacherValues
from glm46.tasks.pretrain.network_rows import greedy_answers, tokens_at_once
from glm46.tasks.pretrain.task import Pretraining
from glm46.tasks.pretrain.validation import held_out_batches

_VALIDATED = ("loss", "rewards/margins", "rewards/accuracies")


class FineTuning(Pretraining):
    """Text, loss and validation are those of pre-training: the loader gives a label to each token that the model shall
    learn to sample, and to no other. See `Task`."""

    name = "finetune"

    def __init__(self, plan: Plan, cluster: Cluster):
        """Load the text and build the network. Collective.

        Raises:
            UserError: the data, the samples or the layout do not match the configuration.
        """
        super().__init__(plan, cluster)
        self._config: FineTuneConfig = cast(FineTuneConfig, plan.config.finetune)
        self._prompts = run_on_all_ranks(self._sample_prompts)

    def _sample_prompts(self) -> list[list[int]]:
        config = self._config
        prompts = [
            chat_prompt(self.tokenizer, [Message("user", text)], thinking=config.thinking) for text in config.samples
        ]
        longest, positions = max(map(len, prompts), default=0), self.plan.shape.max_position_embeddings
        if longest + config.max_new_tokens > positions:
            raise UserError(
                f"finetune.max_new_tokens = {config.max_new_tokens}: after a sample of {longest} tokens the model has "
                f"{positions - longest} of its {positions} positions (max_position_embeddings) left; lower it, or "
                "shorten finetune.samples"
            )
        exchange, most = self.plan.config.parallelism.expert_exchange, tokens_at_once(self.plan)
        if exchange == "deepep" and longest + config.max_new_tokens > most:
            raise UserError(
                f"finetune.max_new_tokens = {config.max_new_tokens}: after a sample of {longest} tokens an answer is "
                f"longer than the {most} tokens of a micro-batch, the most that DeepEP sends; lower it, shorten "
                'finetune.samples, or set parallelism.expert_exchange = "two_level"'
            )
        return prompts

    def sample(self, stop: StopRequest, progress: Progress) -> list[str]:
        """See `Task.sample`: the greedy answers to the samples, and which of them ended."""
        if not self._prompts:
            return []
        tokenizer, network = self.tokenizer, self.network
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

    def _split(self, batch: Batch) -> Batch:
        """A batch of the loader as the objective reads it."""
        return batch

    def _held_out(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Sums and totals of the objective over a source's held-out documents, FP64, over all ranks. Collective."""
        objective, network = self.objectives["model"], self.network
        sums = objective.empty_sums()
        counts = dict.fromkeys(objective.count([]), 0.0)
        for batch in held_out_batches(network, manifest):
            split = self._split(batch)
            # Counted by every rank that reads the same rows; the sums are not.
            for name, count in objective.count([split]).items():
                counts[name] += count / network.plan.layout.non_dp_degree
            (batch,) = self.complete([split])
            output = network.evaluate(batch, objective.form)
            if output is not None:
                for name, value in objective.sums(output, batch).items():
                    sums[name] += value.cpu()
        return sum_over_all_ranks(sums | {name: torch.tensor(n, dtype=torch.float64) for name, n in counts.items()})


class PreferenceTuning(FineTuning):
    """Learns from pairs of answers, or from labelled ones: their batches, the reference, and validation. The reference
    is the policy without its adapters, or else a network of its own, which each start fills from
    checkpoint.initial_load_path; some losses have none."""

    keeps_prediction_layers = True

    def __init__(self, plan: Plan, cluster: Cluster):
        """See `FineTuning`; builds the reference too. Collective."""
        super().__init__(plan, cluster)
        self._prefer(cast(PreferenceConfig, plan.config.preference))

    def _prefer(self, config: PreferenceConfig) -> None:
        self._preference, self._begin_id = config, self.tokenizer.special[BEGIN]
        self._reference = cast(Network, self.network)
        if config.has_reference and self.plan.config.adapter is None:
            self._reference = build_frozen_network(self.plan, self.cluster)
            self._reference.attend_as(self.plan.stage_after(0).shape)
            self.networks = {**self.networks, "reference": self._reference}
        self.objectives = {"model": PreferenceLoss(self.network, config)}

    def describe(self) -> list[str]:
        """See `Task.describe`; with the loss and its reference."""
        config, start = self._preference, self.plan.config.checkpoint.initial_load_path
        reference = start if self.plan.config.adapter is None else "the model without its adapters"
        of = f"; reference {reference}" if config.has_reference else ", without a reference"
        return [*super().describe(), f"preference   {config.loss_type}{of}"]

    def next(self, progress: Progress, sequences: int) -> StepBatches:
        """See `Task.next`."""
        step = super().next(progress, sequences)
        self._reference.attend_as(stage_at(self.plan.text_stages, progress.samples).shape)
        return step._replace(micro_batches=[self._split(batch) for batch in step.micro_batches])

    def _split(self, batch: Batch) -> Batch:
        """The halves of a batch of the loader; see `split_pairs`."""
        halves = split_pairs(batch, self._begin_id)
        return only_ends(halves) if self.plan.config.head == "value" else halves

    def complete(self, micro_batches: list[Batch]) -> list[Batch]:
        """See `Task.complete`: the log-probabilities of the reference, and for KTO the divergence from it."""
        needed = self.objectives["model"].fields
        if REFERENCE not in needed:
            return micro_batches
        of_reference = self._logprobs(self._reference, micro_batches, adapted=False)
        added = [{REFERENCE: found} for found in of_reference]
        if KL in needed:
            divergence = self._divergence(micro_batches)
            added = [each | {KL: torch.full_like(each[REFERENCE], divergence)} for each in added]
        self._reference.release()
        return [with_fields(batch, fields) for batch, fields in zip(micro_batches, added, strict=True)]

    def _divergence(self, micro_batches: list[Batch]) -> float:
        """KTO's estimate of the divergence of the policy from the reference: the mean log-ratio of the completions of
        all ranks to prompts of other examples, and not below 0. Collective."""
        mismatched = [mismatch_completions(batch) for batch in micro_batches]
        rows, layout = [rows for rows, _ in mismatched], self.plan.layout
        of_reference = self._logprobs(self._reference, rows, adapted=False)
        self._reference.release()  # it may be the policy
        ratios = zip(self._logprobs(self.network, rows), of_reference, strict=True)
        self.network.release()
        # Each rank has the values of whole rows, as have those that read the same rows.
        log_ratios = torch.stack([(policy.double() - reference).sum() for policy, reference in ratios])
        count = torch.tensor(sum(count for _, count in mismatched) / layout.non_dp_degree, dtype=torch.float64)
        sums = sum_over_all_ranks({"total": log_ratios.sum() / layout.ranks_per_dp_rank, "count": count})
        return max((sums["total"] / sums["count"].clamp(min=1)).item(), 0.0)

    def _logprobs(self, network: Network, batches: list[Batch], *, adapted: bool = True) -> list[torch.Tensor]:
        """FP32 [B, S] of whole rows; zeros on pipeline stages without the head, which compute no loss. Collective."""
        found = []
        for batch in batches:
            output, logprobs = network.evaluate(batch, token_logprobs, adapted=adapted), None
            if output is not None and output.logprobs is not None:  # sync: batches are on the CPU
                logprobs = network.whole_rows(output.logprobs.unsqueeze(0), batch)[0].cpu()
            found.append(torch.zeros(batch["labels"].shape) if logprobs is None else logprobs)
        return found

    def validate(self, progress: Progress) -> dict[str, float]:
        """See `Task.validate`: the loss of held-out pairs or examples, and what `PreferenceLoss` says of their rewards.
        KTO estimates its divergence at each batch."""
        of_sources = {name: self._held_out(manifest) for name, manifest in self.manifests.items()}
        names = next(iter(of_sources.values()))
        total = {name: torch.stack([sums[name] for sums in of_sources.values()]).sum(0) for name in names}
        self.network.release()
        columns: dict[str, float] = {}
        for suffix, sums in (("", total), *((f"/{name}", sums) for name, sums in of_sources.items())):
            found = self.objectives["model"].metrics(sums, {name: value.tolist() for name, value in sums.items()}, 0)
            columns |= {f"validation_{key}{suffix}": found[key] for key in _VALIDATED if key in found}
        return columns


class Distillation(FineTuning):
    """Learns what a teacher says of the targets. The teacher is a network of its own, or the student without its
    adapters, and each start reads it again; or it has been asked before."""

    keeps_prediction_layers = True
    identity_keys = (*FineTuning.identity_keys, "finetune.distillation.stored_path")
    other_text = "data.sources, finetune.distillation.stored_path: hold other text, or values of another teacher"
    _stored: TeacherValues | None = None

    def __init__(self, plan: Plan, cluster: Cluster):
        """See `FineTuning`; builds the teacher too. Collective."""
        super().__init__(plan, cluster)
        self._learn_from_teacher()

    def _check_chats(self) -> None:
        super()._check_chats()
        config = self._keys
        if config.stored_path is not None:
            self._stored = TeacherValues(Path(config.stored_path))
            self._stored.check(config, [*self.manifests.values()])
        check_teacher(config, self.tokenizer)

    @property
    def _keys(self) -> DistillationConfig:
        return cast(DistillationConfig, self.plan.config.distillation)

    def _learn_from_teacher(self) -> None:
        self._teacher, plan = cast(Network, self.network), self.plan
        if (teacher := plan.config.teacher) is not None:
            of_teacher = resolve_plan(teacher, plan.layout.world_size, host_ranks=plan.host_ranks)
            self._teacher = build_frozen_network(of_teacher, self.cluster)
            self.networks = {**self.networks, "teacher": self._teacher}
        self._distillation = DistillationLoss(self.network, self._keys)
        self.objectives = {"model": self._distillation}

    def describe(self) -> list[str]:
        """See `Task.describe`; with the divergence and the teacher."""
        config, of = self._keys, "" if self._stored is None else f" of {self._stored.facts['teacher']}"
        begin = "the weights of the start" if self.plan.config.adapter is None else "the model without its adapters"
        teacher = f"{config.load_path or config.stored_path or begin}{of}"
        keys = f"beta {config.beta:g}, temperature {config.temperature:g}, top_k {config.top_k}"
        return [*super().describe(), f"distillation {keys}; teacher {teacher}"]

    def fingerprint(self) -> str:
        """See `Task.fingerprint`; with what the teacher was and was asked."""
        facts = "" if self._stored is None else json.dumps(self._stored.facts)
        return hashlib.sha256((super().fingerprint() + facts).encode()).hexdigest() if facts else super().fingerprint()

    def complete(self, micro_batches: list[Batch]) -> list[Batch]:
        """See `Task.complete`: the teacher's most likely tokens."""
        if (stored := self._stored) is not None:
            values = run_on_all_ranks(lambda: [stored.of_batch(batch, self._keys.top_k) for batch in micro_batches])
            return [with_values(batch, *of_batch) for batch, of_batch in zip(micro_batches, values, strict=True)]
        of = self._distillation
        outputs = (self._teacher.evaluate(batch, of.of_teacher, adapted=False) for batch in micro_batches)
        found = [of.completed(batch, output) for batch, output in zip(micro_batches, outputs, strict=True)]
        self._teacher.release()
        return found

    def validate(self, progress: Progress) -> dict[str, float]:
        """See `Task.validate`: the cross-entropy of held-out targets, as in SFT, and the divergence at them."""
        columns, sums = super().validate(progress), [*map(self._held_out, self.manifests.values())]
        self.network.release()
        kl, targets = (sum(each[name].item() for each in sums) for name in ("kl", "targets"))
        return columns | {"validation_kl": kl / max(targets, 1.0)}


def train(config: RunConfig, stop: StopRequest | None = None) -> int:
    """Fine-tune as configured, on this rank; see `run`. Collective."""
    tasks = {"preference": PreferenceTuning, "distillation": Distillation}
    return run(config, next((task for key, task in tasks.items() if getattr(config, key)), FineTuning), stop)
