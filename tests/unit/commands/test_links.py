"""Paths whose links lead to themselves, to each other or nowhere, and folders that do not exist: one line before any
work, exit code 2, and nothing is written."""

from pathlib import Path

import pytest

from glm46.cli import main

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
