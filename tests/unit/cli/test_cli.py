"""Verbs, messages and exit codes of the command line. Most tests run in this process: starting one costs seconds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from glm46.cli import main
from glm46.commands import plan as plan_module
from glm46.config.options import VERBS
from tests.processes import PROGRAM_SECONDS

ROOT = Path(__file__).parents[3]
DEBUG = str(ROOT / "train_configs" / "debug.toml")


def test_a_missing_package_is_named():
    code = "import sys; sys.modules['pydantic'] = None; from glm46.cli import main; sys.exit(main(['schema']))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROGRAM_SECONDS)
    assert ended.returncode == 2 and "pydantic is missing" in ended.stderr


def test_help_lists_the_verbs_and_each_verb_is_one_module(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    printed = capsys.readouterr().out
    assert end.value.code == 0
    for verb, meaning in VERBS.items():
        assert f"    {verb}" in printed and " ".join(meaning.split()[:3]) in printed
        module = verb.replace("-", "_")
        source = (ROOT / "glm46" / "commands" / f"{module}.py").read_text(encoding="utf-8")
        assert f"\ndef {module}_command(argv: Sequence[str]) -> int:" in source


@pytest.mark.parametrize("arguments", [[], ["trian", "--config", DEBUG], ["--training.steps", "3", "train"]])
def test_a_verb_is_required(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and "python -m glm46: error: " in capsys.readouterr().err


@pytest.mark.slow
def test_help_and_schema_survive_an_interpreter_that_drops_docstrings():
    code = (
        "import sys\nfrom glm46.cli import main\nfor verb in sys.argv[1:]:\n"
        "    try: main([verb, '--help'])\n    except SystemExit as end: assert not end.code or sys.exit(verb)\n"
        "main(['schema'])"
    )
    ends = [
        subprocess.run(
            [sys.executable, *options, "-c", code, *VERBS], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for options in ([], ["-OO"])
    ]
    assert ends[1].stdout == ends[0].stdout
    assert ends[0].stdout.endswith((ROOT / "train_configs" / "schema.json").read_text())


@pytest.mark.parametrize(("stated", "found"), [
    ({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, None),
])  # fmt: skip
def test_segments_of_gpu_memory_grow_unless_the_user_says_otherwise(stated, found, capsys, monkeypatch):
    """Set by the first process, so that the server of ranks, ranks and their workers have it before torch."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that the end of the test removes what the verb sets
        monkeypatch.delenv(name)
    for name, value in stated.items():
        monkeypatch.setenv(name, value)
    assert main(["schema"]) == 0
    assert os.environ.get("PYTORCH_ALLOC_CONF") == found


