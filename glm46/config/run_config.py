"""The whole configuration of a run: one TOML table per field. Defines the sections [job] and [inference]."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer

from glm46.config.ablation import Ablation
from glm46.config.adapter import Adapter
from glm46.config.checkpoint import Checkpoint, Metrics
from glm46.config.data import Data
from glm46.config.finetune import FineTune, Preference
from glm46.config.float8 import Float8
from glm46.config.model import Model
from glm46.config.moe import MTP, MoE
from glm46.config.optimizer import LRScheduler, Optimizer
from glm46.config.overrides import key_parts
from glm46.config.parallelism import ActivationCheckpoint, Comm, Compile, FaultTolerance, Parallelism
from glm46.config.profiling import Profiling
from glm46.config.rl import RL
from glm46.config.rollout import Rollout
from glm46.config.section import LocalPath, Needs, Section
from glm46.config.training import Debug, Training, Validation


class Job(Section):
    """[job]: description and output folder of the run."""

    dump_folder: LocalPath = "./outputs"
    """Folder of all outputs: metrics.jsonl, tb/, checkpoint/, config.toml, log.txt. A start with the same folder
    resumes. ``checkpoint.folder`` and ``metrics.save_tb_folder`` may lie elsewhere."""

    description: str = "glm46 training"
    """One line that is printed at the start and written to the logs."""

    print_config: bool = False
    """Print the resolved configuration, defaults included, at the start."""


class Inference(Section):
    """[inference]: the sample text that is printed when training ends."""

    prompt: str = ""
    """Text to continue when training ends. Empty: no sample."""

    max_new_tokens: Annotated[int, Needs("prompt")] = Field(64, ge=1)
    """Length of the continuation in tokens."""

    temperature: Annotated[float, Needs("prompt")] = Field(0.0, ge=0.0)
    """Sampling temperature; 0 always takes the most likely token."""


class RunConfig(Section):
    """The configuration of one run, read from one TOML file."""

    job: Job = Field(default_factory=Job)
    model: Model
    data: Data = Field(default_factory=Data)
    training: Training = Field(default_factory=Training)
    moe: MoE = Field(default_factory=MoE)
    mtp: MTP = Field(default_factory=MTP)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = Field(default_factory=LRScheduler)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    float8: Float8 = Field(default_factory=Float8)
    activation_checkpoint: ActivationCheckpoint = Field(default_factory=ActivationCheckpoint)
    compile: Compile = Field(default_factory=Compile)
    comm: Comm = Field(default_factory=Comm)
    fault_tolerance: FaultTolerance = Field(default_factory=FaultTolerance)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    validation: Validation = Field(default_factory=Validation)
    inference: Inference = Field(default_factory=Inference)
    metrics: Metrics = Field(default_factory=Metrics)
    profiling: Profiling = Field(default_factory=Profiling)
    debug: Debug = Field(default_factory=Debug)
    finetune: FineTune | None = None
    rl: RL | None = None
    rollout: Rollout | None = None
    adapter: Adapter | None = None
    ablation: Ablation | None = None
    _ids: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @property
    def preference(self) -> Preference | None:
        return None if self.finetune is None else self.finetune.preference

    @property
    def is_reference_in_policy(self) -> bool:
        """Whether the reference of [rl], if it needs one, is the policy without its adapters."""
        return self.adapter is not None and (self.rl is None or self.rl.reference is None)

    @property
    def ids(self) -> Mapping[str, str]:
        """Ids of the hub, by the dotted keys that hold the local folders or files of them."""
        return self._ids

    def with_ids(self, ids: Mapping[str, str]) -> "RunConfig":
        """A copy that knows of which ids its folders are. Dumps of it have the ids, which each machine can fetch."""
        copy = self.model_copy()
        copy._ids = dict(ids)
        return copy

    @model_serializer(mode="wrap")
    def _dump_ids(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        table = dump(self)
        for key, stated in self._ids.items():
            *outer, name = key_parts(key)
            place = table
            for part in outer:
                place = place.get(part, {}) if isinstance(place, dict) else place[part]
            if name in place:
                place[name] = stated
        return table

    @property
    def keeps_its_start(self) -> bool:
        """Whether every start reads frozen weights from checkpoint.initial_load_path: the base of adapters, or the
        reference of a preference or of [rl]."""
        has_reference = self.rl is not None and self.rl.reference is None and self.rl.resolved().has_reference
        return self.adapter is not None or self.preference is not None or has_reference

    @property
    def checkpoint_folder(self) -> Path:
        return Path(self.job.dump_folder, self.checkpoint.folder)

    @property
    def tensorboard_folder(self) -> Path:
        return Path(self.job.dump_folder, self.metrics.save_tb_folder)

    @property
    def folders_apart(self) -> dict[str, Path]:
        """The folders that this run writes to outside of job.dump_folder, by their keys."""
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
