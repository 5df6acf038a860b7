"""Builders of what tests work on: runs, sources, shapes, models, batches, plans, model folders, checkpoints; and the
reader of the metrics of a run.

All are small: a run of `small_config` takes a second. The fixtures are imported by the conftest.py of tests/unit and of
tests/ranks. There is none above these two, so that tests/architecture loads nothing of the package.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from glm46.compute.model.transformer import Transformer
from glm46.config.loader import dump_config
from glm46.config.model import ModelShape
from glm46.config.presets import PRESETS
from glm46.config.run_config import RunConfig
from glm46.run.plan import Plan, resolve_plan
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.data.manifest import Manifest
from glm46.storage.data.tokenizer import Tokenizer, load_tokenizer
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids
from glm46.storage.prepare.sharding import SplitWriter, save_manifest

TINY = dict(
    flavor="debug", num_hidden_layers=2, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
    n_routed_experts=4, num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
)  # fmt: skip


def model_table(**keys) -> dict[str, Any]:
    """[model] with these keys; the keys of the shape are in [model.shape]."""
    shape = {key: keys.pop(key) for key in ModelShape.model_fields if key in keys}
    return keys | {"shape": keys.get("shape", {}) | shape}


def with_shape(config: RunConfig, **keys) -> RunConfig:
    """A run with other keys of the shape."""
    shape = config.model.shape.model_copy(update=keys)
    return config.model_copy(update={"model": config.model.model_copy(update={"shape": shape})})


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The shipped vocabulary."""
    return load_tokenizer("builtin")


def call_here(workers, start, arguments, function, items):
    """In place of `call_in_workers`, in this process."""
    start(*arguments)
    yield from ((number, function(*item)) for number, item in enumerate(items))


@pytest.fixture(scope="session")
def source_folder(tokenizer, tmp_path_factory) -> Path:
    """Repeating sentences, cut into documents, a few of them held out."""
    return write_source(tmp_path_factory.mktemp("source"), tokenizer)


def write_source(folder: Path, tokenizer: Tokenizer, *, documents: int = 60, factor: int = 1) -> Path:
    """The prepared source of `source_folder`, also for programs outside pytest, or one of more or longer documents."""
    splits = {}
    for name, count in (("train", documents), ("validation", 6)):
        metadata = {"tokenizer": tokenizer.fingerprint, "eos_id": str(tokenizer.eos_id)}
        writer = SplitWriter(folder, name, metadata)
        for number in range(count):
            text = f"def function_{number}(value):\n    return value + {number}\n" * factor * (3 + number % 5)
            tokens = np.append(tokenizer.encode(text), tokenizer.eos_id).astype(np.uint32)
            piece = {
                "tokens": tokens,
                "doc_ends": np.array([len(tokens)]),
                "text_bytes": np.array([len(text.encode())]),
            }
            writer.add(piece, np.array([True]))
        splits[name] = writer.finish()
    save_manifest(Manifest(folder, "test", tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eos_id, splits))
    return folder


def write_tokens(folder: Path, tokenizer: Tokenizer, documents: dict[str, Iterable[Any]]) -> Path:
    """A prepared source of these documents, for each split arrays of tokens that end with the end of a document. Each
    token counts as one byte of text."""
    splits = {}
    for name, tokens_of_documents in documents.items():
        writer = SplitWriter(folder, name, {"tokenizer": tokenizer.fingerprint, "eos_id": str(tokenizer.eos_id)})
        for tokens in tokens_of_documents:
            size = np.array([len(tokens)])
            writer.add({"tokens": tokens, "doc_ends": size, "text_bytes": size}, np.array([True]))
        splits[name] = writer.finish()
    save_manifest(Manifest(folder, "test", tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eos_id, splits))
    return folder


