"""Fetches folders of the Hugging Face hub, named ``hf://owner/name`` where a verb or a config takes a folder, and files
of its data sets, named ``hf://datasets/owner/name/file``."""

import argparse
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from glm46.config.errors import UserError, raise_if
from glm46.config.faults import counted
from glm46.config.hub_ids import hub_keys
from glm46.config.section import HubId, OnHub, Section, is_hub_address
from glm46.storage.huggingface.config_json import CONFIG

_LOG = logging.getLogger(__name__)
MODEL = OnHub("model")
TOKENIZER = OnHub("tokenizer")
DATASET = OnHub("dataset")
_FILES = {
    "model": ("*.safetensors", "*.json", "*.jinja"),
    "tokenizer": ("tokenizer*.json", "special_tokens_map.json", "generation_config.json", "*.jinja"),
}
"""Files fetched from the top folder. Models and adapters: weights and their index, config, tokenizer, chat template."""

_IN_CACHE = re.compile(r".*/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[^/]+)/?")
"""Source: huggingface_hub `file_download.py`, ``repo_folder_name``."""
_PART_OF_SERIES = re.compile(r"(?P<stem>.*)-(?P<number>\d{5,9})-of-(?P<total>\d{5,9})(?P<ending>[^/]*)")
"""A file of a data set whose name includes the number of files."""
_MAX_PARTS = 100_000
"""Maximum number of parts of a series that are looked for."""
_ANSWER_SECONDS = 10.0
"""Time for the hub to answer one request."""


def fetch_options(arguments: argparse.Namespace, *names: str) -> dict[str, str]:
    """Replace options that name a repository of the hub by its local folder, see `local_path`. Returns the folder of
    each id, for `with_folders`."""
    folders = {}
    for name in names:
        value = getattr(arguments, name)
        if value is not None and is_hub_address(str(value)):
            folder = local_path(value, TOKENIZER if name == "tokenizer" else MODEL, f"--{name}")
            setattr(arguments, name, type(value)(folder))
            folders[str(Path(value))] = str(folder)
    return folders


def with_folders(argv: Sequence[str], folders: Mapping[str, str]) -> list[str]:
    """Replace ids in a command line by folders, so that the processes that it starts do not contact the hub again."""
    replaced = []
    for word in argv:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        replaced.append(f"{option}{equals}{folders.get(str(Path(value)), value)}")
    return replaced


def fetched_keys(config: Section) -> dict[str, str]:
    """Return the local folder or file of each config key that is an id, by its dotted key; see `local_path`. Raises
    UserError with one fault for each id that cannot be fetched."""
    paths = dict[str, str]()
    faults = list[str]()
    for key, mark, value in hub_keys(config):
        try:
            paths[key] = str(local_path(value, mark, f"{key} ="))
        except UserError as error:
            faults += error.faults
    raise_if(faults)
    return paths


def local_inputs(inputs: Sequence[str]) -> tuple[str, ...]:
    """Replace ids of data sets among input files by local paths; see `local_path`."""
    return tuple(str(local_path(path, DATASET, "input =")) if is_hub_address(path) else path for path in inputs)


def local_path(hub_address: Path | str, mark: OnHub, option: str) -> Path:
    """Return the folder in huggingface_hub's cache that holds the files of a repository, or the file, folder or glob in
    it that the id names. Missing or changed files are downloaded, with huggingface_hub's progress, token and variables
    (``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``); processes that need the same file wait for one
    download.

    Args:
        hub_address: ``hf://owner/name`` or ``hf://datasets/owner/name/path``, with ``@revision`` after the name.
        option: option or key, for messages.

    Raises:
        UserError: huggingface_hub is not installed, the id is malformed, or the files are neither in the cache nor
            received from the hub.
    """
    hub_id = mark.parse(str(hub_address))
    if hub_id is None:
        raise UserError(f"{option} {hub_address}: not an id of the hub; give {mark.form}")
    if mark.kind == "dataset":
        return _dataset_path(hub_id, option)
    at = _address(hub_id, option, "")
    return _snapshot(hub_id, at, repo_type="model", allow_patterns=[*_FILES[mark.kind]], ignore_patterns="*/*")


def _address(hub_id: HubId, option: str, kind: str) -> str:
    """Format an id and its option for messages, without a path inside the repository."""
    revision = f"@{hub_id.revision}" if hub_id.revision else ""
    return f"{option} hf://{kind}{hub_id.repository}{revision}"


