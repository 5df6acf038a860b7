"""Fixtures of small runs."""

from tests.small_run import make_config, source_folder, tokenizer

__all__ = ["make_config", "source_folder", "tokenizer"]
