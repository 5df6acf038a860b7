"""The documents for developers name only files, functions, verbs and options that exist."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import draw_badges, draw_packages, write_troubleshooting
from tests.architecture import rules

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "RELEASING.md",
    "CHANGELOG.md",
    "docs/architecture.md",
    "docs/configuration.md",
    "docs/api.md",
    "docs/infrastructure.md",
    "docs/nccl.md",
    "docs/preflight.md",
    "docs/troubleshooting.md",
)
FOLDERS = "glm46|docs|tests|scripts|train_configs|deploy"
VERBS = {
    path.stem.replace("_", "-")
    for path in (ROOT / "glm46" / "commands").glob("*.py")
    if f"def {path.stem}_command(" in path.read_text(encoding="utf-8")
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_and_verbs_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    paths = re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w/.-]*\w/?", text) + re.findall(r"\./([\w/]+\.sh)", text)
    paths = [path for path in paths if not re.search(r"\b(PACKAGE|GROUP|NAME)\b", path)]  # what a reader fills in
    assert [path for path in paths if not (ROOT / path).exists()] == []
    anchors = re.findall(r"`(docs/[\w/.-]+\.md)#([\w-]+)", text)
    assert [name for page, name in anchors if name not in headings(ROOT / page)] == []
    verbs = re.findall(r"python -m glm46 ([a-z][\w-]*)", text)
    assert set(verbs) - VERBS == set()


def test_links_lead_to_files_and_headings():
    """Links between pages, and to their headings by GitHub's rule; ``docs/index.md`` lists every page beside it."""
    pages = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "RELEASING.md")]
    pages += sorted((ROOT / "docs").rglob("*.md"))
    broken = []
    for page in pages:
        text = re.sub(r"(?s)```.*?```", "", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, heading = target.partition("#")
            there = page if not file else (page.parent / file).resolve()
            if re.match(r"[a-z]+://", target) or (there.exists() and (not heading or heading in headings(there))):
                continue
            broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\((\w+\.md)\)", index)) | {"index.md"}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - listed == set()


def test_tables_and_pages_of_reinforcement_learning_stay_short():
    """A table cell of a hand-written page has at most 25 words, a page of RL at most 1,000."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    long_cells = []
    for page in pages:
        rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        cells = [cell.strip() for row in rows for cell in row.strip("|").split("|")]
        long_cells += [f"{page.name}: {cell[:60]}" for cell in cells if len(cell.split()) > 25]
    assert long_cells == []
    long_pages = [page.name for page in pages if page.name.startswith("rl") and len(page.read_text().split()) > 1000]
    assert long_pages == []


def test_a_page_answers_each_word_of_the_guides():
    """``guide_words.toml`` lists what users of the published guides look for."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    words = tomllib.loads((ROOT / "tests" / "architecture" / "guide_words.toml").read_text(encoding="utf-8"))
    listed = [word for document in words.values() for word in document]
    assert len(words) == 5 and len(listed) == len(set(listed)) > 100
    assert [word for word in listed if word not in text] == []


def test_keys_that_pages_name_exist():
    """Names in backticks, such as ``training.seq_len``; coming_from.md has keys of others in its first column. Known
    beside the keys are a tensor and a key that is refused."""
    reference = ROOT / "docs" / "reference"
    pages = [(reference / name).read_text(encoding="utf-8") for name in ("keys.md", "shape.md")]
    sections = [section for page in pages for section in re.split(r"(?m)^## ", page)[1:]]
    keys = {
        f"{section.splitlines()[0].strip('[]')}.{key}"
        for section in sections for key in re.findall(r"(?m)^\| `(\w+)` \|", section)
    }  # fmt: skip
    known = keys | {key.rpartition(".")[0] for key in keys} | {"model.embed_tokens.weight", "rollout.top_p"}
    files = (".md", ".py", ".toml", ".json", ".jsonl", ".sh", ".txt", ".jinja", ".png", ".safetensors")
    unknown = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"(?m)^\| [^|]*\|", "|", text) if page.name == "coming_from.md" else text
        names = re.findall(r"`((?:[a-z0-9_]+(?:\[\d*\])?\.)+[a-z0-9_]+)(?: = [^`]*)?`", text)
        for name in (re.sub(r"\[\d*\]", "", name) for name in names if not name.endswith(files)):
            if name not in known and any(key.startswith(f"{name.partition('.')[0]}.") for key in keys):
                unknown.append(f"{page.name}: {name}")
    assert unknown == []


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 950


