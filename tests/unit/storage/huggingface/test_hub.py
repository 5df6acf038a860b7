"""Repositories of the Hugging Face hub, from a hub on loopback that gives the few answers needed."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import tomli

from glm46.cli import main
from glm46.config.errors import UserError
from glm46.config.loader import dump_config, load_config
from glm46.config.presets import PRESETS
from glm46.operate.launch import node_run, one_node, ranks
from glm46.operate.launch.fetched_config import load_fetched
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.tokenizer import BUILTIN_PATH
from glm46.storage.huggingface import hub as hub_folders
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.hub import DATASET, MODEL, local_path
from tests.builders import small_config

hub_utils = pytest.importorskip("huggingface_hub.utils", reason="not installed; pip install '.[hf]'")
from glm46.storage.huggingface import hub_files  # noqa: E402 - it imports huggingface_hub

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
DATA = {"README.md": b"words", "a/0.jsonl": b'{"prompt": "1 + 1"}\n', "a/1.jsonl": b"{}\n", "b.parquet": b"columns"}


class Hub(BaseHTTPRequestHandler):
    """A model ``owner/name`` and a data set ``owner/sums``, which need the token ``secret``."""

    def do_GET(self):
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != "Bearer secret":
            return self._answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        for kind, name, before, files in (
            ("models", "owner/name", "", FILES),
            ("datasets", "owner/sums", "datasets/", DATA),
        ):
            if path == f"/api/{kind}/{name}/revision/main":
                return self._answer(200, json.dumps({"id": name, "sha": COMMIT}).encode())
            if path == f"/api/{kind}/{name}/tree/{COMMIT}":
                rows = [{"type": "file", "path": one, "size": len(x), "oid": _tag(x)} for one, x in files.items()]
                return self._answer(200, json.dumps(rows).encode())
            start = f"/{before}{name}/resolve/{COMMIT}/"
            if path.startswith(start) and (content := files.get(path.removeprefix(start))) is not None:
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
from glm46.storage.huggingface import hub as hub_folders
from glm46.storage.huggingface.hub import DATASET, MODEL, local_path
for stated in sys.argv[1:]:
    try:
        print(local_path(Path(stated), DATASET if "datasets" in stated else MODEL, "--model"))
    except UserError as error:
        print(error)
"""


