"""Print a constraints file for pip: each dependency of pyproject.toml at its lower bound, the highest of its lines.

    python scripts/lowest_versions.py > lowest.txt
    pip install --constraint lowest.txt --editable '.[hf,data,plot,eval,test]'

Without arguments it takes all extras, else those that are named.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import tomli
from packaging.requirements import Requirement
from packaging.version import Version

_PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def lowest_versions(extras: Sequence[str] = ()) -> dict[str, str]:
    """The lower bound of each dependency by its name; of those of the extras too, or of all extras.

    Raises:
        ValueError: a dependency has no lower bound.
    """
    project = tomli.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras or optional for line in optional[extra])]
    lowest: dict[str, str] = {}
    for requirement in map(Requirement, lines):
        bounds = [one.version for one in requirement.specifier if one.operator == ">="]
        if len(bounds) != 1:
            raise ValueError(f"{requirement}: needs one lower bound, as >=VERSION")
        lowest[requirement.name] = max(lowest.get(requirement.name, "0"), bounds[0], key=Version)
    return lowest


if __name__ == "__main__":
    for name, version in lowest_versions(sys.argv[1:]).items():
        print(f"{name}=={version}")
