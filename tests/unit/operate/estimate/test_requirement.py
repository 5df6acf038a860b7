"""A run that this machine cannot hold is refused on one screen, with what it needs and what to do."""

import json
import time
from pathlib import Path

import pytest

from glm46.config.adapter import BASE_FORMATS
from glm46.config.float8 import Float8Config
from glm46.config.run_config import RunConfig
from glm46.engine.observe.peaks import accelerator_of
from glm46.operate.estimate import requirement, units
from glm46.operate.estimate.machine import Gpu, Machine
from glm46.operate.estimate.memory import plan_memory
from glm46.operate.estimate.plan_sizes import run_flops
from glm46.operate.estimate.report import plan_numbers, plan_run, plan_text
from glm46.operate.estimate.requirement import describe_requirement, judge_config, memory_lines, memory_parts
from glm46.operate.estimate.target_cluster import TargetCluster
from glm46.run.plan import resolve_plan

_GIB = 2**30
SMALL = Machine(cores=2, memory_bytes=24 * _GIB, free_bytes=23 * _GIB)
NODE = Machine(96, 1024 * _GIB, 1000 * _GIB, gpus=tuple([Gpu("NVIDIA H100 80GB HBM3", 80 * _GIB)] * 8))


def _run(flavor, *, parallelism=None, **training) -> RunConfig:
    sections = {"model": {"flavor": flavor}, "training": {"seq_len": 4096, "steps": 10} | training}
    return RunConfig.model_validate(sections | {"parallelism": parallelism or {}})


def _assert_one_screen(text):
    assert len(text.splitlines()) <= 40
    assert max(len(line) for line in text.splitlines()) <= 160


def test_too_few_gpus_are_named_with_both_numbers():
    fits, text = describe_requirement(_run("debug", parallelism={"tensor_parallel_degree": 16}), NODE)
    assert not fits
    assert "needs 16 GPUs" in text and "found: 8" in text
    assert describe_requirement(_run("debug", parallelism={"tensor_parallel_degree": 4}), NODE)[0]


