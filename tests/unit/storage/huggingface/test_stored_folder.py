"""Folders of weights in an object store: published whole, fetched once, compared with their hashes."""

import json
from argparse import Namespace
from itertools import count
from pathlib import Path

import pytest

from glm46.commands.checkpoint import checkpoint_command
from glm46.commands.convert import convert_command
from glm46.commands.prepare import prepare_command
from glm46.config.errors import UserError
from glm46.config.loader import dump_config, load_config
from glm46.files import store as store_module
from glm46.files.store import Store
from glm46.operate.launch.fetched_config import fetched_overrides, load_fetched
from glm46.operate.launch.train_rank import train
from glm46.storage.checkpoint.folder_kind import Kind, kind_of
from glm46.storage.huggingface.hub import fetch_options
from glm46.storage.huggingface.stored_folder import SUMS, cache_folder, fetch_folder, publish_folder
from tests.builders import model_folder, random_model, small_config
from tests.step_tensors import step_tensors

memory = pytest.importorskip("fsspec.implementations.memory", reason="not installed; pip install '.[cloud]'")
NUMBERS = count()


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setattr(store_module, "_PAUSES", (0.0, 0.0))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def url() -> str:
    """A prefix without objects."""
    return f"memory://folders/{next(NUMBERS)}/name"


@pytest.fixture
def weights(tmp_path, tokenizer) -> Path:
    """A Hugging Face folder."""
    return model_folder(tmp_path / "weights", random_model(), tokenizer)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_published_folder_is_fetched_once_and_again_when_it_changes(url, weights, monkeypatch):
    publish_folder(weights, url)
    folder = fetch_folder(url, "--model")
    assert folder.name == "name"
    sums = contents(folder).pop(SUMS).decode()
    assert {line.split("  ")[1] for line in sums.splitlines()} == contents(weights).keys()
    assert contents(folder) == {**contents(weights), SUMS: sums.encode()}
    with monkeypatch.context() as patch:
        patch.setattr(Store, "blocks", None)  # nothing is downloaded
        assert fetch_folder(url, "--model") == folder
    (weights / "config.json").write_text("{}")
    (weights / "generation_config.json").unlink()
    publish_folder(weights, url)
    fetch_folder(url, "--model")
    assert contents(folder).keys() == {*contents(weights), SUMS}
    assert (folder / "config.json").read_text() == "{}"


def test_a_download_that_was_interrupted_is_completed(url, weights, monkeypatch):
    publish_folder(weights, url)
    with monkeypatch.context() as patch:
        fetch = Store.fetch

        def fail(self, name, *arguments):
            if name.endswith(".safetensors"):
                raise OSError(5, "cut")
            fetch(self, name, *arguments)

        patch.setattr(Store, "fetch", fail)
        with pytest.raises(UserError, match="cut"):
            fetch_folder(url, "--model")
    assert contents(fetch_folder(url, "--model")).keys() == {*contents(weights), SUMS}


def test_an_interrupted_upload_is_no_folder_of_weights(url, weights, monkeypatch):
    put = Store.put

    def fail(self, file, name, record):
        if name == "config.json":
            raise OSError(5, "killed")
        put(self, file, name, record)

    monkeypatch.setattr(Store, "put", fail)
    with pytest.raises(OSError, match="killed"):
        publish_folder(weights, url)
    # Without its list of hashes the index alone would be taken for a folder of weights.
    with pytest.raises(UserError, match="lacks config.json"):
        fetch_folder(url, "--model")


@pytest.mark.parametrize("damage", ["flip", "missing"])
def test_other_bytes_than_the_hashes_are_refused(damage, url, weights):
    publish_folder(weights, url)
    store = Store(url)
    file = next(path.name for path in weights.glob("*.safetensors"))
    content = store.read(file)
    if damage == "flip":
        store.write(file, content[:-1] + bytes([content[-1] ^ 1]))
    else:
        store.remove([file])
    with pytest.raises(UserError) as raised:
        fetch_folder(url, "--model")
    assert file in str(raised.value) and url in str(raised.value)


def test_a_folder_of_another_program_has_no_hashes_and_is_fetched(url, weights):
    store = Store(url)
    for name, content in contents(weights).items():
        store.write(name, content)
    store.write("original/model.safetensors", b"not fetched")
    assert contents(fetch_folder(url, "--model")) == contents(weights)


