"""Runs that train adapters: every start reads the base, and checkpoints hold no weight of it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from glm46.cli import main
from glm46.config.check import check_config
from glm46.config.errors import UserError
from glm46.config.presets import resolve_shape
from glm46.operate.estimate.requirement import INTEGERS_TORCH
from glm46.operate.launch.train_rank import train
from glm46.storage.huggingface.peft_export import export_adapter
from glm46.tasks.weights.start_folders import refuse_weights
from tests.builders import TINY, metric_rows
from tests.step_tensors import step_tensors
from tests.unit.storage.huggingface.adapters import adapters

NO_BALANCE = {"balance": "none", "sequence_aux_loss_weight": 0.0}


@pytest.fixture(scope="module")
def base(source_folder, tmp_path_factory) -> Path:
    """A run whose step folder and Hugging Face folder hold the same weights, of two steps."""
    from tests.builders import small_config

    folder = tmp_path_factory.mktemp("base")
    config = small_config(
        source_folder, folder, training={"steps": 2}, validation={"enable": True},
        checkpoint={"last_save_in_hf": True}, model={"num_nextn_predict_layers": 0},
        moe={"bias_update_rate": 0.05},
    )  # fmt: skip
    assert train(config) == 0
    return folder


def adapted(make_config, base: Path, *, in_hf: bool = False, name: str = "lora", **tables):
    path = base / ("huggingface/step-000002" if in_hf else "checkpoint/step-000002")
    start = {"initial_load_path": str(path), "initial_load_in_hf": in_hf, "async_mode": "disabled", "interval": 2}
    usual = {
        "checkpoint": start | tables.pop("checkpoint", {}), "finetune": {}, "moe": NO_BALANCE,
        "adapter": {"name": name, "rank": 8, "expert_rank": 4}, "model": {"num_nextn_predict_layers": 0},
        "validation": {"enable": True, "freq": 2},
    }  # fmt: skip
    return make_config(**usual | tables)


def losses(folder: Path) -> list[float]:
    rows = metric_rows(folder)
    return [row["validation_loss"] for row in rows if "validation_loss" in row]


def contents(folder: Path) -> dict[str, torch.Tensor]:
    return step_tensors(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "dora"])
def test_adapters_begin_as_the_base_and_their_checkpoints_hold_nothing_else(make_config, base, tmp_path, name):
    profiling = {"enable_profiling": True, "profile_freq": 4}
    assert train(adapted(make_config, base, name=name, profiling=profiling)) == 0
    assert (tmp_path / "out/profile_traces/step-000004/rank0_flops.json").is_file()
    before, *_, after = losses(tmp_path / "out")
    assert before == losses(base)[-1] and after < before
    step = tmp_path / "out/checkpoint/step-000004"
    held = contents(step)
    assert held and all("lora_" in name or "magnitude" in name for name in held)
    numbers = sum(tensor.numel() for tensor in held.values())
    size = sum(file.stat().st_size for file in step.iterdir())
    # An adapter and both AdamW states in FP32, and some KB for each tensor.
    assert 12 * numbers < size < 12 * numbers + 4096 * 3 * len(held)


@pytest.mark.slow
@pytest.mark.parametrize("in_hf", [False, True])
def test_a_resume_reads_the_base_again_and_changes_no_bit(make_config, base, tmp_path, in_hf):
    """Another base and another rank are refused with what changed."""
    mine = shutil.copytree(base, tmp_path / "base")
    config, step = adapted(make_config, mine, in_hf=in_hf), tmp_path / "out/checkpoint/step-000004"
    assert train(config) == 0
    whole, rows = contents(step), losses(tmp_path / "out")
    shutil.rmtree(step)
    assert train(config) == 0
    resumed = contents(step)
    assert whole.keys() == resumed.keys() and losses(tmp_path / "out") == rows
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    with pytest.raises(UserError, match=r"adapter.rank = 4: .* was saved with 8; restore it"):
        train(adapted(make_config, mine, in_hf=in_hf, adapter={"name": "lora", "rank": 4, "expert_rank": 4}))
    with pytest.raises(UserError, match=r"initial_load_path = .*config.json, manifest.json, model.*restore them, or"):
        train(adapted(make_config, mine, in_hf=not in_hf, training={"steps": 6}))
    changed = Path(config.checkpoint.initial_load_path) / ("config.json" if in_hf else "meta.json")
    changed.write_text(changed.read_text() + "\n")
    said = (
        "initial_load_path = .*: config.json changed since .*step-000004 was saved"
        if in_hf
        else "meta.json: .* bytes, expected"
    )
    with pytest.raises(UserError, match=said):
        train(adapted(make_config, mine, in_hf=in_hf, training={"steps": 6}))
    shutil.rmtree(changed.parents[1])
    with pytest.raises(UserError, match="no such folder"):
        refuse_weights(config)


@pytest.mark.slow
@pytest.mark.skipif(
    TorchVersion(torch.__version__) < INTEGERS_TORCH, reason="the launcher refuses a quantised base on this torch"
)
@pytest.mark.parametrize(
    ("name", "scheme", "quantised"),
    [
        ("lora", "fp8-block", "float8"), ("dora", "fp8-block", "float8"), ("lora", "int4", "int4"),
        ("dora", "bfloat16", "nf4"),
    ],
)  # fmt: skip
def test_a_quantised_base_trains_as_the_converted_one_and_a_resume_changes_no_bit(
    make_config, tmp_path, capsys, name, scheme, quantised
):
    """To the last bit of each adapter and state, through DoRA's norms too; and the same folder is generated from."""
    model = TINY | {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 64}
    usual = {"model": model | {"num_nextn_predict_layers": 0}, "moe": NO_BALANCE}
    begun = make_config(**usual, job={"dump_folder": str(tmp_path / "base")}, training={"steps": 2})
    assert train(begun) == 0
    first, base = str(tmp_path / "base/checkpoint/step-000002"), tmp_path / "quantised"
    assert main(["convert", "to-hf", "--checkpoint", first, "--output", str(base), "--dtype", scheme]) == 0
    steps = {}
    for base_dtype in (None, quantised):
        config = make_config(
            **usual, finetune={}, job={"dump_folder": str(tmp_path / str(base_dtype))},
            checkpoint={
                "initial_load_path": str(base), "initial_load_in_hf": True, "interval": 2, "async_mode": "disabled"
            },
            adapter={"name": name, "rank": 8, "expert_rank": 4, "base_dtype": base_dtype},
        )  # fmt: skip
        assert train(config) == 0
        step = tmp_path / str(base_dtype) / "checkpoint/step-000004"
        steps[base_dtype] = contents(step)
    shutil.rmtree(step)
    assert train(config) == 0
    steps["resumed"] = contents(step)
    # Matrices of 128 x 128: outputs of attention, a dense layer, four experts, the shared one; queries, keys, values.
    matrices = 2 + 3 + 3 * 4 + 3 + 4 * (quantised != "float8")
    assert f"{matrices * 128**2:,} of" in capsys.readouterr().out
    for other in (quantised, "resumed") if quantised != "nf4" else ():
        assert steps[None].keys() == steps[other].keys()
        assert all(torch.equal(tensor, steps[other][key]) for key, tensor in steps[None].items())
    assert all(torch.equal(tensor, steps["resumed"][key]) for key, tensor in steps[quantised].items())
    if quantised != "float8":
        return
    with pytest.raises(UserError, match=r'adapter.base_dtype = "float8": .*convert to-hf --dtype'):
        assert main(["convert", "to-hf", "--checkpoint", first, "--output", str(tmp_path / "bf16")]) == 0
        checkpoint = config.checkpoint.model_copy(update={"initial_load_path": str(tmp_path / "bf16")})
        job = config.job.model_copy(update={"dump_folder": str(tmp_path / "other")})
        refuse_weights(config.model_copy(update={"checkpoint": checkpoint, "job": job}))


