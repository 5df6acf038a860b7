"""The benchmark compares equal work, counts it correctly, and refuses to compare different work."""

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from glm46.cli import main
from glm46.compute.model.router import RoutingOptions
from glm46.config.adapter import AdapterConfig
from glm46.config.errors import UserError
from glm46.config.presets import PRESETS
from glm46.operate.benchmark import rates
from glm46.operate.estimate.target_cluster import Efficiencies
from scripts.measure import speed_with_peers
from scripts.measure.finetune_speed import RECOMPUTED, TRAINED, FineTuningWork
from scripts.measure.model_speed import Contestant, Workload, build_ours, median_ratio, race
from scripts.measure.rounds import timed_rounds
from scripts.measure.speed_with_peers import CONTESTANTS
from scripts.measure.titan import with_titan_moe

TINY = Workload("debug", 2, 32, torch.device("cpu"), torch.float32, layers=2)


def build_contestant(name, work, ours):
    return CONTESTANTS[name](name, work, ours)


def builders(*names):
    return {name: CONTESTANTS[name] for name in names}


@pytest.mark.parametrize("flavor", ["debug", "debug-flash"])
def test_every_contestant_computes_the_same_loss_from_the_same_weights(flavor):
    work = replace(TINY, flavor=flavor)
    ours = build_ours(work)
    names = ("ours", "transformers grouped_mm", "transformers default")
    losses = [build_contestant(name, work, ours).step() for name in names]
    # FP32 over a few hundred operations in another order.
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert losses[0] == pytest.approx(np.log(8192), rel=0.02)  # untrained: near the uniform distribution


def test_contestants_have_the_same_weights_in_bf16_and_the_peer_rotates_in_fp32():
    work = replace(TINY, dtype=torch.bfloat16)
    ours = build_ours(work)
    compiled, peer = (build_contestant(name, work, ours).model for name in ("ours compiled", "transformers grouped_mm"))
    weights = ours.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in compiled.state_dict().items())
    wider = {name for name, parameter in peer.named_parameters() if parameter.dtype != torch.bfloat16}
    assert compiled is not ours and wider <= {"model.layers.1.mlp.gate.weight"}  # FP32 in transformers 5.24
    assert peer.model.rotary_emb.inv_freq.dtype == torch.float32 == torch.get_default_dtype()


def test_a_timed_round_adds_to_no_gradient_of_the_round_before(monkeypatch):
    class Adds(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), options=None):
            added[-1] += operator is torch.ops.aten.add_.Tensor
            return operator(*arguments, **(options or {}))

    added = [0]
    # It begins and ends each round.
    monkeypatch.setattr(rates, "_wait", lambda device: added.append(0))
    monkeypatch.setattr(rates, "_ROUNDS", 1)
    with Adds():
        rates.measure_rates(PRESETS["debug"], 16, torch.device("cpu"), torch.float32)
    first, second = added[1::4], added[3::4]
    assert first == second and len(first) == 6


def test_torchtitans_layer_computes_what_ours_does(monkeypatch):
    pytest.importorskip("torchtitan", reason="not installed; pip install torchtitan")
    ours = build_ours(replace(TINY, dtype=torch.bfloat16))
    theirs = with_titan_moe(ours)
    layers = [model.layers["1"].mlp for model in (ours, theirs)]
    gate = layers[1].moe.router.gate
    # Autocast to FP32 exists on a GPU only; in BF16 other experts would be chosen.
    monkeypatch.setattr(gate, "forward", lambda x: F.linear(x.float(), gate.weight.float()))
    outputs, gradients = [], []
    for layer in layers:
        x = torch.randn(2, 32, 256, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16).requires_grad_()
        y = layer(x, None, RoutingOptions())[0]
        y.square().sum().backward()
        outputs.append(y.detach().double())
        gradients.append(x.grad.double())
    for ours_, theirs_ in (outputs, gradients):
        assert (ours_ - theirs_).norm() < 0.01 * ours_.norm() and ours_.norm() > 0
    up = layers[1].moe.routed_experts.inner_experts.w3_EFD.grad.double()
    expected = layers[0].experts.gate_up.grad.double().chunk(2, dim=1)[1]
    assert (up - expected).norm() < 0.01 * expected.norm()


def test_torchtitan_races_in_bf16_only():
    with pytest.raises(UserError, match="torchtitan computes experts in bfloat16; add --dtype bfloat16"):
        race(TINY, builders("ours", "torchtitan MoE"), 1, lambda text: None)


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan.models.common", None)
    work = replace(TINY, dtype=torch.bfloat16)
    with pytest.raises(UserError, match="torchtitan .* cannot be imported"):
        build_contestant("torchtitan MoE", work, build_ours(work))


def test_a_race_times_each_contestant_once_per_round():
    contestants = race(TINY, builders("ours", "transformers grouped_mm"), 3, lambda text: None)
    assert [len(contestant.seconds) for contestant in contestants] == [3, 3]
    assert all(parameter.grad is None for parameter in contestants[0].model.parameters())


