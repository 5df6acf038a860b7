"""A NaN at any place, on any rank: exactly one step is skipped, on all ranks, and no bit of the state changes."""

import json
from pathlib import Path

import torch
from torch import Tensor

from glm46.engine.training import loop
from glm46.engine.training import network as network_module
from glm46.operate.launch.train_rank import train
from glm46.tasks.pretrain import next_token, task
from tests.builders import small_config
from tests.harness import Ranks, call, in_halves, this_rank

LAYOUTS = {"shards": {}, "copies": {"data_parallel_replicate_degree": 2}}
SITES = ("gradient", "gradient shard", "activation", "router", "loss")
BAD = {2 * (1 + i): (site, victim) for i, (site, victim) in enumerate((s, v) for s in SITES for v in (0, 1))}
"""Every second step: where the NaN appears, and on which rank."""
STEPS = max(BAD) + 1


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def poison(hit) -> None:
    """Put a NaN at a place of the step whenever ``hit(place)``."""
    loss, norm, build = next_token.next_token_loss, network_module.global_grad_norm, task.build_network
    nan = float("nan")

    def poisoned_norm(parameters, *arguments):
        # After the gradients were summed: only the ranks of this shard, or of this copy, can see it.
        parameters = list(parameters)
        if hit("gradient shard"):
            next(g for g in (local(p.grad) for p in parameters) if g.numel()).view(-1)[0] = nan
        return norm(parameters, *arguments)

    def poisoned_build(*arguments, **options):
        network = build(*arguments, **options)
        layer = network.models[0].get_submodule("layers.1")
        for site, module in (("activation", layer), ("router", layer.mlp.router)):
            module.register_forward_pre_hook(
                lambda _, inputs, site=site: (inputs[0] * nan, *inputs[1:]) if hit(site) else None
            )
        layer.self_attn.q_proj.register_forward_hook(
            lambda _, __, output: output.register_hook(lambda g: g * nan) and None if hit("gradient") else None
        )
        return network

    next_token.next_token_loss = lambda *arguments: loss(*arguments) * (nan if hit("loss") else 1.0)
    network_module.global_grad_norm, task.build_network = poisoned_norm, poisoned_build


def train_poisoned(config) -> list[bool]:
    """On each rank: whether each step kept all bits of the state."""
    rank = this_rank()
    step, pending, kept = 0, None, []
    original = loop.train_step

    def recorded(job, *arguments):
        nonlocal step, pending
        step += 1
        site, victim = BAD.get(step, (None, None))
        pending = site if rank == victim else None
        parts = job.network
        named = parts.parameters | parts.optimizer.state_tensors() | parts.balance.state_tensors()
        named |= {f"bias{i}": r.e_score_correction_bias for i, r in enumerate(parts.balance.routers.values())}
        before = {name: local(t.detach()).clone() for name, t in named.items()}
        outcome = original(job, *arguments)
        after = {name: local(t.detach()) for name, t in named.items()}
        assert pending is None, pending
        assert all(t.isfinite().all() for t in after.values())
        kept.append(all(torch.equal(before[n], after[n]) for n in before))
        return outcome

    def hit(site: str) -> bool:
        nonlocal pending
        is_due = pending == site
        pending = None if is_due else pending
        return is_due

    loop.train_step = recorded
    poison(hit)
    train(config)
    return kept


def run_layouts(source: Path, folder: Path) -> list[dict]:
    def run(layout: str) -> dict:
        config = small_config(
            source, folder / layout, training={"steps": STEPS}, parallelism=LAYOUTS[layout],
            checkpoint={"enable": False},
            moe={"balance": "proportional", "bias_update_rate": 0.01},
        )  # fmt: skip
        kept = Ranks(2, train_poisoned, config).results()
        rows = map(json.loads, (folder / layout / "metrics.jsonl").read_text().splitlines())
        row = {"layout": layout, "bad": list(BAD), "skipped": [row["skipped_steps"] for row in rows]}
        return row | {"log": (folder / layout / "log.txt").read_text(), "kept": kept}

    return in_halves(list(LAYOUTS), run)


def test_a_nan_anywhere_on_any_rank_skips_one_step_and_changes_nothing(source_folder, tmp_path):
    rows = call(run_layouts, source_folder, tmp_path)
    assert {row["layout"] for row in rows} == {"shards", "copies"} and len(rows) == 2
    for row in rows:
        assert len(row["bad"]) == 5 * 2  # places, ranks
        steps = range(1, len(row["skipped"]) + 1)
        assert row["skipped"] == [sum(bad <= step for bad in row["bad"]) for step in steps], row
        for kept in row["kept"]:  # of each rank: whether a step left weights, states and biases as they were
            assert kept == [step in row["bad"] for step in steps], row
        assert "step 2 skipped: loss or gradient norm is not finite; samples 4 to 7" in row["log"], row