@pytest.mark.slow
@pytest.mark.skipif(
    TorchVersion(torch.__version__) < INTEGERS_TORCH, reason="the launcher refuses a quantised base on this torch"
)
@pytest.mark.parametrize(("trained", "used", "remedy"), [
    ("nf4", None, 'set adapter.base_dtype = "nf4"'), (None, "nf4", "remove adapter.base_dtype"), ("nf4", "nf4", None),
])  # fmt: skip
def test_adapters_on_a_base_that_is_held_otherwise_are_told_once(
    make_config, source_folder, tmp_path, capsys, trained, used, remedy
):
    """A run that starts from their folder, and one that resumes from their checkpoint."""
    from tests.builders import small_config

    wide = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 64}
    shape = wide | {"num_nextn_predict_layers": 0}
    config = small_config(
        source_folder, tmp_path / "wide", training={"steps": 1}, checkpoint={"last_save_in_hf": True}, model=shape
    )
    assert train(config) == 0
    start = {
        "initial_load_path": str(tmp_path / "wide/huggingface/step-000001"), "initial_load_in_hf": True,
        "last_save_in_hf": True, "interval": 2, "async_mode": "disabled",
    }  # fmt: skip

    def tune(name: str, steps: int, base_dtype: str | None, **adapter) -> str:
        tables = {"rank": 4, "expert_rank": 4, "base_dtype": base_dtype} | adapter
        config = small_config(
            source_folder, tmp_path / name, model=shape, checkpoint=start, finetune={}, moe=NO_BALANCE,
            training={"steps": steps}, adapter={key: value for key, value in tables.items() if value is not None},
        )  # fmt: skip
        capsys.readouterr()
        assert train(config) == 0
        return capsys.readouterr().out

    tune("first", 2, trained)
    folder = tmp_path / "first/huggingface/step-000002"
    loaded = tune("next", 2, used, initial_load_path=str(folder))
    resumed = tune("first", 4, used)
    lines = [line for line in loaded.splitlines() if line.startswith(f"adapter.initial_load_path = {str(folder)!r}: ")]
    lines_of_resume = [line for line in resumed.splitlines() if "were trained on other values of the base" in line]
    assert len(lines) == len(lines_of_resume) == (remedy is not None)
    assert remedy is None or (lines[0].endswith(remedy) and "adapter.base_dtype = " in lines_of_resume[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "dora"])
