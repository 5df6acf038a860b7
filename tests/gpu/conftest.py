"""What the tests on a GPU share."""

from collections.abc import Iterator

import pytest
import torch

from glm46.compute.distributed.process import Process, join, leave


@pytest.fixture
def process() -> Iterator[Process]:
    """This process, in a group of its own."""
    yield join(60)
    leave()


@pytest.fixture
def nondeterministic_afterwards():
    """`debug.deterministic` is for the rest of a process, which trains once."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
