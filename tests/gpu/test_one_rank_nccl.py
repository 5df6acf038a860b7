"""Every path between ranks by NCCL, in groups of one rank: see `one_rank.py`."""

import pytest
import torch

from tests.gpu import one_rank
from tests.gpu.one_rank import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("case", CASES)
def test_a_path_between_ranks_works_by_nccl(case, process):
    CASES[case](process)
    torch.cuda.synchronize()
    assert one_rank.still_work(process)