@pytest.mark.parametrize("address", ["memory://folders/none", "memory://user:secret@folders/a"])
def test_what_is_no_folder_is_refused_without_its_password(address):
    with pytest.raises(UserError, match="--model") as raised:
        fetch_folder(address, "--model")
    assert "secret" not in str(raised.value)


def test_a_conversion_reads_and_writes_urls(url, weights, tmp_path):
    source = f"{url}/source"
    steps = f"{url}/steps"
    publish_folder(weights, source)
    assert convert_command(["from-hf", "--model", source, "--output", steps]) == 0
    assert checkpoint_command(["verify", steps]) == 0
    step = fetch_folder(f"{steps}/step-000000", "")
    assert kind_of(step) is Kind.STEP and step_tensors(step)
    assert convert_command(["to-hf", "--checkpoint", f"{steps}/step-000000", "--output", f"{url}/back"]) == 0
    assert convert_command(["to-hf", "--checkpoint", str(step), "--output", str(tmp_path / "back")]) == 0
    stored = contents(fetch_folder(f"{url}/back", ""))
    stored.pop(SUMS)
    assert stored == contents(tmp_path / "back")
    with pytest.raises(UserError, match="has objects already"):
        convert_command(["to-hf", "--checkpoint", str(step), "--output", f"{url}/back"])


def test_a_failed_conversion_uploads_nothing(url, weights):
    (weights / "config.json").write_text("{}")
    with pytest.raises(UserError):
        convert_command(["from-hf", "--model", str(weights), "--output", url])
    assert not Store(url).objects()


def test_a_run_starts_from_weights_of_a_store_and_its_config_keeps_the_url(url, weights, tmp_path, source_folder):
    publish_folder(weights, url)
    start = {"initial_load_path": url, "initial_load_in_hf": True, "folder": f"{url}/run", "last_save_in_hf": True}
    config = small_config(source_folder, tmp_path / "out", checkpoint=start, training={"steps": 1})
    file = tmp_path / "run.toml"
    file.write_text(dump_config(config))
    loaded = load_fetched(file, [], world_size=1)
    assert loaded.checkpoint.initial_load_path == str(cache_folder(url))
    assert dump_config(loaded) == dump_config(config), "each machine fetches it"
    # The launcher has fetched it; a rank gets its folder.
    ranks = load_fetched(file, fetched_overrides(load_config(file, [])), world_size=1)
    assert dump_config(ranks) == dump_config(config)
    assert train(loaded) == 0
    export = fetch_folder(f"{url}/run/huggingface/step-000001", "")
    assert kind_of(export) is Kind.HUGGING_FACE
    assert contents(export).keys() == {*contents(tmp_path / "out" / "huggingface" / "step-000001"), SUMS}


def test_options_that_are_urls_become_folders(url, weights):
    publish_folder(weights, url)
    arguments = Namespace(model=Path(url), tokenizer=url, adapter=None)
    folder = cache_folder(url)
    assert fetch_options(arguments, "model", "tokenizer", "adapter") == {str(Path(url)): str(folder)}
    assert arguments.model == folder and arguments.tokenizer == str(folder)


def test_shards_are_prepared_into_a_store_and_trained_on(url, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(60):
        (text / f"{number}.txt").write_text(f"def function_{number}(value):\n    return value + {number}\n" * 9)
    options = ["--input", str(text), "--held_out", "0.1", "--deduplicate", "exact", "--processes", "1"]
    assert prepare_command([*options, "--output", url]) == 0
    assert prepare_command([*options, "--output", str(tmp_path / "shards")]) == 0
    config = small_config(Path("unused"), tmp_path / "out", data={"sources": [{"name": "test", "path": url}]})
    file = tmp_path / "run.toml"
    file.write_text(dump_config(config))
    loaded = load_fetched(file, [], world_size=1)
    assert loaded.data.sources[0].path == str(cache_folder(url))
    assert dump_config(loaded) == dump_config(config)
    assert train(loaded) == 0
    local = small_config(tmp_path / "shards", tmp_path / "local")
    assert train(local) == 0
    losses = [[line for line in metrics_of(run) if "loss" in line] for run in (loaded, local)]
    assert [row["loss"] for row in losses[0]] == [row["loss"] for row in losses[1]] and losses[0]


def metrics_of(config) -> list[dict]:
    lines = (Path(config.job.dump_folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
