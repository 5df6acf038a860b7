"""One BF16 step of a few layouts, and of one process, against one process in FP32; prints the distances.

PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/bf16_layouts.py
"""

import json
import math
import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.process import join, leave
from glm46.compute.model.cross_entropy import token_logprobs
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize import deepep
from glm46.compute.parallelize.plan import initialise
from glm46.config.presets import resolve_shape
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from tests.ranks import fake_deep_ep
from tests.ranks.forked_ranks import in_halves, run_ranks
from tests.ranks.sharded_layouts import (
    OPTIONS,
    ROWS,
    Layout,
    build_job,
    distances,
    held,
    loss_of_step,
    make_batch,
    make_config,
    micro_batches,
    schedule_here,
    squares,
)
from tests.small_run import with_shape

LAYOUTS = {
    "fsdp": Layout(), "tensor": Layout(tensor=2), "expert": Layout(experts_over=2), "context": Layout(context=2),
    "pipeline": Layout(pipeline=2),
    "deepep": Layout(experts_over=2),
    "deepep, compiled, selective": Layout(experts_over=2, compiled=True, checkpointing="selective"),
    "deepep, context, exchange again": Layout(
        experts_over=2, context=2, checkpointing="selective", recompute=("exchange",)
    ),
    # Of four ranks.
    "deepep, pipeline, full": Layout(experts_over=2, pipeline=2, checkpointing="full"),
    "deepep, split backward": Layout(experts_over=2, pipeline=2, schedule=schedule_here("DualPipeV"), micro_batches=4),
}  # fmt: skip


def bf16_run(layout: Layout, exchange: str = "auto"):
    """`make_config` in BF16, without clipping, so that gradients compare as they are, and with widths that `grouped_mm`
    (multiples of 16 bytes) and DeepEP (32) take in BF16."""
    config = with_shape(make_config(layout, layers=4), hidden_size=80, moe_intermediate_size=40)
    # DeepEP asks for the rows of a micro-batch beforehand.
    batch = {"global_batch_size": ROWS, "local_batch_size": ROWS // layout.micro_batches}
    training = config.training.model_copy(update={"mixed_precision_param": "bfloat16", "max_norm": 1e9} | batch)
    parallelism = config.parallelism.model_copy(update={"expert_exchange": exchange})
    return config.model_copy(update={"training": training, "parallelism": parallelism})


def one_process(dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of the labels and gradients of one process, in a plain forward and backward."""
    config = bf16_run(Layout())
    with torch.device("meta"):
        model = Transformer(resolve_shape(config.model))
    model.to_empty(device="cpu")
    initialise(model, config.debug.seed)
    model.cast(dtype)
    batch = make_batch(0)
    loss_of_step(batch)(model(**batch, options=OPTIONS)).backward()
    with torch.no_grad():
        logprobs = model(**batch, options=OPTIONS, form=token_logprobs).logprobs
    return logprobs, {name: p.grad.float() for name, p in model.named_parameters()}


def measure(names: list[str], truth: dict[str, Tensor]) -> None:
    """On each rank: each layout's loss sum, and the distance of each gradient from ``truth``."""
    process = join(300)
    for name in names:
        layout = LAYOUTS[name]
        job = build_job(bf16_run(layout, "deepep" if "deepep" in name else "auto"), process)
        totals = count_step(job, [make_batch(0)])
        outcome = train_step(job, micro_batches(job, 0, layout.micro_batches), totals, 0, 1.0)
        ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, squares({n: held(p.grad) for n, p in job.network.parameters.items()}, truth))
        if process.is_main:
            print(
                json.dumps(
                    {
                        "layout": name,
                        "loss": outcome.main.objective["loss"].item(),
                        "gradients": distances(ranks, truth),
                    }
                )
            )
    leave()


def main() -> None:
    """FP32 first (its gradients are given by their norms), then one process in BF16, then the layouts."""
    torch.set_num_threads(1)
    logprobs, truth = one_process(torch.float32)
    loss = -logprobs.sum().item()
    print(json.dumps({"layout": "fp32", "loss": loss, "gradients": {n: g.norm().item() for n, g in truth.items()}}))
    rounded, gradients = one_process(torch.bfloat16)
    of_tokens = torch.dist(rounded, logprobs).item()
    apart = {name: math.dist(g.flatten().tolist(), truth[name].flatten().tolist()) for name, g in gradients.items()}
    print(json.dumps({"layout": "one process", "loss_of_tokens": of_tokens, "gradients": apart}), flush=True)
    names = [name for name, layout in LAYOUTS.items() if layout.experts_over * layout.pipeline * layout.context <= 2]
    others = [name for name in LAYOUTS if name not in names]
    with mock.patch.dict(sys.modules, deep_ep=fake_deep_ep), mock.patch.object(deepep, "why_not", lambda device: None):
        in_halves((names[::2], names[1::2]), lambda half: run_ranks(2, lambda: measure(half, truth)))
        run_ranks(4, lambda: measure(others, truth))


if __name__ == "__main__":
    main()
