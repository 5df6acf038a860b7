"""The inference servers of a run: the commands of vLLM or SGLang, host by host, with the options that the run checks at
its start, on as many GPUs as hold the model, or on the CPU of this machine."""

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import glm46
from glm46.compute.distributed.environment import set_variables, visible_gpus
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.presets import resolve_shape
from glm46.config.rl_data import PromptsConfig
from glm46.config.run_config import RunConfig
from glm46.engine.observe.peaks import Accelerator
from glm46.operate.estimate.machine import detect_machine
from glm46.operate.estimate.other_networks import inference_bytes
from glm46.operate.estimate.server_split import ServerSplit, leaves_room, split_model
from glm46.operate.estimate.units import binary_size
from glm46.operate.launch.hostfile import Host
from glm46.operate.launch.nodes import is_loopback
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.tasks.rl.prompts import read_prompts

_SHARES = {"sglang": 0.7, "vllm": 0.9}
"""Of a GPU's memory that a server takes for weights and cache: SGLang's as miles has it for GLM-4.5, vLLM's default."""
_FIRST_PORT, _MEETING_PORT = 8000, 5000
_MOST_GPUS = 512
_HERE = Path(glm46.__path__[0]).parent / "deploy" / "vllm"
_EXTENSION = _HERE if _HERE.is_dir() else Path("deploy/vllm")  # of a checkout, beside an installed package
_VLLM_VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(_EXTENSION)}
_PYTHON = "GLM46_VLLM_PYTHON"
_CPU, _CPU_CACHE = "CPU", 64 * 2**20  # the least bytes of keys and values
_DRAFTS = {"method": "mtp", "num_speculative_tokens": 1}


