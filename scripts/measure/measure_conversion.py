"""Measure import, export and conversion of a random Hugging Face folder: speed beside a copy, memory, bytes read.

    python scripts/measure/measure_conversion.py --folder /tmp                    # 3.5 GB in 20 files, three rounds
    python scripts/measure/measure_conversion.py --folder /tmp --gb 0.1 --rounds 0   # memory and bytes only

Takes about four times --gb of disk, and as much memory as --gb; all files are removed. Linux only. Exit code 1
if a limit is missed: speed below 0.6 of the copy, more memory than two of the largest tensors, needless bytes read.
"""

import argparse
import contextlib
import io
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from glm46.commands.convert import convert_command
from glm46.config.errors import raise_if
from glm46.config.model import ModelShape
from glm46.config.presets import PRESETS
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.config_json import CONFIG, config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.folder_check import check_folder
from glm46.storage.huggingface.folder_tensors import INDEX
from glm46.storage.huggingface.import_weights import FolderReader, import_weights
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids

LEAST_SPEED = 0.6
"""Limit: speed relative to the copy's bytes per second."""

MOST_TENSORS = {"convert from-hf": 2}
"""Limit: memory beyond the model, in units of the largest tensor: one is written while the next is filled. All other
actions move pieces."""

BASE_BYTES = 48_000_000
"""Limit: further memory for pieces, headers, and modules that Python and torch load on first use."""

SMALL_READS = 50_000
"""Limit: further bytes read, such as those of /proc."""

RANKS = 4
"""Ranks that read their parts, one after the other."""

DTYPE = torch.bfloat16


def shape_of_size(gb: float) -> ModelShape:
    """A narrow GLM-4.6 with as many expert layers as fill the size."""
    width = 1536 if gb >= 1 else 384
    shape = PRESETS["GLM-4.6"].model_copy(
        update=dict(
            vocab_size=8192, hidden_size=width, num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=64,
            intermediate_size=2 * width, moe_intermediate_size=width // 3, num_attention_heads=12,
            num_key_value_heads=2, head_dim=64,
        )
    )  # fmt: skip
    smaller, larger = (nbytes_of(shape.model_copy(update={"num_hidden_layers": n})) for n in (2, 3))
    layers = 2 + max(0, round((gb * 1e9 - smaller) / (larger - smaller)))
    return shape.model_copy(update={"num_hidden_layers": layers})