def _dataset_path(hub_id: HubId, option: str) -> Path:
    """Return the local file, folder or glob of an id of a data set, after fetching the matching files."""
    at = _address(hub_id, option, "datasets/")
    path = hub_id.path
    patterns = [path, f"{path}/*"] if path else ["*"]
    folder = _snapshot(hub_id, at, repo_type="dataset", allow_patterns=patterns)
    if path is not None and not any(folder.glob(path)):
        raise UserError(f"{at}/{path}: the data set has no such file; correct the path, or connect this machine")
    files = matching_files(folder, patterns)
    if files != [path] and not _hub_answers(hub_id):
        if parts := missing_parts(files, patterns):
            raise UserError(
                f"{at}: the cache of huggingface_hub lacks {', '.join(parts[:3])} ({len(parts)} of a series), and the "
                f"hub does not answer; connect this machine, or run `hf download {hub_id.repository} --repo-type "
                "dataset` on another and give that folder"
            )
        _LOG.warning(
            f"{at}: the hub does not answer, so only what its cache holds is used ({counted(len(files), 'file')}); the "
            "data set may have more"
        )
    return folder if path is None else folder / path


def _hub_answers(hub_id: HubId) -> bool:
    """Return whether the hub answers for a data set: `snapshot_download` falls back to its cache silently."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    http_errors: Any = HfHubHTTPError.__bases__
    try:
        HfApi().repo_info(hub_id.repository, repo_type="dataset", revision=hub_id.revision, timeout=_ANSWER_SECONDS)
    except (OSError, ValueError, *http_errors):
        return False
    return True


def matching_files(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return the files of a snapshot that match patterns of `snapshot_download`, by their names in the repository."""
    from huggingface_hub.utils import filter_repo_objects

    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return list(filter_repo_objects(names, allow_patterns=[*patterns]))


def missing_parts(files: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the matching names of files that are missing in a series such as ``train-00000-of-00002.parquet``."""
    from huggingface_hub.utils import filter_repo_objects

    present: dict[tuple[str, str], set[int]] = {}
    endings: dict[tuple[str, str], str] = {}
    for file in files:
        if match := _PART_OF_SERIES.fullmatch(file):
            series = (match["stem"], match["total"])
            present.setdefault(series, set()).add(int(match["number"]))
            endings.setdefault(series, match["ending"])
    missing = []
    for (stem, total), numbers in present.items():
        # Some series begin with 0, others with 1.
        first = 0 if 0 in numbers or int(total) not in numbers else 1
        for number in range(first, first + min(int(total), _MAX_PARTS)):
            if number not in numbers:
                missing.append(f"{stem}-{number:0{len(total)}d}-of-{total}{endings[stem, total]}")
    return list(filter_repo_objects(missing, allow_patterns=[*patterns]))


def local_tokenizer(path: str) -> str:
    """Return the tokenizer path of a checkpoint; an id is fetched and becomes its local path."""
    return str(local_path(path, TOKENIZER, "model.tokenizer_path =")) if is_hub_address(path) else path


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
            folder = _snapshot(hub_id, "", repo_type="model", allow_patterns=[CONFIG])
            return folder if (folder / CONFIG).is_file() else None
    return None


def _snapshot(hub_id: HubId, at: str, **options: Any) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        raise UserError(f"{at}: huggingface_hub is not installed; pip install 'glm46[hf]', or give a folder") from None
    http_errors: Any = HfHubHTTPError.__bases__
    try:
        return Path(snapshot_download(hub_id.repository, revision=hub_id.revision, **options))
    except RevisionNotFoundError as error:
        raise UserError(f"{at}: the repository has no such revision; give a branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{at}: no such repository, or one that needs a token; correct the id, or run hf auth login or set HF_TOKEN"
        ) from error
    # The last are errors of the HTTP library, which differs between releases of huggingface_hub.
    except (OSError, ValueError, *http_errors) as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        kind = " --repo-type dataset" if options["repo_type"] == "dataset" else ""
        raise UserError(
            f"{at}: not in the cache of huggingface_hub, and not received from the hub ({reason}); "
            f"connect this machine, or run `hf download {hub_id.repository}{kind}` on another and give that folder"
        ) from error
