"""Rules across sections, one small function each: the tuples of rules are the list of them.

A rule yields the faults that it finds and reads only the config. Rules about one key are in its field, rules about the
shape in `rules_model`, rules about the mesh in `rules_layout`, and so on.
"""

import os
from collections.abc import Callable
from pathlib import Path

from glm46.config.faults import Fault, Faults, nearest, show
from glm46.config.float8_layers import FLOAT8_RULES
from glm46.config.hub_ids import hub_keys
from glm46.config.presets import PRESETS, resolve_shape
from glm46.config.rules_adapter import adapter_is_possible
from glm46.config.rules_data import DATA_RULES
from glm46.config.rules_effect import stated_keys_have_an_effect
from glm46.config.rules_finetune import FINETUNE_RULES
from glm46.config.rules_layout import LAYOUT_RULES, values_of
from glm46.config.rules_model import MODEL_RULES
from glm46.config.rules_pipeline import PIPELINE_RULES
from glm46.config.rules_preference import preference_is_possible
from glm46.config.rules_profiling import PROFILING_RULES
from glm46.config.rules_rl import RL_RULES
from glm46.config.rules_rollout import ROLLOUT_RULES, the_model_can_draw
from glm46.config.run_config import RunConfig


def check_config(config: RunConfig, *, world_size: int | None) -> list[str]:
    """The messages of all broken rules; empty if the config is valid.

    Args:
        world_size: processes of the run; None when they are not known yet: rules about them are skipped.
    """
    return [fault.message for fault in find_faults(config, world_size)]


def find_faults(config: RunConfig, world_size: int | None) -> list[Fault]:
    """Like `check_config`, with the keys of each fault."""
    faults = [fault for rule in SECTION_RULES for fault in rule(config)]
    if config.model.flavor not in PRESETS:
        return faults
    shape = resolve_shape(config.model)
    faults += [
        fault for rule in (*MODEL_RULES, adapter_is_possible, preference_is_possible) for fault in rule(config, shape)
    ]
    rules = (*LAYOUT_RULES, *PIPELINE_RULES, *FLOAT8_RULES, *PROFILING_RULES, the_model_can_draw)
    return faults + [fault for rule in rules for fault in rule(config, shape, world_size)]


def flavor_is_a_preset(config: RunConfig) -> Faults:
    """The flavor is an existing preset; the message lists them."""
    flavor = config.model.flavor
    if flavor not in PRESETS:
        near = nearest(flavor, PRESETS, 0.6)
        remedy = f"did you mean '{near}'? " if near else ""
        yield Fault(
            ("model.flavor",), f"model.flavor = {show(flavor)}: no such preset; {remedy}Presets: {', '.join(PRESETS)}"
        )


def budget_is_given_once(config: RunConfig) -> Faults:
    """Exactly one of tokens and steps is given: without one, training would never end."""
    keys = ("training.tokens", "training.steps")
    tokens, steps = config.training.tokens, config.training.steps
    if tokens is None and steps is None:
        yield Fault(keys, "training.tokens, training.steps: both absent; set one of them")
    if tokens is not None and steps is not None:
        yield Fault(keys, f"training.tokens = {tokens}, training.steps = {steps}: both given; remove one of them")


def schedules_keep_their_range(config: RunConfig) -> Faults:
    """Every value of a schedule is in the range of its key."""
    for key, schedule, lowest, inclusive in (
        ("moe.bias_update_rate", config.moe.bias_update_rate, 0, True),
        ("moe.router_temperature", config.moe.router_temperature, 0, False),
        ("moe.sequence_aux_loss_weight", config.moe.sequence_aux_loss_weight, 0, True),
        ("moe.z_loss_weight", config.moe.z_loss_weight, 0, True),
        ("mtp.loss_weight", config.mtp.loss_weight, 0, True),
        ("training.global_batch_size", config.training.global_batch_size, 1, True),
    ):
        wrong = [value for value in values_of(schedule) if value < lowest or (value == lowest and not inclusive)]
        if wrong:
            rule = "must be at least" if inclusive else "must be greater than"
            point = f": value {show(wrong[0])}" if isinstance(schedule, tuple) else ""
            yield Fault((key,), f"{key} = {show(schedule)}{point}: {rule} {lowest}")