def test_the_ratio_is_the_median_of_the_rounds():
    fast, slow = (Contestant(name, torch.nn.Identity(), lambda: torch.zeros(())) for name in ("fast", "slow"))
    fast.seconds, slow.seconds = [1.0, 1.0, 10.0], [2.0, 3.0, 10.0]
    assert median_ratio(fast, slow) == 2.0
    assert median_ratio(slow, slow) == 1.0


def test_different_losses_are_refused(monkeypatch):
    from scripts.measure import model_speed

    def spoiled(name, work, ours):
        contestant = build_contestant(name, work, ours)
        torch.nn.init.zeros_(contestant.model.lm_head.weight[:100])
        return contestant

    with pytest.raises(UserError, match="different losses"), torch.no_grad():
        monkeypatch.setattr(Contestant, "step", lambda self: self.loss().item())
        monkeypatch.setattr(model_speed, "_LOSS_TOLERANCE", {torch.float32: 1e-9})
        race(TINY, builders("ours") | {"transformers grouped_mm": spoiled}, 1, lambda text: None)


@pytest.mark.slow
def test_the_command_prints_what_it_measured(capsys):
    work = ["--flavor", "debug", "--layers", "2", "--batch", "2", "--seq-len", "32"]
    assert speed_with_peers.main(["model", *work, "--rounds", "2", "--only", "ours", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for part in ("2 layers, without MTP, 2 x 32 tokens, float32", "tokens/s", "GFLOP per step", "ours"):
        assert part in text


@pytest.mark.slow
def test_generation_is_raced_against_transformers(capsys):
    command = ["generate", "--flavor", "debug", "--prompt-tokens", "4", "--new-tokens", "3", "--rounds", "1"]
    assert speed_with_peers.main([*command, "--threads", "1", "--speculative"]) == 0
    out = capsys.readouterr().out
    assert "transformers grouped_mm" in out and "times the fastest peer" in out
    assert "ours, speculative" in out and "drafts accepted" in out


@pytest.mark.parametrize(
    "stated, seconds, total",
    [(None, 1.0, 9), (None, 12.0, 5), (None, 200.0, 3), (4, 200.0, 4), (12, 1.0, 12), (1, 1.0, 1)],
)
def test_rounds_fit_into_a_minute_unless_they_are_stated(stated, seconds, total):
    now, lines = [0.0], []
    for number in timed_rounds(stated, lines.append, lambda: now[0]):
        assert number == len(lines)
        now[0] += seconds
    assert len(lines) == total
    assert lines[-1] == f"round {total} of {total}, {seconds:.1f} s each, 0 s left"
    if total > 1:
        assert lines[0].endswith(f"{seconds:.1f} s each, {(total - 1) * seconds:.0f} s left")


def test_measured_rates_are_what_the_planner_takes(tmp_path, capsys):
    file = tmp_path / "efficiencies.json"
    options = ["rates", "--flavor", "debug", "--tokens", "64", "--threads", "1", "--json", str(file)]
    for _ in range(4):
        assert main(["benchmark", *options]) == 0
        described = capsys.readouterr().out.splitlines()[0].partition("'")[2].rstrip("'")
        # A share above 1 is refused: another program held the core while the peak was measured, and not afterwards.
        with suppress(UserError):
            measured = Efficiencies.read(file, Efficiencies())
            break
    else:
        measured = Efficiencies.read(file, Efficiencies())
    assert measured.source.startswith("CPU, debug, 64 tokens") and measured.launch_seconds > 0
    assert all(getattr(measured, name) > 0 for name in ("products", "experts", "attention"))
    debug = str(Path(__file__).parents[4] / "train_configs/debug.toml")
    assert main(["plan", "--config", debug, "--gpu", described, "--measured", str(file)]) == 0
    assert f"efficiencies: {measured.source}" in capsys.readouterr().out
    assert main(["benchmark", *options[:-1], str(tmp_path / "none" / "file")]) == 2


@pytest.mark.slow
def test_ways_of_fine_tuning_begin_at_one_loss_and_change_what_they_train():
    runs = {trained: FineTuningWork(TINY, trained, AdapterConfig(rank=8, expert_rank=4)) for trained in TRAINED}
    losses = [run.forward() for run in runs.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)
    for trained, run in runs.items():
        for recomputed in (*RECOMPUTED, "none"):
            before = {name: weight.clone() for name, weight in run.model.named_parameters()}
            loss = run.forward()
            assert run.step(recomputed) == pytest.approx(loss, rel=1e-6) and run.forward() < loss
            changed = {name for name, weight in run.model.named_parameters() if not torch.equal(weight, before[name])}
            assert changed and all(
                ("lora_" in name or "magnitude" in name) == (trained != "all weights") for name in changed
            )


@pytest.mark.slow
def test_fine_tuning_is_raced(capsys):
    options = ["--flavor", "debug", "--layers", "2", "--seq-len", "32", "--rounds", "1", "--experts", "4"]
    assert speed_with_peers.main(["finetune", *options]) == 0
    text = capsys.readouterr().out
    assert text.count("LoRA, ") == 3 and text.count("DoRA, ") == 2 and text.count("all weights, ") == 3
