"""The whole configuration of a run: one TOML table per field, in the order in which a reader wants them."""

from pydantic import Field

from glm46.config.checkpoint import Checkpoint, Metrics
from glm46.config.data import Data
from glm46.config.job import Inference, Job
from glm46.config.model import Model
from glm46.config.moe import MTP, MoE
from glm46.config.optimizer import LRScheduler, Optimizer
from glm46.config.parallelism import ActivationCheckpoint, Comm, Compile, Parallelism
from glm46.config.section import Section
from glm46.config.training import Debug, Training, Validation


class RunConfig(Section):
    """One TOML file = one run = one phase."""

    job: Job = Field(default_factory=Job)
    model: Model
    data: Data = Field(default_factory=Data)
    training: Training = Field(default_factory=Training)
    moe: MoE = Field(default_factory=MoE)
    mtp: MTP = Field(default_factory=MTP)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = Field(default_factory=LRScheduler)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = Field(default_factory=ActivationCheckpoint)
    compile: Compile = Field(default_factory=Compile)
    comm: Comm = Field(default_factory=Comm)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    validation: Validation = Field(default_factory=Validation)
    inference: Inference = Field(default_factory=Inference)
    metrics: Metrics = Field(default_factory=Metrics)
    debug: Debug = Field(default_factory=Debug)
