"""Fixtures of small runs."""

from tests.small_run import source_folder, tokenizer

__all__ = ["source_folder", "tokenizer"]
