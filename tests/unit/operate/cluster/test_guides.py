"""docs/nccl.md names the variables that preflight warns of, with its verdicts; links of the guides exist."""

import re
from pathlib import Path

from glm46.operate.cluster.network import NCCL_VARIABLES

DOCS = Path(__file__).parents[4] / "docs"


def test_the_page_of_nccl_has_the_verdicts_of_the_program():
    part = (DOCS / "nccl.md").read_text().partition("## What preflight calls a fault")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| (`NCCL_.*?) \| (FAIL|WARN)", part)
    stated = {name: verdict for names, verdict in rows for name in re.findall(r"`(\w+)`", names)}
    assert stated == {name: verdict for name, (verdict, _) in NCCL_VARIABLES.items()}


def test_pages_scripts_and_headings_that_the_guides_name_exist():
    missing = []
    for page in ("infrastructure", "nccl", "preflight", "troubleshooting"):
        text = (DOCS / f"{page}.md").read_text()
        for path, heading in re.findall(r"`((?:docs|scripts|tests|deploy)/[\w/.-]+)(?:#([\w-]+))?`", text):
            file = DOCS.parent / path
            titles = re.findall(r"(?m)^#+ (.+)$", file.read_text()) if file.suffix == ".md" and file.is_file() else []
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            if not file.exists() or (heading and heading not in anchors):
                missing.append(f"{page}.md: {path}#{heading}")
    assert missing == []
