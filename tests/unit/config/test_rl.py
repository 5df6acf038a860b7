"""What the presets of [rl] set, and the shipped debug run with [rl]."""

import re
import shlex
from pathlib import Path

import pytest

from glm46.config.loader import dump_config, load_config
from glm46.config.rl import PRESETS, RLConfig
from tests.unit.config.test_faults import write

RECIPE = Path("train_configs/rl_debug_labels.toml")


@pytest.mark.parametrize("algorithm", PRESETS)
def test_every_preset_is_sound_and_its_dump_runs_again(algorithm, tmp_path):
    teacher = ['rl.reference.load_path = "teacher"'] if algorithm == "distillation" else []
    config = load_config(write("rl", [f'rl.algorithm = "{algorithm}"', *teacher], tmp_path / "run.toml"))
    rl = config.rl.resolved()
    assert None not in [getattr(rl, name) for name in ("ratio", "advantage", "whiten", "gamma", "reduction", "critic")]
    (tmp_path / "dump.toml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path / "dump.toml").rl.resolved() == rl


def test_a_stated_key_is_stronger_than_the_preset():
    rl = RLConfig.model_validate(
        {"algorithm": "dapo", "prompts_per_rollout": 1, "clip": {"low": 0.1}, "overlong_share": 0.0}
    )
    assert (rl.resolved().clip.low, rl.resolved().clip.high, rl.resolved().overlong_share) == (0.1, 0.28, 0.0)
    assert rl.resolved().resolved() == rl.resolved()


def test_the_page_states_what_each_preset_sets():
    page = Path(__file__).parents[3].joinpath("docs", "rl_reference.md").read_text()
    header = page.index("| `algorithm` | ratio |")
    rows = [line.split("|")[1:7] for line in page[header:].split("\n\n")[0].splitlines()[2:]]
    row_by_name = {re.match(r" `(\S+)`", row[0])[1]: row for row in rows}
    assert row_by_name.keys() == PRESETS.keys()
    for name, row in row_by_name.items():
        rl = RLConfig(algorithm=name, prompts_per_rollout=1).resolved()
        assert row[1].strip() == rl.ratio
        low, high = re.match(r" (\S+), ([\d.e-]+)", row[2]).groups()
        # CISPO's lower bound of 1 bounds nothing.
        assert (0.0 if rl.clip.low == 1 else rl.clip.low) == (0.0 if low == "none" else float(low))
        assert rl.clip.high == float(high)
        assert row[3].split(",")[0].strip(" `") == rl.advantage
        assert row[4].strip(" `") == rl.reduction


def test_the_recipe_has_no_fault():
    assert load_config(RECIPE, (), world_size=2).rl.resolved().ratio == "sequence"


def test_the_resolved_recipe_runs_again(tmp_path):
    """The dump folder has it, with every default stated."""
    config = load_config(RECIPE)
    (tmp_path / "config.toml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path / "config.toml") == config


def test_the_debug_run_takes_servers_by_the_line_of_the_docs():
    """Its file has the number of samples that are generated at once, which holds for servers too."""
    guide = Path("docs/rl.md").read_text().replace("\\\n", "")
    (line,) = [line for line in guide.splitlines() if "--rollout.kind vllm" in line and line.startswith("CONFIG_FILE=")]
    words = shlex.split(line)
    file = Path(words[0].partition("=")[2])
    config = load_config(file, words[words.index("./run_train.sh") + 1 :])
    assert config.rollout.kind == "vllm" and config.rollout.urls and config.rollout.samples_at_once == 256
    config = load_config(file, ["--rollout.kind", "sglang", "--rollout.urls", '["http://a:1"]'])
    assert config.rollout.kind == "sglang"
