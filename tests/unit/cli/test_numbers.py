"""Numbers on the command line that are out of range: one line, exit code 2, before any work."""

import re
from pathlib import Path

import pytest

from glm46.cli import main

COMMANDS = Path(__file__).parents[3] / "glm46" / "commands"
NONE = ["-1", "1.5", "nan", "x", "", "1e14", "99999999999999", "9" * 5000]  # of no count
COUNT = ["0", *NONE]
AMOUNT = ["0", "-1", "nan", "inf", "-inf", "x", ""]
SHARE = ["-0.1", "1.1", "nan", "inf", "x"]
DEGREES = [f"--{name}-parallel-degree" for name in ("tensor", "pipeline", "expert")]
MODEL = ["--model", "none"]
CONFIG = ["--config", "none.toml"]
GENERATE = ["generate", *MODEL, "--prompt", "a", "--temperature", "1"]
TABLE = [
    (["launch", *CONFIG], ["--nproc"], COUNT),
    (["launch", *CONFIG], ["--max-restarts", "--from-hostfile", "--known-step"], NONE),
    (["ablate", *CONFIG], ["--nproc"], COUNT),
    (["preflight", *CONFIG], ["--nproc"], COUNT),
    (["plan", *CONFIG], ["--gpus", "--nproc", "--gpus-per-node", "--document-tokens"], COUNT),
    (["plan", *CONFIG], ["--engines", "--gpus-per-engine", "--completion-tokens"], COUNT),
    (["plan", *CONFIG], ["--network", "--storage", "--price"], AMOUNT),
    (["setup-cluster"], ["--nodes", "--gpus-per-node"], COUNT),
    (GENERATE, ["--nproc", *DEGREES], COUNT),
    (GENERATE, ["--max-new-tokens", "--top-k"], ["0", "-1", "1.5", "nan", "x"]),
    (GENERATE, ["--temperature"], ["-0.1", "nan", "inf", "x"]),
    (GENERATE, ["--top-p"], [*SHARE, "0"]),
    (GENERATE, ["--min-p"], SHARE),
    (GENERATE, ["--seed"], ["1.5", "nan", str(2**64)]),
    (["evaluate", *MODEL, "--data", "a"], ["--nproc", *DEGREES, "--limit", "--samples", "--lengths"], COUNT),
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
            assert len(lines) == 1 and "error: " in lines[0] and option in lines[0], (option, value, lines)
            assert len(lines[0]) < 250, lines[0][:100]


def test_the_table_has_every_option_with_a_number():
    """By the types in the sources; a bare int or float takes any number, which the verb then has to check."""
    named = {option for _, options, _ in TABLE for option in options} | {"--master-port", "--rows", "--seq_len"}
    types = "int|float|positive|port|above_zero|process_count|whole"
    number = re.compile(rf'"(--[\w-]+)",(?: "--[\w-]+",)?\s*type=(?:{types})')
    found = {option for file in COMMANDS.glob("*.py") for option in number.findall(file.read_text(encoding="utf-8"))}
    assert len(found) > 25 and found <= named, found - named
