"""docs/nccl.md names the variables that preflight warns of, with its verdicts."""

import re
from pathlib import Path

from glm46.operate.cluster.network import NCCL_VARIABLES

DOCS = Path(__file__).parents[4] / "docs"


def test_the_page_of_nccl_has_the_verdicts_of_the_program():
    part = (DOCS / "nccl.md").read_text().partition("## What preflight calls a fault")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| (`NCCL_.*?) \| (FAIL|WARN)", part)
    stated = {name: verdict for names, verdict in rows for name in re.findall(r"`(\w+)`", names)}
    assert stated == {name: verdict for name, (verdict, _) in NCCL_VARIABLES.items()}
