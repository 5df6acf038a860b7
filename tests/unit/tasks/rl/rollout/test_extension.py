"""The parts of the worker extension of vLLM that need no vLLM; the others run in tests/servers."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

FOLDER = Path(__file__).parents[5] / "deploy/vllm"


@pytest.fixture
def extension(monkeypatch):
    source = (FOLDER / "glm_ext.py").read_text()
    imported = {line.split()[1] for line in source.splitlines() if line.startswith(("import vllm", "from vllm"))}
    for name in imported:
        monkeypatch.setitem(sys.modules, name, MagicMock(__version__="0.32.0"))
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("glm_ext", FOLDER / "glm_ext.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_routes_are_those_of_the_request_and_not_of_one_whose_name_begins_alike(extension):
    recorder = extension._RouteRecorder(MagicMock())
    for number in (10, 1, 11):
        rows = {place: np.full((2, 2), number, np.int16) for place in (1, 0)}
        recorder.rows[f"generate-tokens-18a0-{number}-0123abcd"] = rows
    assert recorder.take("generate-tokens-18a0-1").tolist() == [[[1, 1]] * 2] * 2
    assert recorder.take("generate-tokens-18a0-1") is None
    assert list(recorder.rows) == [f"generate-tokens-18a0-{number}-0123abcd" for number in (10, 11)]


def test_workers_are_numbered_over_all_replicas(extension, monkeypatch):
    numbers = []
    monkeypatch.setattr(extension, "Receiver", lambda said, worker, device: numbers.append(worker) or MagicMock())
    for replica in (0, 1):
        for rank in (0, 1):
            worker = MagicMock(rank=rank)
            worker.vllm_config.parallel_config = SimpleNamespace(world_size=2, data_parallel_index=replica)
            assert "version" in extension.Extension.glm46_receive(worker, "{}")
    assert numbers == [0, 1, 2, 3]
