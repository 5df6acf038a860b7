#!/usr/bin/env python3
"""Write docs/reference: the keys of a TOML file, and of the shape of a model, from its schema, the verbs from their
parsers, the metrics from their table, the recipes from their heads.

    python scripts/write_reference.py            # into docs/reference
    python scripts/write_reference.py FOLDER
"""

import argparse
import re
import sys
from pathlib import Path
from pkgutil import resolve_name

import tomli

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from glm46.config.options import VERBS, VerbParser  # noqa: E402
from glm46.config.schema import describe_keys, describe_shape  # noqa: E402
from glm46.engine.observe.metrics import METRICS  # noqa: E402

_PLANNED = re.compile(r"(?m)^# Planned on ([\d,]+) x (\w+): ([\d,]+) GiB")
_MADE = "Written by `scripts/write_reference.py`; a test holds it current.\n"


class _Parser(Exception):
    """Carries the parser of a verb out of its command, at the moment it would parse."""

    def parse(self, *_):
        raise _Parser(self)


def pages() -> dict[str, str]:
    """The text of each page by its file name."""
    return {
        "keys.md": _keys(),
        "shape.md": _shape(),
        "verbs.md": _verbs(),
        "metrics.md": _metrics(),
        "recipes.md": _recipes(),
    }


def _keys() -> str:
    """One table for each section of a config."""
    parts = [f"# Keys\n\nEvery key of a run's TOML file, in the order of the file. {_MADE}"]
    for section in describe_keys():
        rows = [(f"`{row.key}`", row.values, f"`{row.default}`", row.meaning) for row in section.rows]
        meaning = f"{section.meaning[:1].upper()}{section.meaning[1:]}"
        parts.append(f"## {section.header}\n\n{meaning}\n\n{_table(('key', 'values', 'default', 'meaning'), rows)}")
    return "\n".join(parts).replace("docs/reference/shape.md", "[shape](shape.md)")


def _shape() -> str:
    """One table for [model.shape], and one for its table of RoPE scaling."""
    parts = [
        "# Shape\n\nKeys of [`[model.shape]`](keys.md#model) in a TOML file, `--model.shape.KEY VALUE` on the command "
        "line. They have the names of Hugging Face's `config.json`, whose values can be copied. Keys that the table "
        f"does not set have the value of the preset, `model.flavor`. {_MADE}"
    ]
    for section in describe_shape():
        preset = "of the preset" if section.header == "[model.shape]" else None
        rows = [(f"`{row.key}`", row.values, preset or f"`{row.default}`", row.meaning) for row in section.rows]
        meaning = f"{section.meaning[:1].upper()}{section.meaning[1:]}"
        parts.append(f"## {section.header}\n\n{meaning}\n\n{_table(('key', 'values', 'default', 'meaning'), rows)}")
    return "\n".join(parts)


def _verbs() -> str:
    """One section for each verb, and one table for it or for each of its kinds."""
    parts = [
        f"# Verbs\n\n`python -m glm46 VERB`, and what each verb takes. Verbs with `--config` also take "
        f"`--section.key VALUE` for every [key](keys.md). {_MADE}"
    ]
    for verb, meaning in VERBS.items():
        parts.append(f"## {verb}\n\n{_sentence(meaning.partition('; see ')[0])}\n")
        if verb == "prepare":
            keys = "[data.sources.recipe](keys.md#datasourcesrecipe)"
            parts.append(f"With `--input` or `--recipe` it takes the keys of {keys} as options instead.\n")
        parser = parser_of(verb)
        kinds = next((one for one in parser._actions if isinstance(one, argparse._SubParsersAction)), None)
        if kinds is None:
            parts.append(_options(verb, parser))
            continue
        helps = {choice.dest: choice.help for choice in kinds._choices_actions}
        for kind, inner in kinds.choices.items():
            parts.append(f"`{verb} {kind}`: {helps[kind]}.\n\n{_options(f'{verb} {kind}', inner)}")
    return "\n".join(parts)


def parser_of(verb: str) -> VerbParser:
    """The parser of a verb, at the moment it would parse."""
    parse = VerbParser.parse_known_args
    VerbParser.parse_known_args = _Parser.parse
    try:
        module = verb.replace("-", "_")
        resolve_name(f"glm46.commands.{module}:{module}_command")([])
    except _Parser as caught:
        return caught.args[0]
    finally:
        VerbParser.parse_known_args = parse
    raise AssertionError(f"{verb} parses nothing")


def _options(command: str, parser: argparse.ArgumentParser) -> str:
    """The table of the options of a verb, or of one of its kinds."""
    rows = [
        (_shown(action), "required" if action.required else "", parser._get_formatter()._expand_help(action))
        for action in parser._actions
        if action.help is not argparse.SUPPRESS and "--help" not in action.option_strings
    ]
    return _table((f"`{command}`", "", "meaning"), rows) if rows else ""


def _shown(action: argparse.Action) -> str:
    """An option with its value, and the default unless its help states it."""
    value = action.metavar or " | ".join(map(str, action.choices or ())) or action.dest.upper()
    words = ["`" + ", ".join(action.option_strings) + "`"] if action.option_strings else []
    words += [value] if action.nargs != 0 else []
    if action.default and isinstance(action.default, (str, int, float, Path)) and "default" not in (action.help or ""):
        words.append(f"(default {action.default})")
    return " ".join(words)


def _metrics() -> str:
    """One table for each group of metrics."""
    parts = [
        "# Metrics\n\nThe columns of metrics.jsonl. `name/part` stands for one column per part. TensorBoard shows "
        f"`group/name`. {_MADE}"
    ]
    for group in dict.fromkeys(metric.group for metric in METRICS):
        rows = [
            (f"`{one.name}`" if one.per is None else f"`{one.name}`/{one.per}", one.unit, one.meaning)
            for one in METRICS if one.group == group
        ]  # fmt: skip
        parts.append(f"## {group}\n\n{_table(('metric', 'unit', 'meaning'), rows)}")
    return "\n".join(parts)


def _recipes() -> str:
    """One row for each shipped TOML file, with the first sentence of its head and its planned memory."""
    rows = []
    for file in sorted((ROOT / "train_configs").glob("*.toml")):
        text = file.read_text(encoding="utf-8")
        table = tomli.loads(text)
        head = " ".join(line.removeprefix("# ") for line in text.partition("\n\n")[0].splitlines()[1:])
        start = table.get("checkpoint", {}).get("initial_load_path")
        what = re.split(r"\. |:? #", head)[0].rstrip(".")
        planned = _PLANNED.search(text)
        gpus, gib = (f"{planned[1]} {planned[2]}", planned[3]) if planned else ("", "")
        rows.append((f"`{file.name}`", what, table["model"]["flavor"], gpus, gib, f"`{start}`" if start else ""))
    titles = ("file", "what it is", "model", "GPUs", "GiB of each", "starts from")
    explained = (
        "The TOML files of `train_configs`. GPUs and the memory of each are those of the recipe's plan "
        "(`python -m glm46 plan`); files without them run on a CPU. "
    )
    return f"# Recipes\n\n{explained}{_MADE}\n{_table(titles, rows)}"


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "".join(f"| {' | '.join(cell.replace(' | ', ' &#124; ') for cell in line)} |\n" for line in lines)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def main(folder: Path) -> None:
    """Write the pages."""
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs" / "reference")
