"""A dumped run is the same run: loaded again, it is equal, whatever its values are."""

import functools
import typing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from glm46.config.errors import UserError
from glm46.config.loader import dump_config, load_config
from glm46.config.model import ModelConfig
from glm46.config.overrides import key_parts
from glm46.config.printable import printable
from glm46.config.rules_fields import idle_keys
from glm46.config.run_config import RunConfig
from glm46.config.validation import section_of

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_NUMBERS = st.floats(min_value=1e-12, max_value=1e12) | st.sampled_from([0.1, 0.3, 1e-8, 5e-324, 1.5])
_TOKENS = st.lists(st.integers(0, 10**15), min_size=1, max_size=4).map(sorted)
_SCHEDULES = _NUMBERS | _TOKENS.flatmap(
    lambda tokens: st.tuples(*(st.tuples(st.just(token), _NUMBERS) for token in tokens))
)


def _values(annotation):
    """Values of a field's type; its range is left to chance and to validation."""
    choices = {
        str: _TEXT, bool: st.booleans(), int: st.integers(1, 64), float: st.floats(0.01, 1.0), type(None): st.none(),
    }  # fmt: skip
    if annotation in choices:
        return choices[annotation]
    if typing.get_origin(annotation) is typing.Literal:
        return st.sampled_from(typing.get_args(annotation))
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        return _values(inner[0])
    return st.one_of(*map(_values, inner))


@st.composite
def sections(draw, section):
    """A table of some keys of a section."""
    table = {}
    for name, field in section.model_fields.items():
        if section_of(field) is None and draw(st.booleans()):
            is_schedule = "tuple[tuple[int, float], ...]" in str(field.annotation)
            table[name] = draw(_SCHEDULES if is_schedule else _values(field.annotation))
    return table


@st.composite
def runs(draw):
    """A run that is valid field by field, and often unsound across sections."""
    tables = {}
    for name, field in RunConfig.model_fields.items():
        section = section_of(field)
        if section is not ModelConfig and draw(st.integers(0, 3)) == 0:
            tables[name] = draw(sections(section))
    tables["model"] = {"flavor": "debug", "shape": {"hidden_size": draw(st.integers(1, 999))}}
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=3))
    tables.setdefault("data", {})["sources"] = tuple(
        {"name": name, "path": draw(_TEXT.filter(lambda path: path and "://" not in path)), "weight": draw(_NUMBERS)}
        for name in names
    )
    try:
        return RunConfig.model_validate(tables)
    except ValidationError:
        return RunConfig.model_validate({"model": tables["model"], "data": {"sources": tables["data"]["sources"]}})


def without_idle_keys(config: RunConfig) -> RunConfig:
    """The same run, with keys that have no effect at their defaults."""
    table = config.model_dump()
    for idle in idle_keys(config):
        *path, key = key_parts(idle.key)
        functools.reduce(lambda outer, part: outer[part], path, table).pop(key)
    return RunConfig.model_validate(table)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(config=runs())
def test_dump_loads_again_to_an_equal_run(config, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config), encoding="utf-8")
    config = without_idle_keys(config)
    try:
        assert load_config(path) == config
    except UserError as error:
        # Rules across sections may refuse a random run; what the file says must have been read back all the same.
        from glm46.config.check import check_config

        broken = [printable(message) for message in check_config(config, world_size=None)]
        assert [fault.split(": ", 1)[1] for fault in error.faults] == broken


def test_dump_states_every_default_and_no_absent_key(tmp_path):
    config = RunConfig.model_validate({"model": {"flavor": "debug"}, "training": {"steps": 3}})
    text = dump_config(config)
    assert "seq_len = 4096" in text and "max_norm = 1.0" in text
    assert "tokens" not in text.split("[training]")[1].split("[")[0]
