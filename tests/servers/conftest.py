"""Fixtures of small runs."""

from tests.builders import make_config, source_folder, tokenizer
from tests.unit.tasks.rl.conftest import make_run

__all__ = ["make_config", "make_run", "source_folder", "tokenizer"]
