"""Rules across sections, one small function each: the tuples of rules are the list of them.

A rule yields the faults it finds and reads nothing but the configuration. Rules about one key alone sit in its field,
those about the shape in `rules_model`, those about the mesh in `rules_layout`, and so on.
"""

from collections.abc import Callable

from glm46.config.faults import Fault, Faults, nearest, show
from glm46.config.presets import PRESETS, resolve_shape
from glm46.config.rules_data import DATA_RULES
from glm46.config.rules_effect import stated_keys_have_an_effect
from glm46.config.rules_layout import LAYOUT_RULES, values_of
from glm46.config.rules_model import MODEL_RULES
from glm46.config.rules_optimizer import OPTIMIZER_RULES
from glm46.config.rules_pipeline import PIPELINE_RULES
from glm46.config.run_config import RunConfig


def check_config(config: RunConfig, *, world_size: int | None) -> list[str]:
    """Messages of every broken rule; an empty list is a sound run.

    Args:
        world_size: processes of the run; None when they are not known yet, which leaves out the rules about them.
    """
    return [fault.message for fault in find_faults(config, world_size)]


def find_faults(config: RunConfig, world_size: int | None) -> list[Fault]:
    """As `check_config`, with the keys that each fault is about."""
    faults = [fault for rule in SECTION_RULES for fault in rule(config)]
    if config.model.flavor not in PRESETS:
        return faults
    shape = resolve_shape(config.model)
    faults += [fault for rule in MODEL_RULES for fault in rule(config, shape)]
    rules = (*LAYOUT_RULES, *PIPELINE_RULES, *OPTIMIZER_RULES)
    return faults + [fault for rule in rules for fault in rule(config, shape, world_size)]


def flavor_is_a_preset(config: RunConfig) -> Faults:
    """A preset that does not exist has no shape; the message lists those that do."""
    flavor = config.model.flavor
    if flavor not in PRESETS:
        near = nearest(flavor, PRESETS, 0.6)
        remedy = f"did you mean '{near}'? " if near else ""
        yield Fault(
            ("model.flavor",), f"model.flavor = {show(flavor)}: no such preset; {remedy}Presets: {', '.join(PRESETS)}"
        )


def budget_is_given_once(config: RunConfig) -> Faults:
    """Tokens or steps: two budgets would contradict each other, none would never end."""
    keys = ("training.tokens", "training.steps")
    tokens, steps = config.training.tokens, config.training.steps
    if tokens is None and steps is None:
        yield Fault(keys, "training.tokens, training.steps: both absent; state how long to train, in one of them")
    if tokens is not None and steps is not None:
        yield Fault(keys, f"training.tokens = {tokens}, training.steps = {steps}: both given; state one of them")


def schedules_keep_their_range(config: RunConfig) -> Faults:
    """Every point of a schedule lies where its key has a meaning."""
    for key, schedule, lowest, inclusive in (
        ("moe.bias_update_rate", config.moe.bias_update_rate, 0, True),
        ("moe.router_temperature", config.moe.router_temperature, 0, False),
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
    """A run that outlives its schedule would train at the lowest rate, most likely by a slip in the tokens."""
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
    """Where the schedule ends. None under a budget in steps: that is how a person tries a run out, and a trial may end
    inside its warm-up."""
    if config.lr_scheduler.total_tokens is not None:
        return config.lr_scheduler.total_tokens
    if config.training.tokens is not None:
        return config.lr_scheduler.start_tokens + config.training.tokens
    return None


def hugging_face_folder_can_say_it(config: RunConfig) -> Faults:
    """What is written for Hugging Face's readers computes the same there."""
    checkpoint = config.checkpoint
    if checkpoint.last_save_in_hf and config.model.sliding_window is not None:
        yield Fault(
            ("checkpoint.last_save_in_hf", "model.sliding_window"),
            f"checkpoint.last_save_in_hf = true: Hugging Face's GLM has no model.sliding_window = "
            f"{config.model.sliding_window}, so its readers would attend to everything; set one of them only",
        )


def checkpoint_folder_is_inside(config: RunConfig) -> Faults:
    """Retention deletes step folders, so they lie where only this run writes."""
    folder = config.checkpoint.folder
    if not folder or folder.startswith(("/", "~")) or ".." in folder.replace("\\", "/").split("/"):
        yield Fault(
            ("checkpoint.folder",),
            f"checkpoint.folder = {show(folder)}: must be a relative path inside job.dump_folder; move dump_folder",
        )


SECTION_RULES: tuple[Callable[[RunConfig], Faults], ...] = (
    flavor_is_a_preset,
    budget_is_given_once,
    *DATA_RULES,
    schedules_keep_their_range,
    warmup_ends_before_decay,
    run_fits_into_its_schedule,
    hugging_face_folder_can_say_it,
    checkpoint_folder_is_inside,
    stated_keys_have_an_effect,
)
