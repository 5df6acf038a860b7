"""The bodies of `tests/gpu/test_one_rank_nccl.py` by gloo, so that only NCCL and the GPU are new there."""

import pytest
import torch

from glm46.compute.distributed.process import join, leave
from tests.gpu import one_rank
from tests.gpu.one_rank import CASES


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield join(60)
    leave()


@pytest.mark.parametrize("case", CASES)
def test_a_path_between_ranks_works_by_gloo(case, process):
    CASES[case](process)
    assert one_rank.still_work(process)