def test_too_little_gpu_memory_says_how_many_would_do():
    # The sequence must be short: unsharded activations of 4,096 tokens over 92 layers alone exceed one GPU.
    config = _run("GLM-4.6", seq_len=512)
    fits, text = describe_requirement(config, NODE)
    assert not fits
    _assert_one_screen(text)
    assert "each GPU needs" in text
    number = int(text.split("run it on ")[1].split(" GPUs")[0].replace(",", ""))
    usable = 0.92 * 80 * _GIB
    assert plan_memory(config, number).total <= usable < plan_memory(config, number // 2).total


def test_the_memory_of_all_local_processes_counts_on_a_cpu():
    config = _run("100M", seq_len=512, mixed_precision_param="float32")
    needed = plan_memory(config, 2, device="cpu").total * 2
    # A run may fill 95 % of what is free: just above and just below that.
    enough = Machine(2, 2 * int(needed), int(needed / 0.95) + 1)
    short = Machine(2, 2 * int(needed), int(needed / 0.95) - 1)
    assert describe_requirement(config, enough, world_size=2)[0]
    fits, text = describe_requirement(config, short, world_size=2)
    assert not fits and "2 processes need" in text


def test_a_machine_without_fp8_is_named_with_what_to_do():
    run = _run("debug", seq_len=512)
    fp8 = {"recipe_name": "rowwise", "experts_recipe_name": "rowwise"}
    A100, L40S = (Machine(96, 2**40, 2**40, (Gpu(name, 40 * 2**30),)) for name in ("NVIDIA A100-SXM4", "NVIDIA L40S"))

    def found(machine: Machine, **keys) -> str:
        return describe_requirement(
            run.model_copy(update={"float8": Float8Config(**fp8 | keys)}), machine, world_size=1
        )[1]

    for machine, name in ((SMALL, "found: none"), (A100, "found: NVIDIA A100-SXM4")):
        text = found(machine)
        assert 'float8.recipe_name = "rowwise" needs' in text and name in text and "float8.emulate = true" in text
        assert "It fits." in found(machine, emulate=True)
    assert 'float8.experts_recipe_name = "rowwise" needs' in found(L40S)
    assert "It fits." in found(L40S, experts_recipe_name=None)
    assert "it has none of these products" in found(L40S) and "can run BF16: remove the key" in found(A100)
    text = found(NODE, experts_recipe_name="mxfp8")
    assert "B200, B300); found: NVIDIA H100" in text and 'take "rowwise", which it can run' in text


def test_attention_kernels_of_a_package_need_a_gpu():
    run = _run("debug", seq_len=512)
    run = run.model_copy(update={"model": run.model.model_copy(update={"attention_kernel": "FA3"})})
    assert (
        'model.attention_kernel = "FA3" needs a GPU; found: none' in describe_requirement(run, SMALL, world_size=1)[1]
    )
    assert "It fits." in describe_requirement(run, NODE, world_size=1)[1]


@pytest.mark.parametrize("base_dtype", BASE_FORMATS)
def test_a_quantised_base_that_this_torch_cannot_shard_is_named(base_dtype, monkeypatch):
    sections = {
        "model": {"flavor": "debug", "shape": {"num_nextn_predict_layers": 0}},
        "adapter": {"base_dtype": base_dtype},
    }
    config = RunConfig.model_validate(sections | {"training": {"seq_len": 4096, "steps": 10}})
    for torch, fits in (("2.11.0+cu130", False), ("2.13.0", True)):
        monkeypatch.setattr(requirement.metadata, "version", {"torch": torch}.__getitem__)
        text = describe_requirement(config, NODE)[1]
        assert ("It fits." in text) == fits
        said = f'adapter.base_dtype = "{base_dtype}" needs torch 2.13; found: {torch}; update torch, or'
        assert (said in text) != fits


def test_a_schedule_that_this_torch_cannot_run_is_named(monkeypatch):
    config = _run("debug", parallelism={"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"})
    monkeypatch.setattr(requirement.metadata, "version", {"torch": "2.11.0+cu130"}.__getitem__)
    text = describe_requirement(config, NODE)[1]
    assert 'parallelism.pipeline_parallel_schedule = "ZBVZeroBubble" splits backward, which needs torch 2.13' in text
    assert "found: 2.11.0+cu130" in text and 'take one of "GPipe", "1F1B", "Interleaved1F1B"' in text
    assert "It fits." in describe_requirement(_run("debug", parallelism={"pipeline_parallel_degree": 2}), NODE)[1]
    monkeypatch.setattr(requirement.metadata, "version", {"torch": "2.13.0"}.__getitem__)
    assert "It fits." in describe_requirement(config, NODE)[1]


def _planned(config: RunConfig, gpu="H100", world=None, here=None, **cluster) -> str:
    """The text of the plan, without a pipeline."""
    plan = resolve_plan(config, world)
    run = plan_run(plan, TargetCluster(accelerator_of(gpu), plan.layout.world_size, **cluster))
    return plan_text(run, here and (here, judge_config(config, here, world)))


def test_a_plan_states_its_assumptions():
    config = _run("GLM-4.6", parallelism={"expert_parallel_degree": 8}, seq_len=512)
    text = _planned(config, world=1024, gpus_per_node=4, network_gbits=200.0, price=2.5)
    assert "356,785,898,816" in text and "44,689" in text
    for part in ("nodes of 4, 200 Gbit/s", "efficiencies: assumed", "(at $2.50)", "GPU-hours", "waiting for ep"):
        assert part in text


@pytest.mark.slow
def test_a_plan_says_whether_it_fits_and_by_how_much():
    """Against the GPU that is named and the machine that is given. The time of a run that does not fit is marked."""
    config = _run("GLM-4.6", seq_len=512)
    for world, words in ((8, "no: each GPU needs"), (512, "yes: each GPU needs")):
        total = plan_memory(config, world).total
        spare = abs(0.92 * 140 - total / _GIB)
        text = _planned(config, "H200", world)
        assert f"does it fit on {world} x H200\n  {words} {total / _GIB:,.1f} GiB, and 128.8 GiB of 140.0 GiB" in text
        assert f": {spare:,.1f} GiB {'to spare' if words[0] == 'y' else 'too much'}" in text
        assert "GPU-hours" in text and ("it does not fit, as said above" in text) == (words[0] == "n")
    text = _planned(_run("debug", seq_len=512), here=SMALL)
    assert "does it fit on this machine (no GPU, 2 cores)\n  yes: one process needs" in text
    text = _planned(_run("GLM-4.6"), here=NODE)
    assert "this machine (8 x NVIDIA H100 80GB HBM3, 96 cores)\n  no: each GPU needs" in text


def test_the_numbers_of_a_plan_are_those_of_its_text():
    config = _run("GLM-4.6", seq_len=512, tokens=512 * 10**9, steps=None)
    plan = resolve_plan(config, 512)
    run = plan_run(plan, TargetCluster(accelerator_of("H200"), 512, price=3.0))
    numbers, text = json.loads(json.dumps(plan_numbers(run))), plan_text(run)
    assert f"{numbers['days']:,.2f}" in text and f"${numbers['dollars']:,.0f}" in text
    assert f"{numbers['gpu_hours']:,.0f}" in text and f"{numbers['steps']:,}" in text
    assert numbers["fits"] and numbers["memory"][0]["total"] == plan_memory(config, 512).total
    stage = numbers["stages"][0]
    assert sum(stage["parts"].values()) == pytest.approx(stage["step_seconds"])
    assert numbers["days"] == pytest.approx(numbers["gpu_hours"] / 512 / 24)


def test_memory_is_listed_in_one_unit_which_hides_no_part():
    for config in (_run("debug", seq_len=512), _run("GLM-4.6", seq_len=512)):
        for device in ("cpu", "gpu"):
            plan = plan_memory(config, 8, device=device)
            *lines, total = memory_lines(plan)
            assert total.split()[0] == "total"
            for line, size in zip(lines, memory_parts(plan).values(), strict=True):
                *_, number, unit = line.split()
                assert (float(number) == 0) == (size == 0), line
                assert unit == total.split()[-1] or 0 < size < 0.01 * 2**30, line


def test_flops_of_a_published_run():
    # 22T tokens at 4,096: 5.1e24 FLOPs with MTP, from the facts page.
    plan = resolve_plan(_run("GLM-4.6", tokens=22 * 10**12, steps=None), 1)
    assert run_flops(plan) == pytest.approx(5.1e24, rel=0.01)


def test_a_billion_steps_are_counted_at_once():
    """As one by one: with a ramp, and with stages whose last step is shorter."""
    began = time.process_time()
    assert resolve_plan(_run("debug", seq_len=128, steps=10**9), 2).budget_tokens == 10**9 * 2 * 128
    ramp = _run("debug", seq_len=128, global_batch_size=((0, 8.0), (1024, 16.0)), steps=10**9)
    assert resolve_plan(ramp, 1).budget_tokens == (8 + 16 * (10**9 - 1)) * 128
    assert time.process_time() - began < 60  # one by one takes minutes
    sections = {"model": {"flavor": "debug"}, "training": {"seq_len": 128, "steps": 9, "global_batch_size": 4}}
    stages = ({"start_tokens": 0, "seq_len": 64}, {"start_tokens": 640})
    staged = RunConfig.model_validate(sections | {"data": {"stages": stages}})
    # Ten samples of 64 tokens in three steps of 4, 4 and 2, then six steps of four samples of 128.
    assert resolve_plan(staged, 1).budget_tokens == 640 + 6 * 4 * 128


def test_a_step_whose_text_no_memory_holds_is_refused():
    fits, text = describe_requirement(_run("debug", seq_len=256, global_batch_size=10**9), SMALL)
    assert not fits and "lower training.global_batch_size: a rank reads" in text
    fits, text = describe_requirement(_run("debug", seq_len=256, global_batch_size=10**10), NODE)
    assert not fits and "lower training.global_batch_size: a rank reads" in text


def test_planner_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys\n"
        "import glm46.operate.estimate.requirement, glm46.operate.estimate.report\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    root = Path(__file__).parents[4]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


@pytest.mark.parametrize(("form", "value", "text"), [
    (units.amount, 0, "0.00"), (units.amount, 51.04, "51.04"), (units.amount, 0.0164, "0.0164"),
    (units.amount, 2.7e-5, "0.0000270"), (units.amount, 1e9, "1,000,000,000.00"),
    (units.binary_size, 0, "0 B"), (units.binary_size, 1023, "1,023 B"), (units.binary_size, 1536, "1.50 KiB"),
    (units.binary_size, 2**20, "1.00 MiB"), (units.binary_size, 2.35 * 2**30, "2.35 GiB"),
    (units.binary_size, 99_999 * 2**30, "99,999.0 GiB"),
    (units.decimal_size, 0, "0 B"), (units.decimal_size, 999, "999 B"), (units.decimal_size, 12_400, "12.4 kB"),
    (units.decimal_size, 116.3e6, "116.3 MB"), (units.decimal_size, 2.9e12, "2.9 TB"),
    (units.decimal_size, 2.9e16, "29.0 PB"),
    (units.duration, 0, "0.00 ms"), (units.duration, 3.1e-6, "3.10 µs"), (units.duration, 0.05817, "58.17 ms"),
    (units.duration, 1.233, "1.233 s"), (units.duration, 98765.4, "98,765.400 s"),
    (units.run_time, 0.628, "0.628 s"), (units.run_time, 59, "59.00 s"), (units.run_time, 60, "1.00 min"),
    (units.run_time, 3599, "59.98 min"), (units.run_time, 12_600, "3.50 h"), (units.run_time, 86_400, "1.00 days"),
    (units.run_time, 5_111_424, "59.16 days"), (units.run_time, 0, "0.00 s"),
    (units.flops_text, 0, "0.000 GFLOP"), (units.flops_text, 2e3, "2.000 kFLOP"),
    (units.flops_text, 2e6, "2.000 MFLOP"),    (units.flops_text, 218.234e9, "218.234 GFLOP"),
    (units.token_count, 999, "999"), (units.token_count, 4096, "4.096k"), (units.token_count, 4_194_304, "4.1943M"),
    (units.token_count, 15 * 10**12, "15T"), (units.token_count, 10**15, "1P"),
])  # fmt: skip
def test_a_number_keeps_three_digits(form, value, text):
    assert form(value) == text


def test_columns_are_as_wide_as_their_cells():
    assert units.aligned([("a", "change"), ("1,234", "x")]) == ["    a  change", "1,234       x"]


def test_parts_have_the_unit_of_their_total_unless_it_hides_them():
    total = 2.35 * 2**30
    parts = [0, 0.124 * 2**30, 5 * 2**20, 7]
    assert [units.binary_size(part, total) for part in parts] == ["0.00 GiB", "0.12 GiB", "5.00 MiB", "7 B"]