def test_stops_of_the_ways_exist():
    """``file: name`` in docs/architecture.md, and the names that follow it: the file defines them at its top level, or
    in the class before the dot."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"`([\w/]+\.py): ([\w.]+)`((?:, `\w+`)*)", text)
    stops = [(file, name) for file, first, others in rows for name in (first, *re.findall(r"\w+", others))]
    ways = re.split(r"\n\*\*(?:A|An) [\w ]+\*\*\n", text)[1:]
    assert len(ways) == 6 and [len(re.findall(r"(?m)^\d\. `", way)) for way in ways] == [6] * 6
    unknown = []
    for file, name in stops:
        path = ROOT / "glm46" / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        names = {getattr(node, "name", "") for node in tree.body}
        names |= {getattr(node.target, "id", "") for node in tree.body if isinstance(node, ast.AnnAssign)}
        assigned = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        names |= {getattr(target, "id", "") for target in assigned}
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        names |= {f"{node.name}.{getattr(part, 'name', '')}" for node in classes for part in node.body}
        if name not in names:
            unknown.append(f"{file}: {name}")
    assert unknown == []


def test_the_page_names_the_packages():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = re.findall(r"(?m)^\| `([\w/]+)/` \|", text)
    assert sorted(packages) == sorted(package for package in rules.LAYERS if (ROOT / "glm46" / package).is_dir())


def test_the_readme_states_the_size_of_the_core():
    """Within 3 %: a number of the README that nobody has to change with each commit."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(r"core of about ([\d,]+) lines", text)
    modules = rules.read_package(ROOT).values()
    core = [module for module in modules if rules.is_in(module.package, rules.CORE)]
    lines = sum(len(module.path.read_text(encoding="utf-8").splitlines()) for module in core)
    assert int(match[1].replace(",", "")) == pytest.approx(lines, rel=0.03)


@pytest.mark.slow
def test_the_picture_shows_the_imports():
    """``python scripts/draw_packages.py`` writes it."""
    assert (ROOT / "docs" / "images" / "packages.svg").read_text(encoding="utf-8") == draw_packages.picture()


def test_troubleshooting_shows_the_messages_of_the_program():
    """``python scripts/write_troubleshooting.py`` writes it; it refuses a text that is not of exactly one message."""
    assert write_troubleshooting.OUTPUT.read_text(encoding="utf-8") == write_troubleshooting.page()
    with pytest.raises(ValueError, match="0 messages contain"):
        write_troubleshooting.find_message(ROOT / "glm46" / "engine" / "training" / "loop.py", "no such words")


def test_badges_are_those_of_the_project():
    """``python scripts/draw_badges.py`` writes them."""
    assert draw_badges.OUTPUT.read_text(encoding="utf-8") == draw_badges.picture()
    assert [name for name, _ in draw_badges.badges()] == ["version", "Python", "torch", "license"]


def test_reference_is_that_of_the_code_and_the_recipes(tmp_path):
    """``python scripts/write_reference.py`` writes it."""
    subprocess.run([sys.executable, "scripts/write_reference.py", tmp_path], cwd=ROOT, check=True)
    written = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.iterdir()}
    shipped = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").iterdir()}
    assert shipped == written and len(shipped) == 5


def test_every_command_that_starts_a_server_states_its_address():
    """vLLM listens on all addresses by default; SGLang on the loopback address."""
    faults = []
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "deploy").rglob("*"),
        *(ROOT / "glm46").rglob("*.py"),
    ]
    for page in pages:
        if not page.is_file() or "results" in page.parts:
            continue
        text = page.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
        for line in text.splitlines():
            if re.search(r"\bvllm serve [\w{$\"]", line) and "--host" not in line:
                faults.append(f"{page.relative_to(ROOT)}: {line.strip()[:80]}")
    assert faults == []
