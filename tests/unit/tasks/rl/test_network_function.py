"""Each key that changes the function of a network, one by one: all consumers compute what a plain model computes.

`KEYS` has an entry for every key of the sections whose keys may change it, so a new key needs one.
"""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from glm46.commands.convert import convert_command
from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.model.cross_entropy import token_logprobs
from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.transformer import Transformer, router_names
from glm46.config.adapter import AdapterConfig
from glm46.config.check import check_config
from glm46.config.checkpoint import CheckpointConfig
from glm46.config.errors import UserError
from glm46.config.model import ModelShape, RopeScalingConfig
from glm46.config.moe import MoEConfig, MTPConfig
from glm46.engine.inference.decoder import Decoder
from glm46.engine.inference.loading import load_for_inference
from glm46.engine.inference.model_mesh import ModelMesh
from glm46.engine.inference.scoring import ContinuationRequest as Scored
from glm46.engine.inference.scoring import score
from glm46.engine.observe.observers import observing
from glm46.engine.training import build, loop
from glm46.engine.training.balance import routing_options
from glm46.operate.launch.train_rank import train
from glm46.run.function import function_of_meta, gate_factor, is_gate, next_temperature
from glm46.run.schedule import schedule_value
from glm46.storage.checkpoint.stored_values import StepTensors
from glm46.tasks.pretrain.task import Pretraining
from glm46.tasks.rl.rollout.local import LocalEngine
from glm46.tasks.rl.rollout.records import Request, SamplingRules
from glm46.tasks.rl.rollout.weights import served_tensors, whole_weights
from glm46.tasks.weights.exports import write_weights
from glm46.tasks.weights.weight_folders import WeightFolders
from tests.builders import TINY, metric_rows

