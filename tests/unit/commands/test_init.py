"""The shipped TOML files are written from an installed package; a path that leads nowhere ends a verb in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm46.cli import main

ROOT = Path(__file__).parents[3]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix not in ("", ".pyc"))


SHIPPED = files(ROOT / "train_configs")


def test_init_writes_missing_files_and_keeps_existing_ones(tmp_path, capsys):
    folder = tmp_path / "new" / "configs"
    assert main(["init", str(folder)]) == 0
    assert files(folder) == SHIPPED
    assert (folder / "debug.toml").read_bytes() == (ROOT / "train_configs" / "debug.toml").read_bytes()
    assert main(["init", str(folder)]) == 0
    assert "has them all" in capsys.readouterr().out
    (folder / "debug.toml").write_text("mine")
    (folder / "schema.json").unlink()
    assert main(["init", str(folder)]) == 2
    assert "debug.toml: differs from the shipped file" in capsys.readouterr().err
    assert (folder / "debug.toml").read_text() == "mine" and not (folder / "schema.json").exists()
    for name in files(folder):
        (folder / name).write_text("mine")
    (tmp_path / "file").touch()
    for place, said in ((folder, f"{len(SHIPPED) - 1} files differ"), (tmp_path / "file", "file: cannot be")):
        assert main(["init", str(place)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line, line


def test_a_file_in_place_of_a_folder_ends_it_before_any_file_is_written(tmp_path, capsys):
    (tmp_path / "programs").touch()
    assert main(["init", str(tmp_path)]) == 2
    assert "cannot be read or written" in capsys.readouterr().err
    assert files(tmp_path) == []


def test_a_wheel_holds_configs_and_schema(tmp_path):
    """From the one place where they lie in the checkout; built as pip builds it, and run from what was built."""
    pytest.importorskip("setuptools", minversion="77")
    command = ["setup.py", "-q", "egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", tmp_path / "site"]
    built = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    assert files(tmp_path / "site" / "glm46" / "train_configs") == SHIPPED
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "glm46", "init"]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=300, check=True)
    assert files(tmp_path / "train_configs") == SHIPPED


CONFIGS = Path(__file__).parents[3] / "train_configs"
LAUNCH = ["launch", "--config", str(CONFIGS / "debug.toml"), "--nproc", "1"]
NEW = ["--job.dump_folder", "new"]
COMMANDS = [
    [*LAUNCH, "--job.dump_folder", "PATH"],
    [*LAUNCH, *NEW, "--checkpoint.load_path", "PATH"], [*LAUNCH, *NEW, "--checkpoint.initial_load_path", "PATH"],
    [*LAUNCH, "--hostfile", "PATH"], ["generate", "--model", "PATH", "--prompt", "a"],
    ["generate", "--checkpoint", "PATH", "--prompt", "a"], ["evaluate", "--checkpoint", "PATH", "--tasks", "needle"],
    ["convert", "to-hf", "--checkpoint", "PATH", "--output", "new"],
    ["convert", "from-hf", "--model", "PATH", "--output", "new"],
    ["convert", "merge", "--base", "PATH", "--adapter", "PATH", "--output", "new"],
    ["prepare", "--input", "PATH", "--output", "new"],
    ["prepare", "--recipe", "PATH"], ["plan", "--config", "PATH"], ["rl", "inspect", "PATH"], ["inspect", "PATH"],
    ["plan", "--config", str(CONFIGS / "debug.toml"), "--measured", "PATH"],
    ["plot", "PATH"], ["checkpoint", "list", "PATH"], ["checkpoint", "verify", "PATH"], ["checkpoint", "show", "PATH"],
    ["checkpoint", "prune", "PATH", "--keep-latest-k", "1"],
]  # fmt: skip


@pytest.mark.parametrize("path", ["loop", "one", "gone", "one/below", "absent"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(word[-30:] for word in words))
def test_a_path_that_leads_nowhere_is_one_line(command, path, tmp_path, monkeypatch, capsys):
    if path == "absent" and "--job.dump_folder" in command[-2]:
        return
    monkeypatch.chdir(tmp_path)
    for link, target in {"loop": "loop", "one": "other", "other": "one", "gone": "absent"}.items():
        Path(link).symlink_to(target)
    assert main([word.replace("PATH", path) for word in command]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ") and path.split("/")[0] in line, line
    assert {each.name for each in tmp_path.iterdir()} <= {"loop", "one", "other", "gone"} | {".new.lock"}
