"""Fixtures of small runs."""

from tests.builders import source_folder, tokenizer

__all__ = ["source_folder", "tokenizer"]
