"""Fixtures that tests of several rooms use."""

from tests.small_run import make_config, small_disk, source_folder, tokenizer

__all__ = ["make_config", "small_disk", "source_folder", "tokenizer"]