def test_the_folder_of_a_run_is_a_peft_folder_that_the_next_run_goes_on_from(make_config, base, tmp_path, capsys, name):
    ours = {"name": name, "rank": 8, "expert_rank": 4}
    save = {"adapter": ours, "checkpoint": {"last_save_in_hf": True}}
    assert train(adapted(make_config, base, in_hf=True, **save)) == 0
    step, exported = tmp_path / "out/checkpoint/step-000004", tmp_path / "out/huggingface/step-000004"
    convert = ["convert", "adapter-to-hf", "--checkpoint", str(step), "--output", str(tmp_path / "again")]
    assert main(convert) == 0
    assert {file.name for file in exported.iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "base_files.json",
    }  # fmt: skip
    assert all(file.read_bytes() == (tmp_path / "again" / file.name).read_bytes() for file in exported.iterdir())
    last = losses(tmp_path / "out")[-1]
    on = ours | {"initial_load_path": str(exported)}
    job = {"dump_folder": str(tmp_path / "next")}
    save_on = {"last_save_in_hf": True}
    assert train(adapted(make_config, base, in_hf=True, adapter=on, job=job, checkpoint=save_on)) == 0
    assert losses(tmp_path / "next")[0] == last > losses(tmp_path / "next")[-1]
    assert capsys.readouterr().out.count("servers refuse it") == (3 if name == "dora" else 0)  # convert, and both runs
    # The merged folder is the trained model: a run that starts from it has the same loss.
    source, out = base / "huggingface/step-000002", tmp_path / "merged"
    merge = ["convert", "merge", "--base", str(source), "--adapter", str(exported), "--output", str(out)]
    assert main(merge) == 0
    shutil.rmtree(out)
    assert main([*merge, "--dtype", "float32"]) == 0
    start = {"initial_load_path": str(out), "initial_load_in_hf": True}
    plain = make_config(
        checkpoint=start, job={"dump_folder": str(tmp_path / "plain")}, model={"num_nextn_predict_layers": 0},
        validation={"enable": True, "freq": 2}, training={"steps": 2}, moe=NO_BALANCE, finetune={},
    )  # fmt: skip
    assert train(plain) == 0
    assert losses(tmp_path / "plain")[0] == pytest.approx(last, abs=1e-5)
    capsys.readouterr()
    for command, words in (
        (["convert", "to-hf", "--checkpoint", str(step), "--output", "x"], ["adapter-to-hf"]),
        (
            ["convert", "adapter-to-hf", "--checkpoint", str(base / "checkpoint/step-000002"), "--output", "x"],
            ["to-hf"],
        ),
        (["generate", "--checkpoint", str(step), "--prompt", "x"], [str(source), "adapter-to-hf", "--adapter"]),
    ):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert all(word in err for word in words), err


