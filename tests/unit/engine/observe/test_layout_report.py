"""The first message of a run."""

from types import SimpleNamespace

import pytest
import torch

from glm46.config.run_config import RunConfig
from glm46.engine.observe.layout_report import _attention
from glm46.run import context_keys
from glm46.run.plan import describe_exchange, resolve_plan
from tests.builders import small_config


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
        monkeypatch.setattr(context_keys, "MOST_GATHERED_BYTES", 1)
    tables = {"parallelism": {"context_parallel_degree": cp}} | tables
    plan = resolve_plan(small_config(source_folder, tmp_path, **tables), cp)
    task = SimpleNamespace(plan=plan, cluster=SimpleNamespace(device=torch.device(device)))
    assert _attention(task) == said


@pytest.mark.parametrize(
    ("parallelism", "host_ranks", "said"),
    [
        ({}, 8, "two levels, one host of 8 ranks: rows of a token 4.7 inside them (all to all 7.0); 1 host wait per "
         "layer"),
        ({"expert_exchange": "all_to_all"}, 8, "all to all: 7.0 rows of a token to 8 ranks; 1 host wait per layer"),
        ({"expert_parallel_degree": 32}, 8, "two levels, 4 hosts x 8 ranks, 2 chunks: 2.7 rows of a token between "
         "hosts (all to all 6.0), 6.4 inside them (all to all 1.8); 1 host wait per layer"),
        ({"expert_exchange": "deepep"}, 8, "DeepEP, one host of 8 ranks: rows of a token 4.7 inside them (all to all "
         "7.0); 1 host wait per layer"),
        ({"expert_exchange": "deepep", "expert_parallel_degree": 32}, 8, "DeepEP, 4 hosts x 8 ranks: 2.7 rows of a "
         "token between hosts (all to all 6.0), 6.4 inside them (all to all 1.8); 1 host wait per layer"),
        ({"expert_exchange_chunks": 2}, 8, "two levels, one host of 8 ranks, 2 chunks: rows of a token 4.7 inside them "
         "(all to all 7.0); 1 host wait per layer; 128 rows of an expert at a time: products of fewer than 512 are "
         "slow"),
        ({}, 0, "all to all: 7.0 rows of a token to 8 ranks; 1 host wait per layer; not two levels: the 8 ranks that "
         "share experts (parallelism.expert_parallel_degree) are not whole hosts, or on one: hosts have unequal "
         "numbers of ranks"),
    ],
)  # fmt: skip
def test_the_way_of_tokens_to_experts_is_named(parallelism, host_ranks, said):
    parallelism = {"expert_parallel_degree": 8} | parallelism
    training = {"seq_len": 512, "local_batch_size": 1}
    tables = {"model": {"flavor": "GLM-4.5-Air"}, "parallelism": parallelism, "training": training}
    plan = resolve_plan(RunConfig.model_validate(tables), 32, host_ranks=host_ranks)
    assert describe_exchange(plan) == said


@pytest.mark.parametrize(
    ("seq_len", "ranks", "chunks"), [(4096, 16, 2), (1024, 16, 2), (512, 16, 1), (4096, 8, 1), (4096, 1, 1)]
)
def test_chunks_are_two_between_hosts_where_products_stay_large(seq_len, ranks, chunks):
    """Air has 128 experts and a token 8: 1,024 tokens of 16 ranks are 1,024 rows of each expert."""
    training = {"seq_len": seq_len, "local_batch_size": 1}
    tables = {"parallelism": {"expert_parallel_degree": ranks}, "training": training}
    config = RunConfig.model_validate({"model": {"flavor": "GLM-4.5-Air"}} | tables)
    assert resolve_plan(config, 32, host_ranks=8).exchange_chunks == chunks
