"""The Python API (docs/api.md). ``import glm46`` loads nothing: each name is loaded when it is first used (PEP 562)."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers
    from glm46.operate.models.local_model import load as load
    from glm46.operate.models.muon_with_adamw import MuonWithAdamW as MuonWithAdamW
    from glm46.run.counted_shape import model_shape as model_shape

_HOMES = {
    "MuonWithAdamW": "glm46.operate.models.muon_with_adamw",
    "load": "glm46.operate.models.local_model",
    "model_shape": "glm46.run.counted_shape",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
