"""The sections [checkpoint] and [metrics]."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from glm46.config.field_rules import Excludes, Needs
from glm46.config.finetune import WITH_REFERENCE
from glm46.config.hub_address import OnHub
from glm46.config.section import (
    LocalPath,
    ModelFolder,
    Removed,
    RunFolder,
    Section,
    StoredRunFolder,
    real_folder,
)


class CheckpointConfig(Section):
    """[checkpoint]: what to save and how often, and the checkpoint that a run starts from."""

    enable: bool = True
    """Save checkpoints and resume from the newest one in ``folder``."""

    folder: Annotated[StoredRunFolder, Needs("enable")] = "checkpoint"
    """Folder of this run alone, under job.dump_folder or absolute; step N is in ``step-00000N``. Or the URL of a prefix
    of an object store, ``s3://bucket/runs/name`` (docs/object_storage.md); saves are uploaded in the background."""

    interval: Annotated[int, Needs("enable")] = Field(500, ge=1)
    """Steps between two checkpoints. The last step is always saved."""

    keep_latest_k: Annotated[int, Needs("enable")] = Field(10, ge=0)
    """Number of newest checkpoints to keep; 0 keeps all."""

    keep_every: Annotated[int, Needs("enable"), Needs("keep_latest_k")] = Field(0, ge=0)
    """Keep the checkpoints of all steps that are multiples of this; 0 switches it off."""

    keep_best_k: Annotated[int, Needs("enable"), Needs("keep_latest_k"), Needs("validation.enable")] = Field(0, ge=0)
    """Number of checkpoints with the lowest validation loss to keep besides the newest. Only steps that are also
    multiples of `validation.freq` have one."""

    async_mode: Annotated[Literal["async", "disabled"], Needs("enable")] = "async"
    """async copies the state to host memory, through pinned memory on a GPU, and writes it in the background; the last
    save is always waited for. disabled waits for every save."""

    node_local_folder: Annotated[LocalPath | None, Needs("enable")] = None
    """Folder on a local disk of each node to save to first; a background thread gathers the saves in ``folder``. If a
    local disk is full or lost, only checkpoints are lost. Absent: save to ``folder`` directly; if that is a URL, to
    job.dump_folder first."""

    load_step: Annotated[int, Needs("enable")] = Field(-1, ge=-1)
    """Step to resume from; -1 takes the newest."""

    load_path: Annotated[LocalPath | None, Needs("enable")] = None
    """Checkpoint (a step folder) of another run that this run continues when ``folder`` has no checkpoint yet: step,
    tokens, clock and position in the data are kept. Later starts resume from ``folder``."""

    @property
    def load_folder(self) -> Path | None:
        """``load_path``, absolute and without links; see `real_folder`."""
        return real_folder(self.load_path)

    initial_load_path: Annotated[ModelFolder | None, OnHub("model")] = None
    """Checkpoint (a step folder) that a new run starts from when its own folder is empty, such as the last one of the
    previous phase; with ``initial_load_in_hf`` a Hugging Face folder, or ``hf://owner/name`` of the hub. Both may be
    URLs of an object store, of which each node fetches what it needs. From a folder
    that another program wrote with torch.distributed.checkpoint only the weights are read. Under [adapter]: the base;
    every start reads its weights and nothing else."""

    @property
    def initial_load_folder(self) -> Path | None:
        """``initial_load_path``, absolute and without links; see `real_folder`."""
        return real_folder(self.initial_load_path)

    @property
    def initial_folder(self) -> Path:
        """``initial_load_path`` as a path, where other keys require it."""
        assert self.initial_load_path is not None
        return Path(self.initial_load_path)

    initial_load_model_only: Annotated[bool, Needs("initial_load_path"), Needs("initial_load_in_hf", False)] = False
    """Load only weights and expert biases from initial_load_path. Otherwise also load the optimizer states, and skip
    text that the earlier phase has read. The clock begins at lr_scheduler.start_tokens in both cases."""

    initial_load_exclude: Annotated[
        tuple[str, ...],
        Needs("initial_load_path"),
        Needs("initial_load_in_hf", False),
        Excludes("adapter", reason="whose base is loaded whole"),
        Excludes("finetune.train_only", reason="whose frozen weights are loaded whole"),
        Excludes(
            "finetune.preference.loss_type", WITH_REFERENCE, reason="whose reference is all that the run begins with"
        ),
    ] = ()
    """Do not load names that match these patterns (``model.mtp.*``); they keep their initial values."""

    initial_load_in_hf: Annotated[bool, Needs("initial_load_path")] = False
    """initial_load_path is a Hugging Face folder: config.json and safetensors of GLM-4.5 or 4.6, read directly into
    each rank's shards. Optimizer, clock and data position start fresh."""

    last_save_in_hf: Annotated[
        bool, Excludes("finetune.preference.loss_type", "reward", reason="for which transformers has no form")
    ] = False
    """When the budget is spent, write the BF16 weights as a Hugging Face folder too, under job.dump_folder/huggingface;
    with [adapter] only the adapters, as a PEFT folder."""


class MetricsConfig(Section):
    """[metrics]: how often metrics are logged, and where in addition to console and metrics.jsonl."""

    removed = {
        "prometheus_address": Removed(
            "the endpoint is at 127.0.0.1; forward its port with ssh -L, or put a proxy in front"
        ),
        "prometheus_sd_folder": Removed(
            "a run writes no file for Prometheus; list its address in outputs/monitoring/runs"
        ),
        "tracker": Removed("write enable_wandb = true"),
    }

    log_freq: int = Field(10, ge=1)
    """Steps between two rows of metrics. The host waits for the device a few times for each row."""

    enable_tensorboard: bool = True
    """Write TensorBoard event files."""

    save_tb_folder: Annotated[RunFolder, Needs("enable_tensorboard")] = "tb"
    """Folder of the event files of this run alone, under job.dump_folder or absolute."""

    prometheus_port: int | None = Field(None, ge=1, le=65535)
    """Serve metrics for Prometheus on this port of the first rank's machine, at 127.0.0.1, such as 9400. Absent: no
    endpoint. See docs/monitoring.md."""

    enable_wandb: bool = False
    """Send the rows to Weights & Biases too; its package must be installed. Its environment variables set the
    destination: WANDB_PROJECT, WANDB_MODE. A restart continues the run there."""