def test_a_plan_that_does_not_fit_exits_with_one_and_marks_its_time(tmp_path, capsys):
    file = tmp_path / "plan.json"
    large = ["--config", DEBUG, "--model.flavor=GLM-4.6", "--training.global_batch_size=256"]
    assert main(["plan", *large, "--gpus", "64", "--json", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "does it fit on 64 x H100\n  no: each GPU needs" in printed
    assert printed.index("; it does not fit, as said above") < printed.index("GPU-hours")
    found = json.loads(file.read_text())
    assert found["fits"] is False and found["days_low"] < found["days"] < found["days_high"]


@pytest.mark.parametrize(("options", "words"), [
    (["--gpu", "H8000"], ("--gpu 'H8000'", "did you mean H800", "MI300X:bf16=")),
    (["--gpu", "X:bf16=1"], ("--gpu", "lacks bandwidth, link, memory")),
    (["--gpus", "8"], ("multiply to 8192", "start 8192 processes", "lower another degree")),
    (["--measured", "/none.json"], ("/none.json: no such file", "--measured")),
    *((options, (f"{options[0]} {options[1]}", "name a file")) for search in ([], ["--search"])
      for options in (["--json", "/none/plan.json", *search], ["--json", "/", *search])),
    (["--gpus", "1000000", "--json", "/none/plan.json"], ("--json /none/plan.json",)),  # before the config
    (["--gpus", "1000003"], ("multiply to 8192", "start 8192 processes")),
    (["--document-tokens", "9", "--data.document_mask=false"], ("--document-tokens", "leave it out")),
])  # fmt: skip
def test_a_wrong_option_of_a_plan_is_refused(options, words, capsys, monkeypatch):
    """Before any work, in one line."""
    phase = str(ROOT / "train_configs" / "glm46_phase1.toml")
    monkeypatch.setattr(plan_module, "plan_run", None)
    monkeypatch.setattr(plan_module, "search_layouts", None)
    assert main(["plan", "--config", phase, *options]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words) and error.count("\n") == 1, error


def test_a_plan_of_too_many_gpus_is_refused_at_once(capsys):
    """No rule tries each number of processes."""
    options = ["--training.global_batch_size=", "--training.local_batch_size=1", "--training.steps=1"]
    gpus = 10**6
    ended = main(["plan", "--config", DEBUG, "--gpus", str(gpus), *options])
    error = capsys.readouterr().err
    assert ended == 2 and f"data_parallel_shard_degree = {gpus}: 16 experts" in error
    assert "start processes for 256" in error
    large = [
        "--parallelism.data_parallel_replicate_degree=100000000000000",
        "--parallelism.data_parallel_shard_degree=1",
    ]
    for search in ([], ["--search"]):
        assert main(["plan", "--config", DEBUG, *options, *large, *search]) == 2
        assert capsys.readouterr().err.endswith("a plan goes up to 262,144; take fewer\n")


@pytest.mark.parametrize("words", [
    ["plan", "--config", DEBUG, "--training.steps", "-3", "--nprok", "2"], ["plan", "--config", DEBUG, "--adaptor="],
    ["schema", "--training.steps=3"], ["init", "--training.steps=3"],
], ids=" ".join)  # fmt: skip
def test_a_mistyped_option_and_a_key_of_a_verb_without_a_config_are_not_taken_for_keys(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    option = next(word for word in reversed(words) if word.startswith("--"))
    assert (
        end.value.code == 2 and f"glm46 {words[0]}: error: unrecognized arguments: {option}" in capsys.readouterr().err
    )


def test_a_section_is_taken_out_of_a_file(capsys):
    recipe = ["plan", "--config", str(Path(DEBUG).with_name("lora_debug.toml"))]
    assert main(recipe) == 0 and "adapters" in capsys.readouterr().out
    assert main([*recipe, "--adapter="]) == 0 and "adapters" not in capsys.readouterr().out


def test_refusing_a_file_loads_no_torch(tmp_path):
    """Bad input is answered at once: in well under the seconds that torch takes to import."""
    code = (
        "import sys; from glm46.cli import main; code = main(sys.argv[1:]); "
        "print(code, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "launch", "--config", str(tmp_path / "none.toml")]
    end = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert end.stdout.splitlines() == [f"starting     {tmp_path / 'none.toml'}", "2 False False"]
    assert end.stderr.startswith("error: ") and "there is no folder" not in end.stderr


@pytest.mark.parametrize(("arguments", "code"), [
    ("schema", 0), (f"train --help --config {DEBUG}", 0), (f"plan --config {DEBUG}", 0),
    ("launch --config nowhere.toml", 141),
])  # fmt: skip
def test_a_closed_output_is_an_error_only_for_verbs_that_do_work(arguments, code):
    command = f"exec 3>&1; ( '{sys.executable}' -m glm46 {arguments} 2>&3; echo $? >&3 ) | true"
    # `true` closes the pipe before the first line.
    end = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert end.stdout.splitlines()[-1] == str(code)
    assert "Traceback" not in end.stdout and "BrokenPipe" not in end.stdout
    assert code or end.stdout == "0\n"


@pytest.mark.parametrize("arguments", ["schema", "train --help", f"plan --config {DEBUG}"])
def test_output_that_cannot_be_written_is_reported(arguments):
    command = f"'{sys.executable}' -m glm46 {arguments} > /dev/full"
    end = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert end.returncode == 2
    assert end.stderr == (
        "error: the output cannot be written: No space left on device; make room or write it elsewhere\n"
    )


def test_work_that_a_closed_output_cuts_off_has_its_own_exit_code(monkeypatch):
    def gone(*_):
        raise BrokenPipeError

    monkeypatch.setattr("glm46.cli._run", gone)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    assert [main([verb]) for verb in ("launch", "train", "prepare", "convert", "plan")] == [141, 141, 141, 141, 0]


COMMANDS = Path(__file__).parents[3] / "glm46" / "commands"
NONE = ["-1", "1.5", "nan", "x", "", "1e3", "1e14", "1_0", "99999999999999", "9" * 5000]  # of no count
COUNT = ["0", *NONE]
AMOUNT = ["0", "-1", "nan", "inf", "-inf", "x", ""]
SHARE = ["-0.1", "1.1", "nan", "inf", "x"]
DEGREES = [f"--{name}-parallel-degree" for name in ("tensor", "pipeline", "expert")]
MODEL = ["--model", "none"]
CONFIG = ["--config", "none.toml"]
GENERATE = ["generate", *MODEL, "--prompt", "a", "--temperature", "1"]
NODES = ["--nodes", "1", "--gpus-per-node", "1"]
CLUSTER = ["setup-cluster", "--type", "ssh", *NODES, "--master-addr", "a", "--nvme-path", "/a"]
TABLE = [
    (["launch", *CONFIG], ["--nproc"], COUNT),
    (["launch", *CONFIG], ["--max-restarts", "--from-hostfile", "--known-step"], NONE),
    (["ablate", *CONFIG], ["--nproc"], COUNT),
    (["preflight", *CONFIG], ["--nproc"], COUNT),
    (["plan", *CONFIG], ["--gpus", "--nproc", "--gpus-per-node", "--document-tokens"], COUNT),
    (["plan", *CONFIG], ["--engines", "--gpus-per-engine", "--completion-tokens"], COUNT),
    (["plan", *CONFIG], ["--network", "--storage", "--price"], AMOUNT),
    (["setup-cluster"], ["--nodes", "--gpus-per-node"], COUNT),
    (CLUSTER, ["--master-port"], COUNT),
    (["inspect", "a"], ["--rows"], NONE),
    (["inspect", "a"], ["--seq_len"], COUNT),
    (GENERATE, ["--nproc", *DEGREES], COUNT),
    (GENERATE, ["--draft-tokens"], COUNT),
    (GENERATE, ["--max-new-tokens", "--top-k"], ["0", "-1", "1.5", "nan", "x"]),
    (GENERATE, ["--temperature"], ["-0.1", "nan", "inf", "x"]),
    (GENERATE, ["--top-p"], [*SHARE, "0"]),
    (GENERATE, ["--min-p"], SHARE),
    (GENERATE, ["--seed"], ["1.5", "nan", str(2**64)]),
    (["evaluate", *MODEL, "--data", "a"], ["--nproc", *DEGREES, "--limit", "--samples", "--lengths"], COUNT),
    (["evaluate", *MODEL, "--data", "a"], ["--draft-tokens"], COUNT),
    (["evaluate", *MODEL, "--data", "a"], ["--fewshot"], NONE),
    (["evaluate", *MODEL, "--data", "a"], ["--depths"], SHARE),
    (["convert", "to-hf", "--checkpoint", "a", "--output", "b"], ["--max-file-gb"], AMOUNT),
    (["checkpoint", "prune", "a"], ["--keep-latest-k", "--keep-every", "--keep-best-k"], COUNT),
    (["rl", "inspect", "a"], ["--samples"], COUNT),
    (["rl", "inspect", "a"], ["--step"], NONE),
    (["benchmark", "links"], ["--network"], AMOUNT),
]  # fmt: skip


@pytest.mark.parametrize(("words", "options", "values"), TABLE, ids=lambda x: " ".join(x[:2]) if x != "a" else x)
def test_a_number_that_is_out_of_range_is_one_line(words, options, values, capsys):
    for option in options:
        for value in values:
            try:
                code = main([*words, f"{option}={value}"])
            except SystemExit as end:
                code = end.code
            printed = capsys.readouterr()
            lines = printed.err.splitlines()
            assert code == 2 and not printed.out, (option, value, printed)
            assert len(lines) == 1 and re.search(f"error: .*{option}.*(expected|must)", lines[0]), (
                option,
                value,
                lines,
            )
            assert len(lines[0]) < 250, lines[0][:100]


def test_the_table_has_every_option_with_a_number():
    """By the types in the sources; a bare int or float takes any number, which the verb then has to check."""
    named = {option for _, options, _ in TABLE for option in options}
    types = "int|float|number|positive|port|above_zero|process_count|whole"
    number = re.compile(rf'"(--[\w-]+)",(?: "--[\w-]+",)?\s*type=(?:{types})')
    found = {option for file in COMMANDS.glob("*.py") for option in number.findall(file.read_text(encoding="utf-8"))}
    assert len(found) > 25 and found <= named, found - named
