"""Addresses of the Hugging Face hub: ``hf://owner/name``. Needs no pydantic, so that options can be read without it."""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import unquote

HubKind: TypeAlias = Literal["model", "tokenizer", "dataset"]

_HUB_ADDRESS = re.compile(r"(hf|huggingface):|(https?:/+)?(www\.)?(huggingface\.co|hf\.co)/", re.IGNORECASE)


def is_hub_address(address: str) -> bool:
    """Return True if a text is an address of the Hugging Face hub, well-formed or not. `Path` merges two slashes to
    one, so one slash is accepted too."""
    return _HUB_ADDRESS.match(address) is not None


class HubId(NamedTuple):
    """Parts of an id of the hub."""

    repository: str
    revision: str | None
    """A branch, tag or commit."""
    path: str | None
    """File, folder or glob in a data set; None: all of it."""


@dataclass(frozen=True)
class OnHub:
    """Metadata of a field that takes an id of the hub instead of a folder or file: ``hf://owner/name@revision``, or
    ``hf://datasets/owner/name@revision/path``. The id is replaced by the local folder before a run begins."""

    kind: HubKind

    def parse(self, address: str) -> HubId | None:
        """Return the parts of an id; None if it is malformed.

        A revision is read as `huggingface_hub.HfFileSystem` reads it: ``%2F`` stands for a slash, and the special
        branches ``refs/convert/NAME`` and ``refs/pr/NUMBER`` may contain a plain slash.
        """
        match = (_DATASET_ID if self.kind == "dataset" else _MODEL_ID).fullmatch(address)
        if match is None:
            return None
        revision = match["revision"] and unquote(match["revision"])
        path = match.groupdict().get("path")
        # Revision and path become parts of paths in the cache.
        if _leaves_folder(revision) or _leaves_folder(path):
            return None
        return HubId(match["repository"], _HUB_ALIASES.get(revision, revision), path)

    @property
    def form(self) -> str:
        """Form of an id, for messages."""
        if self.kind == "dataset":
            return "hf://datasets/owner/name/file or hf://datasets/owner/name@revision/file, without .. in it"
        return "hf://owner/name or hf://owner/name@revision"


_MODEL_ID = re.compile(r"hf:/+(?P<repository>[\w.-]+/[\w.-]+?)(?:@(?P<revision>\S+?))?/?")
_DATASET_ID = re.compile(
    r"hf:/+datasets/(?P<repository>[\w.-]+/[\w.-]+?)"
    r"(?:@(?P<revision>refs/(?:convert/[\w.-]+|pr/\d+)(?=/|$)|[^/\s]+))?"
    r"(?:/(?P<path>.+?))?/?"
)
_HUB_ALIASES: dict[str | None, str] = {"~parquet": "refs/convert/parquet"}
"""Short names that the hub accepts for branches -> the branches."""


def _leaves_folder(path: str | None) -> bool:
    """Return whether a path inside a repository has a part that is empty or `..`."""
    return path is not None and not {"", ".."}.isdisjoint(path.split("/"))


class HubKey(NamedTuple):
    """A key whose value is an id."""

    key: str
    """Dotted key."""
    mark: OnHub
    value: str

    @property
    def repository(self) -> str | None:
        """Owner and name; None for the URL of an object store."""
        hub_id = self.mark.parse(self.value)
        return None if hub_id is None else hub_id.repository
