"""Fixtures that tests of several rooms use."""

import gc
from collections.abc import Iterator

import pytest

from tests.small_run import make_config, small_disk, source_folder, tokenizer
from tests.warm_python import WarmPython

__all__ = ["make_config", "small_disk", "source_folder", "tokenizer"]


def pytest_collection_finish() -> None:
    """What the imports made stays; without this each garbage collection at the start of a run looks at all of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory) -> Iterator[str]:
    """Path of a Python whose programs start with torch and glm46 imported."""
    one = WarmPython(tmp_path_factory.mktemp("warm"))
    yield str(one.file)
    one.close()