MODEL = {"num_hidden_layers": 3, "n_shared_experts": 1, "use_qk_norm": True}
ADAPTER = {"name": "lora", "rank": 8, "alpha": 8.0}
FROZEN = {"bias_update_rate": 0.0, "sequence_aux_loss_weight": 0.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
RAMP = [[0, 1.2], [64, 4.0]]
"""At 1.2 in the first step, at 2.6 in the second one, the last."""

_SIZE = "a size of tensors: another value is refused by every reader of weights"
_INDEXED = "only for a model with indexers, which holds other tensors; `test_sparse_attention.py` has its values"
_TRAINS = "acts on the update, not on what the weights compute"
KEYS = {
    "model.shape": {
        "vocab_size": _SIZE, "hidden_size": _SIZE, "num_hidden_layers": _SIZE, "intermediate_size": _SIZE,
        "moe_intermediate_size": _SIZE, "n_routed_experts": _SIZE, "n_shared_experts": _SIZE, "head_dim": _SIZE,
        "num_attention_heads": _SIZE, "num_nextn_predict_layers": _SIZE, "q_lora_rank": _SIZE, "kv_lora_rank": _SIZE,
        "qk_nope_head_dim": _SIZE, "qk_rope_head_dim": _SIZE, "v_head_dim": _SIZE,
        "index_n_heads": _SIZE, "index_head_dim": _SIZE,
        "index_topk": _INDEXED, "indexer_types": _INDEXED,
        "attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 2, "num_key_value_heads": 2,
        "num_experts_per_tok": 1, "routed_scaling_factor": 1.5,
        "partial_rotary_factor": 1.0, "rope_theta": 50.0, "sliding_window": 3, "rms_norm_eps": 0.1,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        "initializer_range": "the initial weights, which are then stored",
        "max_position_embeddings": "a bound of lengths; no product reads it",
    },
    "model.shape.rope_scaling": {
        "rope_type": {"rope_type": "linear", "factor": 2.0}, "factor": YARN | {"factor": 8.0},
        "original_max_position_embeddings": YARN | {"original_max_position_embeddings": 16},
        "beta_fast": YARN | {"beta_fast": 2.0}, "beta_slow": YARN | {"beta_slow": 0.01},
    },
    "moe": {
        "router_temperature": RAMP,
        "balance": _TRAINS, "bias_update_rate": _TRAINS, "bias_ema_decay": _TRAINS, "bias_clamp": _TRAINS,
        "sequence_aux_loss_weight": _TRAINS, "z_loss_weight": _TRAINS,
        "capacity_factor": "cannot leave training: `test_a_capacity_is_said_where_it_ends`",
    },
    "mtp": {"loss_weight": _TRAINS, "depths": _TRAINS},
    "adapter": {
        "name": "dora", "rank": 16, "expert_rank": 4, "alpha": 24.0, "targets": ["attention"],
        "layers": [1, 2],
        "base_dtype": "how the base is held; tests/unit/tasks/rl/test_server_check.py",
        "initial_load_path": "which weights are read",
    },
}  # fmt: skip
"""The other value of a key that changes the function, or the reason (a sentence) why a key does not."""
SECTIONS = {
    "model.shape": ModelShape, "model.shape.rope_scaling": RopeScalingConfig, "moe": MoEConfig, "mtp": MTPConfig,
    "adapter": AdapterConfig,
}  # fmt: skip

IDS = (torch.arange(2 * 15).view(2, 15) * 37 + 11) % 290


def is_reason(value: object) -> bool:
    return isinstance(value, str) and " " in value


CHANGES = [(section, key, value) for section, keys in KEYS.items() for key, value in keys.items()
           if not is_reason(value)]  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_an_entry(section):
    assert set(KEYS[section]) == set(SECTIONS[section].model_fields)


def spread(network) -> None:
    """Give all weights, or the adapters alone, numbers under which every key counts."""
    for name, tensor in (network.parameters if network.is_adapted else network.weights()).items():
        own = local_tensor(tensor.detach())
        if name.endswith(("correction_bias", "lora_B", ".bias")):
            own.copy_(torch.sin(torch.arange(own.numel()).float()).view_as(own) * 0.3)
        elif name.endswith("norm.weight") or "magnitude" in name:
            own.mul_(1 + 0.3 * torch.sin(torch.arange(own.numel()).float()).view_as(own))
        elif own.ndim > 1 and "lora" not in name:
            own.mul_(4.0)
    network.loaded(new_adapters=False)


def logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Of each token of `IDS` but the first."""
    return logits[:, :-1].float().log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]


def rows() -> dict:
    shape, labels = IDS.shape, torch.full_like(IDS, -100)
    labels[:, :-1] = IDS[:, 1:]
    return {
        "input_ids": IDS, "labels": labels, "positions": torch.arange(shape[1]).expand(shape),
        "document_ids": torch.zeros_like(IDS),
    }  # fmt: skip


@torch.no_grad()
def by_a_plain_model(network, temperature: float) -> torch.Tensor:
    """Merged weights in a module of this shape, which gets the temperature as an argument of its routers."""
    shape = network.shape
    model = Transformer(shape)
    weights = {name: tensor.clone() for name, tensor in whole_weights(network, shape)}
    model.load_state_dict(weights)
    return logprobs(model(IDS, options=RoutingOptions(torch.tensor(temperature))))


@torch.no_grad()
def by_training(network) -> torch.Tensor:
    batch = network.to_device(rows())
    form = partial(token_logprobs, entropy=False)
    output = network.models[0](**batch, options=routing_options(network.plan.config.moe), form=form)
    network.release()
    return output.logprobs[:, :-1]


def by_validation(network) -> torch.Tensor:
    found = network.evaluate(rows(), token_logprobs).logprobs[:, :-1]
    network.release()
    return found


def by_scoring(model: Transformer) -> torch.Tensor:
    asked = [Scored(tuple(row[:n]), (row[n],)) for row in IDS.tolist() for n in range(1, len(row))]
    answers = [answer for some in score(model, ModelMesh(), asked) for answer in some]
    return torch.tensor([one.logprob for _, one in sorted(answers)]).view(len(IDS), -1)


@torch.inference_mode()
def by_decoding(model: Transformer, *, cpu_kernels: bool) -> torch.Tensor:
    """Half of a row as a prompt, the rest token by token."""
    half = IDS.shape[1] // 2
    with Decoder(model, batch=len(IDS), max_length=IDS.shape[1], cpu_kernels=cpu_kernels) as decoder:
        found = [decoder.logits(decoder.hidden(IDS[:, :half], [0, 0]))]
        for place in range(half, IDS.shape[1]):
            found.append(decoder.logits(decoder.hidden(IDS[:, place : place + 1], [place, place])))
    return logprobs(torch.cat(found, 1))


def by_rollouts(network, *, speculative: bool) -> float:
    """The largest difference of what a local engine says of its samples from what the network says of them."""
    engine = LocalEngine(network, max_length=16, mesh=ModelMesh(), rows=4, speculative=speculative)
    engine.update(1)
    prompts = [row[:5] for row in IDS.tolist()]
    rules = SamplingRules(1.0, frozenset(), network.shape.vocab_size, False)
    generated = engine.generate([Request(prompt, 7, 11) for prompt in prompts], rules)
    whole = torch.tensor([[*prompt, *one.tokens] for prompt, one in zip(prompts, generated, strict=True)])
    labels = torch.cat([whole[:, 1:], torch.full_like(whole[:, :1], -100)], 1)
    batch = {"input_ids": whole, "labels": labels, "positions": torch.arange(whole.shape[1]).expand_as(whole),
             "document_ids": torch.zeros_like(whole)}  # fmt: skip
    ours = network.evaluate(batch, token_logprobs).logprobs[:, 4:-1]
    network.release()
    engine.close()
    return (ours - torch.tensor([one.logprobs for one in generated])).abs().max().item()


@torch.no_grad()
def by_transformers(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return logprobs(model.eval()(IDS).logits)


def by_folder(folder: Path, of=by_scoring) -> torch.Tensor:
    return of(load_for_inference(folder, tokenizer=None, dtype=torch.float32, device=torch.device("cpu"))[0])


@pytest.fixture
def consumers(make_config, tmp_path):
    """A function that trains two steps of a config, and gives what each consumer computes."""

    def consume(
        name: str, model: dict, moe: dict, adapter: dict | None, base: Path | None = None, clock: int | None = None
    ) -> SimpleNamespace:
        start = {} if base is None else {"initial_load_path": str(base), "initial_load_in_hf": clock is None}
        config = make_config(
            job={"dump_folder": str(tmp_path / name)},
            model=TINY | MODEL | model | ({} if adapter is None else {"num_nextn_predict_layers": 0}),
            moe=FROZEN | moe,
            training={"steps": 2},
            optimizer={"lr": 1e-3},
            lr_scheduler={"start_tokens": clock or 0},
            checkpoint={"interval": 1, "async_mode": "disabled"} | start,
            **({} if adapter is None else {"adapter": adapter}),
        )
        assert check_config(config, world_size=1) == []
        found = SimpleNamespace(of={}, step=tmp_path / name / "checkpoint/step-000002", folder=tmp_path / f"{name}-hf")

        def work(task, services, progress, weights) -> int:
            network = task.network
            if base is None or adapter is not None:
                spread(network)
            found.start = by_validation(network)
            found.gates = {
                name: local_tensor(tensor).clone() for name, tensor in network.weights().items() if is_gate(name)
            }
            assert loop.train(task, services, progress, weights) == 0
            temperature = schedule_value(config.moe.router_temperature, (clock or 0) + 32)
            found.plain = by_a_plain_model(network, temperature)
            found.of |= {"training": by_training(network), "validation": by_validation(network)}
            found.rollouts = by_rollouts(network, speculative=False)
            if network.shape.num_nextn_predict_layers:
                found.drafted = by_rollouts(network, speculative=True)
            if network.shape.sliding_window is None:
                found.served = {n: t.clone() for n, t in served_tensors(network, None)}
                gates = [tensor for name, tensor in found.served.items() if name.endswith("mlp.gate.weight")]
                whole = dict(whole_weights(network, network.shape))
                for name, gate in zip(router_names(network.shape), gates, strict=True):  # of prediction layers too
                    assert torch.equal(gate, whole[f"{name}.weight"] / temperature), name
                if adapter is None:
                    write_weights(network, task.tokenizer, found.folder, torch.float32)
            return 0

        with mock.patch.object(build, "train", work):
            assert build.run(config, Pretraining, WeightFolders(), observing) == 0
        return found

    return consume


def compare(found: SimpleNamespace) -> None:
    """FP32 with other orders of sums; a key changes some value by more than 3e-3."""
    for name, value in found.of.items():
        assert (value - found.plain).abs().max() < 1e-4, name
    assert found.rollouts < 1e-4 and getattr(found, "drafted", 0) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "section, key, value", [one for one in CHANGES if one[0] != "adapter"], ids=lambda value: str(value)[:32]
)
def test_all_consumers_compute_what_a_key_says(consumers, section, key, value, tmp_path):
    changes = {"model.shape": {key: value}, "model.shape.rope_scaling": {"rope_scaling": value}}
    model = changes.get(section, {})
    before = {"rope_scaling": YARN} if section == "model.shape.rope_scaling" else {}
    found = consumers("new", model, {key: value} if section == "moe" else {}, None)
    old = consumers("old", before, {}, None)
    assert (found.plain - old.plain).abs().max() > 3e-3, "the key changes the function"
    found.of |= {
        "evaluate": by_folder(found.step),
        "generate": by_folder(found.step, partial(by_decoding, cpu_kernels=False)),
        "generate by few_tokens": by_folder(found.step, partial(by_decoding, cpu_kernels=True)),
    }
    folder = tmp_path / "converted"
    converted = ["to-hf", "--checkpoint", str(found.step), "--output", str(folder), "--dtype", "float32"]
    if key == "sliding_window":
        with pytest.raises(UserError, match="sliding_window = 3 .*models have none"):
            convert_command(converted)
    else:
        assert convert_command(converted) == 0
        for one in (found.folder, folder):
            found.of |= {f"transformers {one}": by_transformers(one), str(one): by_folder(one)}
        stored = load_file(found.folder / "model.safetensors")
        assert found.served.keys() == set(stored)
        assert all(torch.equal(found.served[name], stored[name]) for name in stored)
        # The function goes on in a run that starts from the folder, whatever its own temperature, and leaves it alike.
        for moe in ({}, {"router_temperature": 1.5}):
            again = consumers(f"again-{len(moe)}", model, moe, None, found.folder)
            assert (again.start - found.plain).abs().max() < 1e-4
            again.of["transformers"] = by_transformers(again.folder)
            compare(again)
    compare(found)


@pytest.mark.slow
@pytest.mark.parametrize("key, value", [one[1:] for one in CHANGES if one[0] == "adapter"])
@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_all_consumers_compute_what_a_key_of_adapters_says(consumers, key, value, temperature, tmp_path):
    base = consumers("base", {"num_nextn_predict_layers": 0}, {"router_temperature": temperature}, None).folder
    found = [
        consumers(str(number), {}, {"router_temperature": temperature}, adapter, base)
        for number, adapter in enumerate((ADAPTER, ADAPTER | {key: value}))
    ]
    assert (found[0].plain - found[1].plain).abs().max() > 3e-3, "the key changes the function"
    step, peft, merged = found[1].step, tmp_path / "peft", tmp_path / "merged"
    assert convert_command(["adapter-to-hf", "--checkpoint", str(step), "--output", str(peft)]) == 0
    assert convert_command(["merge", "--base", str(base), "--adapter", str(peft), "--output", str(merged)]) == 0
    found[1].of |= {"transformers": by_transformers(merged), "generate": by_folder(merged)}
    stored = load_file(merged / "model.safetensors")
    # Merged and folded in another order.
    assert all(torch.allclose(found[1].served[name], stored[name], rtol=1e-5, atol=1e-6) for name in stored)
    compare(found[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "moe, clock, factor",
    [
        ({"router_temperature": RAMP}, 64, 1.0),  # the schedule goes on, although the last step was at 2.6
        ({"router_temperature": 1.3}, 64, 0.5),
        ({}, 0, 1 / 2.6),
    ],
)
def test_a_phase_goes_on_with_the_function_of_the_one_before(consumers, moe, clock, factor):
    before = consumers("before", {}, {"router_temperature": RAMP}, None)
    after = consumers("after", {}, moe, None, before.step, clock)
    stored, clocks = StepTensors(before.step), StepTensors(after.step).meta["progress"]
    assert (clocks["tokens"], clocks["curriculum_tokens"]) == (64, clock + 64)
    assert "begins at lr_scheduler.start_tokens" in CheckpointConfig.model_fields["initial_load_model_only"].description
    assert stored.function.router_temperature == pytest.approx(2.6)
    assert torch.equal(after.gates["layers.1.mlp.router.weight"], stored["layers.1.mlp.router.weight"].read() * factor)
    if factor != 1.0:
        assert (after.start - before.plain).abs().max() < 1e-4
        assert f"times {factor:g}: at" in (after.step.parents[1] / "log.txt").read_text()
    compare(after)


@pytest.mark.slow
def test_a_resume_computes_at_the_temperature_of_the_last_step_and_scales_nothing(make_config, tmp_path):
    rows = {}
    for name, ends in (("whole", [4]), ("parts", [2, 4])):
        for steps in ends:
            config = make_config(
                job={"dump_folder": str(tmp_path / name)},
                moe={"router_temperature": RAMP},
                training={"steps": steps},
                lr_scheduler={"total_tokens": 128},
                validation={"enable": True, "freq": 1, "steps": 1},
                checkpoint={"interval": 2, "async_mode": "disabled"},
            )
            assert train(config) == 0
        lines = metric_rows(tmp_path / name)
        keys = ("step", "loss", "grad_norm", "router_temperature", "validation_loss")
        rows[name] = [{key: row[key] for key in keys if key in row} for row in lines]
    assert rows["whole"] == rows["parts"] and len(rows["whole"]) > 6


def test_checkpoints_of_earlier_versions_have_the_temperature_of_their_schedule():
    config = '[model]\nflavor = "debug"\n[moe]\nrouter_temperature = [[0, 1.0], [100, 2.0]]\n'
    meta = {"config": config, "progress": {"curriculum_tokens": 50}}
    assert function_of_meta(meta).router_temperature == 1.5 == next_temperature(meta)
    assert (
        gate_factor(meta, 1.5) == 1.0
        and gate_factor(meta, 3.0) == 2.0
        and gate_factor({"router_temperature": 1.0}, 1.5) == 1.5
    )
    assert function_of_meta({"config": '[model]\nflavor = "debug"\n'}).router_temperature == 1.0
    shape = function_of_meta(meta).shape
    gone = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    assert function_of_meta(meta | {"shape": shape.model_dump() | gone}).shape == shape


@pytest.mark.parametrize("other", [{"n_group": 2}, {"norm_topk_prob": False}, {"topk_group": 2}])
def test_a_checkpoint_of_another_function_is_refused(other):
    config = '[model]\nflavor = "debug"\n'
    shape = function_of_meta({"config": config}).shape.model_dump() | {"n_group": 1}
    (key, value), *_ = other.items()
    with pytest.raises(UserError, match=f"model.shape.{key} = {value} of the checkpoint: this version"):
        function_of_meta({"config": config, "shape": shape | other})
    stated = f"{config}n_group = 1\nnorm_topk_prob = true\n"  # of an import by an earlier version
    assert function_of_meta({"config": stated}) == function_of_meta({"config": config})
    with pytest.raises(UserError, match=f"model.shape.{key} = {value} of the checkpoint"):
        function_of_meta({"config": f"{config}{key} = {json.dumps(value)}\n"})


@pytest.mark.slow
def test_a_capacity_is_said_where_it_ends(make_config, tmp_path, capsys):
    config = make_config(
        moe={"capacity_factor": 1.5},
        training={"steps": 1},
        validation={"enable": True, "freq": 1, "steps": 1},
        checkpoint={"last_save_in_hf": True},
    )
    assert train(config) == 0
    log = (tmp_path / "out/log.txt").read_text()
    line = "warning: moe.capacity_factor = 1.5: training drops tokens of full experts"
    assert log.count(line) == 2 and "; validation drops none" in log and "; what reads this folder drops none" in log
    step = str(tmp_path / "out/checkpoint/step-000001")
    assert convert_command(["to-hf", "--checkpoint", step, "--output", str(tmp_path / "hf")]) == 0
    assert line in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.5, [[0, 1.2], [512, 4.0]]])
def test_a_policy_learns_at_the_temperature_at_which_it_draws(make_run, tmp_path, temperature):
    last = {"interval": 1, "async_mode": "disabled", "last_save_in_hf": True}
    balance = {"sequence_aux_loss_weight": 0.0, "bias_update_rate": 0.0}
    assert train(make_run("before", 1, checkpoint=last, moe=balance)) == 0
    start = {"initial_load_path": str(tmp_path / "before/huggingface/step-000001"), "initial_load_in_hf": True}
    config = make_run(
        "rl", 4,
        {"algorithm": "grpo", "prompts_per_rollout": 4, "correction": {"level": "token"},
         "kl": {"weight": 0.1}},
        moe=balance | {"router_temperature": temperature}, checkpoint=start | {"interval": 4}, optimizer={"lr": 1e-2},
    )  # fmt: skip
    assert train(config) == 0
    lines = (tmp_path / "rl/metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    firsts = rows[::2]  # of a rollout
    assert len(rows) == 4 and all(abs(row["mismatch_kl"]) < 1e-10 and row["ratio_deviation"] < 1e-5 for row in firsts)
    assert all(row["ratio_deviation"] > 1e-4 for row in rows[1::2])
    assert rows[0]["reference_kl"] < 1e-10, "the reference computes what it computed in the folder"
