"""The validation loss of pre-training is the same on every layout."""

import json

import pytest

from tests.builders import small_config
from tests.harness import run_ranks
from tests.ranks.forked_launch import train_and_exit

BOUND = 1e-6
"""Relative. FP32 logits whose sums have another order; losses are about 9."""
LAYOUTS = {
    "fsdp": (2, {}),
    "replicas": (2, {"data_parallel_replicate_degree": 2}),
    "experts": (2, {"expert_parallel_degree": 2}),
    "tensor": (2, {"tensor_parallel_degree": 2}),
    "context": (2, {"context_parallel_degree": 2}),
    "pipeline": (2, {"pipeline_parallel_degree": 2}),
    "context and tensor": (4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}),
}
"""Number of ranks and degrees."""


@pytest.fixture(scope="module")
def first_loss(source_folder, tmp_path_factory):
    """A function that trains one step on a layout and returns the validation loss of step 0.

    The weights of this row are the initial ones, which are equal on every layout.
    """

    def measure(ranks: int, degrees: dict[str, int]) -> float:
        folder = tmp_path_factory.mktemp("run")
        config = small_config(
            source_folder,
            folder,
            parallelism=degrees,
            validation={"enable": True},
            training={"steps": 1, "global_batch_size": 4},
            checkpoint={"enable": False},
            model={"num_key_value_heads": 2},
        )
        run_ranks(train_and_exit, ranks, config)
        with (folder / "metrics.jsonl").open() as rows:
            row = json.loads(next(rows))
        assert row["step"] == 0
        return row["validation_loss"]

    return measure


@pytest.fixture(scope="module")
def loss_of_one_process(first_loss) -> float:
    loss = first_loss(1, {})
    assert 8 < loss < 10
    return loss


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_validates_what_one_process_does(first_loss, loss_of_one_process, layout):
    assert first_loss(*LAYOUTS[layout]) == pytest.approx(loss_of_one_process, rel=BOUND)
