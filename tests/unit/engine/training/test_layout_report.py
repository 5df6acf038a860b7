"""The first message of a run."""

from types import SimpleNamespace

import pytest
import torch

from glm46.config.run_config import RunConfig
from glm46.engine.training.layout_report import _attention, _exchange
from glm46.run import activations
from glm46.run.plan import resolve_plan
from tests.small_run import small_config


@pytest.mark.parametrize(
    ("device", "tables", "cp", "said"),
    [
        ("cpu", {"data": {"document_mask": False}}, 1, "causal, by torch's scaled_dot_product_attention"),
        ("cpu", {"data": {"document_mask": True}}, 1, "blocks of 128 queries by torch's CPU kernel, within documents"),
        (
            "cuda",
            {"data": {"document_mask": True}, "training": {"mixed_precision_param": "bfloat16"}},
            2,
            "variable-length flash attention, within documents, keys gathered over 2 ranks",
        ),
        (
            "cuda",
            {"data": {"document_mask": False}, "model": {"sliding_window": 1024}},
            2,
            "blocks of 128 queries by matrix products, window of 1,024 tokens, keys exchanged over 2 ranks",
        ),
        (
            "cuda",
            {"data": {"document_mask": True}, "training": {"mixed_precision_param": "bfloat16"}},
            4,
            "variable-length flash attention, within documents, keys passed around 4 ranks",
        ),
    ],
)
def test_the_core_of_attention_is_named(source_folder, tmp_path, monkeypatch, device, tables, cp, said):
    if cp == 4:
        monkeypatch.setattr(activations, "MOST_GATHERED_BYTES", 1)
    tables = {"parallelism": {"context_parallel_degree": cp}} | tables
    plan = resolve_plan(small_config(source_folder, tmp_path, **tables), cp)
    task = SimpleNamespace(plan=plan, cluster=SimpleNamespace(device=torch.device(device)))
    assert _attention(task) == said


@pytest.mark.parametrize(
    ("exchange", "ranks", "numbers"),
    [("auto", 8, ["7.0"]), ("two_level", 8, ["one host", "4.7", "7.0"]), ("auto", 32, ["4 hosts x 8", "2.7", "6.0"])],
)
def test_the_way_of_tokens_to_experts_is_named(exchange, ranks, numbers):
    parallelism = {"expert_parallel_degree": ranks, "expert_exchange": exchange}
    config = RunConfig.model_validate({"model": {"flavor": "GLM-4.5-Air"}, "parallelism": parallelism})
    said = _exchange(resolve_plan(config, 32, host_ranks=8))
    assert all(number in said for number in numbers), said
