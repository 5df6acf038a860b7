"""Interface through which a run reads weights that are not a checkpoint of this program, and writes its last save for
other programs."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from glm46.engine.training.network import Network
from glm46.engine.training.state import Progress
from glm46.run.plan import Plan
from glm46.storage.data.tokenizer import Tokenizer


class WeightFolder(Protocol):
    """Weights in a folder for one network."""

    names: Collection[str]
    """Names of the weights of this rank's part of the network that the folder provides."""

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Fill the weights of `names`, on any mesh and in any type. Collective.

        Returns:
            Metadata of a checkpoint, or the entries that `function_of_meta` reads; None if weights that are read
            before these ones determine the function, as for adapters.

        Raises:
            UserError: the folder is damaged or belongs to another model.
        """

    def files(self) -> list[Path]:
        """Return the files that hold the weights and describe them."""


class WeightSource(Protocol):
    """Weights of other programs. The commands of training build it; `build.run` and `resume.start` use it."""

    def refuse(self, plan: Plan) -> None:
        """Check the folders of weights that a start would read, without their values. Not collective.

        Raises:
            UserError: a folder is missing, or of another kind or model.
        """

    def open(self, network: Network, folder: Path) -> WeightFolder:
        """Open a folder that is not a step folder. `WeightFolder.read` checks it."""

    def check(
        self, networks: Mapping[str, Network], folder: Path, saved_files: Mapping[str, Mapping[str, str]]
    ) -> list[str]:
        """Return the faults of a resume from a step folder with the frozen weights that were read. Print a line on the
        main rank if adapters continue on other values of their base than they were trained on. Not collective.

        Args:
            networks: networks with frozen weights, by name.
            saved_files: `Network.frozen_files` of each network at the time of the save.
        """

    def export(self, network: Network, tokenizer: Tokenizer, progress: Progress) -> str:
        """Save a network in the format of other programs, and return lines for the user, the folder first.
        Collective."""
