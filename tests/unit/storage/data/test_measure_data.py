"""The small form of scripts/measure/measure_data.py: from text to batches, each result beside its goal."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[4] / "scripts/measure/measure_data.py"


@pytest.mark.slow
def test_the_path_from_text_to_batches_is_measured_beside_its_goals():
    sizes = ["--batch", "2", "--seq-len", "128", "--rounds", "1", "--megabytes", "1", "--shard-tokens", "2000000"]
    ended = subprocess.run([sys.executable, str(SCRIPT), *sizes], capture_output=True, text=True)
    assert not ended.stderr  # the script compares the ids of both tokenizers before it compares their times
    lines = ended.stdout.splitlines()[1:]
    names = ("tokenise", "against `tokenizers`", "prepare", "find duplicates", "through StatefulDataLoader", "without",
             "disk", "seek", "99th percentile", "state")  # fmt: skip
    assert len(lines) == len(names) and all(name in line for name, line in zip(names, lines, strict=True))
    assert all(float(line[61:70]) > 0 and line.endswith(("held", "MISSED")) for line in lines)
    assert ended.returncode == int(any(line.endswith("MISSED") for line in lines))
    # These two are sizes, which do not depend on the load of the machine.
    assert lines[6].endswith("held") and lines[9].endswith("held")
