"""Exit 0 when this interpreter has every package that pyproject.toml asks for, in a version that fits; else 1.

Usage: check_environment.py PYPROJECT EXTRA[,EXTRA]. Imports nothing heavy, so that it costs a tenth of a second.
"""

import sys
from importlib.metadata import PackageNotFoundError, version


def is_complete(pyproject: str, extras: list[str]) -> bool:
    """Whether the dependencies of a project, with those of the extras named, are installed here."""
    try:
        import tomli
        from packaging.requirements import Requirement
    except ImportError:
        return False
    with open(pyproject, "rb") as file:
        project = tomli.load(file)["project"]
    wanted = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    try:
        return all(
            requirement.specifier.contains(version(requirement.name), prereleases=True)
            for requirement in map(Requirement, wanted)
        )
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(not is_complete(sys.argv[1], [extra for extra in sys.argv[2].split(",") if extra]))
