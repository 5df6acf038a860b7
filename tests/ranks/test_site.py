"""The site of the documentation: links and headings are found, and a browser shows pages and search."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import look_at_site

ROOT = Path(__file__).parents[2]
SECONDS = 600

pytest.importorskip("mkdocs", reason="not installed; pip install '.[docs]'")
pytest.importorskip("material", reason="not installed; pip install '.[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built without a warning: of a link, a heading, or a page that the navigation lacks."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    variables = {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.thorough
def test_site_has_every_page_in_four_parts_and_knows_keys(site):
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not (site / page).is_file()} == set()
    first = (site / "index.html").read_text(encoding="utf-8")
    tabs = re.findall(r'(?s)class="md-tabs__link">\s*([\w -]+?)\s*</a>', first)
    assert tabs == ["Home", "Tutorials", "How to", "Reference", "Explanation"]
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert any("state_offload" in entry["text"] for entry in entries if "keys" in entry["location"])
    outside = [page for page in site.rglob("*.html") if 'src="http' in page.read_text(encoding="utf-8")]
    assert outside == []  # nothing is loaded from other hosts


@pytest.mark.thorough
@pytest.mark.skipif(not any(map(shutil.which, look_at_site.BROWSERS)), reason="there is no chromium")
def test_a_browser_shows_the_first_page_a_key_and_what_the_search_finds(site):
    views = look_at_site.look(site)
    assert all(number > 0 for number, _, _ in views.values())
    assert views["first"][0] == 5 and "Tutorials" in views["first"][1]
    assert "state_offload" in views["key"][1]
    assert "Keys" in views["search"][1] and re.search(r"\d+ matching documents?", views["search"][1])
    assert all(picture.startswith(b"\x89PNG") for _, _, picture in views.values())