@contextmanager
def folder_with_source() -> Iterator[tuple[Path, Path]]:
    """A temporary folder, and the source of `write_source` in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "source"
        folder.mkdir()
        yield Path(name), write_source(folder, load_tokenizer("builtin"))


def small_config(source: Path, dump_folder: Path, **tables) -> RunConfig:
    """A small run; keyword arguments are whole or partial tables of the TOML; keys of the shape are in
    ``model`` itself."""
    content = {
        "job": {"dump_folder": str(dump_folder)},
        "model": TINY,
        "data": {"document_mask": True, "sources": [{"name": "test", "path": str(source)}]},
        "training": {"local_batch_size": 2, "seq_len": 16, "steps": 4, "mixed_precision_param": "float32"},
        "optimizer": {"name": "AdamW", "lr": 1e-2},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
    }
    for table, keys in tables.items():
        content[table] = {**content.get(table, {}), **keys}
    content["model"] = model_table(**content["model"])
    return RunConfig.model_validate_json(json.dumps(content))


def metric_rows(folder: Path | str, column: str | None = None) -> list[dict[str, Any]]:
    """The rows of metrics of the run in this folder, of all columns or only those that have this one.

    A last line without its end is skipped: a run may be writing it. A run that has no rows yet has no file.
    """
    file = Path(folder) / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if column is None or column in row]


def computed_rows(folder: Path | str, *others: str) -> list[dict[str, Any]]:
    """The rows of `metric_rows` without columns that tell of the machine or of this attempt, not of what was computed.

    ``others``: ends of further names of columns to exclude.
    """
    excluded = ("seconds", "second", "device", "mfu", "gib", "overhead_ratio", "extreme_rank", *others)
    return [
        {name: value for name, value in row.items() if not name.partition("/")[0].endswith(excluded)}
        for row in metric_rows(folder)
    ]


@pytest.fixture
def make_config(source_folder, tmp_path):
    """A function that makes a small run; keyword arguments are whole or partial tables of the TOML."""

    def make(**tables) -> RunConfig:
        return small_config(source_folder, tmp_path / "out", **tables)

    return make


def plan_of(world_size: int = 1, host_ranks: int | None = None, **tables) -> Plan:
    """The plan of a run with these tables of the TOML; keys of the shape are in ``model`` itself."""
    tables["model"] = model_table(**tables.get("model", {"flavor": "debug"}))
    config = RunConfig.model_validate_json(json.dumps(tables))
    return resolve_plan(config, world_size, host_ranks=host_ranks)


def tiny_shape(**changes) -> ModelShape:
    """The shape of `TINY`: two layers, the second with four experts."""
    sizes = {name: size for name, size in TINY.items() if name != "flavor"}
    return PRESETS["debug"].model_copy(update=sizes | changes)


def randomise(model: nn.Module, seed: int = 0, scale: float = 1.0) -> None:
    """Fill all parameters and buffers, so that a forgotten norm, bias or factor cannot hide.

    Matrices have standard deviation ``scale / sqrt(inputs)``: with 1 every layer changes its input by about as much as
    there is. Norm weights lie around 1, biases around 0.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(1.0 + 0.3 * noise)
            elif name.endswith("bias"):
                tensor.copy_(0.2 * noise)
            else:
                tensor.copy_(noise * scale * tensor.shape[-1] ** -0.5)


def random_model(shape: ModelShape | None = None, seed: int = 0, scale: float = 1.0) -> Transformer:
    """A model in FP32, of `tiny_shape` unless another shape is given, filled by `randomise`."""
    model = Transformer(shape or tiny_shape())
    randomise(model, seed, scale)
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a model by name, without gradients."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def random_batch(shape: ModelShape, rows: int = 2, length: int = 19, seed: int = 1) -> dict[str, Tensor]:
    """Keyword arguments of `Transformer.forward` with labels, about one in eight of them ignored: int64
    [rows, length], and [rows, depth, length] for the prediction layers."""
    generator = torch.Generator().manual_seed(seed)

    def ids(*size: int) -> Tensor:
        return torch.randint(0, shape.vocab_size, size, generator=generator)

    def labels(*size: int) -> Tensor:
        ignored = torch.rand(size, generator=generator) < 0.125
        return ids(*size).masked_fill(ignored, -100)

    batch = {"input_ids": ids(rows, length), "labels": labels(rows, length)}
    if depth := shape.num_nextn_predict_layers:
        batch["mtp_input_ids"] = ids(rows, depth, length)
        batch["mtp_labels"] = labels(rows, depth, length)
    return batch


def model_folder(folder: Path, model: Transformer, tokenizer: Tokenizer | None = None) -> Path:
    """Write a model as a Hugging Face folder in FP32, with the shipped vocabulary unless another is given."""
    tokenizer = tokenizer or load_tokenizer("builtin")
    config = config_of(model.shape, None, eos_ids=stop_ids(tokenizer), dtype="float32")
    files = files_beside_weights(tokenizer, max_length=model.shape.max_position_embeddings)
    options = ExportOptions(torch.float32, other_files=files)
    export_weights(folder, model.shape, config, weights_of(model), options=options)
    return folder


def step_folder(dump_folder: Path, model: Transformer, step: int = 1, /, **tables) -> Path:
    """Write a model as the step folder of a run with these tables: the weights alone, without optimizer states."""
    tensors = {f"model.{name}": tensor for name, tensor in weights_of(model).items()}
    config = RunConfig.model_validate_json(json.dumps(tables))
    CheckpointManager(dump_folder, keep_latest_k=0).save(step, tensors, {"config": dump_config(config)})
    return dump_folder / f"step-{step:06d}"
