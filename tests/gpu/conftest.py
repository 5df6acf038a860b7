"""What the tests on a GPU share."""

import pytest
import torch


@pytest.fixture
def nondeterministic_afterwards():
    """`debug.deterministic` is for the rest of a process, which trains once."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
