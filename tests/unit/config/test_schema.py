"""The documentation of the keys is complete, and the schema that editors read agrees with what the loader takes."""

import json
from pathlib import Path

import pytest

from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.config.schema import describe_keys, json_schema
from glm46.config.validation import section_of

ROOT = Path(__file__).parents[3]


def test_every_key_is_described_with_values_and_meaning():
    rows = {(section.header.strip("[]"), row.key): row for section in describe_keys() for row in section.rows}
    for name, field in RunConfig.model_fields.items():
        for key, inner in section_of(field).model_fields.items():
            if section_of(inner) is None or (name, key) == ("model", "shape"):
                assert rows[name, key].meaning.endswith((".", "?")), f"{name}.{key}: the documentation is no sentence"
                assert rows[name, key].values and rows[name, key].default
    assert rows["data.sources", "weight"].values == "number > 0"
    assert rows["training", "global_batch_size"].values == "number or [[integer, number], ...]"
    assert rows["training", "seq_len"].default == "4096"
    assert rows["optimizer", "ns_steps"].values == "integer >= 1 and < 100"
    assert rows["model", "flavor"].default == "required"
    assert rows["model", "shape"].values == "a table" and "docs/reference/shape.md" in rows["model", "shape"].meaning
    assert all(section.meaning for section in describe_keys())


def test_shipped_schema_is_the_current_one():
    """Mended by: python -m glm46 schema > train_configs/schema.json"""
    assert json.loads((ROOT / "train_configs" / "schema.json").read_text()) == json_schema()


def test_schema_knows_presets_and_refuses_unknown_keys():
    schema = json_schema()
    assert schema["$defs"]["ModelConfig"]["properties"]["flavor"]["enum"] == list(PRESETS)
    assert schema["additionalProperties"] is False
    assert all(not part.get("additionalProperties", True) for part in schema["$defs"].values())


@pytest.mark.parametrize("path", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_file_points_editors_to_the_schema(path):
    assert path.read_text().splitlines()[0] == "#:schema ./schema.json"


def test_help_prints_every_key_once(capsys):
    from glm46.config.schema import describe_keys
    from glm46.operate.launch.config_options import print_keys

    print_keys()
    lines = capsys.readouterr().out.splitlines()
    rows = [row for section in describe_keys() for row in section.rows]
    for row in rows:
        times = sum(other.key == row.key for other in rows)
        assert sum(line.startswith(f"  {row.key}  ") for line in lines) == times, row.key
