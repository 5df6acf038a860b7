"""Downloads files of the Hugging Face hub, or finds them in the cache of huggingface_hub, which must be installed.

`glm46.storage.huggingface.hub` imports this module when the first id is fetched.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # imported there lazily

from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.hub_address import HubId
from glm46.storage.huggingface.config_json import CONFIG

_LOG = logging.getLogger(__name__)
_ERRORS = cast(tuple[type[Exception], ...], (OSError, ValueError, *HfHubHTTPError.__bases__))
"""Errors of a request. The last are those of the HTTP library, which differs between releases of huggingface_hub."""
_FILES: Mapping[str, Sequence[str]] = {
    "model": ("*.safetensors", "*.json", "*.jinja"),
    "tokenizer": ("tokenizer*.json", "special_tokens_map.json", "generation_config.json", "*.jinja"),
    "config": (CONFIG,),
}
"""Files fetched from the top folder. Models and adapters: weights and their index, config, tokenizer, chat template."""
_PART_OF_SERIES = re.compile(r"(?P<stem>.*)-(?P<number>\d{5,9})-of-(?P<total>\d{5,9})(?P<ending>[^/]*)")
"""A file of a data set whose name includes the number of files."""
_MAX_PARTS = 100_000
"""Maximum number of parts of a series that are looked for."""
_ANSWER_SECONDS = 10.0
"""Time for the hub to answer one request."""


def fetch_files(hub_id: HubId, kind: str, address: str) -> Path:
    """Return the local folder with the files of a repository, or the file, folder or glob in it that the id names.

    Args:
        kind: a key of `_FILES`, or ``dataset``.
        address: option and id, for messages.

    Raises:
        UserError: the files are neither in the cache nor received from the hub.
    """
    if kind == "dataset":
        return _dataset_path(hub_id, address)
    return _snapshot(hub_id, address, "model", _FILES[kind], ignored="*/*")


def _dataset_path(hub_id: HubId, address: str) -> Path:
    """Return the local file, folder or glob of an id of a data set, after fetching the matching files."""
    path = hub_id.path
    patterns = [path, f"{path}/*"] if path else ["*"]
    folder = _snapshot(hub_id, address, "dataset", patterns)
    if path is not None and not any(folder.glob(path)):
        raise UserError(f"{address}/{path}: the data set has no such file; correct the path, or connect this machine")
    files = matching_files(folder, patterns)
    if files != [path] and not _hub_answers(hub_id):
        if parts := missing_parts(files, patterns):
            raise UserError(
                f"{address}: the cache of huggingface_hub lacks {', '.join(parts[:3])} ({len(parts)} of a series), and "
                f"the hub does not answer; connect this machine, or run `hf download {hub_id.repository} --repo-type "
                "dataset` on another and give that folder"
            )
        _LOG.warning(
            f"{address}: the hub does not answer, so only what its cache holds is used "
            f"({counted(len(files), 'file')}); the data set may have more"
        )
    return folder if path is None else folder / path


def _hub_answers(hub_id: HubId) -> bool:
    """Return whether the hub answers for a data set: `snapshot_download` falls back to its cache silently."""
    try:
        HfApi().repo_info(hub_id.repository, repo_type="dataset", revision=hub_id.revision, timeout=_ANSWER_SECONDS)
    except _ERRORS:
        return False
    return True


def matching_files(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return the files of a snapshot that match patterns of `snapshot_download`, by their names in the repository."""
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return list(filter_repo_objects(names, allow_patterns=[*patterns]))


def missing_parts(files: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the matching names of files that are missing in a series such as ``train-00000-of-00002.parquet``."""
    present: dict[tuple[str, str], set[int]] = {}
    endings: dict[tuple[str, str], str] = {}
    for file in files:
        if match := _PART_OF_SERIES.fullmatch(file):
            series = (match["stem"], match["total"])
            present.setdefault(series, set()).add(int(match["number"]))
            endings.setdefault(series, match["ending"])
    missing: list[str] = []
    for (stem, total), numbers in present.items():
        # Some series begin with 0, others with 1.
        first = 0 if 0 in numbers or int(total) not in numbers else 1
        expected = range(first, first + min(int(total), _MAX_PARTS))
        ending = f"of-{total}{endings[stem, total]}"
        missing += [f"{stem}-{number:0{len(total)}d}-{ending}" for number in expected if number not in numbers]
    return list(filter_repo_objects(missing, allow_patterns=[*patterns]))


def _snapshot(hub_id: HubId, address: str, kind: str, patterns: Sequence[str], ignored: str | None = None) -> Path:
    try:
        folder = snapshot_download(
            hub_id.repository,
            repo_type=kind,
            revision=hub_id.revision,
            allow_patterns=[*patterns],
            ignore_patterns=ignored,
        )
        return Path(folder)
    except RevisionNotFoundError as error:
        raise UserError(f"{address}: the repository has no such revision; give a branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{address}: no such repository, or one that needs a token; correct the id, or run hf auth login or set "
            "HF_TOKEN"
        ) from error
    except _ERRORS as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        option = " --repo-type dataset" if kind == "dataset" else ""
        raise UserError(
            f"{address}: not in the cache of huggingface_hub, and not received from the hub ({reason}); "
            f"connect this machine, or run `hf download {hub_id.repository}{option}` on another and give that folder"
        ) from error
