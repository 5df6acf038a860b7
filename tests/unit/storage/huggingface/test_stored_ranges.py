"""Text and weights in an object store that are read by range: the same values, and only the bytes that are needed."""

import json
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from glm46.commands.prepare import prepare_command
from glm46.config.errors import UserError
from glm46.config.loader import dump_config
from glm46.files import store as store_module
from glm46.files import store_links, store_ranges
from glm46.files.block_digests import BLOCK_BYTES
from glm46.files.store import Store
from glm46.files.tensor_file import TensorFile, read_records
from glm46.operate.launch.fetched_config import load_fetched
from glm46.operate.launch.train_rank import train
from glm46.storage.data.manifest import load_manifest
from glm46.storage.data.packing import open_tokens
from glm46.storage.huggingface import stored_folder
from glm46.storage.huggingface.import_weights import import_weights
from glm46.storage.huggingface.stored_folder import cache_folder, fetch_folder, publish_folder
from tests.builders import model_folder, random_model, small_config

memory = pytest.importorskip("fsspec.implementations.memory", reason="not installed; pip install '.[cloud]'")
NUMBERS = count()


@pytest.fixture(autouse=True)
def _small_files(monkeypatch, tmp_path):
    """Files of any size are read by range, and the cache is on an empty home."""
    monkeypatch.setattr(store_module, "_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(store_module, "LEAST_BYTES", 1)
    monkeypatch.setattr(stored_folder, "LEAST_BYTES", 1)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def url() -> str:
    """A prefix without objects."""
    return f"memory://ranges/{next(NUMBERS)}/name"


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Prepared text of about 100,000 tokens."""
    base = tmp_path_factory.mktemp("text")
    (base / "text").mkdir()
    for number in range(60):
        lines = (f"def function_{number}_{line}(value):\n    return value + {number * line}\n" for line in range(60))
        (base / "text" / f"{number}.txt").write_text("".join(lines))
    options = ["--input", str(base / "text"), "--held_out", "0.1", "--deduplicate", "exact", "--processes", "1"]
    assert prepare_command([*options, "--output", str(base / "shards")]) == 0
    return base / "shards"


@pytest.fixture
def fetched(monkeypatch) -> list[int]:
    """A list of the bytes of each request for a range."""
    sizes = []
    original = Store.range

    def counted(self, name, start, stop):
        sizes.append(stop - start)
        return original(self, name, start, stop)

    monkeypatch.setattr(Store, "range", counted)
    return sizes


def losses(config) -> list[float]:
    lines = (Path(config.job.dump_folder) / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_a_run_on_a_cache_smaller_than_its_text_reads_the_same_rows(packing, url, shards, tmp_path, monkeypatch):
    publish_folder(shards, url)
    size = sum(file.stat().st_size for file in shards.glob("*.safetensors"))
    monkeypatch.setattr(stored_folder, "cache_bytes", lambda _: size // 3)
    monkeypatch.setattr(store_ranges, "_UNCHECKED_BYTES", BLOCK_BYTES)
    training = {"steps": 3, "global_batch_size": 8}
    source = {"name": "test", "packing": packing}
    local = small_config(
        shards, tmp_path / "local", data={"sources": [{**source, "path": str(shards)}]}, training=training
    )
    stored = small_config(shards, tmp_path / "out", data={"sources": [{**source, "path": url}]}, training=training)
    file = tmp_path / "run.toml"
    file.write_text(dump_config(stored))
    loaded = load_fetched(file, [], world_size=1)
    assert (cache_folder(url) / "train-00000.safetensors").is_symlink()
    assert train(loaded) == 0
    assert train(local) == 0
    assert losses(loaded) == losses(local) and len(losses(local)) == 3
    assert 0 < store_links.limited_bytes(cache_folder(url).parents[1]) <= size // 3 + BLOCK_BYTES


def test_a_cold_start_reads_a_row_without_the_rest_of_the_text(url, shards, fetched, monkeypatch, capsys):
    publish_folder(shards, url)
    monkeypatch.setattr(stored_folder, "cache_bytes", lambda _: 1 << 17)
    fetched.clear()
    folder = fetch_folder(url, "data.sources[0].path =", "text")
    size = sum(file.stat().st_size for file in shards.glob("*.safetensors"))
    said = f"{url}: 0.0 MB fetched, {size / 1e6:.1f} MB read by range, through a cache of 0.1 MB"
    assert said in capsys.readouterr().out
    manifest = load_manifest(folder)
    out = torch.empty(129, dtype=torch.int64).numpy()
    expected = out.copy()
    open_tokens(manifest, "train").read(5000, out)
    local = load_manifest(shards)
    open_tokens(local, "train").read(5000, expected)
    assert (out == expected).all()
    # Of both shards the header and the last end; of one all ends of documents, the tokens of the row, and checksums.
    assert sum(fetched) < size / 2


@pytest.mark.parametrize("damage", ["on the disk", "in the store"])
def test_text_of_another_program_is_compared_with_its_checksums(damage, url, shards):
    store = Store(url)
    for file in shards.iterdir():
        if file.is_file():
            store.write(file.name, file.read_bytes())
    folder = fetch_folder(url, "data.sources[0].path =", "text")
    name = "train-00000.safetensors"
    tokens = open_tokens(load_manifest(folder), "train")
    out = torch.empty(129, dtype=torch.int64).numpy()
    tokens.read(5000, out)
    ranges = store_ranges.range_file(folder / name)
    content = bytearray((shards / name).read_bytes())
    content[-5000] ^= 1
    place = len(content) - 5000
    last_row = load_manifest(folder).splits["train"].tokens - 400
    if damage == "on the disk":
        ranges.read(place, 1)
        with ranges.data.open("r+b") as file:
            file.seek(place)
            file.write(content[place : place + 1])
    else:
        store.write(name, bytes(content))
        ranges.forget(0, len(content))
    rows = [torch.empty(129, dtype=torch.int64).numpy() for _ in range(last_row // 128)]
    if damage == "on the disk":
        for number, row in enumerate(rows):
            tokens.read(128 * number, row)
        return
    with pytest.raises(UserError, match="do not match the checksum"):
        for number, row in enumerate(rows):
            tokens.read(128 * number, row)


def fetched_blocks(file: Path):
    """Marks of the blocks of a link that were fetched."""
    return store_ranges.range_file(file)._have & 1


def test_a_rank_of_four_reads_its_rows_of_a_file(url, tmp_path, fetched):
    values = torch.arange(4096 * 512, dtype=torch.float32).reshape(4096, 512)
    (tmp_path / "weights").mkdir()
    save_file({"a": values, "b": -values}, tmp_path / "weights" / "model.safetensors")
    (tmp_path / "weights" / "config.json").write_text("{}")
    publish_folder(tmp_path / "weights", url)
    fetched.clear()
    file = fetch_folder(url, "--model", "weights") / "model.safetensors"
    with TensorFile(file, read_records(file)) as opened:
        rows = {name: opened.read(name, ((1024, 1024), (0, 512))) for name in "ab"}
    assert torch.equal(rows["a"], values[1024:2048]) and torch.equal(rows["b"], -values[1024:2048])
    assert sum(fetched) <= 1.1 * values.nbytes / 2


def test_weights_by_range_are_the_weights_of_the_folder(url, tokenizer, tmp_path, fetched):
    model = random_model()
    folder = model_folder(tmp_path / "weights", model, tokenizer)
    publish_folder(folder, url)
    linked = fetch_folder(url, "checkpoint.initial_load_path =", "weights")
    files = [*linked.glob("*.safetensors")]
    assert files and all(file.is_symlink() and not fetched_blocks(file).any() for file in files)
    names = [name for name, _ in model.named_parameters()][:4]
    tensors = {name: torch.zeros_like(model.get_parameter(name)) for name in names}
    nbytes = import_weights(linked, model.shape, tensors)
    assert all(torch.equal(tensors[name], model.get_parameter(name)) for name in names)
    assert nbytes == sum(tensor.nbytes for tensor in tensors.values())