def kinds_of(shape: ModelShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every tensor, by our name."""
    entries = HFNames(shape, repeat_shared=False).entries
    return {name: (entry.shape, torch.float32 if entry.is_fp32 else DTYPE) for name, entry in entries.items()}


def sizes_of(shape: ModelShape) -> list[int]:
    """Bytes of each tensor."""
    return [torch.Size(size).numel() * dtype.itemsize for size, dtype in kinds_of(shape).values()]


def nbytes_of(shape: ModelShape) -> int:
    """Bytes of the model."""
    return sum(sizes_of(shape))


class RandomTensors(Mapping[str, Tensor]):
    """A model whose tensors are generated on access, always with the same values."""

    def __init__(self, shape: ModelShape):
        self._kinds = kinds_of(shape)

    def __getitem__(self, name: str) -> Tensor:
        size, dtype = self._kinds[name]
        generator = torch.Generator().manual_seed(list(self._kinds).index(name))
        return torch.randn(size, dtype=dtype, generator=generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


def memory_of(line: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM the maximum since `peak_of` began."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(f"{line}:"):
            return 1024 * int(text.split()[1])
    raise KeyError(line)


def read_so_far() -> int:
    """Bytes that this process has read with system calls."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def peak_of(action: Callable[[], object]) -> tuple[float, int, int]:
    """Run the action; returns seconds, peak memory beyond the memory before, and bytes read."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    memory, read, started = memory_of("VmRSS"), read_so_far(), time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        action()
    return time.perf_counter() - started, memory_of("VmHWM") - memory, read_so_far() - read


def forget(folder: Path) -> None:
    """Sync all files and drop them from the page cache, so that they are read from the disk again."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def header_of(path: Path) -> int:
    """Bytes read for the header of a safetensors file: its length, the header, and Python's read-ahead."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little") + io.DEFAULT_BUFFER_SIZE


def copy(source: Path, target: Path) -> None:
    """Copy with `cp` and sync every file: the reference of all speeds."""
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


class Measurement:
    """The measured folder, the measurements, and the limits that were missed.

    Attributes:
        missed: one line for each limit.
    """

    def __init__(self, place: Path, gb: float, files: int):
        self.place, self.source = place, place / "source"
        self.shape = shape_of_size(gb)
        self.nbytes, self.largest = nbytes_of(self.shape), max(sizes_of(self.shape))
        tokenizer = load_tokenizer("builtin")
        self.config = config_of(self.shape, None, eos_ids=stop_ids(tokenizer), dtype="bfloat16")
        others = files_beside_weights(tokenizer, max_length=self.shape.max_position_embeddings)
        self.options = ExportOptions(max_file_bytes=int(self.nbytes / (files - 0.5)), other_files=others)
        self.missed: list[str] = []
        export_weights(self.source, self.shape, self.config, RandomTensors(self.shape), options=self.options)
        count = len(list(self.source.glob("*.safetensors")))
        print(f"{self.nbytes / 1e9:.3f} GB in {count} files, largest tensor {self.largest / 1e6:.0f} MB", flush=True)

    def _read_parts(self, kept: dict[str, Tensor], held: dict[str, list[Tensor]]) -> int:
        """Fill the given indices of tensors, as a rank does; returns the bytes read."""
        check_folder(self.source, self.shape)  # as an import does, once for all ranks
        with FolderReader(self.source, self.shape) as reader:
            for name, tensor in kept.items():
                raise_if(reader.fill(name, tensor, held[name]))
        return reader.bytes_read

    def _require(self, is_held: bool, text: str) -> None:
        print(f"  {text}{'' if is_held else '   MISSED'}", flush=True)
        if not is_held:
            self.missed.append(text)

    def parts(self) -> None:
        """Check that each of several ranks reads only the rows that it keeps, in bounded memory."""
        # Headers, index and config are read to check the folder, and again to read from it.
        known = sum(map(header_of, self.source.glob("*.safetensors")))
        known += sum((self.source / name).stat().st_size for name in (CONFIG, INDEX))
        for rank in range(RANKS):
            indices = {name: list(map(torch.arange, size)) for name, (size, _) in kinds_of(self.shape).items()}
            kept, held = {}, {}
            for name, (_, dtype) in kinds_of(self.shape).items():
                indices[name][0] = indices[name][0].tensor_split(RANKS)[rank]
                kept[name] = torch.zeros([len(index) for index in indices[name]], dtype=dtype)
                held[name] = indices[name]
            forget(self.source)
            _, memory, read = peak_of(lambda kept=kept, held=held: self._read_parts(kept, held))
            size = sum(tensor.nbytes for tensor in kept.values())
            self._require(
                read <= size + 2 * known + SMALL_READS,
                f"rank {rank} of {RANKS}: keeps {size / 1e6:.2f} MB, reads {read / 1e6:.2f} MB, "
                f"{2 * known / 1e6:.2f} MB of them headers, index and config",
            )
            self._require_memory(f"rank {rank} of {RANKS}", memory)

    def _require_memory(self, what: str, memory: int) -> None:
        most = MOST_TENSORS.get(what, 0) * self.largest + BASE_BYTES
        self._require(memory <= most, f"{what}: {memory / 1e6:.0f} MB beyond the model, limit {most / 1e6:.0f} MB")

    def race(self, rounds: int) -> None:
        """Convert both ways, import and export, each right after a copy; without rounds, once, for the memory alone.

        Each starts with its files out of the page cache and the output of the one before removed, so that all have the
        same free memory.
        """
        step = self.place / "checkpoint/step-000000"
        from_hf = ["from-hf", "--model", str(self.source), "--output", str(step.parent), "--dtype", "bfloat16"]
        to_hf = ["to-hf", "--checkpoint", str(step), "--output", str(self.place / "converted")]
        ratios: dict[str, list[float]] = {}
        speeds: dict[str, list[float]] = {}
        memory: dict[str, int] = {}

        def take(name: str, action: Callable[[], object]) -> None:
            forget(self.place)
            copied, _, _ = peak_of(lambda: copy(self.source, self.place / "copied"))
            shutil.rmtree(self.place / "copied")
            forget(self.place)
            took, most, _ = peak_of(action)
            memory[name] = max(memory.get(name, 0), most)
            ratios.setdefault(name, []).append(copied / took)
            speeds.setdefault(name, []).append(self.nbytes / took / 1e9)
            speeds.setdefault("copy", []).append(self.nbytes / copied / 1e9)

        for number in range(max(rounds, 1)):
            take("convert from-hf", lambda: convert_command(from_hf))
            take("convert to-hf", lambda: convert_command(to_hf))
            shutil.rmtree(self.place / "checkpoint")
            model = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in kinds_of(self.shape).items()}
            take("import", lambda model=model: import_weights(self.source, self.shape, model))
            take("export", lambda model=model: self._export(model))
            for folder in ("converted", "exported"):
                if number == 0:
                    self._require_same(self.place / folder)
                shutil.rmtree(self.place / folder)
        for name, most in memory.items():
            self._require_memory(name, most)
        if rounds:
            print(f"  copy: {_spread(speeds.pop('copy'))} GB/s")
            for name, ratio in ratios.items():
                text = f"{name}: {_spread(speeds[name])} GB/s, {_spread(ratio)} of the copy"
                self._require(statistics.median(ratio) >= LEAST_SPEED, text)

    def _export(self, model: Mapping[str, Tensor]) -> None:
        export_weights(self.place / "exported", self.shape, self.config, model, options=self.options)

    def _require_same(self, folder: Path) -> None:
        """Check that the folder has the weights of the source, byte for byte, in whatever files."""
        again = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in kinds_of(self.shape).items()}
        import_weights(folder, self.shape, again)
        expected = RandomTensors(self.shape)
        differing = [name for name, tensor in again.items() if not torch.equal(tensor, expected[name])]
        if differing:
            self._require(False, f"{folder.name}: {len(differing)} tensors differ, such as {differing[0]}")


def _spread(values: list[float]) -> str:
    """Median, minimum and maximum."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--gb", type=float, default=3.5, help="size of the weights, 10^9 bytes")
    parser.add_argument("--files", type=int, default=20, help="files of the folder")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; 0 checks memory and bytes only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        measurement = Measurement(Path(name), arguments.gb, arguments.files)
        measurement.parts()
        measurement.race(arguments.rounds)
    for text in measurement.missed:
        print(f"missed: {text}", file=sys.stderr)
    return 1 if measurement.missed else 0


if __name__ == "__main__":
    sys.exit(main())
