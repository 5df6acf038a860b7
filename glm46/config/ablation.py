"""The section [ablation]: the same run with other keys, which ``python -m glm46 ablate`` compares."""

import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from glm46.config.errors import UserError
from glm46.config.section import Removed, Section

_LONGEST_NAME = 100


def _folder_name(name: str) -> str:
    if name != folder_name(name):
        raise ValueError(f"names a folder; write it as '{folder_name(name)}'")
    return name


def folder_name(text: str) -> str:
    """Return a text with only the characters that a folder name may have, such as ``optimizer.name=Muon``."""
    return re.sub(r"[^\w.=,+-]+", "_", text, flags=re.ASCII).lstrip(".-")[:_LONGEST_NAME] or "_"


class VariantConfig(Section):
    """[[ablation.variants]]: one of the compared runs. The first one is the baseline."""

    name: Annotated[str, AfterValidator(_folder_name)]
    """Name in the report and of the folder of its runs."""

    keys: dict[str, Any] = Field(default_factory=dict)
    """Keys with other values than in the rest of the file, such as ``keys.optimizer.ns_steps = 3``. Absent: the run as
    the file has it."""


class AblationConfig(Section):
    """[ablation]: variants of this run that ``python -m glm46 ablate`` trains one after the other and compares."""

    removed = {"seeds": Removed("give them on the command line, such as ablate --seeds 0,1,2; remove it")}

    variants: tuple[VariantConfig, ...] = ()
    """The runs to compare."""


def flat_keys(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables: ``{"optimizer": {"lr": 1.0}}`` becomes ``{"optimizer.lr": 1.0}``."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flat_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def require_one_run(ablation: AblationConfig | None, file: object, command: str) -> None:
    """Refuse to train a file that describes several runs as if it were one.

    Args:
        command: ``python -m glm46``.

    Raises:
        UserError: there are variants.
    """
    if ablation is not None and ablation.variants:
        start = f"{command} ablate --config {shlex.quote(str(file))}"
        raise UserError(
            f"{file}: [ablation] with {len(ablation.variants)} variants: these are several runs; compare them with "
            f"{start}, or add --ablation.variants= to train the rest of the file once"
        )
