"""The task of pre-training: next-token prediction on prepared text."""

import hashlib
import json
import shlex
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.compute.distributed.mesh import Cluster
from glm46.config.command_line import module_command
from glm46.config.run_config import RunConfig
from glm46.engine.inference.sampling import continue_tokens
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.training.build import run
from glm46.engine.training.hf_weights import save_weights
from glm46.engine.training.network import build_network
from glm46.engine.training.state import Progress
from glm46.engine.training.task import StepBatches, Task
from glm46.run.curriculum import stage_at
from glm46.run.function import capacity_lines
from glm46.run.plan import Plan
from glm46.storage.chats.chat_template import raise_for_model, raise_for_source
from glm46.storage.checkpoint.integrity import step_folder
from glm46.storage.data.corpus import check_epochs, describe_sources, load_text
from glm46.storage.data.tokenizer import TOKENIZER_KEY
from glm46.tasks.pretrain.data_stream import DataStream, rows_read
from glm46.tasks.pretrain.next_token import NextToken
from glm46.tasks.pretrain.validation import due_tasks, evaluate, validation_measures


class Pretraining(Task):
    """One network that learns to predict the next token of the text in data.sources. See `Task`."""

    name = "pretrain"
    identity_keys: ClassVar[tuple[str, ...]] = (
        "data.sources", "data.stages", "training.seq_len", "debug.seed", "model.num_nextn_predict_layers"
    )  # fmt: skip

    def __init__(self, plan: Plan, cluster: Cluster):
        """Load the text and build the network. Collective.

        Raises:
            UserError: the data or the layout do not match the configuration.
        """
        self.plan, self.cluster = plan, cluster
        self.tokenizer, self.manifests = run_on_all_ranks(lambda: load_text(plan))
        run_on_all_ranks(self._check_chats)
        check_epochs(plan, self.manifests)
        self.measures = run_on_all_ranks(lambda: validation_measures(plan, self.manifests, self.tokenizer))
        self.network = build_network(plan, cluster, head=plan.config.head)
        self._objective = NextToken(self.network)
        self.networks, self.objectives = {"model": self.network}, {"model": self._objective}
        self.stream = DataStream(plan, cluster, self.manifests)
        self.network.attend_as(plan.stage_after(0).shape)

    def _check_chats(self) -> None:
        """Raise UserError if a source or the base has another chat format than the tokenizer."""
        for manifest in self.manifests.values():
            raise_for_source(manifest, self.tokenizer)
        checkpoint = self.plan.config.checkpoint
        has_chats = any(manifest.splits["train"].targets is not None for manifest in self.manifests.values())
        if checkpoint.initial_load_in_hf and has_chats:
            raise_for_model(checkpoint.initial_folder, self.tokenizer)

    def next(self, progress: Progress, sequences: int) -> StepBatches:
        """See `Task.next`."""
        self.network.attend_as(stage_at(self.plan.text_stages, progress.samples).shape)
        return self.stream.next(progress, sequences)

    def fingerprint(self) -> str:
        """See `Task.fingerprint`."""
        config = self.plan.config
        # The depth matters: rows need one more token per depth, so a source can have fewer rows.
        identity: list = [config.debug.seed, config.training.seq_len, self.plan.shape.num_nextn_predict_layers]
        for source in config.data.sources:
            manifest = self.manifests[source.name]
            shards = [(shard.sha256, shard.tokens) for shard in manifest.splits["train"].shards]
            identity.append([source.name, source.weight, source.packing, shards])
        if config.data.stages:
            stages = [stage._asdict() for stage in self.plan.text_stages]
            identity.append([{key: stage[key] for key in stage if key != "shape"} for stage in stages])
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def state(self, progress: Progress) -> dict[str, Any]:
        """See `Task.state`."""
        read = rows_read(self.plan, self.manifests, progress)
        return {TOKENIZER_KEY: self.tokenizer.fingerprint, "read": read}

    def validate(self, progress: Progress) -> dict[str, float]:
        """See `Task.validate`."""
        due = due_tasks(self.plan, progress)
        measures = [measure for measure, is_due in zip(self.measures, due, strict=True) if is_due]
        return evaluate(self.network, self._objective, self.manifests, self.tokenizer, measures)

    def describe(self) -> list[str]:
        """See `Task.describe`."""
        moe = self.plan.config.moe
        lines = capacity_lines(moe, "validation") if self.plan.config.validation.enable else []
        return [*describe_sources(self.plan, self.manifests), *lines]

    def export(self, progress: Progress) -> str:
        """See `Task.export`."""
        self.network.attend_as(self.plan.stage_after(progress.samples).shape)  # not in force yet if no step was trained
        return save_weights(self.network, self.tokenizer, progress)

    def sample(self, stop: StopRequest, progress: Progress) -> list[str]:
        """See `Task.sample`: a continuation of [inference] prompt."""
        config = self.plan.config
        if not config.inference.prompt or not progress.step:
            return []
        self.network.attend_as(self.plan.stage_after(progress.samples).shape)
        if self.plan.layout.non_dp_degree > 1:
            # Generation does not support ranks with parts of a sequence or of the layers.
            step = step_folder(config.checkpoint_folder, progress.step)
            command = f"{module_command()} generate --checkpoint {shlex.quote(str(step))} --prompt '...'"
            return [f"To see text: {command}"] if config.checkpoint.enable else []
        return ["Continuation of the prompt (prompt, then generated text):", "", self._continuation(stop), ""]

    def _continuation(self, stop: StopRequest) -> str:
        def is_stopped() -> bool:
            """True if any rank has received a signal. Collective."""
            requested = torch.tensor(stop.signal_name is not None, dtype=torch.int32)
            dist.all_reduce(requested, dist.ReduceOp.MAX)
            return bool(requested)

        options = self.plan.config.inference
        new = continue_tokens(
            self.network.models[0],
            self.tokenizer.encode(options.prompt).tolist(),
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            stop=frozenset({self.tokenizer.eos_id}),
            vocab_size=self.tokenizer.vocab_size,
            device=self.cluster.device,
            is_stopped=is_stopped,
        )
        return options.prompt + "│" + self.tokenizer.decode(new)


def train(config: RunConfig, stop: StopRequest | None = None) -> int:
    """Pre-train as configured, on this rank; see `run`. Collective."""
    return run(config, Pretraining, stop)
