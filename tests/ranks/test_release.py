"""Wheel and sdist: built by the backend that pip calls, installed beside the dependencies only, and used from an empty
folder."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import tomli

from glm46.config.options import VERBS

ROOT = Path(__file__).parents[2]
VERSION = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
SOURCES = ("README.md", "LICENSE", "pyproject.toml", "setup.py", "glm46", "train_configs")
SECONDS = 600


def call(*command, cwd: Path, **variables: str) -> str:
    """What a program prints; its failure is an AssertionError."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=kept | variables, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def backend(hook: str, source: Path, output: Path) -> Path:
    """The file that a hook of the build backend makes of a folder of sources."""
    code = f"from setuptools import build_meta; print(build_meta.{hook}({str(output)!r}))"
    return output / call(sys.executable, "-c", code, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Of the files of the checkout that git knows."""
    folder = tmp_path_factory.mktemp("sources")
    listed = subprocess.check_output(["git", "ls-files", "-z", *SOURCES], cwd=ROOT, text=True).split("\0")
    for name in filter(None, listed):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return backend("build_sdist", folder, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """Of what the sdist holds, as pip makes it where there is no wheel."""
    folder = tmp_path_factory.mktemp("unpacked")
    call("tar", "-xzf", sdist, cwd=folder)
    return backend("build_wheel", folder / f"glm46-{VERSION}", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def program(wheel, tmp_path_factory) -> Path:
    """``glm46`` of an environment that has the wheel and, from this one, the packages that it needs."""
    folder = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", folder, cwd=folder)
    python = folder / "bin" / "python"
    call(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = folder.glob("lib/python3*/site-packages")
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "of_the_tests.pth").write_text("\n".join(packages) + "\n")
    return folder / "bin" / "glm46"


@pytest.mark.thorough
def test_sdist_and_wheel_hold_every_file_of_the_package(sdist, wheel):
    names = subprocess.check_output(["git", "ls-files", "glm46", "train_configs"], cwd=ROOT, text=True).splitlines()
    inside = {name if name.startswith("glm46/") else f"glm46/{name}" for name in names}
    assert inside - set(zipfile.ZipFile(wheel).namelist()) == set()
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {*names, "README.md", "LICENSE", "pyproject.toml", "setup.py"} - packed == set()


def files_of(folder: Path) -> dict[Path, bytes]:
    """The content of all files below a folder, but for what Python has compiled."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(folder): path.read_bytes() for path in files}


@pytest.mark.thorough
def test_verbs_run_from_an_empty_folder(program, tmp_path):
    assert f"glm46 {VERSION}" in call(program, "--version", cwd=tmp_path)
    for verb in VERBS:
        assert f"glm46 {verb}" in call(program, verb, "--help", cwd=tmp_path)
    assert call(program, "schema", cwd=tmp_path) == (ROOT / "train_configs" / "schema.json").read_text()
    assert list(tmp_path.iterdir()) == []
    call(program, "init", cwd=tmp_path)
    assert files_of(tmp_path / "train_configs") == files_of(ROOT / "train_configs")
    assert "debug" in call(program, "plan", "--config", "train_configs/debug.toml", cwd=tmp_path)
    call(program, "prepare", "--config", "train_configs/sft_debug.toml", cwd=tmp_path)
    assert "every shard verified" in call(program, "inspect", "data/debug_chats", cwd=tmp_path)
    code = "import glm46; print(glm46.__file__, glm46.model_shape('15B').total_parameters)"
    assert str(program.parents[1]) in call(program.parent / "python", "-c", code, cwd=tmp_path)