def warmup_ends_before_decay(config: RunConfig) -> Faults:
    """The rate reaches its peak before it falls."""
    scheduler = config.lr_scheduler
    total = _curriculum_tokens(config)
    if total is None:
        return
    decay_start = total if scheduler.decay_ratio is None else total * (1 - scheduler.decay_ratio)
    keys = ("lr_scheduler.warmup_tokens", "lr_scheduler.total_tokens", "training.tokens")
    if scheduler.warmup_tokens >= total:
        yield Fault(
            keys,
            f"lr_scheduler.warmup_tokens = {scheduler.warmup_tokens}: the schedule ends at {total} tokens, before its "
            "peak; warm up for fewer tokens, or raise training.tokens or lr_scheduler.total_tokens",
        )
    elif scheduler.warmup_tokens > decay_start:
        yield Fault(
            (*keys, "lr_scheduler.decay_ratio"),
            f"lr_scheduler.decay_ratio = {scheduler.decay_ratio}: the decay would begin at {decay_start:.0f} tokens, "
            f"inside the warm-up of {scheduler.warmup_tokens}; lower decay_ratio or warmup_tokens",
        )


def run_fits_into_its_schedule(config: RunConfig) -> Faults:
    """The run ends before its schedule: after it, training would continue at the lowest rate."""
    scheduler = config.lr_scheduler
    if scheduler.total_tokens is None:
        return
    end = scheduler.start_tokens + (config.training.tokens or 1)
    if end > scheduler.total_tokens:
        yield Fault(
            ("lr_scheduler.total_tokens", "lr_scheduler.start_tokens", "training.tokens"),
            f"lr_scheduler.total_tokens = {scheduler.total_tokens}: the schedule ends before this run, which reaches "
            f"{end} tokens (lr_scheduler.start_tokens + training.tokens); raise total_tokens to at least that",
        )


def _curriculum_tokens(config: RunConfig) -> int | None:
    """The token count at which the schedule ends. None under a budget in steps: a short trial may end inside its
    warm-up."""
    if config.lr_scheduler.total_tokens is not None:
        return config.lr_scheduler.total_tokens
    if config.training.tokens is not None:
        return config.lr_scheduler.start_tokens + config.training.tokens
    return None


def state_file_has_a_folder(config: RunConfig) -> Faults:
    """Optimizer states in a file need a folder for it."""
    if config.optimizer.state_offload == "nvme" and not config.optimizer.state_offload_folder:
        yield Fault(
            ("optimizer.state_offload", "optimizer.state_offload_folder"),
            'optimizer.state_offload = "nvme": needs a folder on a local disk; set optimizer.state_offload_folder',
        )


def hugging_face_knows_the_model(config: RunConfig) -> Faults:
    """Hugging Face's model class can compute what this config trains."""
    if not config.checkpoint.last_save_in_hf:
        return
    for key, window in _last_windows(config).items():
        if window not in (None, -1):
            unknown = "" if config.training.steps is None else " (any stage may be the last one of training.steps)"
            yield Fault(
                ("checkpoint.last_save_in_hf", key),
                f"checkpoint.last_save_in_hf = true: Hugging Face's GLM has no {key} = {window}, so its readers would "
                f"attend to all tokens{unknown}; set only one of the two",
            )
            return


