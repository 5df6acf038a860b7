"""Missing and unfit packages are one message, before torch is imported."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement

from glm46.cli import main
from glm46.operate.launch.environment import describe_version, unfit_packages

ROOT = Path(__file__).parents[4]
DEBUG = str(ROOT / "train_configs" / "debug.toml")


def test_every_dependency_has_a_lower_bound_of_which_a_constraint_is_made():
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    made = subprocess.run(
        [sys.executable, ROOT / "scripts" / "lowest_versions.py"], capture_output=True, text=True, check=True
    ).stdout
    pinned = dict(line.split("==") for line in made.splitlines())
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    assert set(pinned) == {Requirement(line).name for line in lines}
    for requirement in map(Requirement, lines):
        assert requirement.specifier.contains(pinned[requirement.name]), requirement


def test_lines_of_one_package_have_one_lower_bound():
    """An extra with a lower one would state what the job with the lowest versions does not install."""
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    bounds = {}
    for requirement in map(Requirement, lines):
        bounds.setdefault(requirement.name, set()).add(str(requirement.specifier))
    assert {name: of_name for name, of_name in bounds.items() if len(of_name) > 1} == {}


@pytest.fixture
def versions(monkeypatch):
    """Versions that are put over those of this interpreter; None is missing."""
    put_over: dict[str, str | None] = {}
    true = metadata.version

    def version(name: str) -> str:
        found = put_over.get(name, true)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return true(name) if found is true else found

    monkeypatch.setattr(metadata, "version", version)
    return put_over


@pytest.mark.parametrize("torch", ["2.11.0", "2.13.0+cpu", "2.15.1+cu130", "2.15.0.dev20260701", "2.15.0a0+git1"])
def test_torch_in_range_fits(versions, torch):
    versions["torch"] = torch
    assert unfit_packages() == []


def test_all_unfit_packages_are_one_message(versions, capsys):
    versions |= {"torch": "2.16.0", "torchdata": None}
    assert main(["launch", "--config", DEBUG, "--training.seq_len", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {sys.executable}: torch is 2.16.0, and torch<2.16,>=2.11 is needed; torchdata is")
    assert "-m pip install 'torch<2.16,>=2.11' 'torchdata>=0.11'" in line
    assert main(["train", "--config", DEBUG]) == 2
    with pytest.raises(SystemExit) as end:  # the help needs none of them
        main(["launch", "--help"])
    assert end.value.code == 0


def test_extras_are_asked_for_by_name(versions):
    versions["pyarrow"] = None
    assert [fault for fault, _ in unfit_packages(["data"])] == ["pyarrow is missing"]
    assert unfit_packages() == []


def test_version_prints_the_versions_of_a_bug_report(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"{describe_version()}\n"
    assert f"torch {metadata.version('torch')}, Python {sys.version.split()[0]}" in describe_version()


def test_the_check_of_packages_imports_no_torch():
    code = "import sys, glm46.operate.launch.environment as e; e.unfit_packages(); print('torch' in sys.modules)"
    end = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert end.stdout == "False\n"


PYTHON = """#!/bin/bash
case "$*" in
*"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo venv >> "$root/done" ;;
*glm46.operate.launch.environment*) [ -e "$root/has_all" ] || { [[ $0 == */.venv/* ]] && [ -e "$root/installed" ]; } ;;
*"pip install"*) echo install >> "$root/done"; sleep 0.5; touch "$root/installed" ;;
esac
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
def test_nodes_of_a_job_that_start_at_once_install_into_their_checkout_once(tmp_path, is_first):
    """With a stand-in for Python, which has everything once it has been installed."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "python3", "python3.13"):
        (tmp_path / "bin" / name).write_text(PYTHON)
        (tmp_path / "bin" / name).chmod(0o755)
    if not is_first:
        (tmp_path / "has_all").touch()
    command = f'. {ROOT}/scripts/environment.sh; use_environment ""; ls -l /proc/$$/fd; echo "uses $python"'
    variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "root": str(tmp_path)}
    nodes = [
        subprocess.Popen(["bash", "-euc", command], env=os.environ | variables, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [node.communicate(timeout=300)[0] for node in nodes]
    assert all(node.returncode == 0 for node in nodes) and not any(".lock" in text for text in said)
    if not is_first:
        assert not (tmp_path / "done").exists() and not (tmp_path / ".venv").exists()
        return
    assert (tmp_path / "done").read_text() == "venv\ninstall\n"
    assert sum(f"uses {tmp_path}/.venv/bin/python" in text for text in said) == 3


@pytest.mark.parametrize(("text", "extras"), [
    ("[job]\n", ""), ("[rl]\n", "rl"), ("[[rl.rewards]]\n", "rl"), ("[job]\n  [ rl.prompts ]\n", "rl"),
    ("# [rl]\n[rlx]\n", ""),
])  # fmt: skip
def test_a_file_with_rl_is_run_with_its_extra(text, extras, tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "run_train.sh").write_text((ROOT / "run_train.sh").read_text())
    lines = (ROOT / "scripts" / "environment.sh").read_text()
    (tmp_path / "scripts" / "environment.sh").write_text(lines + '\nuse_environment() { echo "<$1>"; exit; }\n')
    (tmp_path / "run.toml").write_text(text)
    end = subprocess.run(
        ["bash", "run_train.sh"], cwd=tmp_path, env=os.environ | {"CONFIG_FILE": "run.toml"}, capture_output=True,
        text=True, timeout=300, check=True,
    )  # fmt: skip
    assert end.stdout == f"starting     run.toml\n<{extras}>\n"
