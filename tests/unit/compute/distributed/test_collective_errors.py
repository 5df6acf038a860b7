"""Errors of one rank that all ranks raise; several ranks raise them in tests/ranks."""

import pytest
import torch.distributed as dist

from glm46.compute.distributed.collective_errors import raise_on_all_ranks
from glm46.config.errors import UnreadableError, UserError

IN_WORKER = 'Caught {0} in DataLoader worker process 0.\nTraceback:\n  File "x"\n{0}: a.bin: bytes 4 to 7\n'
"""As torch's loader words the error of a worker."""


@pytest.fixture
def group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("kind", "code"), [(UserError, 2), (UnreadableError, 1)])
def test_the_error_of_a_rank_keeps_its_exit_code_and_loses_the_traceback_of_a_worker(group, kind, code):
    text = IN_WORKER.format(f"{kind.__module__}.{kind.__qualname__}")
    with pytest.raises(kind) as raised:
        raise_on_all_ranks(kind(text))
    assert (raised.value.faults, raised.value.exit_code) == (("a.bin: bytes 4 to 7",), code)
