"""Rules about a run as a whole: preset, budget, schedules, checkpoints, folders, profiles."""

import os
from pathlib import Path

from glm46.config.faults import nearest
from glm46.config.fields import hub_keys
from glm46.config.model import ModelShape
from glm46.config.presets import PRESETS, relative_of
from glm46.config.rules import Faults, fault, rule
from glm46.config.run_config import RunConfig


@rule
def flavor_is_a_preset(config: RunConfig) -> Faults:
    """The flavor is an existing preset; the message lists the presets, and what other models of the family would
    need."""
    flavor = config.model.flavor
    if flavor not in PRESETS:
        relative = relative_of(flavor)
        near = nearest(flavor, PRESETS, 0.6)
        remedy = f"did you mean '{near}'? " if near and not relative else ""
        what = f"another model{relative}" if relative else "no such preset"
        yield fault(f"`model.flavor`: {what}; {remedy}Presets: {', '.join(PRESETS)}")


@rule
def budget_is_given_once(config: RunConfig) -> Faults:
    """Exactly one of tokens and steps is given: without either, training would never end."""
    budgets = [budget for budget in (config.training.tokens, config.training.steps) if budget is not None]
    if not budgets:
        yield fault("`training.tokens`, `training.steps`: both absent; set one of them")
    if len(budgets) == 2:
        yield fault("`training.tokens`, `training.steps`: both given; remove one of them")


@rule
def warmup_ends_before_decay(config: RunConfig) -> Faults:
    """The rate reaches its peak before it falls. A budget in steps is a short trial, which may end in its warm-up."""
    scheduler = config.lr_scheduler
    tokens = config.training.tokens
    total = scheduler.total_tokens or (tokens and scheduler.start_tokens + tokens)
    if total is None:
        return
    decay_start = total * (1 - (scheduler.decay_ratio or 0.0))
    if scheduler.warmup_tokens > decay_start or scheduler.warmup_tokens == total:
        yield fault(
            f"`lr_scheduler.warmup_tokens`: the rate falls, or the schedule ends, at {decay_start:.0f} tokens, "
            "before its peak; warm up for fewer tokens, lower lr_scheduler.decay_ratio, or raise training.tokens or "
            "lr_scheduler.total_tokens",
            "lr_scheduler.decay_ratio",
            "lr_scheduler.total_tokens",
            "training.tokens",
        )


@rule
def run_fits_into_its_schedule(config: RunConfig) -> Faults:
    """The run ends before its schedule: after it, training would continue at the lowest rate."""
    scheduler = config.lr_scheduler
    end = scheduler.start_tokens + (config.training.tokens or 1)
    if scheduler.total_tokens is not None and end > scheduler.total_tokens:
        yield fault(
            f"`lr_scheduler.total_tokens`: the schedule ends before this run, which reaches {end} tokens "
            "(lr_scheduler.start_tokens + training.tokens); raise total_tokens to at least that",
            "lr_scheduler.start_tokens",
            "training.tokens",
        )


@rule
def hugging_face_knows_the_model(config: RunConfig, shape: ModelShape) -> Faults:
    """Hugging Face's model class can compute what this config trains."""
    windows = _last_windows(config, shape) if config.checkpoint.last_save_in_hf else {}
    key = next((key for key, window in windows.items() if window not in (None, -1)), None)
    if key is not None:
        unknown = "" if config.training.steps is None else " (any stage may be the last one of training.steps)"
        yield fault(
            f"`checkpoint.last_save_in_hf`: Hugging Face's GLM has no `{key}`, so its readers would attend to all "
            f"tokens{unknown}; set only one of the two"
        )


def _last_windows(config: RunConfig, shape: ModelShape) -> dict[str, int | None]:
    """Return the sliding windows, by their keys, with which a run may end: the window of its last stage of text, or of
    all stages under a budget in steps."""
    stages = dict(enumerate(config.data.stages))
    tokens = config.training.tokens
    if stages and tokens is not None:
        start = config.lr_scheduler.start_tokens
        clocks = config.data.stage_clocks(config.training.seq_len, start)
        last = max(index for index, clock in enumerate(clocks) if clock < start + tokens)
        stages = {last: stages[last]}
    windows = {f"data.stages[{index}].sliding_window": stage.sliding_window for index, stage in stages.items()}
    if not windows or None in windows.values():
        windows["model.shape.sliding_window"] = shape.sliding_window
    return windows


@rule
def run_starts_from_one_checkpoint(config: RunConfig) -> Faults:
    """A run continues another run, or starts a new clock from its weights, not both."""
    starts = (config.checkpoint.load_path, config.checkpoint.initial_load_path)
    # The base of adapters and the reference of a preference are read at every start, and have no clock.
    if None not in starts and not config.keeps_its_start:
        yield fault(
            "`checkpoint.load_path`, `checkpoint.initial_load_path`: both given; load_path keeps steps, clock and data "
            "position, initial_load_path begins them anew; remove one of them"
        )


@rule
def weights_of_the_hub_are_in_its_format(config: RunConfig) -> Faults:
    """An id of the hub is not the step folder of a checkpoint."""
    ids = {hub_key.key for hub_key in hub_keys(config) if hub_key.repository is not None}
    for begin, (_, is_hf) in config.read_weights.items():
        if f"{begin}_path" in ids and not is_hf:
            switch = f"{begin}_in_hf"
            yield fault(f"`{begin}_path`: is in Hugging Face's format; set {switch} = true", switch)


@rule
def events_have_a_folder_of_their_own(config: RunConfig) -> Faults:
    """The folder of event files, which a new run renames, holds no other folder of the run."""
    if not config.metrics.enable_tensorboard:
        return
    events = os.path.abspath(config.tensorboard_folder)
    folders = {"job.dump_folder": Path(config.job.dump_folder)}
    if config.checkpoint.enable:
        folders["checkpoint.folder"] = config.checkpoint_folder
    held = [key for key, folder in folders.items() if Path(os.path.abspath(folder)).is_relative_to(events)]
    for key in held[:1]:
        yield fault(
            f"`metrics.save_tb_folder`: must not hold {key} = {folders[key]}, because a new run renames it; name "
            "another folder",
            key,
        )


@rule
def some_step_is_profiled(config: RunConfig) -> Faults:
    """A run with a budget in steps reaches the first profile."""
    profiling = config.profiling
    steps = config.training.steps
    is_on = profiling.enable_profiling or profiling.enable_memory_snapshot
    if is_on and steps is not None and profiling.profile_freq > steps:
        yield fault(
            "`profiling.profile_freq`: no step would be profiled, because the run ends at `training.steps`; lower it "
            f"to at most {steps}"
        )