@pytest.mark.slow
def test_a_folder_of_other_adapters_is_refused_before_the_start(make_config, base, tmp_path):
    other = {"name": "lora", "rank": 8, "targets": ["attention"], "initial_load_path": str(tmp_path / "folder")}
    config = adapted(make_config, base, in_hf=True, adapter=other)
    with pytest.raises(UserError, match="adapter.initial_load_path = .*folder: no such folder; give a PEFT folder"):
        refuse_weights(config)
    shape = resolve_shape(config.model)
    export_adapter(tmp_path / "folder", shape, adapters(["dense"], shape=shape), scale=1.0, base="base")
    with pytest.raises(UserError, match="adapter.initial_load_path = .*lacks.*q_proj.*adapter.targets"):
        refuse_weights(config)


def test_patterns_for_the_base_are_refused(make_config, base):
    config = adapted(make_config, base, checkpoint={"initial_load_exclude": ["model.norm.weight"]})
    print(check_config(config, world_size=1))
    (fault,) = check_config(config, world_size=1)
    assert fault.startswith('checkpoint.initial_load_exclude = ["model.norm.weight"]') and "remove" in fault


@pytest.mark.slow
def test_an_adapter_is_evaluated_on_its_base_and_refused_on_another(make_config, base, source_folder, tmp_path, capsys):
    assert train(adapted(make_config, base, in_hf=True, checkpoint={"last_save_in_hf": True})) == 0
    source, exported = base / "huggingface/step-000002", tmp_path / "out/huggingface/step-000004"
    measure = ["evaluate", "--tasks", "loss", "--samples", "1000", "--data", str(source_folder)]
    on_base = [*measure, "--model", str(source), "--output", str(tmp_path / "found")]
    assert main([*on_base, "--adapter", str(exported)]) == 0
    assert main(on_base) == 2  # its file has the results of the adapter
    assert "results of another model" in capsys.readouterr().err
    pair, whole = ["--adapter", str(exported)], str(tmp_path / "whole")
    merge = ["convert", "merge", "--base", str(source), *pair, "--output", whole, "--dtype", "float32"]
    assert main(merge) == main([*measure, "--model", whole, "--output", str(tmp_path / "of_whole")]) == 0
    found, wanted = (
        json.loads((tmp_path / name / "evaluation.json").read_text())["results"]["loss"]["columns"]["loss"]
        for name in ("found", "of_whole")
    )
    assert found == pytest.approx(wanted, rel=1e-6)  # FP32
    other = tmp_path / "other"
    shutil.copytree(source, other)
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    for command in (
        ["convert", "merge", "--base", str(other), *pair, "--output", str(tmp_path / "merged")],
        ["generate", "--model", str(other), *pair, "--prompt", "a"],
        [*measure, "--model", str(other), *pair],
    ):
        capsys.readouterr()
        assert main(command) == 2
        error = capsys.readouterr().err
        assert all(word in error for word in (str(other), "config.json", str(exported), "base_files.json")), error
    assert not (tmp_path / "merged").exists()
    on = {"name": "lora", "rank": 8, "expert_rank": 4, "initial_load_path": str(exported)}
    start, job = {"initial_load_path": str(other)}, {"dump_folder": str(tmp_path / "next")}
    with pytest.raises(UserError, match=r"other: not the base that .*config.json.*base_files.json"):
        train(adapted(make_config, base, in_hf=True, adapter=on, checkpoint=start, job=job))
    (exported / "base_files.json").unlink()
    assert main(["generate", "--model", str(other), *pair, "--prompt", "a", "--max-new-tokens", "1"]) == 0
