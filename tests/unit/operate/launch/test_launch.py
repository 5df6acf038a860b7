"""Checks before the first process starts, messages about the end of the processes, and restarts.

What a launcher remembers of checkpoints, and its wait for storage that has gone.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from glm46.cli import main
from glm46.commands.launch import launch_command
from glm46.config.adapter import AdapterConfig
from glm46.config.command_line import Start
from glm46.config.errors import UserError
from glm46.config.finetune import FineTuneConfig
from glm46.config.loader import dump_config, load_config
from glm46.config.presets import resolve_shape
from glm46.config.rl import ReferenceConfig
from glm46.config.run_config import RunConfig
from glm46.engine.observe.start_times import StartTimes
from glm46.engine.reliability.stop import EXIT_STOPPED
from glm46.engine.reliability.verdict import write_verdict
from glm46.operate.estimate.machine import Gpu, Machine
from glm46.operate.launch import node_run, one_node
from glm46.operate.launch.config_options import config_parser, parse_with_overrides
from glm46.operate.launch.environment import unfit_packages
from glm46.operate.launch.next_commands import describe_next
from glm46.operate.launch.one_node import _refuse_state_folder, describe_refusal
from glm46.operate.launch.restarts import SavedSteps, StorageLost, hung_hosts, keep_running, known_step
from glm46.operate.launch.start_checks import refuse_start
from glm46.operate.launch.torchrun import End, LauncherSignals, describe_exit, run_ranks
from glm46.run.plan import resolve_plan
from glm46.tasks.weights.start_folders import refuse_weights

ROOT = Path(__file__).parents[4]
GIB = 2**30
LAPTOP = Machine(cores=8, memory_bytes=16 * GIB, free_bytes=12 * GIB)
SERVER = Machine(cores=64, memory_bytes=999 * GIB, free_bytes=900 * GIB, gpus=(Gpu("NVIDIA H100", 79 * GIB),) * 8)


def debug_run(**parallelism: int) -> RunConfig:
    """The debug run with some degrees."""
    return changed(load_config(ROOT / "train_configs" / "debug.toml"), parallelism=parallelism)


def changed(config: RunConfig, **tables: dict) -> RunConfig:
    """A config with some keys of its tables replaced."""
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=keys) for name, keys in tables.items()}
    )


def test_each_of_several_nodes_has_a_process_for_each_of_its_gpus(monkeypatch, tmp_path):
    found = []

    def seen(plan, processes):
        found.append((plan.layout.world_size, processes))
        raise UserError("seen")

    monkeypatch.setattr(one_node, "detect_machine", lambda *arguments, nodes: replace(SERVER, nodes=nodes))
    monkeypatch.setattr(one_node, "_refuse_state_folder", seen)
    for name, value in (("NNODES", "16"), ("NODE_RANK", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    command = ["--config", str(ROOT / "train_configs/debug.toml"), "--job.dump_folder", str(tmp_path / "out")]
    with pytest.raises(UserError, match="seen"):
        launch_command([*command, "--training.global_batch_size", "1024"])
    assert found == [(128, 8)]


def test_memory_snapshots_are_refused_where_there_is_no_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(one_node, "detect_machine", lambda *arguments, **keys: LAPTOP)
    dump = ["--job.dump_folder", str(tmp_path / "out")]
    command = ["--config", str(ROOT / "train_configs/debug.toml"), "--profiling.enable_memory_snapshot", "true", *dump]
    with pytest.raises(UserError, match=r"profiling.enable_memory_snapshot = true: needs a GPU.*set it to false"):
        launch_command(command)
    assert not (tmp_path / "out").exists()


def test_a_job_system_states_the_processes_unless_the_command_does(monkeypatch, tmp_path):
    monkeypatch.setattr(one_node, "detect_machine", lambda *arguments, **keys: LAPTOP)
    monkeypatch.setenv("PET_NNODES", "1")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    command = ["--config", str(ROOT / "train_configs/debug.toml"), "--job.dump_folder", str(tmp_path / "out")]
    command += ["--parallelism.data_parallel_shard_degree", "2"]
    for options, count in (([], 3), (["--nproc", "auto"], 3), (["--nproc", "4"], 4)):
        with pytest.raises(UserError, match=f"multiply to 2 processes, and {count} is more"):
            launch_command([*command, *options])


def test_too_many_processes_for_the_memory_are_refused():
    config = changed(debug_run(), training={"global_batch_size": None})
    assert describe_refusal(config, LAPTOP, 2) is None
    screen = describe_refusal(config, LAPTOP, 64)
    assert "This machine cannot run it:" in screen and "of 12.0 GiB can be filled" in screen


def test_refusal_of_a_large_run_shows_needs_and_machine():
    screen = describe_refusal(load_config(ROOT / "train_configs" / "glm46_phase3.toml"), LAPTOP, None)
    for text in (
        "356,785,898,816 parameters",
        "8,192 = pipeline 8 x context 128 x tensor 8, experts over 32",
        "12.0 GiB free of 16.0 GiB",
        "GPUs               none",
        *(f"  {length}  " for length in ("32,768", "65,536", "131,072", "196,608")),
    ):
        assert text in screen
    # One screen: of the usual 24 to 50 lines of a terminal.
    assert len(screen.splitlines()) <= 40


def test_launcher_refuses_what_a_rank_would_refuse_at_its_start(make_config, tmp_path):
    (tmp_path / "file").touch()
    typed = Start(tmp_path / "run.toml", ())
    for tables, key in (
        ({"checkpoint": {"initial_load_path": "nowhere"}}, "checkpoint.initial_load_path = 'nowhere'"),
        ({"checkpoint": {"load_step": 3}}, "checkpoint.load_step = 3"),
        ({"checkpoint": {"load_path": "nowhere"}}, "checkpoint.load_path = 'nowhere': no such folder"),
        ({"job": {"dump_folder": str(tmp_path / "file/out")}}, "job.dump_folder = "),
        ({"checkpoint": {"folder": str(tmp_path / "file/steps")}}, "checkpoint.folder = "),
    ):
        config = make_config(**tables)
        with pytest.raises(UserError, match=re.escape(key)):
            refuse_start(config, typed)
        assert not Path(config.job.dump_folder).exists()
    refuse_start(make_config(), typed)
    assert not Path(make_config().job.dump_folder).exists()


@pytest.mark.parametrize("key", ["job.dump_folder", "checkpoint.folder", "metrics.save_tb_folder"])
def test_a_folder_in_which_another_run_trains_is_refused_without_taking_it(key, make_config, monkeypatch, tmp_path):
    monkeypatch.setattr("glm46.engine.reliability.run_lock._PATIENCE_SECONDS", 0.2)
    section, name = key.split(".")
    more = {"enable_tensorboard": True} if section == "metrics" else {}
    config = make_config(**{section: {name: str(tmp_path / "apart"), **more}})
    typed = Start(tmp_path / "run.toml", ())
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom glm46.engine.reliability.run_lock import lock_run\n"
        f"held = lock_run(Path(sys.argv[1]), {{{key!r}: Path(sys.argv[2])}})\nprint('locked', flush=True)\n"
        "time.sleep(1000)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "theirs"), str(tmp_path / "apart")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "locked\n"
            before = sorted(tmp_path.rglob("*"))
            with pytest.raises(UserError, match=f"{key} = .*process {other.pid} .*is training in this folder"):
                refuse_start(config, typed)
            assert sorted(tmp_path.rglob("*")) == before
        finally:
            other.kill()
    refuse_start(config, typed)


def test_initial_weights_of_another_shape_are_refused_as_by_ranks(make_config, tmp_path):
    """A step folder, by its meta. What it has beyond the run is left to the ranks."""
    step, typed = tmp_path / "checkpoint/step-000003", Start(tmp_path / "run.toml", ())
    step.mkdir(parents=True)
    shape = resolve_shape(make_config().model)
    (step / "meta.json").write_text(json.dumps({"config": dump_config(make_config())}))

    def start(checkpoint: dict | None = None, **model: int) -> None:
        table = make_config().model.model_dump(exclude_none=True) | model
        refuse_start(make_config(model=table, checkpoint={"initial_load_path": str(step), **(checkpoint or {})}), typed)

    wider = {"hidden_size": 2 * shape.hidden_size}
    with pytest.raises(UserError) as refusal:
        start(**wider)
    (fault,) = refusal.value.faults
    saved = f"model.shape.hidden_size = {wider['hidden_size']}: {step} was saved with {shape.hidden_size}; restore it"
    assert fault.startswith(saved), fault
    with pytest.raises(UserError, match="model.shape.num_hidden_layers = .* was saved with"):
        start(num_hidden_layers=shape.num_hidden_layers + 1)
    start()
    start({"initial_load_exclude": ["model.*"]}, **wider)
    start(num_hidden_layers=shape.num_hidden_layers - 1)


@pytest.mark.parametrize(("stated", "is_refused"), [
    ((), False), (("--model.shape.hidden_size=128",), True), (("--model.shape.num_nextn_predict_layers=0",), False),
    (("--model.shape.hidden_size=128", '--checkpoint.initial_load_exclude=["model.*"]'), True),
])  # fmt: skip
def test_a_reference_of_another_shape_is_refused_before_ranks_start(stated, is_refused, tmp_path):
    """Nothing of it can be excluded; its prediction layers are not read."""
    recipe = Path(__file__).parents[4] / "train_configs" / "rl_debug.toml"
    step = tmp_path / "checkpoint" / "step-000003"
    step.mkdir(parents=True)
    (step / "meta.json").write_text(json.dumps({"config": dump_config(load_config(recipe))}))
    config = changed(
        load_config(recipe, stated), rl={"reference": ReferenceConfig(load_path=str(step))},
        checkpoint={"initial_load_path": None}, job={"dump_folder": str(tmp_path / "r")},
    )  # fmt: skip
    with (
        pytest.raises(UserError, match="was saved with.*of the model that is trained") if is_refused else nullcontext()
    ):
        refuse_weights(config)


def make_folder(path: Path, kind: str) -> None:
    """Files that a kind of folder is told by."""
    files = {
        "PEFT": ("adapter_config.json", "adapter_model.safetensors"), "DCP": (".metadata",), "empty": (),
        "pickle": ("consolidated.00.pth",), "tokenizer": ("tokenizer.json",), "adapters": ("meta.json",),
        "run": ("checkpoint/step-000003/manifest.json",), "weights": ("config.json", "model.safetensors"),
    }  # fmt: skip
    if kind == "file":
        path.write_bytes(b"GGUF")
        return
    path.mkdir()
    for name in files[kind]:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}")


@pytest.mark.parametrize("in_hf", [False, True])
@pytest.mark.parametrize("key", ["rl.reference.load_path", "checkpoint.initial_load_path"])
@pytest.mark.parametrize(("kind", "said"), [
    ("PEFT", "this is a PEFT folder with adapters"), ("empty", "neither a Hugging Face folder"), ("file", "is a file"),
    ("pickle", "consolidated.00.pth is a pickle"), ("tokenizer", "a tokenizer alone"),
    ("adapters", "without their base"),
    ("run", "it holds steps; give one of them"),
])  # fmt: skip
def test_folders_of_other_kinds_are_refused_before_ranks_start(kind, said, key, in_hf, tmp_path):
    recipe = Path(__file__).parents[4] / "train_configs" / "rl_debug.toml"
    path = tmp_path / "step-000003"
    make_folder(path, kind)
    config = load_config(recipe)
    if kind == "adapters":
        saved = config.model_copy(update={"adapter": AdapterConfig(name="lora"), "rl": None})
        saved = changed(saved, checkpoint={"initial_load_path": "base"})
        (path / "meta.json").write_text(json.dumps({"config": dump_config(saved)}))
        said = "this is a step folder" if in_hf and not key.startswith("rl.") else said
    start, reference = {"initial_load_path": str(path), "initial_load_in_hf": in_hf}, config.rl.reference
    if key.startswith("rl."):
        start = {"initial_load_path": None, "initial_load_in_hf": False}
        reference = ReferenceConfig(load_path=str(path))
    tables = {"rl": {"reference": reference}, "checkpoint": start, "job": {"dump_folder": str(tmp_path / "r")}}
    with pytest.raises(UserError) as raised:
        refuse_weights(changed(config, **tables))
    (fault,) = raised.value.faults
    assert fault.startswith(f"{key} = {str(path)!r}: ") and said in fault, fault


def test_weights_that_another_config_makes_are_named_with_its_command(make_config, tmp_path):
    (tmp_path / "broken.toml").write_text("[job")
    for name in ("first", "second"):
        (tmp_path / f"{name}.toml").write_text(f'[job]\ndump_folder = "{tmp_path / name}"\n')
    path = tmp_path / "first/huggingface/step-000100"
    config = make_config(checkpoint={"initial_load_path": str(path), "initial_load_in_hf": True})
    typed = Start(tmp_path / "second.toml", (), script="CONFIG_FILE=second.toml ./run_train.sh")
    with pytest.raises(UserError, match="no such folder") as refusal:
        refuse_start(config, typed)
    assert str(refusal.value).endswith(f"made by: CONFIG_FILE={tmp_path / 'first.toml'} ./run_train.sh")
    own = make_config(checkpoint={"initial_load_path": str(tmp_path / "second/checkpoint/step-000100")})
    with pytest.raises(UserError, match="give a step folder, or start the run first") as refusal:
        refuse_start(own, typed)
    assert str(refusal.value).endswith(repr(str(tmp_path / "second"))) and "CONFIG_FILE" not in str(refusal.value)


@pytest.mark.slow
def test_launcher_refuses_a_folder_of_states_that_no_rank_could_use(make_config, monkeypatch, tmp_path):
    def refused(folder: Path, processes: int = 2) -> str:
        keys = {"state_offload": "nvme", "state_offload_folder": str(folder)}
        with pytest.raises(UserError) as caught:
            _refuse_state_folder(resolve_plan(make_config(optimizer=keys), 2), processes)
        return str(caught.value)

    assert "no such folder" in refused(tmp_path / "missing")
    monkeypatch.setattr(one_node.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    text = refused(tmp_path)
    assert "optimizer states of 2 processes need 0.00 GiB, and 0.00 GiB of" in text and "are free" in text
    assert 'or set optimizer.state_offload = "cpu"' in text
    monkeypatch.undo()
    keys = {"state_offload": "nvme", "state_offload_folder": str(tmp_path)}
    _refuse_state_folder(resolve_plan(make_config(optimizer=keys), 2), 2)
    _refuse_state_folder(resolve_plan(make_config(), 2), 2)


def test_refusal_names_the_command_that_plans_this_run(tmp_path):
    """It is printed to be copied: it runs as it is, wherever the first command was started."""
    end = start("--training.seq_len", "16384", CONFIG_FILE="train_configs/glm46_phase2.toml", NGPU="8192")
    (line,) = [line for line in end.stderr.splitlines() if "see what it needs in detail:" in line]
    command = line.partition(":  ")[2]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PATH": path}
    plan = subprocess.run(
        ["bash", "-c", command], cwd="/", env=environment, capture_output=True, text=True, timeout=300
    )
    assert (plan.returncode, plan.stderr) == (0, "")
    assert "at 16,384 tokens" in plan.stdout and "memory of each of 8,192 ranks" in plan.stdout
    assert "CONFIG_FILE=train_configs/debug.toml" in end.stderr


def test_next_command_is_the_same_with_a_larger_budget(make_config, tmp_path):
    apart, config_file = {"folder": str(tmp_path / "steps")}, tmp_path / "run.toml"
    config = make_config(training={"steps": 2, "global_batch_size": 4}, checkpoint=apart)
    config_file.write_text(dump_config(config))
    typed = Start(config_file, ("--optimizer.lr", "2e-3", "--training.steps", "3"), processes=2)
    config = load_config(config_file, typed.overrides, world_size=2)
    longer, keys = describe_next(resolve_plan(config, 2), typed).splitlines()
    assert longer.startswith("Next: train longer  ") and keys.endswith(" -m glm46 train --help keys")
    (config.checkpoint_folder / "step-000003").mkdir(parents=True)
    (ask,) = [line for line in describe_next(resolve_plan(config, 2), typed).splitlines() if "  ask it  " in line]
    assert ask.endswith(f"generate --checkpoint {config.checkpoint_folder / 'step-000003'} --prompt '...'")
    chats = config.model_copy(update={"finetune": FineTuneConfig()})
    assert " --chat --prompt" in describe_next(resolve_plan(chats, 2), typed)
    valued = chats.model_copy(update={"finetune": FineTuneConfig(preference={"loss_type": "reward"})})
    assert "ask it" not in describe_next(resolve_plan(valued, 2), typed)
    start = config.checkpoint.model_copy(update={"initial_load_path": "base", "initial_load_in_hf": True})
    tuned = chats.model_copy(update={"adapter": AdapterConfig(name="lora"), "checkpoint": start})
    assert "ask it" not in describe_next(resolve_plan(tuned, 2), typed)
    exported = Path(config.job.dump_folder, "huggingface/step-000003")
    exported.mkdir(parents=True)
    (exported / "adapter_config.json").touch()
    assert f"generate --model base --adapter {exported} --chat" in describe_next(resolve_plan(tuned, 2), typed)
    parser = config_parser("launch")
    parser.add_argument("--nproc")
    _, _, command = longer.partition(" launch ")
    again, options = parse_with_overrides(parser, shlex.split(command))
    assert (again.config, again.nproc) == (config_file, "2")
    again = load_config(config_file, options, world_size=2)
    assert (again.training.tokens, again.training.steps, again.optimizer.lr) == (4 * 3 * 4 * 16, None, 2e-3)
    assert again.job.dump_folder == f"{config.job.dump_folder}_longer"
    assert again.checkpoint_folder == Path(f"{config.checkpoint_folder}_longer")


def test_a_longer_run_that_would_be_refused_is_not_proposed(make_config, tmp_path):
    config_file = tmp_path / "run.toml"
    for tables in (
        {"training": {"steps": None, "tokens": 320}, "lr_scheduler": {"total_tokens": 640}},
        {"data": {"sources": [make_config().data.sources[0].model_dump() | {"max_epochs": 0.05}]}},
    ):
        config = make_config(**tables)
        config_file.write_text(dump_config(config))
        shown = describe_next(resolve_plan(config, 1), Start(config_file, ()))
        assert shown.startswith("Next: all keys ")


def test_end_of_a_rank_is_described():
    assert describe_exit(1).startswith("ended with exit code 1;")
    assert describe_exit(-9).startswith("was ended by SIGKILL.") and "memory" in describe_exit(-9)
    assert describe_exit(-11) == "was ended by SIGSEGV."


@pytest.mark.parametrize(
    ("ends", "max_restarts", "expected", "starts"),
    [
        # (exit code, newest checkpoint afterwards) of each start
        ([(1, 10)], 0, 1, 1),
        ([(1, 0)], 0, 1, 1),
        ([(1, 10), (0, 20)], 3, 0, 2),
        ([(76, 10), (1, 20), (-75, 20)], 3, 75, 3),  # stopped by a signal
        ([(75, 10), (75, 20), (0, 30)], 3, 0, 3),  # stopped by failed saves
        ([(75, 10), (75, 10), (75, 10), (75, 10)], 9, 75, 4),
        ([(1, 10), (2, 10)], 3, 2, 2),  # a mistake of the user
        ([(1, 10), (143, 10)], 3, 143, 2),
        ([(1, 10), (1, 20)], 1, 1, 2),  # no restart left
        ([(1, 10), (1, 10), (1, 10), (76, 10)], 9, 76, 4),  # three in a row got nowhere
        ([(1, 0), (1, 0), (1, 0)], 9, 1, 3),
        ([(1, 0), (1, 0), (1, 5), (1, 5), (1, 5), (1, 6), (0, 9)], 9, 0, 7),
    ],
)
def test_failed_starts_are_repeated_while_new_checkpoints_appear(ends, max_restarts, expected, starts, capsys):
    started: list[int] = []

    def start(number: int, times: StartTimes) -> End:
        assert number == len(started)
        started.append(number)
        code = ends[number][0]
        return End(abs(code), "rank 1 was ended by SIGKILL.", is_final=code < 0)

    end = keep_running(start, lambda: ends[len(started) - 1][1] if started else 0, max_restarts)
    said = capsys.readouterr().err
    assert (end.code, len(started)) == (expected, starts)
    if not max_restarts:
        end_of_line = "goes on from the checkpoint of step 10" if ends[-1][1] else "begins anew: there is no checkpoint"
        is_last = ends[-1][0] > 0
        assert (f"The same command {end_of_line}." in said) == is_last
    assert said.count("\nrestart") + said.startswith("restart") == starts - 1
    assert ("giving up after 3 starts in a row" in said and "rank 1 was ended by SIGKILL. The" in said) == (
        ends[-3:-2] + ends[-1:] in ([(1, 10), (76, 10)], [(1, 0), (1, 0)], [(75, 10), (75, 10)])
    )


def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """run_train.sh with this interpreter first on the path, from a folder that is not the checkout."""
    if unfit_packages():
        pytest.skip("this interpreter lacks a dependency, and a test must not make the script install one")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [str(ROOT / "run_train.sh"), *arguments]
    environment = {**os.environ, "PATH": path, **variables}
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_one_command_passes_overrides_on():
    end = start("--training.seq_len", "1", "--trainin.steps", "3", NGPU="2")
    assert end.returncode == 2
    assert end.stderr.splitlines() == [
        "error: command line: training.seq_len = 1: must be greater than or equal to 2 (Tokens per sequence)",
        "error: command line: trainin: unknown key; did you mean 'training'?",
    ]


@pytest.mark.parametrize(("codes", "expected", "said"), [
    ((141, 1), 141, "closed the pipe"),  # rank 0 writes to the console; the others end because it has left
    ((1, 7), 1, "rank 1 ended with exit code 7"), ((1, -9), 1, "rank 1 was ended by SIGKILL"), ((1, 2), 2, ""),
    ((75, 7), 1, "rank 1 ended with exit code 7"), ((75, 2), 2, ""), ((75, 1), 75, ""),
])  # fmt: skip
def test_the_first_failure_is_the_end_of_the_run_whichever_torchrun_sees_first(
    codes, expected, said, monkeypatch, capsys
):
    from torch.distributed.elastic.multiprocessing.api import ProcessFailure
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    failures = {rank: ProcessFailure(rank, 1000 + rank, code, "") for rank, code in enumerate(codes)}

    def run(_):
        raise ChildFailedError("ranks", failures)

    monkeypatch.setattr("glm46.operate.launch.torchrun_agent.run", run)
    monkeypatch.setattr("logging.disable", lambda _: None)  # it would stay so for the tests after this one
    signals = LauncherSignals()
    try:
        end = run_ranks(["--nproc-per-node=2"], ["train"], signals, StartTimes("the command"))
    finally:
        signals.close()
    output = capsys.readouterr().err
    assert end.code == expected and (said in output if said else not output)


@pytest.mark.parametrize(("stated", "words"), [
    (["--rl.prompts.file=none.jsonl"], ('rl.prompts.file = "none.jsonl"', "No such file")),
    (["--rl.rewards=[{name='no_such_module:score'}]"], ("rl.rewards", "no_such_module:score")),
    (["--rl.rewards=[{name='json:no_such_function'}]"], ("rl.rewards", "json:no_such_function")),
    (["--rl.environment.function=no_such_module:turn"], ("rl.environment", "no_such_module:turn")),
])  # fmt: skip
def test_what_reinforcement_learning_reads_is_checked_before_ranks_start(stated, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(node_run, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    config = Path(__file__).parents[4] / "train_configs" / "rl_debug.toml"
    stated = [*stated, f"--job.dump_folder={tmp_path / 'run'}", "--checkpoint.enable=false"]
    # The weights that it starts from were made by another run, which a fresh clone has not had.
    monkeypatch.setattr("glm46.operate.launch.start_checks.refuse_weights", lambda config: None)
    assert main(["launch", "--config", str(config), "--nproc", "1", *stated]) == 2
    printed = capsys.readouterr().err
    faults = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(faults) == 1 and all(word in faults[0] for word in words), printed
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_there", [True, False])
def test_prompts_of_the_hub_are_fetched_before_they_are_checked(is_there, tmp_path, monkeypatch, capsys):
    prompts = Path(__file__).parents[4] / "train_configs" / "debug_short_answers.jsonl"
    place, asked, started = prompts if is_there else tmp_path / "none.jsonl", [], []
    fetch = lambda stated, mark, option, *_: asked.append((option, str(stated))) or place  # noqa: E731
    monkeypatch.setattr("glm46.storage.huggingface.hub.local_path", fetch)
    run = lambda _, command, *rest: started.append(command) or End(2, is_final=True)  # noqa: E731
    monkeypatch.setattr(node_run, "run_ranks", run)
    monkeypatch.setattr("glm46.operate.launch.start_checks.refuse_weights", lambda config: None)
    monkeypatch.setattr(node_run, "_prepare", lambda plan: None)
    address = "hf://datasets/owner/name/prompts.jsonl"
    stated = [f"--rl.prompts.file={address}", f"--job.dump_folder={tmp_path / 'run'}", "--checkpoint.enable=false"]
    config = prompts.with_name("rl_debug.toml")
    assert main(["launch", "--config", str(config), "--nproc", "1", *stated]) == 2
    assert asked == [("rl.prompts.file =", address)]
    assert [f"--rl.prompts.file={place}" in command for command in started] == [True] * is_there
    assert ("No such file" in capsys.readouterr().err) is not is_there


@pytest.fixture
def saved(make_config, monkeypatch):
    """Of a run that has saved the steps 7 and 9."""
    monkeypatch.setattr("glm46.operate.launch.restarts._WAIT_SECONDS", 0.01)
    config = make_config()
    for step in (7, 9):
        (config.checkpoint_folder / f"step-{step:06d}").mkdir(parents=True)
    return SavedSteps(config)


def test_a_new_run_and_a_run_that_resumes_wait_for_nothing(saved, make_config):
    said: list[str] = []
    saved.wait_for_storage(0, said.append)  # its text may still have to be prepared
    SavedSteps(make_config(job={"dump_folder": "nothing"})).wait_for_storage(0, said.append)
    assert said == []


def test_a_start_waits_until_a_lost_folder_is_back(saved, make_config):
    """An unmounted folder is empty: training from it would begin at step 0."""
    folder, away = make_config().checkpoint_folder, make_config().checkpoint_folder.with_name("away")
    assert saved.newest() == 9
    folder.rename(away)
    folder.mkdir()
    assert saved.newest() == 9

    said: list[str] = []

    def mount(line: str) -> None:
        said.append(line)
        folder.rmdir()
        away.rename(folder)

    saved.wait_for_storage(300, mount)
    assert not away.exists() and len(said) == 1
    assert str(folder) in said[0] and "step 9" in said[0]
    # A rollback has removed a step: the newest that is there counts.
    shutil.rmtree(folder / "step-000009")
    assert saved.newest() == 7


@pytest.mark.parametrize("lost", ["checkpoints", "text"])
def test_a_start_ends_with_the_code_for_job_systems_if_storage_stays_away(saved, make_config, tmp_path, lost):
    config = make_config()
    if lost == "text":
        absent = str(tmp_path / "absent")
        config = make_config(data={"sources": [{"name": "test", "path": absent}]})
    else:
        absent = str(config.checkpoint_folder)
        shutil.rmtree(absent)
    with pytest.raises(StorageLost) as refused:
        SavedSteps(config, earlier_step=9).wait_for_storage(0.05, lambda _: None)
    assert refused.value.exit_code == EXIT_STOPPED
    assert absent in refused.value.faults[0] and "mount it" in refused.value.faults[0]


def test_the_next_start_of_a_job_knows_the_newest_checkpoint(saved, make_config, tmp_path, monkeypatch):
    assert known_step() == 0
    monkeypatch.setenv("GLM46_STATE", str(tmp_path / "state"))
    assert known_step() == 0  # the first start
    saved.newest()
    shutil.rmtree(make_config().checkpoint_folder)
    write_verdict(tmp_path, [3, 4, 5], {3: "n4.site", 4: "n4.site"}, 12)
    (tmp_path / "hang").mkdir()
    (tmp_path / "verdict.json").rename(tmp_path / "hang" / "verdict.json")
    saved.write_job_state(hung_hosts(tmp_path))
    assert known_step() == 9
    assert (tmp_path / "state").read_text() == "newest_step=9\nlost_hosts=n4\n"
    assert hung_hosts(tmp_path / "nowhere") == []
    (tmp_path / "state").write_text("newest_step=12\nlost_hosts='a b'\n")  # of a hostfile
    assert known_step() == 12
