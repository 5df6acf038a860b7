"""Missing and unfit packages are one message, before torch is imported."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from glm46.cli import main
from glm46.commands.environment import describe_version, unfit_packages

ROOT = Path(__file__).parents[3]
DEBUG = str(ROOT / "train_configs" / "debug.toml")


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
    code = "import sys, glm46.commands.environment as e; e.unfit_packages(); print('torch' in sys.modules)"
    end = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert end.stdout == "False\n"
