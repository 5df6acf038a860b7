"""Whether this interpreter has what glm46 asks for: one message about all packages, before any is imported.

``python -m glm46.commands.environment EXTRA,EXTRA`` exits with 0 or 1; the scripts ask it about each interpreter they
find. Only the standard library is imported until the packages that are needed to ask are known to be there.
"""

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import glm46

_ROOT = Path(glm46.__path__[0]).parent
_PROJECT = _ROOT / "pyproject.toml"


def unfit_packages(extras: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Each package that is missing or of a version that does not fit: what is wrong, and what pip would be asked for.

    Args:
        extras: names of optional dependencies of the project that are needed too.
    """
    try:
        from packaging.requirements import Requirement

        wanted = [Requirement(line) for line in _requirements(extras)]
    except ImportError as error:
        return [(f"{error.name} is missing", str(error.name))]
    unfit = []
    for requirement in wanted:
        if requirement.marker and not any(requirement.marker.evaluate({"extra": name}) for name in ("", *extras)):
            continue
        asked = f"{requirement.name}{requirement.specifier}"
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            unfit.append((f"{requirement.name} is missing", asked))
        else:
            if not requirement.specifier.contains(version, prereleases=True):
                unfit.append((f"{requirement.name} is {version}, and {asked} is needed", asked))
    return unfit


def describe_unfit(unfit: Sequence[tuple[str, str]]) -> str:
    """One message about packages that do not fit, and what to do."""
    what = "; ".join(fault for fault, _ in unfit)
    asked = " ".join(f"'{requirement}'" for _, requirement in unfit)
    script = "; ./run_train.sh makes an environment that has all" if (_ROOT / "run_train.sh").is_file() else ""
    return f"{sys.executable}: {what}: {sys.executable} -m pip install {asked}{script}"


def describe_version() -> str:
    """The versions that a report of a fault needs."""
    own = _project()["version"] if _PROJECT.is_file() else metadata.version("glm46")
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "missing"
    return f"glm46 {own}, torch {torch}, Python {sys.version.split()[0]}"


def _requirements(extras: Sequence[str]) -> list[str]:
    """Lines of the checkout's project file; of an installed package, the lines that were made of it."""
    if not _PROJECT.is_file():
        return metadata.requires("glm46") or []
    project = _project()
    return [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]


def _project() -> dict:
    import tomli

    return tomli.loads(_PROJECT.read_text(encoding="utf-8"))["project"]


if __name__ == "__main__":
    sys.exit(bool(unfit_packages([extra for extra in sys.argv[1].split(",") if extra])))
