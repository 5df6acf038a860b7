"""What goes into one checkpoint, fixed at the moment of the save."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """What goes into a checkpoint."""

    step: int
    tensors: Mapping[str, Tensor]
    meta: bytes
    """JSON, encoded at the moment of the save: the trainer goes on changing what it was made from."""
    validation_loss: float | None
    is_good: bool
    """Whether the step before was made. A step is skipped when its figures are bad, and so may be the state."""

    @classmethod
    def of(
        cls,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: dict[str, Any],
        validation_loss: float | None,
        is_good: bool = True,
    ):
        """Snapshot with ``meta`` encoded.

        Raises:
            TypeError: when ``meta`` is no JSON.
        """
        return cls(step, dict(tensors), json.dumps(meta, indent=1).encode() + b"\n", validation_loss, is_good)

    def facts(self, world_size: int, *, is_finite: bool) -> dict[str, Any]:
        """What the manifest tells besides the files, for people and for retention.

        Args:
            is_finite: whether every value was looked at, and is finite.
        """
        return {
            "saved_at": time.time(),
            "world_size": world_size,
            "torch": torch.__version__,
            "validation_loss": self.validation_loss,
            "good": self.is_good,
            "finite": is_finite,
        }
