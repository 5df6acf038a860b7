"""Repositories of the Hugging Face hub, from a hub on loopback that gives the few answers needed."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from glm46.cli import main
from glm46.commands import ranks
from glm46.config.errors import UserError
from glm46.huggingface import hub as hub_folders
from glm46.huggingface.hub import MODEL_FILES, local_folder

pytest.importorskip("huggingface_hub", reason="not installed; pip install '.[hf]'")
COMMIT = "c" * 40
FILES = {
    "config.json": b'{"model_type": "glm4_moe"}',
    "model.safetensors": b"weights",
    "chat_template.jinja": b"[gMASK]",
    "README.md": b"words",
    "pytorch_model.bin": b"a pickle",
    "original/model.safetensors": b"the weights again",
}
WANTED = {"config.json", "model.safetensors", "chat_template.jinja"}


class Hub(BaseHTTPRequestHandler):
    """One repository, ``owner/name``, that needs the token ``secret``."""

    def do_GET(self):
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != "Bearer secret":
            return self._answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        if path == "/api/models/owner/name/revision/main":
            return self._answer(200, json.dumps({"id": "owner/name", "sha": COMMIT}).encode())
        if path == f"/api/models/owner/name/tree/{COMMIT}":
            rows = [{"type": "file", "path": name, "size": len(x), "oid": _tag(x)} for name, x in FILES.items()]
            return self._answer(200, json.dumps(rows).encode())
        start = f"/owner/name/resolve/{COMMIT}/"
        if path.startswith(start) and (content := FILES.get(path.removeprefix(start))) is not None:
            return self._answer(200, content, {"ETag": f'"{_tag(content)}"', "X-Repo-Commit": COMMIT})
        code = "RevisionNotFound" if path.startswith("/api/models/owner/name/") else "RepoNotFound"
        return self._answer(404, b"", {"X-Error-Code": code})

    do_HEAD = do_GET

    def _answer(self, status: int, content: bytes, headers=()) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def _tag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture(scope="module")
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


_SCRIPT = """
import sys
from pathlib import Path
from glm46.cli import main
from glm46.config.errors import UserError
from glm46.huggingface import hub as hub_folders
from glm46.huggingface.hub import MODEL_FILES, local_folder
for stated in sys.argv[1:]:
    try:
        print(local_folder(Path(stated), MODEL_FILES, "--model"))
    except UserError as error:
        print(error)
"""


def fetched(tmp_path: Path, endpoint: str, *stated: str, **variables: str) -> list[str]:
    """A line for each: the folder or the message. In a process of its own, because huggingface_hub reads its variables
    when it is imported."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own |= {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *stated], env=own | variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def first(hub, tmp_path_factory) -> tuple[Path, list[str]]:
    """Where the cache is, and the lines of a first process with the token."""
    home = tmp_path_factory.mktemp("hub")
    ids = ["hf://owner/name", "hf://owner/name@main", "hf://owner/absent", "hf://owner/name@v9"]
    return home, fetched(home, f"http://127.0.0.1:{hub.server_port}", *ids, HF_TOKEN="secret")


def test_only_needed_files_are_fetched_and_each_once(hub, first):
    folder, again, absent, revision = first[1]
    assert again == folder and {path.name for path in Path(folder).iterdir()} == WANTED
    assert all((Path(folder) / name).read_bytes() == FILES[name] for name in WANTED)
    assert sum("resolve" in path and "model.safetensors" in path for path in hub.asked) <= 2  # HEAD and GET
    assert all(word in absent for word in ("--model hf://owner/absent", "no such repository", "HF_TOKEN"))
    assert "hf://owner/name@v9" in revision and "no such revision" in revision


def test_what_is_in_the_cache_is_found_offline(first):
    home, (folder, *_) = first
    cached, other = fetched(home, "http://127.0.0.1:9", "hf://owner/name", "hf://owner/other", HF_HUB_OFFLINE="1")
    assert cached == folder
    assert all(word in other for word in ("--model hf://owner/other", "HF_HUB_OFFLINE", "hf download owner/other"))


def test_without_a_token_the_remedy_is_named(hub, tmp_path):
    (refused,) = fetched(tmp_path, f"http://127.0.0.1:{hub.server_port}", "hf://owner/name")
    assert "--model hf://owner/name" in refused and "HF_TOKEN" in refused


def test_without_a_network_the_remedy_is_named(tmp_path):
    (unreachable,) = fetched(tmp_path, "http://127.0.0.1:9", "hf://owner/name")
    assert "--model hf://owner/name" in unreachable and "hf download owner/name" in unreachable


@pytest.mark.parametrize("stated", ["hf://name", "hf://a/b/c", "hf://a/b@", "hf://"])
def test_what_is_no_id_is_refused_without_a_request(stated):
    with pytest.raises(UserError, match="hf://owner/name"):
        local_folder(Path(stated), MODEL_FILES, "--model")


HF = "hf://owner/name"


@pytest.mark.parametrize(
    "argv, option",
    [
        (["generate", "--prompt", "a", "--model", HF], "--model"),
        (["generate", "--prompt", "a", "--model", "b", "--adapter", HF], "--adapter"),
        (["generate", "--prompt", "a", "--model", "b", "--tokenizer", HF], "--tokenizer"),
        (["evaluate", "--data", "a", "--model", HF], "--model"),
        (["evaluate", "--data", "a", "--model", "b", "--against", HF], "--against"),
        (["serve-config", "--gpus", "8", "--model", HF], "--model"),
        (["convert", "from-hf", "--output", "a", "--model", HF], "--model"),
        (["convert", "merge", "--adapter", "b", "--output", "a", "--base", HF], "--base"),
        (["convert", "merge", "--base", "b", "--output", "a", "--adapter", HF], "--adapter"),
    ],
)
def test_verbs_take_ids_in_place_of_folders(argv, option, monkeypatch, tmp_path, capsys):
    asked = []
    fetch = lambda stated, files, option: asked.append((str(stated), option)) or tmp_path / "in_the_cache"  # noqa: E731
    monkeypatch.setattr(hub_folders, "local_folder", fetch)
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2  # neither folder exists
    assert asked == [(str(Path(HF)) if option != "--tokenizer" else HF, option)]
    if "b" not in argv:
        assert "in_the_cache" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["generate", "--prompt", "hf://x"], ["evaluate", "--data", "a"]])
def test_ranks_get_the_folders_that_were_fetched_once(verb, monkeypatch, tmp_path):
    asked, started = [], []
    monkeypatch.setattr(
        hub_folders, "local_folder", lambda stated, *_: asked.append(stated) or tmp_path / "in_the_cache"
    )
    monkeypatch.setattr(ranks, "run_ranks", lambda _, argv, *rest: started.append(argv) or SimpleNamespace(code=0))
    assert main([*verb, f"--model={HF}", "--tokenizer", f"{HF}@main", "--nproc", "2"]) == 0
    folder = str(tmp_path / "in_the_cache")
    assert started == [[*verb, f"--model={folder}", "--tokenizer", folder]] and len(asked) == 2
