"""Folders of the Hugging Face hub, named ``hf://owner/name`` where a verb or a config takes a folder, and files of its
data sets, named ``hf://datasets/owner/name/file``."""

import argparse
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from glm46.config.errors import UserError, raise_if
from glm46.config.hub_ids import hub_keys
from glm46.config.section import OnHub, Section, is_hub_address
from glm46.storage.huggingface.config_json import CONFIG

MODEL, TOKENIZER, DATASET = OnHub("model"), OnHub("tokenizer"), OnHub("dataset")
_FILES = {
    "model": ("*.safetensors", "*.json", "*.jinja"),
    "tokenizer": ("tokenizer*.json", "special_tokens_map.json", "generation_config.json", "*.jinja"),
}
"""Of the top folder. Of models and adapters: weights and their index, config, tokenizer, chat template."""

_IN_CACHE = re.compile(r".*/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[^/]+)/?")
"""Source: huggingface_hub `file_download.py`, ``repo_folder_name``."""


def fetch_options(arguments: argparse.Namespace, *names: str) -> dict[str, str]:
    """Replace options that name a repository of the hub by its local folder, see `local_path`. Returns the folder of
    each id, for `with_folders`."""
    folders = {}
    for name in names:
        stated = getattr(arguments, name)
        if stated is not None and is_hub_address(str(stated)):
            folder = local_path(stated, TOKENIZER if name == "tokenizer" else MODEL, f"--{name}")
            setattr(arguments, name, type(stated)(folder))
            folders[str(Path(stated))] = str(folder)
    return folders


def with_folders(argv: Sequence[str], folders: Mapping[str, str]) -> list[str]:
    """A command line with folders in place of ids: the processes that it starts do not ask the hub again."""
    replaced = []
    for word in argv:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        replaced.append(f"{option}{equals}{folders.get(str(Path(value)), value)}")
    return replaced


def fetched_keys(config: Section) -> dict[str, str]:
    """The local folder or file of each key of a config that is an id, by its dotted key; see `local_path`. Raises
    UserError with one fault for each key that cannot be had."""
    found, faults = dict[str, str](), list[str]()
    for key, mark, value in hub_keys(config):
        try:
            found[key] = str(local_path(value, mark, f"{key} ="))
        except UserError as error:
            faults += error.faults
    raise_if(faults)
    return found


def local_inputs(inputs: Sequence[str]) -> tuple[str, ...]:
    """Names of input files with local paths in place of ids of data sets; see `local_path`."""
    return tuple(str(local_path(one, DATASET, "input =")) if is_hub_address(one) else one for one in inputs)


def local_path(stated: Path | str, mark: OnHub, option: str) -> Path:
    """The folder in huggingface_hub's cache that holds the files of a repository, or the file, folder or glob in it
    that the id names. Those that are missing or have changed are downloaded, with huggingface_hub's progress, token and
    variables (``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``); processes that ask for the same file
    wait for one download.

    Args:
        stated: ``hf://owner/name`` or ``hf://datasets/owner/name/path``, with ``@revision`` behind the name.
        option: named in messages.

    Raises:
        UserError: huggingface_hub is not installed, the id is malformed, or the files are neither in the cache nor
            received from the hub.
    """
    found = mark.parse(str(stated))
    if found is None:
        raise UserError(f"{option} {stated}: not an id of the hub; give {mark.form}")
    repository, revision, path = found
    is_dataset = mark.kind == "dataset"
    at = f"{option} hf://{'datasets/' * is_dataset}{repository}" + (f"@{revision}" if revision else "")
    patterns = [path, f"{path}/*"] if path else ["*"]
    of_model = {"allow_patterns": [*_FILES.get(mark.kind, ())], "ignore_patterns": "*/*"}
    wanted = {"allow_patterns": patterns} if is_dataset else of_model
    folder = _snapshot(repository, revision, at, repo_type="dataset" if is_dataset else "model", **wanted)
    if path is not None and not any(folder.glob(path)):
        raise UserError(f"{at}/{path}: the data set has no such file; correct the path, or connect this machine")
    return folder if path is None else folder / path


def local_tokenizer(path: str) -> str:
    """The tokenizer path of a checkpoint, of which an id is fetched."""
    return str(local_path(path, TOKENIZER, "model.tokenizer_path =")) if is_hub_address(path) else path


def repository_of(folder: str) -> tuple[str, str | None]:
    """The name of a repository and its revision, if this is an id, or its folder in huggingface_hub's cache; else the
    folder and None. What is published names a base so: the cache is of one user on one machine."""
    if is_hub_address(folder) and (stated := MODEL.parse(folder)):
        return stated.repository, stated.revision
    found = _IN_CACHE.fullmatch(folder)
    return (f"{found['owner']}/{found['name']}", found["commit"]) if found else (folder, None)


def config_folder(stated: Path) -> Path | None:
    """A folder with the config.json of a model of the hub, which is small; None if it cannot be had, of which
    `local_path` says why."""
    if found := MODEL.parse(str(stated)):
        with suppress(UserError):
            folder = _snapshot(*found[:2], "", repo_type="model", allow_patterns=[CONFIG])
            return folder if (folder / CONFIG).is_file() else None
    return None


def _snapshot(repository: str, revision: str | None, at: str, **wanted: Any) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        raise UserError(f"{at}: huggingface_hub is not installed; pip install 'glm46[hf]', or give a folder") from None
    http_errors: Any = HfHubHTTPError.__bases__
    try:
        return Path(snapshot_download(repository, revision=revision, **wanted))
    except RevisionNotFoundError as error:
        raise UserError(f"{at}: the repository has no such revision; give a branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{at}: no such repository, or one that needs a token; correct the id, or run hf auth login or set HF_TOKEN"
        ) from error
    # The last are errors of the HTTP library, which differs between releases of huggingface_hub.
    except (OSError, ValueError, *http_errors) as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        kind = " --repo-type dataset" if wanted["repo_type"] == "dataset" else ""
        raise UserError(
            f"{at}: not in the cache of huggingface_hub, and not received from the hub ({reason}); "
            f"connect this machine, or run `hf download {repository}{kind}` on another and give that folder"
        ) from error
