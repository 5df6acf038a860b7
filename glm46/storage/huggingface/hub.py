"""Fetches folders of the Hugging Face hub, named ``hf://owner/name`` where a verb or a config takes a folder, files of
its data sets, named ``hf://datasets/owner/name/file``, and folders of object stores, named ``s3://bucket/prefix``."""

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from glm46.config.errors import UserError, raise_if
from glm46.config.hub_address import HubId, HubKey, OnHub, is_hub_address
from glm46.config.store_address import is_store_address
from glm46.storage.huggingface.stored_folder import RangedKind, fetch_folder

MODEL = OnHub("model")
TOKENIZER = OnHub("tokenizer")
NOTHING: Mapping[str, RangedKind] = MappingProxyType({})
DATASET = OnHub("dataset")
_IN_CACHE = re.compile(r".*/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[^/]+)/?")
"""Source: huggingface_hub `file_download.py`, ``repo_folder_name``."""


def fetch_options(arguments: argparse.Namespace, *names: str) -> dict[str, str]:
    """Replace options that name a repository of the hub, or a folder of an object store, by its local folder, see
    `local_path`. Returns the folder of each, for `with_folders`."""
    folders = {}
    for name in names:
        value = getattr(arguments, name)
        if value is not None and is_remote(str(value)):
            folder = local_path(value, TOKENIZER if name == "tokenizer" else MODEL, f"--{name}")
            setattr(arguments, name, type(value)(folder))
            folders[str(Path(value))] = str(folder)
    return folders


def is_remote(address: str) -> bool:
    """Return True if a text is an address of the hub or of an object store."""
    return is_hub_address(address) or is_store_address(address)


def with_folders(argv: Sequence[str], folders: Mapping[str, str]) -> list[str]:
    """Replace ids in a command line by folders, so that the processes that it starts do not contact the hub again."""
    replaced = []
    for word in argv:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        replaced.append(f"{option}{equals}{folders.get(str(Path(value)), value)}")
    return replaced


def fetched_keys(keys: Iterable[HubKey], by_range: Mapping[str, RangedKind] = NOTHING) -> dict[str, str]:
    """Return the local folder or file of each key of a config whose value is an id, by its dotted key; see
    `local_path`. ``by_range``: see `fetch_folder`, by key. Raises UserError with one fault for each id that cannot be
    fetched."""
    paths = dict[str, str]()
    faults = list[str]()
    for key, mark, value in keys:
        try:
            paths[key] = str(local_path(value, mark, f"{key} =", by_range.get(key)))
        except UserError as error:
            faults += error.faults
    raise_if(faults)
    return paths


def local_inputs(inputs: Sequence[str]) -> tuple[str, ...]:
    """Replace ids of data sets among input files by local paths; see `local_path`."""
    return tuple(str(local_path(path, DATASET, "input =")) if is_hub_address(path) else path for path in inputs)


def local_path(hub_address: Path | str, mark: OnHub, option: str, by_range: RangedKind | None = None) -> Path:
    """Return the folder in huggingface_hub's cache that holds the files of a repository, or the file, folder or glob in
    it that the id names. Missing or changed files are downloaded, with huggingface_hub's progress, token and variables
    (``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``); processes that need the same file wait for one
    download.

    Args:
        hub_address: ``hf://owner/name`` or ``hf://datasets/owner/name/path``, with ``@revision`` after the name; or the
            URL of a folder in an object store, see `fetch_folder`.
        option: option or key, for messages.
        by_range: see `fetch_folder`; without effect for the hub.

    Raises:
        UserError: huggingface_hub is not installed, the id is malformed, or the files are neither in the cache nor
            received from the hub.
    """
    if is_store_address(str(hub_address)):
        return fetch_folder(str(hub_address), option, by_range)
    hub_id = mark.parse(str(hub_address))
    if hub_id is None:
        raise UserError(f"{option} {hub_address}: not an id of the hub; give {mark.form}")
    return _fetch(hub_id, mark.kind, option)


def _fetch(hub_id: HubId, kind: str, option: str) -> Path:
    """Fetch the files of a repository; for ``kind`` see `hub_files.fetch_files`."""
    revision = f"@{hub_id.revision}" if hub_id.revision else ""
    address = f"{option} hf://{'datasets/' if kind == 'dataset' else ''}{hub_id.repository}{revision}"
    try:
        from glm46.storage.huggingface.hub_files import fetch_files  # huggingface_hub is optional: the extra [hf]
    except ImportError:
        raise UserError(
            f"{address}: huggingface_hub is not installed; pip install 'glm46[hf]', or give a folder"
        ) from None
    return fetch_files(hub_id, kind, address)


def local_tokenizer(path: str) -> str:
    """Return the tokenizer path of a checkpoint; an id is fetched and becomes its local path."""
    return str(local_path(path, TOKENIZER, "model.tokenizer_path =")) if is_remote(path) else path


def repository_of(folder: str) -> tuple[str, str | None]:
    """Return the name of a repository and its revision, if this is an id or its folder in huggingface_hub's cache; else
    the folder and None. Published files name a base like this, because the cache belongs to one user on one machine."""
    if is_hub_address(folder) and (hub_id := MODEL.parse(folder)):
        return hub_id.repository, hub_id.revision
    match = _IN_CACHE.fullmatch(folder)
    return (f"{match['owner']}/{match['name']}", match["commit"]) if match else (folder, None)


def config_folder(path: Path) -> Path | None:
    """Return a folder with the config.json of a model of the hub, which is small. None if it cannot be fetched;
    `local_path` then reports the reason."""
    if hub_id := MODEL.parse(str(path)):
        with suppress(UserError):
            folder = _fetch(hub_id, "config", "")
            return folder if (folder / "config.json").is_file() else None
    return None
