"""Every key of a run on the terminal, as ``--help`` prints it after the options of a verb."""

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from glm46.config.schema import SectionRows, describe_keys

_ARRAYS_OF_TABLES = ("data.sources", "data.stages")


def print_keys() -> None:
    """Print each section with its keys: values and default on one line, the meaning below it."""
    # No guessing of numbers and paths to colour: what is bold is a key, what is dim is a type.
    console = Console(highlight=False)
    for section in describe_keys():
        _print_section(console, section)


def _print_section(console: Console, section: SectionRows) -> None:
    header = f"[[{section.name}]]" if section.name in _ARRAYS_OF_TABLES else f"[{section.name}]"
    console.print()
    console.print(Text.assemble((header, "bold green"), "  ", section.meaning))
    for row in section.rows:
        default = row.default if row.default in ("required", "absent") else f"default {row.default}"
        title = Text.assemble((row.key, "bold"), "  ", (f"{row.values}, {default}", "dim"))
        console.print(Padding(title, (0, 0, 0, 2), expand=False))
        console.print(Padding(Text(row.meaning), (0, 0, 0, 6), expand=False))