def _last_windows(config: RunConfig) -> dict[str, int | None]:
    """The windows, by their keys, with which a run may end: of its last stage of text, or of all stages under a budget
    in steps."""
    stages, tokens = dict(enumerate(config.data.stages)), config.training.tokens
    if stages and tokens is not None:
        start = config.lr_scheduler.start_tokens
        clocks = config.data.stage_clocks(config.training.seq_len, start)
        last = max(index for index, clock in enumerate(clocks) if clock < start + tokens)
        stages = {last: stages[last]}
    windows = {f"data.stages[{index}].sliding_window": stage.sliding_window for index, stage in stages.items()}
    if not windows or None in windows.values():
        windows["model.sliding_window"] = config.model.stated_shape.get("sliding_window")
    return windows


def run_starts_from_one_checkpoint(config: RunConfig) -> Faults:
    """A run continues another one, or begins a new clock with its weights."""
    continued, initial = config.checkpoint.load_path, config.checkpoint.initial_load_path
    # The base of adapters and the reference of a preference are read at every start, and have no clock.
    if continued is not None and initial is not None and not config.keeps_its_start:
        yield Fault(
            ("checkpoint.load_path", "checkpoint.initial_load_path"),
            f"checkpoint.load_path = {show(continued)}, checkpoint.initial_load_path = {show(initial)}: both given; "
            "load_path keeps steps, clock and data position, initial_load_path begins them anew; remove one of them",
        )


def weights_of_the_hub_are_in_its_format(config: RunConfig) -> Faults:
    """An id of the hub is not the step folder of a checkpoint."""
    starts = [("checkpoint.initial_load_path", "checkpoint.initial_load_in_hf", config.checkpoint.initial_load_in_hf)]
    if config.rl is not None and config.rl.reference is not None:
        starts.append(("rl.reference.load_path", "rl.reference.load_in_hf", config.rl.reference.load_in_hf))
    ids = {found.key: found.value for found in hub_keys(config)}
    for key, switch, is_hf in starts:
        if key in ids and not is_hf:
            yield Fault((key, switch), f"{key} = {show(ids[key])}: is in Hugging Face's format; set {switch} = true")


def folders_are_inside_or_absolute(config: RunConfig) -> Faults:
    """Folders of the run are absolute paths or inside the dump folder: retention deletes step folders."""
    for key, folder in (
        ("checkpoint.folder", config.checkpoint.folder),
        ("metrics.save_tb_folder", config.metrics.save_tb_folder),
    ):
        if not folder or folder.startswith("~") or ".." in folder.replace("\\", "/").split("/"):
            yield Fault(
                (key,),
                f"{key} = {show(folder)}: must be an absolute path, or one inside job.dump_folder, without ~ or ..",
            )


def events_have_a_folder_of_their_own(config: RunConfig) -> Faults:
    """The folder of event files, which a new run renames, holds no other folder of the run."""
    if not config.metrics.enable_tensorboard:
        return
    events, folders = os.path.abspath(config.tensorboard_folder), {"job.dump_folder": Path(config.job.dump_folder)}
    if config.checkpoint.enable:
        folders["checkpoint.folder"] = config.checkpoint_folder
    for key, folder in folders.items():
        if Path(os.path.abspath(folder)).is_relative_to(events):
            yield Fault(
                ("metrics.save_tb_folder", key),
                f"metrics.save_tb_folder = {show(config.metrics.save_tb_folder)}: must not hold {key} = {folder}, "
                "because a new run renames it; name another folder",
            )
            return


SECTION_RULES: tuple[Callable[[RunConfig], Faults], ...] = (
    flavor_is_a_preset,
    budget_is_given_once,
    *DATA_RULES,
    *FINETUNE_RULES,
    *RL_RULES,
    *ROLLOUT_RULES,
    schedules_keep_their_range,
    warmup_ends_before_decay,
    run_fits_into_its_schedule,
    state_file_has_a_folder,
    hugging_face_knows_the_model,
    run_starts_from_one_checkpoint,
    weights_of_the_hub_are_in_its_format,
    folders_are_inside_or_absolute,
    events_have_a_folder_of_their_own,
    stated_keys_have_an_effect,
)
