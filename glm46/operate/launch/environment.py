"""Compare the installed packages with pyproject.toml: one message about all of them, before any is imported.

``python -m glm46.operate.launch.environment EXTRA,EXTRA`` exits with 0 if everything fits, else 1; the scripts run it
with each interpreter that they find. It imports only the standard library at its top: other packages may be missing.
"""

import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import glm46

_ROOT = Path(glm46.__path__[0]).parent
_PROJECT = _ROOT / "pyproject.toml"


def unfit_packages(extras: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Find packages that are missing or whose version does not fit, each as (fault, requirement for pip).

    Args:
        extras: names of optional dependencies in pyproject.toml that are also required.
    """
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(line) for line in _requirements(extras)]
    except ImportError as error:
        return [(f"{error.name} is missing", str(error.name))]
    unfit = []
    for requirement in requirements:
        if requirement.marker and not any(requirement.marker.evaluate({"extra": name}) for name in ("", *extras)):
            continue
        pip_requirement = f"{requirement.name}{requirement.specifier}"
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            unfit.append((f"{requirement.name} is missing", pip_requirement))
        else:
            if not requirement.specifier.contains(version, prereleases=True):
                fault = f"{requirement.name} is {version}, and {pip_requirement} is needed"
                unfit.append((fault, pip_requirement))
    return unfit


def describe_unfit(unfit: Sequence[tuple[str, str]]) -> str:
    """Return one message about packages that do not fit, with the command that installs them."""
    faults = "; ".join(fault for fault, _ in unfit)
    requirements = " ".join(f"'{requirement}'" for _, requirement in unfit)
    script = "; ./run_train.sh makes an environment with all of them" if (_ROOT / "run_train.sh").is_file() else ""
    checkout_python = _ROOT / ".venv/bin/python"
    if checkout_python.exists() and Path(sys.prefix) != _ROOT / ".venv":
        script = f"; or use {checkout_python}, which ./run_train.sh has made"
    return f"{sys.executable}: {faults}: {sys.executable} -m pip install {requirements}{script}"


def describe_version() -> str:
    """Return the versions of glm46, torch and Python, for bug reports."""
    version = _project()["version"] if _PROJECT.is_file() else metadata.version("glm46")
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "missing"
    return f"glm46 {version}, torch {torch}, Python {sys.version.split()[0]}"


def _requirements(extras: Sequence[str]) -> list[str]:
    """Read the requirements from pyproject.toml in a checkout, else from the metadata of the installed package."""
    if not _PROJECT.is_file():
        return metadata.requires("glm46") or []
    project = _project()
    return [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
    return project


if __name__ == "__main__":
    sys.exit(bool(unfit_packages([extra for extra in sys.argv[1].split(",") if extra])))
