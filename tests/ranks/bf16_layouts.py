"""One BF16 step of a few layouts on two ranks, and of one process, against one process in FP32; prints the distances.

PYTHONPATH=. OMP_NUM_THREADS=1 python tests/ranks/bf16_layouts.py
"""

import json
import math

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.process import join, leave
from glm46.compute.model.cross_entropy import token_logprobs
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.plan import initialise
from glm46.config.presets import resolve_shape
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from tests.ranks.forked_ranks import in_halves, run_ranks
from tests.ranks.sharded_layouts import (
    OPTIONS,
    Layout,
    build_job,
    distances,
    held,
    loss_of_step,
    make_batch,
    make_config,
    micro_batches,
    squares,
)

LAYOUTS = {
    "fsdp": Layout(), "tensor": Layout(tensor=2), "expert": Layout(experts_over=2), "context": Layout(context=2),
    "pipeline": Layout(pipeline=2),
}  # fmt: skip


def bf16_run(layout: Layout):
    """`make_config` in BF16, without clipping, so that gradients compare as they are, and with widths that `grouped_mm`
    takes in BF16 (multiples of 16 bytes)."""
    config = make_config(layout, layers=3)
    model = config.model.model_copy(update={"hidden_size": 72, "moe_intermediate_size": 40})
    training = config.training.model_copy(update={"mixed_precision_param": "bfloat16", "max_norm": 1e9})
    return config.model_copy(update={"training": training, "model": model})


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
        job = build_job(bf16_run(layout), process)
        totals = count_step(job, [make_batch(0)])
        outcome = train_step(job, micro_batches(job, 0, layout.micro_batches), totals, 0, 1.0)
        ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, squares({n: held(p.grad) for n, p in job.network.parameters.items()}, truth))
        if process.is_main:
            print(
                json.dumps(
                    {"layout": name, "loss": outcome.main.sums["loss"].item(), "gradients": distances(ranks, truth)}
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
    names = list(LAYOUTS)
    in_halves((names[::2], names[1::2]), lambda half: run_ranks(2, lambda: measure(half, truth)))


if __name__ == "__main__":
    main()
