"""Each rule of a config refuses what breaks it, with key, value and remedy; faults.toml has the rows."""

import re
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w

from glm46.config.errors import UserError
from glm46.config.loader import dump_config, load_config
from glm46.config.overrides import apply_overrides, parse_overrides

TABLE = tomli.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))
SOUND = TABLE.pop("sound")
ROWS = [
    pytest.param(base, row, id=f"{base}: {', '.join(row['input'])}") for base, rows in TABLE.items() for row in rows
]
REMEDY = re.compile(r"(?:set|take|use|add) ([a-z_0-9]+(?:\.[a-z_0-9]+)+) = (\"[^\"]*\"|\[[^\]]*\]|[\w.+-]+)")
"""A remedy with a key and its value."""
NEAR_VALUE = re.compile(r"^([\w.]+) = .*; take ([\d_.]+|\"[^\"]*\")(?: or .*)?$")
"""A fault of one key whose remedy is a value."""


def write(base: str, lines: list[str], file: Path) -> Path:
    """Write a sound config with changed keys."""
    table = tomli.loads(SOUND[base])
    overrides, faults = parse_overrides(["--{}={}".format(*re.split(" = ?", line, maxsplit=1)) for line in lines])
    assert faults + apply_overrides(table, overrides) == []
    file.write_text(tomli_w.dumps(table), encoding="utf-8")
    return file


def faults_of(file: Path, *overrides: str, processes: int | None = None) -> list[str]:
    """Return the messages about a config, without the origin of their keys."""
    try:
        load_config(file, overrides, world_size=processes)
    except UserError as error:
        return [fault.replace(f"{file}: ", "").replace(f"{file} and command line: ", "") for fault in error.faults]
    return []


@pytest.mark.parametrize("base", SOUND)
def test_a_sound_config_has_no_fault_and_its_dump_is_equal(base, tmp_path):
    config = load_config(write(base, [], tmp_path / "run.toml"))
    (tmp_path / "dump.toml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path / "dump.toml") == config


@pytest.mark.parametrize(("base", "row"), ROWS)
def test_each_fault_has_key_value_and_remedy(base: str, row: dict[str, Any], tmp_path):
    messages = faults_of(write(base, row["input"], tmp_path / "run.toml"), processes=row.get("processes"))
    assert len(messages) == len(row["faults"]), messages
    for message, (key_and_value, remedy) in zip(messages, row["faults"], strict=True):
        assert message.startswith(f"{key_and_value}: ") and remedy in message, message


@pytest.mark.parametrize(("base", "row"), ROWS)
def test_a_remedy_with_a_value_ends_its_fault_and_brings_no_other(base: str, row: dict[str, Any], tmp_path):
    processes = row.get("processes")
    file = write(base, row["input"], tmp_path / "run.toml")
    messages = faults_of(file, processes=processes)
    for message in messages:
        for key, value in (*REMEDY.findall(message), *NEAR_VALUE.findall(message)):
            remaining = faults_of(file, f"--{key}={value}", processes=processes)
            others = {other for other in messages if other is not message}
            assert {fault.removeprefix("command line: ") for fault in remaining} <= others, (message, key, value)
