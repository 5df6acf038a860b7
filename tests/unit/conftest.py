"""Fixtures that tests of several rooms use."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.builders import make_config, source_folder, tokenizer
from tests.fork_server import ForkServer
from tests.golden import golden
from tests.terminal import small_disk

__all__ = ["golden", "make_config", "small_disk", "source_folder", "tokenizer"]

# Limits of time of an example, and of what generates it, would fail on a busy machine; each run has the same examples.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_collection_finish() -> None:
    """Make a run of many small tests faster."""
    # What the imports made stays; without this each garbage collection at the start of a run looks at all of it.
    gc.collect()
    gc.freeze()
    # A loader that the garbage collector ends cannot tell its workers so, and waits this long before it kills them.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 1.0


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Give each test the same random numbers in every run; one in a thousand would violate some bound."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory) -> Iterator[str]:
    """Path of a Python whose programs start with torch and glm46 imported."""
    modules = (
        "glm46.operate.launch.ssh_hosts",
        "glm46.storage.checkpoint.gathering",
        "glm46.storage.checkpoint.manager",
    )
    one = ForkServer(tmp_path_factory.mktemp("warm"), *modules)
    yield str(one.file)
    one.close()


@pytest.fixture
def small_task_index(monkeypatch) -> None:
    """Leave out the files of lm-eval itself, which take half a minute to read, where lm-eval is installed."""
    try:
        from lm_eval.tasks import manager
    except ImportError:
        return
    real, default = manager.TaskIndex.build, Path(manager.__file__).parent
    monkeypatch.setattr(
        manager.TaskIndex, "build", lambda self, paths, **more: real([p for p in paths if Path(p) != default], **more)
    )
