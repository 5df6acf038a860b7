"""Folders of the Hugging Face hub, named ``hf://owner/name`` where a verb takes a folder."""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from glm46.config.errors import UserError

_ID = re.compile(r"hf:/+(?P<repository>[\w.-]+/[\w.-]+?)(?:@(?P<revision>\S+))?/?")
"""A `Path` has one slash of the two."""
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja")
"""Of models and adapters: weights and their index, config, tokenizer, chat template."""
TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json", "generation_config.json", "*.jinja")


def fetch_options(arguments: argparse.Namespace, *names: str) -> dict[str, str]:
    """Replace options that name a repository of the hub by its local folder, see `local_folder`.

    Returns:
        The folder of each id, for `with_folders`.
    """
    folders = {}
    for name in names:
        stated = getattr(arguments, name)
        if stated is not None and str(stated).startswith("hf:/"):
            files = TOKENIZER_FILES if name == "tokenizer" else MODEL_FILES
            folder = local_folder(stated, files, f"--{name}")
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


def local_folder(stated: Path | str, files: Sequence[str], option: str) -> Path:
    """The folder in huggingface_hub's cache that holds the files of a repository. Those that are missing or have
    changed are downloaded, with huggingface_hub's progress, token and variables (``HF_HOME``, ``HF_TOKEN``,
    ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``); processes that ask for the same file wait for one download.

    Args:
        stated: ``hf://owner/name``, with ``@revision`` a branch, tag or commit.
        files: patterns of names; folders inside the repository are left out.
        option: named in messages.

    Raises:
        UserError: huggingface_hub is not installed, the id is malformed, or the files are neither in the cache nor
            received from the hub.
    """
    found = _ID.fullmatch(str(stated))
    if found is None:
        raise UserError(f"{option} {stated}: not an id of the hub; give hf://owner/name or hf://owner/name@revision")
    repository, revision = found["repository"], found["revision"]
    at = f"{option} hf://{repository}" + (f"@{revision}" if revision else "")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        raise UserError(f"{at}: huggingface_hub is not installed; pip install 'glm46[hf]', or give a folder") from None
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(files), ignore_patterns="*/*"))
    except RevisionNotFoundError as error:
        raise UserError(f"{at}: the repository has no such revision; give a branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{at}: no such repository, or one that needs a token; correct the id, or run hf auth login or set HF_TOKEN"
        ) from error
    # The last are errors of the HTTP library, which differs between releases of huggingface_hub.
    except (OSError, ValueError, *HfHubHTTPError.__bases__) as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise UserError(
            f"{at}: not in the cache of huggingface_hub, and not received from the hub ({reason}); "
            f"connect this machine, or run `hf download {repository}` on another and give that folder"
        ) from error
