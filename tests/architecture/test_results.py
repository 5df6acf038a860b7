"""Every figure that a page quotes has its address: a data file of ``docs/results/data``.

A section of ``docs/results`` names its file in a line ``Data: [...](...)``. In the README and in ``docs`` a paragraph,
an item or a row of a table that links to a page of results quotes from the files of this page, or of the section.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
PAGES = sorted(RESULTS.glob("*.md"))
NOT_FIGURES = re.compile(
    r"`[^`]*`"  # code
    r"|\]\([^)]*\)"  # targets of links
    r"|\b20\d\d-\d\d-\d\d\b"  # dates
    r"|\bGLM-[\d.]+"  # models
    r"|\bGLM-4\.5 to 4\.7\b"
    r"|\b(?:torch|Python|vLLM|TRL|PEFT|verifiers|verl|Slurm|transformers|torchao|torchtitan) \d[\d.]*"  # releases
    r"|^\s*\d+\. "  # items of a list
    r"|\bFlashAttention 3 and 4\b",
    re.MULTILINE,
)
NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?!\w|\.\d)")


def figures(text: str) -> set[float]:
    """The magnitudes of the numbers of a text, without names, releases, dates and code."""
    text = NOT_FIGURES.sub(" ", text)
    text = re.sub(r"(?<=\d)-(?=\d)", " ", text)  # a range
    return {abs(float(number.rstrip(",").replace(",", ""))) for number in NUMBER.findall(text)}


def stated(value: object) -> set[float]:
    """The numbers of a data file, those in its sentences included."""
    if isinstance(value, dict):
        return {number for key, item in value.items() for number in stated(key) | stated(item)}
    if isinstance(value, list):
        return {number for item in value for number in stated(item)}
    if isinstance(value, str):
        return figures(value)
    return {abs(float(value))} if isinstance(value, (int, float)) else set()


def sections(page: Path) -> Iterator[tuple[str, str, list[Path]]]:
    """Anchor, text and data files of each section; the first one is the page's head."""
    for part in re.split(r"(?m)^(?=#+ )", page.read_text(encoding="utf-8")):
        if not part.strip():
            continue
        title, _, text = part.partition("\n")
        anchor = re.sub(r"[^\w\- ]", "", title.lstrip("# ").lower()).strip().replace(" ", "-")
        links = re.findall(r"(?m)^Data: \[[^\]]*\]\(([^)]*)\)$", text)
        yield anchor, re.sub(r"(?s)```.*?```", "", text), [page.parent / link for link in links]


def data_files(page: Path, anchor: str) -> list[Path]:
    """The files of one section, or of the page if the anchor names a section without its own or none."""
    files = {name: names for name, _, names in sections(page)}
    return files.get(anchor) or [file for names in files.values() for file in names]


def numbers_of(files: list[Path]) -> set[float]:
    return {number for file in files for number in stated(tomllib.loads(file.read_text(encoding="utf-8")))}


def passages(text: str) -> Iterator[str]:
    """Paragraphs, items and rows; one that ends with a colon and a link goes with the table that it introduces."""
    text = re.sub(r"(?s)```.*?```", "(code)", text)
    introduction = ""
    for block in re.split(r"\n\s*\n", text):
        if block.lstrip().startswith("|"):
            yield from ([introduction + "\n" + block] if introduction else block.splitlines())
        else:
            yield from re.split(r"\n(?=\s*(?:\* |\d+\. ))", block)
        introduction = block if block.rstrip().endswith(":") and "results/" in block else ""


def unknown_figures(passage: str, folder: Path) -> set[float]:
    """Numbers of a passage that the data of the results to which it links do not have."""
    links = re.findall(r"\]\(([^)#\s]*results/\w+\.md)#?([\w-]*)\)", passage)
    if not links:
        return set()
    files = [file for page, anchor in links for file in data_files((folder / page).resolve(), anchor)]
    known = numbers_of(files)
    return {number for number in figures(passage) - known if not any(rounds_to(value, number) for value in known)}


def rounds_to(value: float, quoted: float) -> bool:
    """True if three or more digits of a quoted figure are those of a value with more digits."""
    digits = f"{quoted:g}"
    decimals = len(digits.partition(".")[2])
    return len(digits.replace(".", "").lstrip("0")) >= 3 and round(value, decimals) == quoted


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_of_a_page_of_results_are_in_its_data(page):
    for anchor, text, files in sections(page):
        if files:
            assert figures(text.replace("\nData: ", "\n")) - numbers_of(files) == set(), anchor


def test_figures_that_pages_quote_are_in_the_data():
    faults = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for passage in passages(page.read_text(encoding="utf-8")):
            for number in sorted(unknown_figures(passage, page.parent)):
                faults.append(f"{page.name}: {number:g} in: {' '.join(passage.split())[:90]}")
    assert faults == []


def test_a_changed_figure_is_found():
    quoted = "One H100 trains at 3,790 tokens/s ([Flash](docs/results/gpu_h100.md#glm-47-flash-with-lora))."
    assert unknown_figures(quoted, ROOT) == set()
    assert unknown_figures(quoted.replace("3,790", "3,970"), ROOT) == {3970.0}
    table = "Measured ([H100](results/gpu_h100.md)):\n\n| run | tokens/s |\n|---|---|\n| eager | 23,392 |\n"
    assert [unknown_figures(passage, ROOT / "docs") for passage in passages(table)][-1] == {23392.0}


def test_every_data_file_belongs_to_one_section_and_says_when_it_was_measured():
    named = [file.resolve() for page in PAGES for _, _, files in sections(page) for file in files]
    files = sorted(file for file in (RESULTS / "data").rglob("*") if file.is_file())
    assert sorted(named) == files
    for file in files:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        assert data["date"].year == 2026 and data["subject"], file
        model, machine, layout = file.relative_to(RESULTS / "data").parts
        assert layout.endswith(".toml") and model and machine
