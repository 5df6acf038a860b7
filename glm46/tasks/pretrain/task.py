"""Pre-training: next-token prediction on prepared text."""

import hashlib
import json
import shlex
from collections.abc import Callable
from typing import Any, ClassVar

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.compute.distributed.mesh import Cluster
from glm46.config.command_line import module_command
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.training.network import Network, build_network
from glm46.engine.training.state import Progress
from glm46.engine.training.task import StepBatches, Task
from glm46.run.curriculum import stage_at
from glm46.run.function import capacity_lines
from glm46.run.plan import Plan
from glm46.storage.checkpoint.integrity import step_folder
from glm46.storage.checkpoint.store_mirror import shown
from glm46.storage.data.corpus import check_epochs, describe_sources, load_text
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.tokenizer import TOKENIZER_KEY, Tokenizer
from glm46.tasks.pretrain.data_stream import DataStream, rows_read
from glm46.tasks.pretrain.next_token import NextToken
from glm46.tasks.pretrain.validation import evaluate

CheckText = Callable[[Plan, dict[str, Manifest], Tokenizer], None]
Sample = Callable[[Network, Tokenizer, StopRequest], list[str]]
"""Function that returns lines with text of a network, until a stop is requested."""


class Pretraining(Task):
    """Trains one network to predict the next token of the text in data.sources. See `Task`."""

    name = "pretrain"
    identity_keys: ClassVar[tuple[str, ...]] = (
        "data.sources",
        "data.stages",
        "training.seq_len",
        "debug.seed",
        "model.shape.num_nextn_predict_layers",
        "mtp.depths",
    )

    def __init__(
        self, plan: Plan, cluster: Cluster, *, check_text: CheckText | None = None, sample: Sample | None = None
    ):
        """Load the text and build the network. Collective.

        Args:
            check_text: refuses text that does not match the model, with a UserError.
            sample: continues [inference] prompt for the final report; collective. None shows no text.

        Raises:
            UserError: if the data or the layout do not match the configuration.
        """
        self.plan = plan
        self.cluster = cluster
        self.tokenizer, self.manifests = run_on_all_ranks(lambda: load_text(plan))
        self._sample = sample
        if check_text is not None:
            run_on_all_ranks(lambda: check_text(plan, self.manifests, self.tokenizer))
        check_epochs(plan, self.manifests)
        self.network = build_network(plan, cluster, head=plan.config.head)
        self._objective = NextToken(self.network)
        self.networks = {"model": self.network}
        self.objectives = {"model": self._objective}
        self.stream = DataStream(plan, cluster, self.manifests)
        self.network.attend_as(plan.stage_after(0).shape)

    def next(self, progress: Progress, sequences: int) -> StepBatches:
        """See `Task.next`."""
        self.network.attend_as(stage_at(self.plan.text_stages, progress.samples).shape)
        return self.stream.next(progress, sequences)

    def fingerprint(self) -> str:
        """See `Task.fingerprint`."""
        config = self.plan.config
        # Prediction depths count because rows need one more token per depth, so a source can have fewer rows.
        identity: list[object] = [config.debug.seed, config.training.seq_len, self.plan.mtp_depths]
        for source in config.data.sources:
            manifest = self.manifests[source.name]
            shards = [(shard.sha256, shard.tokens) for shard in manifest.splits["train"].shards]
            identity.append([source.name, source.weight, source.packing, shards])
        if config.data.stages:
            # The shape of a stage, and what it trains, do not decide which text is read.
            stages = [stage._asdict() for stage in self.plan.text_stages]
            identity.append([{key: stage[key] for key in stage if key not in ("shape", "indexer")} for stage in stages])
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def state(self, progress: Progress) -> dict[str, Any]:
        """See `Task.state`."""
        read = rows_read(self.plan, self.manifests, progress)
        return {TOKENIZER_KEY: self.tokenizer.fingerprint, "read": read}

    def validate(self, progress: Progress) -> dict[str, float]:
        """See `Task.validate`."""
        return evaluate(self.network, self._objective, self.manifests, self.tokenizer)

    def describe(self) -> list[str]:
        """See `Task.describe`."""
        moe = self.plan.config.moe
        lines = capacity_lines(moe, "validation") if self.plan.config.validation.enable else []
        return [*describe_sources(self.plan, self.manifests), *lines]

    def sample(self, stop: StopRequest, progress: Progress) -> list[str]:
        """See `Task.sample`. Continues [inference] prompt."""
        config = self.plan.config
        if not config.inference.prompt or not progress.step:
            return []
        self.network.attend_as(self.plan.stage_after(progress.samples).shape)
        if self.plan.layout.non_dp_degree > 1:
            # Generation here does not support ranks that hold only part of a sequence or of the layers.
            step = shown(step_folder(config.checkpoint_folder, progress.step))
            command = f"{module_command()} generate --checkpoint {shlex.quote(step)} --prompt '...'"
            return [f"To see text: {command}"] if config.checkpoint.enable else []
        return [] if self._sample is None else self._sample(self.network, self.tokenizer, stop)
