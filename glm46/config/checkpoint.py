"""The sections [checkpoint] and [metrics]: what a run leaves behind."""

from typing import Annotated, Literal

from pydantic import Field

from glm46.config.section import LocalPath, Needs, Section


class Checkpoint(Section):
    """[checkpoint]: what is saved, how often, and what a run starts from."""

    enable: bool = True
    """Save checkpoints, and resume from the newest one in ``folder``."""

    folder: Annotated[str, Needs("enable")] = "checkpoint"
    """Folder under job.dump_folder; step N is in ``step-00000N``."""

    interval: Annotated[int, Needs("enable")] = Field(500, ge=1)
    """Steps between two checkpoints. The last step is always saved."""

    keep_latest_k: Annotated[int, Needs("enable")] = Field(10, ge=0)
    """How many of the newest checkpoints are kept; 0 keeps all."""

    keep_every: Annotated[int, Needs("enable"), Needs("keep_latest_k")] = Field(0, ge=0)
    """Checkpoints of steps that are multiples of this are kept for good; 0 keeps none of them."""

    keep_best_k: Annotated[int, Needs("enable"), Needs("keep_latest_k"), Needs("validation.enable")] = Field(0, ge=0)
    """How many checkpoints with the lowest validation loss are kept besides the newest."""

    async_mode: Annotated[Literal["async", "disabled"], Needs("enable")] = "async"
    """async copies the state to host memory, through pinned memory on a GPU, and writes it while training goes on; the
    last save is always waited for. disabled waits for every save."""

    node_local_folder: Annotated[LocalPath | None, Needs("enable")] = None
    """Folder on a disk of each node that saves go to first; they are gathered in ``folder`` behind training. A local
    disk that is full or lost costs checkpoints only. Absent: saves go to ``folder`` directly."""

    load_step: Annotated[int, Needs("enable")] = Field(-1, ge=-1)
    """Step to resume from; -1 takes the newest."""

    initial_load_path: LocalPath | None = None
    """Checkpoint (a step folder) that a new run starts from when its own folder is empty, such as the last of the phase
    before."""

    initial_load_model_only: Annotated[bool, Needs("initial_load_path"), Needs("initial_load_in_hf", False)] = False
    """Take only weights and expert biases from initial_load_path; optimizer, clock and data position start anew."""

    initial_load_include: Annotated[
        tuple[str, ...], Needs("initial_load_path"), Needs("initial_load_in_hf", False)
    ] = ()
    """Take only what these patterns match (``model.layers.*``), of the names that ``checkpoint show`` lists. A state of
    the optimizer goes with its weight. Absent: everything."""

    initial_load_exclude: Annotated[
        tuple[str, ...], Needs("initial_load_path"), Needs("initial_load_in_hf", False)
    ] = ()
    """Leave out what these patterns match (``model.mtp.*``): here it keeps its initial value, there it stays unread."""

    initial_load_in_hf: Annotated[bool, Needs("initial_load_path")] = False
    """initial_load_path is a Hugging Face folder: config.json and safetensors of GLM-4.5 or 4.6, read straight into
    each rank's shards. Optimizer, clock and data position start anew."""

    last_save_in_hf: bool = False
    """When the budget is spent, write the BF16 weights as a Hugging Face folder too, under
    job.dump_folder/huggingface."""


class Metrics(Section):
    """[metrics]: how often figures are written, and where besides console and metrics.jsonl."""

    log_freq: int = Field(10, ge=1)
    """Steps between two rows of metrics. Each one costs a synchronisation with the device."""

    enable_tensorboard: bool = True
    """Write TensorBoard event files under job.dump_folder/tb."""
