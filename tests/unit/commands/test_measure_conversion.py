"""The small form of scripts/measure/measure_conversion.py: memory and bytes read of import, export and conversion."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/measure/measure_conversion.py"


@pytest.mark.slow
def test_a_rank_reads_and_holds_only_what_it_keeps(tmp_path):
    command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path), "--gb", "0.1", "--rounds", "0"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "0.099 GB in 21 files" in ended.stdout
    assert ended.stdout.count("keeps 24.68 MB, reads 25.") == 4  # a quarter each, and the headers
    for what in ("convert from-hf", "convert to-hf", "import", "export"):
        assert f"{what}: " in ended.stdout
    assert list(tmp_path.iterdir()) == []