def fetched(tmp_path: Path, endpoint: str, *stated: str, **variables: str) -> list[str]:
    """A line for each: the folder or the message. In a process of its own, because huggingface_hub reads its variables
    when it is imported."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own |= {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *stated], env=own | variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def first(hub, tmp_path_factory) -> tuple[Path, list[str]]:
    """Where the cache is, and the lines of a first process with the token."""
    home = tmp_path_factory.mktemp("hub")
    ids = ["hf://owner/name", "hf://owner/name@main", "hf://owner/absent", "hf://owner/name@v9"]
    ids += [f"hf://datasets/owner/{one}" for one in ("sums/a/0.jsonl", "sums@main/*.parquet", "sums/a/9.jsonl")]
    return home, fetched(home, f"http://127.0.0.1:{hub.server_port}", *ids, HF_TOKEN="secret")


def test_only_needed_files_are_fetched_and_each_once(hub, first):
    folder, again, absent, revision, *_ = first[1]
    assert again == folder and {path.name for path in Path(folder).iterdir()} == WANTED
    assert all((Path(folder) / name).read_bytes() == FILES[name] for name in WANTED)
    assert sum("resolve" in path and "model.safetensors" in path for path in hub.asked) <= 2  # HEAD and GET
    assert all(word in absent for word in ("--model hf://owner/absent", "no such repository", "HF_TOKEN"))
    assert "hf://owner/name@v9" in revision and "no such revision" in revision


def test_files_of_a_data_set_are_fetched_alone(hub, first):
    file, pattern, absent = map(Path, first[1][4:])
    assert file.read_bytes() == DATA["a/0.jsonl"] and file.parts[-2:] == ("a", "0.jsonl")
    assert [one.read_bytes() for one in pattern.parent.glob(pattern.name)] == [DATA["b.parquet"]]
    assert [one.name for one in file.parent.iterdir()] == ["0.jsonl"] and not (pattern.parent / "README.md").exists()
    assert all(word in str(absent) for word in ("--model", "owner/sums/a/9.jsonl", "no such file"))


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
        local_path(Path(stated), MODEL, "--model")
    with pytest.raises(UserError, match="hf://datasets/owner/name"):
        local_path(Path(stated), DATASET, "--input")


HF = "hf://owner/name"


@pytest.mark.parametrize(
    "argv, option",
    [
        (["generate", "--prompt", "a", "--model", HF], "--model"),
        (["generate", "--prompt", "a", "--model", "b", "--tokenizer", "builtin", "--adapter", HF], "--adapter"),
        (["generate", "--prompt", "a", "--model", "b", "--tokenizer", HF], "--tokenizer"),
        (["evaluate", "--data", "a", "--model", HF], "--model"),
        (["convert", "from-hf", "--output", "a", "--model", HF], "--model"),
        (["convert", "merge", "--adapter", "b", "--output", "a", "--base", HF], "--base"),
        (["convert", "merge", "--base", "b", "--output", "a", "--adapter", HF], "--adapter"),
    ],
)
def test_verbs_take_ids_in_place_of_folders(argv, option, monkeypatch, tmp_path, capsys):
    asked = []
    fetch = lambda stated, files, option, *_: asked.append((str(stated), option)) or tmp_path / "in_the_cache"  # noqa: E731
    monkeypatch.setattr(hub_folders, "local_path", fetch)
    monkeypatch.chdir(tmp_path)
    Path("b").mkdir()  # with what is read before anything is fetched
    Path("b/config.json").write_text(json.dumps(config_of(PRESETS["debug"], None, eos_ids=[0], dtype="bfloat16")))
    assert main(argv) == 2  # neither folder has weights
    assert asked == [(str(Path(HF)) if option != "--tokenizer" else HF, option)]
    if "b" not in argv:
        assert "in_the_cache" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("verb", [["generate", "--prompt", "hf://x"], ["evaluate", "--data", "a"]])
def test_ranks_get_the_folders_that_were_fetched_once(verb, monkeypatch, tmp_path):
    asked, started = [], []
    monkeypatch.setattr(hub_folders, "local_path", lambda stated, *_: asked.append(stated) or tmp_path / "in_the_cache")
    monkeypatch.setattr(ranks, "run_ranks", lambda _, argv, *rest: started.append(argv) or SimpleNamespace(code=0))
    assert main([*verb, f"--model={HF}", "--tokenizer", f"{HF}@main", "--nproc", "2"]) == 0
    folder = str(tmp_path / "in_the_cache")
    assert started == [[*verb, f"--model={folder}", "--tokenizer", folder]] and len(asked) == 2


RUN = """
[job]
dump_folder = "run"
[model]
flavor = "debug"
tokenizer_path = "hf://owner/name"
[data]
document_mask = true
[[data.sources]]
name = "chats"
path = "{source}"
packing = "best_fit"
[data.sources.recipe]
input = ["hf://datasets/owner/chats/*.jsonl"]
format = "messages"
max_tokens = 64
[training]
steps = 1
seq_len = 64
[finetune]
[checkpoint]
initial_load_path = "hf://owner/name@v1"
initial_load_in_hf = true
"""


@pytest.mark.slow
def test_keys_of_a_run_are_fetched_once_by_what_starts_its_ranks(monkeypatch, tmp_path):
    asked, started, prepared = [], [], []
    fetch = lambda stated, mark, key, *_: asked.append((key, mark.kind, stated)) or tmp_path / mark.kind  # noqa: E731
    monkeypatch.setattr(hub_folders, "local_path", fetch)
    monkeypatch.setattr(one_node, "refuse_start", lambda *_: None)  # which would read the folder
    monkeypatch.setattr(node_run, "_prepare", lambda plan: prepared.append(plan.config))
    monkeypatch.setattr(
        node_run, "run_ranks", lambda _, command, *rest: started.append(command) or node_run.End(2, is_final=True)
    )
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN.format(source="chats"))
    assert main(["launch", "--config", "run.toml", "--nproc", "2", "--training.steps", "2"]) == 2
    ids = [("model.tokenizer_path =", "tokenizer", HF), ("checkpoint.initial_load_path =", "model", f"{HF}@v1")]
    assert asked == ids
    folders = [f"--model.tokenizer_path={tmp_path}/tokenizer", f"--checkpoint.initial_load_path={tmp_path}/model"]
    assert started == [["train", "--config", "run.toml", "--training.steps", "2", *folders]]
    assert prepared[0].model.tokenizer_path == f"{tmp_path}/tokenizer"


@pytest.mark.slow
@pytest.mark.parametrize("started_by", ["this process", "a launcher"])
def test_a_run_keeps_the_ids_that_were_stated_and_resumes_with_another_cache(
    started_by, source_folder, monkeypatch, tmp_path, capsys
):
    """config.toml, log and checkpoints name no place of one machine; what reads a checkpoint fetches its tokenizer."""
    source, places = tmp_path / "source", []
    shutil.copytree(source_folder, source)
    for machine in ("one", "two", "three"):
        places.append(tmp_path / machine / "models--owner--name/snapshots/c1")
        places[-1].mkdir(parents=True)
        shutil.copy(BUILTIN_PATH, places[-1] / "t.tiktoken")
    config = small_config(source, tmp_path / "out", checkpoint={"interval": 1})
    (tmp_path / "run.toml").write_text(dump_config(config).replace('"builtin"', f'"{HF}@main"'))
    for place, steps in zip(places, (1, 2), strict=False):
        command = ["train", "--config", str(tmp_path / "run.toml"), "--training.steps", str(steps)]
        if started_by == "a launcher":
            command += [f"--model.tokenizer_path={place / 't.tiktoken'}"]
        monkeypatch.setattr(hub_folders, "local_path", lambda *_, place=place: place / "t.tiktoken")
        assert main(command) == 0
        step = tmp_path / f"out/checkpoint/step-{steps:06d}"
        written = [(tmp_path / "out/config.toml").read_text(), json.loads((step / "meta.json").read_text())["config"]]
        assert all(tomli.loads(text)["model"]["tokenizer_path"] == f"{HF}@main" for text in written)
        assert "snapshots" not in "".join([*written, (tmp_path / "out/log.txt").read_text()])
    assert "resumed after step 1" in (tmp_path / "out/log.txt").read_text()
    assert "tokenizer_path" not in (tmp_path / "out/log.txt").read_text().split("changed      since")[-1]
    asked = []
    fetch = lambda stated, mark, *_: asked.append((str(stated), mark.kind)) or places[2] / "t.tiktoken"  # noqa: E731
    monkeypatch.setattr(hub_folders, "local_path", fetch)
    shutil.rmtree(tmp_path / "one")
    assert (
        main(["generate", "--checkpoint", str(step), "--prompt", "def", "--max-new-tokens", "1", "--device", "cpu"])
        == 0
    )
    assert main(["convert", "to-hf", "--checkpoint", str(step), "--output", str(tmp_path / "exported")]) == 0
    assert set(asked) == {(f"{HF}@main", "tokenizer")}


def test_a_folder_that_was_stated_in_place_of_an_id_stays(tmp_path):
    (tmp_path / "run.toml").write_text(RUN.format(source="chats"))
    for folder, kept in (("/cache/models--owner--name/snapshots/c", HF), ("/cache/models--o--other/snapshots/c", None)):
        words = [f"--model.tokenizer_path={folder}", "--checkpoint.initial_load_path=b"]
        config = load_fetched(tmp_path / "run.toml", words, world_size=1)
        assert config.model.tokenizer_path == folder and config.ids.get("model.tokenizer_path") == kept
        assert config.model_dump()["model"]["tokenizer_path"] == (kept or folder)
        assert config.model_dump()["checkpoint"]["initial_load_path"] == "b"


def test_texts_of_a_data_set_are_fetched_where_a_source_is_made(monkeypatch, tmp_path):
    (tmp_path / "blob").write_text("".join(f"{json.dumps({'text': f'line {i} ' * 9 + str(i)})}\n" for i in range(9)))
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "0.jsonl").symlink_to(tmp_path / "blob")  # as in the cache of the hub
    asked = []
    fetch = lambda stated, *rest: asked.append(stated) or tmp_path / "snapshot" / "*.jsonl"  # noqa: E731
    monkeypatch.setattr(hub_folders, "local_path", fetch)
    pattern, output = "hf://datasets/owner/text/*.jsonl", str(tmp_path / "out")
    assert main(["prepare", "--input", pattern, "--output", output, "--processes", "1"]) == 0
    assert asked == [pattern] and load_manifest(Path(output)).splits["train"].documents == 9


@pytest.mark.parametrize(
    "old, new, said",
    [
        ('"hf://owner/name"', '"hf://name"', ("model.tokenizer_path", "hf://name", "hf://owner/name@revision")),
        ("hf://datasets/owner/chats", "hf://owner", ("input", "hf://datasets/owner/name/file")),
        ("initial_load_in_hf = true", "", ("checkpoint.initial_load_path", "set checkpoint.initial_load_in_hf = true")),
        ('path = "{source}"', 'path = "hf://owner/name"', ("path", "is a URL")),
    ],
)
def test_ids_in_the_wrong_place_are_refused(old, new, said, tmp_path):
    assert RUN.count(old) == 1
    (tmp_path / "run.toml").write_text(RUN.replace(old, new).replace("{source}", "chats"))
    with pytest.raises(UserError) as error:
        load_config(tmp_path / "run.toml")
    assert all(part in error.value.faults[0] for part in said), error.value.faults


MISTYPED = [
    "hf:/x",
    "hf:x/y",
    "HF://owner",
    "huggingface://a/b",
    "https://huggingface.co/owner/name",
    "hf.co/owner/name",
]


@pytest.mark.parametrize("address", MISTYPED)
@pytest.mark.parametrize("key", ["model.tokenizer_path", "checkpoint.initial_load_path", "adapter.initial_load_path"])
def test_a_mistyped_address_in_a_key_is_answered_with_the_right_form(key, address, capsys):
    assert main(["train", "--config", "train_configs/lora_debug.toml", f"--{key}", address]) == 2
    fault = f'{key} = "{address}": not an id of the hub; give hf://owner/name or hf://owner/name@revision'
    assert [line for line in capsys.readouterr().err.splitlines() if key in line] == [f"error: command line: {fault}"]


@pytest.mark.parametrize("address", MISTYPED)
@pytest.mark.parametrize("command", [
    ["generate", "--prompt", "a", "--model"], ["rl", "inspect", "folder", "--tokenizer"],
    ["evaluate", "--tasks", "position", "--data", "x", "--model"],
    ["convert", "from-hf", "--output", "out", "--model"], ["inspect", "folder", "--tokenizer"],
])  # fmt: skip
def test_a_mistyped_address_in_an_option_is_answered_with_the_right_form(command, address, capsys):
    assert main([*command, address]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {command[-1]} ") and "not an id of the hub; give hf://owner/name or" in line


@pytest.mark.parametrize("key", ["input", "decontaminate", "output"])
@pytest.mark.parametrize("address", MISTYPED)
def test_a_mistyped_address_of_a_data_set_is_refused(key, address, tmp_path, capsys):
    stated = {"input": str(tmp_path), "output": str(tmp_path / "out")} | {key: address}
    assert main(["prepare", *(word for name, value in stated.items() for word in (f"--{name}", value))]) == 2
    said = capsys.readouterr().err
    remedy = "give hf://datasets/owner/name/file or" if key == "input" else "give a path of this machine"
    assert key in said and remedy in said and said.count("error: ") == 1


REVISIONS = [
    ("datasets/acme/chats@refs/convert/parquet", "refs/convert/parquet", None),
    ("datasets/acme/chats@refs/convert/parquet/train/0000.parquet", "refs/convert/parquet", "train/0000.parquet"),
    ("datasets/acme/chats@refs/convert/parquet-v2/default", "refs/convert/parquet-v2", "default"),
    ("datasets/acme/chats@refs%2Fconvert%2Fparquet/default", "refs/convert/parquet", "default"),
    ("datasets/acme/chats@refs/pr/10/a.jsonl", "refs/pr/10", "a.jsonl"),
    ("datasets/acme/chats@feature%2Flong/a/*.jsonl", "feature/long", "a/*.jsonl"),
    ("datasets/acme/chats@v1/a.jsonl", "v1", "a.jsonl"),
    ("datasets/acme/chats/mail@1.txt", None, "mail@1.txt"),
    ("acme/model@refs%2Fpr%2F1", "refs/pr/1", None),
    ("acme/model@refs/pr/1", "refs/pr/1", None),
]


@pytest.mark.parametrize("stated, revision, path", REVISIONS)
def test_a_revision_with_slashes_is_read_as_huggingface_hub_reads_it(stated, revision, path):
    hub_id = (DATASET if "datasets" in stated else MODEL).parse(f"hf://{stated}")
    assert hub_id is not None and (hub_id.revision, hub_id.path) == (revision, path)
    if (parse := getattr(hub_utils, "parse_hf_uri", None)) is not None:  # newer releases
        expected = parse(f"hf://{stated}")
        assert hub_id == (expected.id, expected.revision, expected.path_in_repo or None)


def test_the_short_name_of_the_parquet_branch_is_that_branch():
    assert DATASET.parse("hf://datasets/acme/chats@~parquet/a") == ("acme/chats", "refs/convert/parquet", "a")


@pytest.mark.parametrize("stated", [
    "hf://datasets/a/b/../../x", "hf://datasets/a/b/c/..", "hf://datasets/a/b//etc/passwd",
    "hf://datasets/a/b@..%2F../x", "hf://a/b@../x", "hf://a/b@%2e%2e/x",
])  # fmt: skip
def test_an_id_stays_inside_its_repository(stated):
    """Its path and its revision are parts of paths of the cache."""
    with pytest.raises(UserError, match="not an id of the hub; give hf://"):
        local_path(stated, DATASET if "datasets" in stated else MODEL, "--input")


def cached_data_set(home: Path, revision: str, files: dict[str, bytes]) -> None:
    """Write a cache of a data set ``acme/chats`` as huggingface_hub does for single files: without a listing."""
    folder = home / "home/hub/datasets--acme--chats"
    reference = folder / "refs" / revision
    reference.parent.mkdir(parents=True)
    reference.write_text(COMMIT)
    for name, content in files.items():
        file = folder / "snapshots" / COMMIT / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def test_the_branch_of_parquet_files_is_found_in_the_cache(tmp_path):
    cached_data_set(tmp_path, "refs/convert/parquet", {"default/train/0000.parquet": b"columns"})
    spellings = ["refs/convert/parquet", "refs%2Fconvert%2Fparquet", "~parquet"]
    ids = [f"hf://datasets/acme/chats@{spelling}/default/train/0000.parquet" for spelling in spellings]
    places = fetched(tmp_path, "http://127.0.0.1:9", *ids, HF_HUB_OFFLINE="1")
    assert [Path(place).read_bytes() for place in places] == [b"columns"] * 3


@pytest.mark.parametrize("variables", [{"HF_HUB_OFFLINE": "1"}, {}])
def test_a_cache_without_a_listing_is_not_taken_for_the_whole(variables, tmp_path):
    """Offline by the variable, or because nothing listens at the address."""
    cached_data_set(tmp_path, "main", {"b.jsonl": b"{}", "data/train-00000-of-00002.parquet": b"columns"})
    ids = [f"hf://datasets/acme/chats{path}" for path in ("", "/data/*.parquet", "/data/train-00000-of-00002.parquet")]
    ids.append("hf://datasets/acme/chats/*.jsonl")
    whole, pattern, part, lines = fetched(tmp_path, "http://127.0.0.1:9", *ids, **variables)
    for refusal in (whole, pattern):
        assert all(word in refusal for word in ("data/train-00001-of-00002.parquet", "hf download acme/chats"))
    assert Path(part).read_bytes() == b"columns"
    assert Path(lines).name == "*.jsonl"


def test_files_of_a_cache_are_counted_where_the_hub_does_not_answer(tmp_path, monkeypatch, caplog):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "b.txt").write_text("b")
    monkeypatch.setattr(hub_files, "_snapshot", lambda *_, **__: tmp_path)
    monkeypatch.setattr(hub_files, "_hub_answers", lambda _: False)
    assert local_path("hf://datasets/acme/chats/*.jsonl", DATASET, "input =") == tmp_path / "*.jsonl"
    (line,) = caplog.messages
    assert "input = hf://datasets/acme/chats" in line and "only what its cache holds is used (1 file)" in line
    monkeypatch.setattr(hub_files, "_hub_answers", lambda _: True)
    local_path("hf://datasets/acme/chats/*.jsonl", DATASET, "input =")
    monkeypatch.setattr(hub_files, "_hub_answers", lambda _: False)
    local_path("hf://datasets/acme/chats/a.jsonl", DATASET, "input =")  # all that was asked for
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("files, patterns, missing", [
    (["a-00000-of-00001.parquet"], ["*"], []),
    (["a-00000-of-00003.parquet", "a-00002-of-00003.parquet"], ["*"], ["a-00001-of-00003.parquet"]),
    (["a-00002-of-00002.json"], ["*"], ["a-00001-of-00002.json"]),
    (["a-00000-of-00002-1f2e.parquet"], ["a-00000*"], []),
    (["a/b-00001-of-00002.jsonl.gz"], ["a", "a/*"], ["a/b-00000-of-00002.jsonl.gz"]),
])  # fmt: skip
def test_missing_parts_of_a_series_are_named(files, patterns, missing):
    assert hub_files.missing_parts(files, patterns) == missing
