"""The whole configuration of a run: one TOML table per field. Defines the sections [job] and [inference]."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer

from glm46.config.ablation import AblationConfig
from glm46.config.adapter import AdapterConfig
from glm46.config.checkpoint import CheckpointConfig, MetricsConfig
from glm46.config.data import DataConfig
from glm46.config.field_rules import OF_TEXT, Excludes, Needs, Requires
from glm46.config.finetune import FineTuneConfig, PreferenceConfig
from glm46.config.float8 import Float8Config
from glm46.config.indexer import IndexerConfig
from glm46.config.model import ModelConfig
from glm46.config.moe import MoEConfig, MTPConfig
from glm46.config.optimizer import LRSchedulerConfig, OptimizerConfig
from glm46.config.overrides import key_parts
from glm46.config.parallelism import (
    ActivationCheckpointConfig,
    CommConfig,
    CompileConfig,
    ParallelismConfig,
)
from glm46.config.profiling import ProfilingConfig
from glm46.config.rl import RLConfig
from glm46.config.rollout import RolloutConfig
from glm46.config.section import LocalPath, Removed, Section, is_huggingface
from glm46.config.store_address import is_store_address
from glm46.config.training import DebugConfig, TrainingConfig, ValidationConfig


class JobConfig(Section):
    """[job]: description and output folder of the run."""

    dump_folder: LocalPath = "./outputs"
    """Folder of all outputs: metrics.jsonl, tb/, checkpoint/, config.toml, log.txt. A start with the same folder
    resumes. ``checkpoint.folder`` and ``metrics.save_tb_folder`` may lie elsewhere."""

    description: str = "glm46 training"
    """One line that is printed at the start and written to the logs."""


_ANSWERS = ", which shows answers to messages: move the text to finetune.samples"


class InferenceConfig(Section):
    """[inference]: the sample text that is printed when training ends."""

    removed = {
        "max_new_tokens": Removed("a sample has at most 64 tokens; remove it, or continue a text with 'generate'"),
        "temperature": Removed("a sample is generated at 0.6; remove it, or continue a text with 'generate'"),
    }

    prompt: Annotated[str, OF_TEXT, Needs("finetune", absent=_ANSWERS)] = ""
    """Text to continue when training ends, by at most 64 tokens at temperature 0.6. Empty: no sample."""


_TRAINED_WEIGHTS = (
    "name the trained weights to start from: a step folder with checkpoint.initial_load_model_only = true, or a "
    "Hugging Face folder with checkpoint.initial_load_in_hf = true"
)


class RunConfig(Section):
    """The configuration of one run, read from one TOML file."""

    job: JobConfig = Field(default_factory=JobConfig)
    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    moe: MoEConfig = Field(default_factory=MoEConfig)
    mtp: MTPConfig = Field(default_factory=MTPConfig)
    indexer: IndexerConfig = Field(default_factory=IndexerConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = Field(default_factory=LRSchedulerConfig)
    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig)
    float8: Float8Config = Field(default_factory=Float8Config)
    activation_checkpoint: ActivationCheckpointConfig = Field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = Field(default_factory=CompileConfig)
    comm: CommConfig = Field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    inference: InferenceConfig = Field(default_factory=InferenceConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    profiling: ProfilingConfig = Field(default_factory=ProfilingConfig)
    debug: DebugConfig = Field(default_factory=DebugConfig)
    finetune: Annotated[
        FineTuneConfig | None,
        Requires("checkpoint.initial_load_path", unless=("checkpoint.load_path",), remedy=_TRAINED_WEIGHTS),
    ] = None
    rl: Annotated[
        RLConfig | None,
        Excludes("finetune", reason="because a run has one task", remedy="remove one of them"),
        Requires("rollout", remedy="add [rollout] with max_new_tokens"),
        Requires("rl.prompts", remedy="add [rl.prompts] with the file of prompts"),
        Requires("rl.rewards", remedy='add [[rl.rewards]] tables, such as name = "math"'),
        Requires(
            "checkpoint.initial_load_path",
            unless=("checkpoint.load_path", "rl.warm_up_rollouts"),
            remedy=f"{_TRAINED_WEIGHTS}, or set rl.warm_up_rollouts to learn the labels first",
        ),
    ] = None
    rollout: Annotated[RolloutConfig | None, Requires("rl", remedy="add [rl], or remove [rollout]")] = None
    adapter: Annotated[
        AdapterConfig | None,
        Requires("checkpoint.initial_load_path", remedy=_TRAINED_WEIGHTS),
        Excludes("finetune.preference.loss_type", "reward", reason="which trains all weights"),
    ] = None
    ablation: AblationConfig | None = None
    _ids: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @property
    def preference(self) -> PreferenceConfig | None:
        return None if self.finetune is None else self.finetune.preference

    @property
    def trains_only_drafts(self) -> bool:
        """True if a run trains the prediction layers and nothing else."""
        return self.finetune is not None and self.finetune.train_only == "prediction_layers"

    @property
    def head(self) -> Literal["lm", "value"]:
        """The head of the network that is trained."""
        return "value" if self.preference is not None and self.preference.loss_type == "reward" else "lm"

    @property
    def has_preference_reference(self) -> bool:
        """True if the preference loss compares the policy with a reference."""
        return self.preference is not None and self.preference.has_reference

    @property
    def reinforcement(self) -> tuple[RLConfig, RolloutConfig]:
        """Sections [rl] and [rollout] of a config that has them."""
        assert self.rl is not None and self.rollout is not None
        return self.rl, self.rollout

    @property
    def is_reference_in_policy(self) -> bool:
        """True if the reference of [rl], if it needs one, is the policy without its adapters."""
        return self.adapter is not None and (self.rl is None or self.rl.reference is None)

    @property
    def ids(self) -> Mapping[str, str]:
        """Ids of the hub, by the dotted keys whose values were replaced by local folders or files."""
        return self._ids

    def with_ids(self, ids: Mapping[str, str]) -> "RunConfig":
        """Return a copy that remembers the hub ids of its folders. Its dumps contain the ids, which each machine can
        fetch."""
        copy = self.model_copy()
        copy._ids = dict(ids)
        return copy

    @model_serializer(mode="wrap")
    def _dump_ids(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        table: dict[str, Any] = dump(self)
        for key, hub_id in self._ids.items():
            *outer, name = key_parts(key)
            place: Any = table
            for part in outer:
                place = place.get(part, {}) if isinstance(place, dict) else place[part]
            if name in place:
                place[name] = hub_id
        return table

    @property
    def keeps_its_start(self) -> bool:
        """True if every start reads frozen weights from checkpoint.initial_load_path: the base of adapters, or the
        reference of a preference or of [rl]."""
        has_reference = self.rl is not None and self.rl.reference is None and self.rl.resolved().has_reference
        return self.adapter is not None or self.has_preference_reference or has_reference

    @property
    def read_weights(self) -> dict[str, tuple[Path, bool]]:
        """Weights that a run begins with or reads at every start: path, and whether it is a Hugging Face folder, by key
        without the final ``_path``."""
        checkpoint = self.checkpoint
        reference = None if self.rl is None else self.rl.reference
        weights: dict[str, tuple[Path, bool]] = {}
        if checkpoint.initial_load_path is not None:
            weights["checkpoint.initial_load"] = Path(checkpoint.initial_load_path), checkpoint.initial_load_in_hf
        if reference is not None:
            weights["rl.reference.load"] = Path(reference.load_path), is_huggingface(reference.load_path)
        if self.rl is not None and self.rl.reward_model is not None:
            weights["rl.rewards.options.load"] = Path(str(self.rl.reward_model.options.get("load_path"))), False
        return weights

    @property
    def checkpoint_url(self) -> str | None:
        """``checkpoint.folder``, if it is the URL of an object store."""
        return self.checkpoint.folder if is_store_address(self.checkpoint.folder) else None

    @property
    def checkpoint_folder(self) -> Path:
        """The folder of step folders; for the URL of an object store its mirror on this machine, which lists them."""
        return Path(self.job.dump_folder, *_on_this_host("mirror") if self.checkpoint_url else [self.checkpoint.folder])

    @property
    def staging_folder(self) -> Path | None:
        """The folder on this machine that saves go to first; None if they go to ``checkpoint_folder``."""
        if self.checkpoint.node_local_folder is not None:
            return Path(self.checkpoint.node_local_folder)
        return Path(self.job.dump_folder, *_on_this_host("staging")) if self.checkpoint_url else None

    @property
    def tensorboard_folder(self) -> Path:
        return Path(self.job.dump_folder, self.metrics.save_tb_folder)

    @property
    def folders_apart(self) -> dict[str, Path]:
        """Folders outside of job.dump_folder that this run writes to, by their keys."""
        used = {
            "checkpoint.folder": (self.checkpoint.enable, self.checkpoint_folder),
            "metrics.save_tb_folder": (self.metrics.enable_tensorboard, self.tensorboard_folder),
        }
        inside = Path(os.path.abspath(self.job.dump_folder))
        return {
            key: folder
            for key, (is_used, folder) in used.items()
            if is_used and not Path(os.path.abspath(folder)).is_relative_to(inside)
        }


def _on_this_host(name: str) -> tuple[str, str, str]:
    """Return the path of a folder for the object store in job.dump_folder, which several hosts may share."""
    return "object_store", os.uname().nodename, name
