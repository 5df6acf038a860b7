"""The rules in the metadata of fields: which keys have no effect, and which do not fit another key."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from glm46.config.field_rules import FieldRule, Needs, Place, Requires
from glm46.config.fields import FieldValue, fields_of, values_at
from glm46.config.presets import with_presets
from glm46.config.rules import Broken, Faults, fault, rule, with_value
from glm46.config.run_config import RunConfig
from glm46.config.section import Section


class IdleKey(NamedTuple):
    """A key without effect."""

    key: str
    is_stated: bool
    """False if the key is not set, None, a default that is off, or off where `Needs.absent` applies."""
    switch: str
    """Dotted key whose value disables the key."""
    remedy: str
    """Switch with a value that enables the key; empty if the switch must be absent."""
    reason: str
    """See `Needs.absent`."""


@rule
def fields_keep_their_rules(config: RunConfig) -> Faults:
    """Every key that is set has an effect, and fits the keys that the rules of its field name."""
    full = with_presets(config)
    idle = list(idle_keys(config))
    idle_names = {key.key for key in idle}
    missing: set[str] = set()

    def find(key: str) -> list[Any]:
        return [] if key in idle_names else values_at(full, key)

    # `ModelShape` has the rules of shapes, the table [model.shape] has none. For [rl] it is the other way round: the
    # fields of its resolved form are redefined without their rules.
    for field in fields_of(config.model_copy(update={"model": full.model})):
        rules = [mark for mark in field.info.metadata if isinstance(mark, FieldRule)]
        if not rules or field.key in idle_names:
            continue
        (value,) = values_at(full, field.key)
        place = Place(field.key, value, rules, field.whole_key, find)
        for field_rule in rules:
            text = field_rule.broken(place)
            other = field.whole_key(field_rule.key)
            if text is None or other in missing:
                continue
            yield fault(f"`{field.key}`: {text}", other)
            if isinstance(field_rule, Requires):
                missing.add(other)
    yield from _idle_faults(config, idle)


def idle_faults(root: Section) -> Iterator[Broken]:
    """Yield the faults of keys of a config or a recipe that are set without effect."""
    yield from _idle_faults(root, idle_keys(root))


def _idle_faults(root: Section, idle_keys: Iterable[IdleKey]) -> Iterator[Broken]:
    for idle in filter(lambda key: key.is_stated, idle_keys):
        remove = f"remove {with_value(root, idle.key).partition(' = ')[0]}"
        if not idle.remedy:
            yield fault(f"`{idle.key}`: has no effect with `{idle.switch}`{idle.reason}; {remove}")
        elif with_value(root, idle.switch).endswith(")"):  # the value comes from a preset
            yield fault(f"`{idle.key}`: has no effect with `{idle.switch}`; set {idle.remedy}, or {remove}")
        else:
            yield fault(f"`{idle.key}`: has no effect without {idle.remedy}; set that, or {remove}", idle.switch)


def idle_keys(root: Section) -> Iterator[IdleKey]:
    """Yield every key of a config or a recipe that has no effect, set or not, each once."""
    full = with_presets(root) if isinstance(root, RunConfig) else root
    for field in fields_of(root):
        needs = [mark for mark in field.info.metadata if isinstance(mark, Needs)]
        idle = next(filter(None, (_idle_key(field, need, full) for need in needs)), None)
        if idle is not None:
            yield idle


def _idle_key(field: FieldValue, need: Needs, full: Section) -> IdleKey | None:
    """Return a field as an idle key if a rule of it finds no effect with the values of ``full``."""
    find = partial(values_at, full)
    switch = field.whole_key(need.key)
    values = find(switch)
    is_enabled = need.unless and any(find(field.whole_key(need.unless)))
    if is_enabled or any(map(need.suffices, values)):
        return None
    # A value that asks for nothing loses nothing: it may be stated without effect.
    is_off_by_default = field.value == field.info.default and field.value in (0, "", (), "auto")
    is_off_as_needed = bool(need.absent) and not field.value
    asks_nothing = field.value is None or is_off_by_default or is_off_as_needed
    is_stated = field.name in field.section.model_fields_set and not asks_nothing
    return IdleKey(field.key, is_stated, switch.partition("[]")[0], need.remedy(switch, values), need.absent)
