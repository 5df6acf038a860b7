"""A small policy with an engine, and the server that generates for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from glm46.compute.distributed.process import join, leave
from glm46.compute.model.init import fill_parameter
from glm46.compute.model.transformer import Transformer
from glm46.config.model import ModelConfig
from glm46.config.presets import resolve_shape
from glm46.config.rollout import RolloutConfig
from glm46.engine.inference.loading import load_for_inference
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids
from glm46.tasks.rl.rollout.records import Request, SamplingRules
from glm46.tasks.rl.rollout.served_policy import ServedPolicy
from glm46.tasks.rl.rollout.server_engine import ServerEngine
from tests.processes import free_port
from tests.servers.vllm_process import SCRIPT, VllmProcess, reason_to_skip

_REASON = reason_to_skip()
MARKS = [pytest.mark.servers, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]
CLOSE, FAR = 2e-5, 1e-2
"""Both sides round differently: 4e-6 was measured in FP32. Two versions of the weights are 0.01 to 2 apart."""


class Policy:
    """A small GLM that changes when told, the engine, and the server."""

    base: Path | None = None
    weights = "disk"
    adapters: dict[str, torch.Tensor] = {}

    def __init__(self, folder: Path):
        self.tokenizer, self.shape = load_tokenizer("builtin"), resolve_shape(ModelConfig(flavor="debug"))
        self.model = Transformer(self.shape).eval()
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                places = [torch.arange(size) for size in tensor.shape]
                fill_parameter(tensor, places, tensor.shape, seed=0, name=name, std=0.02)
            self.model.lm_head.weight.mul_(6)  # an initial model finds all tokens about equally likely
        self.generator, self.version, self.folder = torch.Generator().manual_seed(0), 0, folder
        self.rules = SamplingRules(1.0, frozenset({self.tokenizer.eos_id, 7}), self.tokenizer.vocab_size)
        self.requests = [Request([3 + n, 50, 1000 + n, 9], seed, 32) for n in range(4) for seed in range(n, n + 4)]
        self.port = free_port()
        self.lines: list[str] = []
        urls = [f"http://127.0.0.1:{self.port}"]
        config = RolloutConfig(kind="vllm", max_new_tokens=32, urls=urls, weights=self.weights)
        self.engine = ServerEngine(
            config,
            folder=folder / "weights",
            policy=ServedPolicy(
                export=lambda folder: self.write(folder),
                tensors=self.tensors,
                score=self.score,
                routed_score=self.routed_score,
                changed=self.changed,
            ),
            base=self.base,
            prompts=[request.prompt * 8 for request in self.requests[::4]],
            rules=self.rules,
            padding=range(self.tokenizer.vocab_size, self.shape.vocab_size),
            say=self.lines.append,
        )

    def export(self, folder: Path) -> None:
        config = config_of(self.shape, None, eos_ids=stop_ids(self.tokenizer), dtype="float32")
        files = files_beside_weights(self.tokenizer, max_length=self.shape.max_position_embeddings)
        options = ExportOptions(dtype=torch.float32, other_files=files)
        export_weights(folder, self.shape, config, self.model.state_dict(), options=options)

    write = export

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `glm46.tasks.rl.engines.served_tensors` of a network."""
        entries = HFNames(self.shape, repeat_shared=False).entries
        for name, tensor in self.model.state_dict().items():
            yield from ((part.hf_name, tensor[part.index()]) for part in entries[name].parts)

    def step(self) -> None:
        """Change all weights, and have the server load them."""
        self.change()
        self.version += 1
        self.engine.update(self.version)

    @torch.no_grad()
    def change(self) -> None:
        for parameter in self.model.parameters():
            spread = parameter.std() if parameter.numel() > 1 else 0.0
            parameter.add_(torch.randn(parameter.shape, generator=self.generator) * 0.1 * spread)

    def score(self, sequences: list[list[int]], temperature: float) -> tuple[list[list[float]], list[list[float]]]:
        logprobs = [log_probabilities(self.model, row[:1], row[1:], temperature).tolist() for row in sequences]
        every = [distributions(self.model, row[:1], row[1:], temperature) for row in sequences]
        return logprobs, [(-(row.exp() * row).sum(-1)).tolist() for row in every]

    def routed_score(
        self, sequences: list[list[int]], routes: list, temperature: float
    ) -> tuple[list[list[float]], float]:
        """Without replay: the routes of FP32 are the trainer's, as a test compares."""
        return self.score(sequences, temperature)[0], 0.0

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Other weights for the check of the start."""
        before, adapters = {name: x.clone() for name, x in self.model.state_dict().items()}, dict(self.adapters)
        self.change()
        yield
        self.model.load_state_dict(before)
        self.adapters = adapters

    def serve(self, *options: str) -> VllmProcess:
        log = self.folder / f"server-{time.monotonic_ns()}.log"
        command = [SCRIPT, self.folder / "start", str(self.port), "--max-model-len", "512", "--max-num-seqs", "16"]
        self.server = VllmProcess([*command, *options], self.port, log)
        return self.server

    def on_disk(self) -> Transformer:
        """The weights that the server has been told to load, read back."""
        found = list((self.folder / "weights").glob("version-*"))
        assert [path.name for path in found] == [f"version-{self.version:08d}"]
        return load_for_inference(found[0], tokenizer=None, dtype=torch.float32, device=torch.device("cpu"))[0]


@contextmanager
def served(kind: type[Policy], folder: Path, *options: str) -> Iterator[Policy]:
    """A policy of this class beside its server, which has loaded one update."""
    join(600)
    made = kind(folder)
    made.export(folder / "start")
    print(f"vLLM answers after {made.serve(*options).wait():.1f} s")
    made.step()
    yield made
    made.server.kill()
    made.engine.close()
    leave()


@torch.no_grad()
def distributions(model, prompt, tokens, temperature=1.0):
    """Log-probabilities of all tokens at each place of a completion [T, V]."""
    logits = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, -1)


def log_probabilities(model, prompt, tokens, temperature=1.0):
    """Of the tokens of a completion [T]."""
    return distributions(model, prompt, tokens, temperature)[range(len(tokens)), tokens]


def gap(model, requests, completions, temperature=1.0):
    """The largest difference of a log-probability from the model's."""
    return max(
        (log_probabilities(model, request.prompt, one.tokens, temperature) - torch.tensor(one.logprobs))
        .abs()
        .max()
        .item()
        for request, one in zip(requests, completions, strict=True)
    )
