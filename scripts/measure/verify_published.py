"""Check a published GLM-4.5 or 4.6 folder once: tensors, the round trip of its bytes, and logits beside transformers.

    python scripts/measure/verify_published.py models/GLM-4.5-Air --scratch /mnt/large

1. Names, shapes and types of all tensors are those that config.json asks for; no weight is read.
2. `convert from-hf` and `convert to-hf` give a folder whose tensors have the same SHA-256. Needs twice the size of the
   folder under --scratch; the files are removed. Quantised folders are not converted.
3. The logits of ten tokens equal those of transformers in FP32, to 1e-4 of the largest logit. One layer at a time is in
   memory: 15 GB of GLM-4.6, 9 GB of Air.

Exit code 1 if something differs, 2 if the folder cannot be used.
"""

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm, Glm4MoeRotaryEmbedding

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from glm46.commands.convert import convert_command
from glm46.compute.distributed.local_tensor import global_indices
from glm46.config.errors import UserError, raise_if
from glm46.config.model import ModelShape
from glm46.engine.inference.model_mesh import ModelMesh
from glm46.files.tensor_file import TensorFile, read_records
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.folder_check import check_folder, stored_shape
from glm46.storage.huggingface.folder_tensors import find_tensors
from glm46.storage.huggingface.import_weights import FolderReader
from glm46.storage.huggingface.names import has_repeats

TEXT = "def read(path: str) -> list[bytes]:\n    with open(path) as file:\n        return"
TOKENS = 10
TOLERANCE = 1e-4
"""Of the largest logit: FP32 sums in another order through up to 92 layers."""
CONVERTED = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Hugging Face folder")
    parser.add_argument("--scratch", type=Path, help="where the round trip is written; default: the temporary folder")
    arguments = parser.parse_args(argv)
    try:
        return verify(arguments.folder, arguments.scratch)
    except UserError as error:
        print(*error.faults, sep="\n", file=sys.stderr)
        return error.exit_code


def verify(folder: Path, scratch: Path | None) -> int:
    """Print the result of each check; returns the exit code. Raises UserError if the folder cannot be used."""
    shape = stored_shape(folder)
    checked = check_folder(folder, shape)
    print(f"tensors: {len(checked.places):,} with the names, shapes and types of config.json")
    dtype = checked.places["model.embed_tokens.weight"][1].dtype
    differing: list[str] = []
    if checked.scheme is not None or dtype not in CONVERTED:
        print("round trip: not for quantised folders and FP16")
    else:
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            differing = differing_tensors(folder, converted_twice(folder, shape, CONVERTED[dtype], Path(place)))
        print(f"round trip: {len(differing)} of {len(checked.places):,} tensors differ", *differing[:10], sep="\n  ")
    gap, same = compare_logits(folder, shape)
    print(f"logits of {TOKENS} tokens: largest difference {gap:.1e} of the largest logit, most likely tokens ", end="")
    print("equal" if same else "differ")
    return int(bool(differing) or not same or not gap <= TOLERANCE)


def converted_twice(folder: Path, shape: ModelShape, dtype: str, place: Path) -> Path:
    """The folder after `convert from-hf` and `convert to-hf`."""
    copies = ["--mtp-copies"] if has_repeats(find_tensors(folder), shape) else []
    convert_command(["from-hf", "--model", str(folder), "--output", str(place / "step"), "--dtype", dtype])
    step, written = place / "step" / "step-000000", place / "folder"
    options = ["--config", str(folder), "--dtype", dtype, *copies]
    convert_command(["to-hf", "--checkpoint", str(step), "--output", str(written), *options])
    return written


def differing_tensors(first: Path, second: Path) -> list[str]:
    """Names of tensors that are in one folder only, or have another type, shape or SHA-256."""
    hashes = [hashes_of(folder) for folder in (first, second)]
    return sorted(name for name in hashes[0].keys() | hashes[1].keys() if hashes[0].get(name) != hashes[1].get(name))


def hashes_of(folder: Path) -> dict[str, tuple[object, ...]]:
    """Type, shape and SHA-256 of each tensor; the files are read one tensor at a time."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted({path for path, _ in find_tensors(folder).values()}):
        records = read_records(path)
        with TensorFile(path, records) as file:
            for name, record in records.items():
                values = file.read(name, tuple((0, size) for size in record.shape))
                digest = hashlib.sha256(values.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
                found[name] = (record.dtype, tuple(record.shape), digest)
    return found


@torch.inference_mode()
def compare_logits(folder: Path, shape: ModelShape) -> tuple[float, bool]:
    """The largest difference of our logits from those of transformers, relative to the largest logit, and whether the
    most likely tokens are equal. FP32; one layer is in memory at a time."""
    shape = shape.model_copy(update={"num_nextn_predict_layers": 0})
    ids = torch.tensor([load_tokenizer(str(folder)).encode(TEXT).tolist()[:TOKENS]])
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    positions = torch.arange(ids.shape[1])[None]
    mask = torch.full((1, 1, ids.shape[1], ids.shape[1]), float("-inf")).triu(1)
    with FolderReader(folder, shape) as reader:
        theirs = read_weight(reader, "model.embed_tokens.weight")[ids]
        rotary = Glm4MoeRotaryEmbedding(config)(theirs, positions)
        ours = None
        for index in range(shape.num_hidden_layers):
            layer = their_layer(reader, config, index)
            output = layer(theirs, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
            theirs = output[0] if isinstance(output, tuple) else output
            del layer
            ours = our_layer(reader, shape, index)(None if index else ids, hidden=ours, positions=positions)
            ours = getattr(ours, "hidden", ours)
        norm = Glm4MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        norm.weight.data = read_weight(reader, "model.norm.weight")
        theirs = norm(theirs) @ read_weight(reader, "lm_head.weight").t()
    gap = (ours - theirs).abs().max() / theirs.abs().max()
    return float(gap), torch.equal(ours.argmax(-1), theirs.argmax(-1))


def our_layer(reader: FolderReader, shape: ModelShape, index: int) -> nn.Module:
    """Our part of the model with one layer; the first has the embedding, the last norm and head."""
    part = ModelMesh().part_of_model(shape, torch.float32)
    part.keep_layers(range(index, index + 1))
    part.to_empty(device="cpu")
    for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
        raise_if(reader.fill(name, tensor, global_indices(tensor)))
    return part


def their_layer(reader: FolderReader, config: PretrainedConfig, index: int) -> nn.Module:
    """A decoder layer of transformers, filled by Hugging Face names; transformers 5 fuses the experts of a layer."""
    with torch.device("meta"):
        layer = Glm4MoeDecoderLayer(config, index)
    layer.to_empty(device="cpu").float().eval()
    for name, target in [*layer.named_parameters(), *layer.named_buffers()]:
        prefix = f"model.layers.{index}.{name}"
        if not name.startswith("mlp.experts."):
            target.copy_(read_weight(reader, prefix))
            continue
        parts = ["gate_proj", "up_proj"] if name.endswith("gate_up_proj") else ["down_proj"]
        for expert, of_expert in enumerate(target):
            names = [f"model.layers.{index}.mlp.experts.{expert}.{part}.weight" for part in parts]
            of_expert.copy_(torch.cat([read_weight(reader, one) for one in names]))
    return layer


def read_weight(reader: FolderReader, name: str) -> Tensor:
    """A whole tensor in FP32, dequantised if it is quantised."""
    size = reader.names.places[name][1].hf_shape
    target = torch.empty(size)
    reader.read(name, tuple((0, length) for length in size), target)
    return target


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