class Command(NamedTuple):
    """One process on a host."""

    variables: dict[str, str]
    words: list[str]

    @property
    def text(self) -> str:
        """For a shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*words, shlex.join(self.words)])


class ServerPlan:
    """The servers of a config on hosts."""

    def __init__(self, config: RunConfig, hosts: Sequence[Host], gpu: Accelerator, folder: str, gpus: int | None):
        """
        Args:
            hosts: in the order in which servers take them; none: those of rollout.urls.
            folder: of the model that the servers start with.
            gpus: of one server; None: the fewest that hold the model and leave half of their room to keys and values.

        Raises:
            UserError: the config has no servers, or they do not fit.
        """
        rollout = config.rollout
        if config.rl is None or rollout is None or rollout.kind == "local":
            raise UserError(
                'rollout.kind: its ranks generate themselves, so it has no servers; set "vllm" or "sglang", or start '
                "the run alone"
            )
        self.config, self.rollout, self._rl = config, rollout, config.rl
        self.kind, self._gpu, self._folder, self.on_cpu = rollout.kind, gpu, folder, gpu.name == _CPU
        self._python = set_variables([_PYTHON]).get(_PYTHON)
        if self.on_cpu and self._python is None:
            raise UserError(
                f"{_PYTHON}: not set, and this machine has no GPU; set it to a Python of deploy/vllm/install_cpu.sh, "
                "or name the --gpu of the servers"
            )
        self._shape = resolve_shape(config.model)
        self.context = longest_prompt(config) + rollout.max_new_tokens
        if self.context > self._shape.max_position_embeddings:
            raise UserError(f"rollout.max_new_tokens: {self.context} tokens with the longest prompt; lower it")
        self.engine = self._fitting(1 if self.on_cpu else gpus)
        self._hosts = list(hosts) or self._hosts_of_urls()
        self.places = list(self._places())
        self.urls = [f"http://{places[0][0].name}:{port}" for places, port in self.places]

    def _fitting(self, stated: int | None) -> ServerSplit:
        sizes = [stated] if stated else [2**power for power in range(10)]
        for gpus in sizes:
            engine = split_model(self._shape, gpus, self._gpu.host_gpus)
            if engine is None or self._needed(engine) > self._room:
                continue
            if stated or leaves_room(self._weights(engine), self._room):
                return engine
        what = f"--gpus-per-engine {stated}" if stated else f"no number of GPUs up to {_MOST_GPUS}"
        engine = split_model(self._shape, sizes[-1], self._gpu.host_gpus)
        if engine is None:
            raise UserError(
                f"command line: {what}: GPUs of a server must divide model.n_routed_experts = "
                f"{self._shape.n_routed_experts} and be whole hosts of {self._gpu.host_gpus}, or a part of one"
            )
        raise UserError(
            f"command line: {what}: a {self._gpu.name} would hold {binary_size(self._needed(engine))} of weights and "
            f"one longest sample, and {self.kind} has {binary_size(self._room)} of it; take more GPUs, "
            'others with --gpu, or rollout.weights_dtype = "fp8-block"'
        )

    @property
    def _room(self) -> float:
        return self._gpu.memory_bytes * _SHARES[self.kind]

    def _weights(self, engine: ServerSplit) -> float:
        """Bytes of a GPU for its weights."""
        weights = inference_bytes(self._shape, engine.layout, self.config.training.mixed_precision_param)
        return weights / (2 if self.rollout.weights_dtype else 1)

    def _needed(self, engine: ServerSplit) -> float:
        """Bytes of a GPU for its weights, and for keys and values of one longest sample."""
        cache = inference_bytes(
            self._shape, engine.layout, self.config.training.mixed_precision_param, rows=1, length=self.context,
            copies_weights=False, caches_drafts=True,
        )  # fmt: skip
        return self._weights(engine) + cache

    def _hosts_of_urls(self) -> list[Host]:
        """The hosts of rollout.urls, with the GPUs of their servers."""
        counts = Counter(urlsplit(url).hostname or "" for url in self.rollout.urls)
        most = self._gpu.host_gpus // self.engine.gpus
        if not counts or max(counts.values()) > most:
            why = f"a host has room for {counted(most, 'server')}" if counts else "rollout.urls names no host"
            raise UserError(
                f"command line: --hosts: missing, and {why} of {counted(self.engine.gpus, 'GPU')}; name a file with "
                "NAME slots=N on each line"
            )
        return [Host(0, name, slots=count * self.engine.gpus) for name, count in counts.items()]

    def _places(self) -> Iterator[tuple[list[tuple[Host, list[int]]], int]]:
        """Hosts with the numbers of their GPUs, and port, of each server."""
        ports: dict[str, list[int]] = {}
        for url in map(urlsplit, self.rollout.urls):
            ports.setdefault(url.hostname or "", []).append(url.port or 80)
        free = [(host, list(range(host.slots or self._gpu.host_gpus))) for host in self._hosts]
        count = sum(len(gpus) for _, gpus in free) // self.engine.gpus
        if not count:
            raise UserError(f"command line: --hosts: fewer than the {counted(self.engine.gpus, 'GPU')} of a server")
        for _ in range(count):
            places: list[tuple[Host, list[int]]] = []
            while (missing := self.engine.gpus - sum(len(gpus) for _, gpus in places)) > 0:
                host, gpus = free.pop(0)
                places.append((host, gpus[:missing]))
                if gpus[missing:]:
                    free.insert(0, (host, gpus[missing:]))
            if len({len(gpus) for _, gpus in places}) > 1:
                raise UserError(f"command line: --hosts: {host.name}: a server would have unequal parts of hosts")
            first, gpus = places[0]
            stated = ports.get(first.name)
            yield places, stated.pop(0) if stated else _FIRST_PORT + gpus[0] // self.engine.gpus

    def host(self, name: str) -> Host:
        """A host of this name."""
        return next(host for host in self._hosts if host.name == name)

    def blocks(self) -> dict[str, list[Command]]:
        """The commands by host."""
        found: dict[str, list[Command]] = {}
        for places, port in self.places:
            for node, (host, gpus) in enumerate(places):
                command = self._command(places, port, node)
                if len(gpus) < self._gpu.host_gpus and not self.on_cpu:
                    command.variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
                found.setdefault(host.name, []).append(command)
        return found

    def _command(self, places: Sequence[tuple[Host, list[int]]], port: int, node: int) -> Command:
        first, nodes, engine = places[0][0].name, len(places), self.engine
        meeting = port - _FIRST_PORT + _MEETING_PORT
        dtype = self.config.training.mixed_precision_param
        address = ["--host", places[node][0].name, "--port", str(port), "--dtype", dtype]
        if self.kind == "sglang":
            words = ["python", "-m", "sglang.launch_server", "--model-path", self._folder, *address]
            words += ["--context-length", str(self.context), "--tp-size", str(engine.gpus)]
            words += ["--mem-fraction-static", str(_SHARES["sglang"])]
            if nodes > 1:
                words += ["--nnodes", str(nodes), "--node-rank", str(node), "--dist-init-addr", f"{first}:{meeting}"]
            if engine.replicas > 1:
                words += ["--attn-dp-size", str(engine.replicas), "--ep-size", str(engine.gpus)]
                words += ["--moe-dense-tp-size", "1", "--enable-dp-lm-head"]
            return Command({}, words + self._sglang_options())
        if self.on_cpu and self._python:
            cache = max(_CPU_CACHE, 4 * int(self._needed(engine) - self._weights(engine)))  # four longest samples
            words = [str(_EXTENSION / "serve_cpu.sh"), self._folder, str(port), *address]
            words += ["--max-model-len", str(self.context), "--kv-cache-memory-bytes", str(cache)]
            return Command({_PYTHON: self._python}, words + self._vllm_options())
        is_here = self._python is not None and is_loopback(places[node][0].name)
        start = [str(self._python), "-m", "vllm.entrypoints.cli.main"] if is_here else ["vllm"]
        words = [*start, "serve", self._folder, *address, "--max-model-len", str(self.context)]
        words += ["--tensor-parallel-size", str(engine.tensor)]
        words += ["--gpu-memory-utilization", str(_SHARES["vllm"])]
        if engine.replicas > 1:
            local = engine.replicas // nodes
            words += ["--data-parallel-size", str(engine.replicas), "--data-parallel-size-local", str(local)]
            words += ["--data-parallel-address", first, "--data-parallel-rpc-port", str(meeting)]
            words += ["--enable-expert-parallel"]
            words += ["--headless", "--data-parallel-start-rank", str(node * local)] if node else []
        more = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if self.rollout.send_adapters else {}
        return Command(_VLLM_VARIABLES | more, words + self._vllm_options())

    def _sglang_options(self) -> list[str]:
        words = ["--enable-return-routed-experts"] if self._rl.routing_replay else []
        words += ["--enable-lora", *self._rank(), "--lora-target-modules", "all"] if self.rollout.send_adapters else []
        if self._shape.num_nextn_predict_layers:
            words += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"]
            words += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"]
        return words

    def _vllm_options(self) -> list[str]:
        words = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
        words += ["--worker-extension-cls", "glm_ext.Extension"]
        words += ["--enable-return-routed-experts"] if self._rl.routing_replay else []
        words += ["--enable-lora", *self._rank()] if self.rollout.send_adapters else []
        words += ["--speculative-config", json.dumps(_DRAFTS)] if self._shape.num_nextn_predict_layers else []
        return words

    def _rank(self) -> list[str]:
        adapter = self.config.adapter
        assert adapter is not None, "send_adapters needs them"
        return ["--max-lora-rank", str(max(adapter.rank, adapter.expert_rank or 0))]


def longest_prompt(config: RunConfig) -> int:
    """Tokens of the longest prompt of training and validation.

    Raises:
        UserError: files cannot be read, or have prompts that the run would refuse.
    """
    assert config.rl is not None and config.rollout is not None
    rl, tokenizer = config.rl.resolved(), load_tokenizer(config.model.tokenizer_path, config.model.flavor)
    most, keys = config.training.seq_len - config.rollout.max_new_tokens, cast(PromptsConfig, rl.prompts)
    files = dict.fromkeys([keys.file, *(table.file for table in rl.validation)])
    read = (read_prompts(Path(f), keys, tokenizer, most_tokens=most, needs_label=False) for f in files)
    return max(len(prompt.tokens) for prompts in read for prompt in prompts)


def cpu_of(config: RunConfig) -> Accelerator | None:
    """A part of this machine for each server of vLLM; None: it has a GPU, or not all of them."""
    rollout, machine = config.rollout, detect_machine(visible_gpus())
    urls = rollout.urls if rollout is not None and rollout.kind == "vllm" else ()
    if machine.gpus or not urls or not all(is_loopback(urlsplit(url).hostname or "") for url in urls):
        return None
    return Accelerator(_CPU, 0.0, machine.memory_bytes // len(urls), 0.0, 0.0, 0.0, host_gpus=len(urls))


def folder_of(config: RunConfig, stated: str | None) -> str:
    """The model that servers start with: its weights do not matter, its shape and types do.

    Raises:
        UserError: none is known.
    """
    checkpoint, quantised = config.checkpoint, config.rollout is not None and config.rollout.weights_dtype
    if stated is None and (quantised or not checkpoint.initial_load_in_hf):
        why = f'rollout.weights_dtype = "{quantised}"' if quantised else "checkpoint.initial_load_in_hf = false"
        dtype = f" --dtype {quantised}" if quantised else ""
        raise UserError(
            f"command line: --folder: missing, with {why}; name a Hugging Face folder of `convert to-hf{dtype}`"
        )
    on_hub = config.ids.get("checkpoint.initial_load_path", "").removeprefix("hf://").partition("@")[0]
    return stated or on_hub or str(checkpoint.initial_load_path)


def show(servers: ServerPlan) -> str:
    """One block of commands for each host, and what the run needs of it."""
    engine, urls = servers.engine, json.dumps(servers.urls)
    split = f"heads over {engine.tensor}"
    split += f", {engine.replicas} replicas of attention, experts over all" if engine.replicas > 1 else ""
    what = "on the CPU of this machine" if servers.on_cpu else f"of {counted(engine.gpus, 'GPU')}: {split}"
    lines = [f"# {servers.kind}, {counted(len(servers.urls), 'server')} {what}"]
    for host, commands in servers.blocks().items():
        lines += ["", f"# on {host}", *(command.text for command in commands)]
    if servers.kind == "sglang":
        lines += ["", "# with --enable-deterministic-inference, which is slower, a resumed run has the same samples"]
    if {*servers.urls} != {*servers.rollout.urls}:
        lines += ["", f"# of the run: --rollout.urls '{urls}'"]
    return "\n".join(lines)
