"""Training of a config on this rank: the task of the config, and the functions that the core does not import."""

from functools import partial
from importlib import import_module

from glm46.config.run_config import RunConfig
from glm46.engine.evaluation.continuation import continue_prompt
from glm46.engine.observe.observers import observing
from glm46.engine.reliability.stop import StopRequest
from glm46.engine.training.build import BuildTask, run
from glm46.storage.chats.chat_template import raise_for_text
from glm46.tasks.pretrain.task import Pretraining
from glm46.tasks.weights.weight_folders import WeightFolders


def train(config: RunConfig, stop: StopRequest | None = None) -> int:
    """Train as configured, on this rank, and return the exit code; see `build.run`. Collective."""
    return run(config, _task_builder(config), WeightFolders(), observing, stop)


def _task_builder(config: RunConfig) -> BuildTask:
    """Return the function that builds the task. Pre-training gets the functions that the core does not import."""
    if config.rl is None and config.finetune is None:
        return partial(Pretraining, check_text=raise_for_text, sample=continue_prompt)
    package = "rl" if config.rl is not None else "finetune"
    build_task: BuildTask = import_module(f"glm46.tasks.{package}.task").build_task
    return build_task
