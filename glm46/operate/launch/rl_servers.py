"""Inference servers of a run: the commands of vLLM or SGLang, host by host, with the options that the run checks at its
start, on as many GPUs as hold the model, or on the CPU of this machine."""

import argparse
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import glm46
from glm46.compute.distributed.environment import variables_that_are_set, visible_gpus
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.presets import resolve_shape
from glm46.config.rl_data import PromptsConfig
from glm46.config.run_config import RunConfig
from glm46.engine.observe.peaks import Accelerator, accelerator_of
from glm46.operate.estimate.machine import detect_machine
from glm46.operate.estimate.other_networks import inference_bytes
from glm46.operate.estimate.server_split import ServerSplit, leaves_room, split_model
from glm46.operate.estimate.units import binary_size
from glm46.operate.launch.fetched_config import load_fetched
from glm46.operate.launch.hostfile import Host, read_hostfile
from glm46.operate.launch.nodes import is_loopback
from glm46.operate.launch.ssh_hosts import HostEnd, HostProcesses, client_words, stoppable
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.tasks.rl.prompts import read_prompts

_SHARES = {"sglang": 0.7, "vllm": 0.9}
"""Share of a GPU's memory that a server takes for weights and cache. Sources: miles for GLM-4.5; vLLM's default."""
_FIRST_PORT = 8000
"""Port of the first server of a host whose port rollout.urls does not name."""
_MEETING_PORT = 5000
"""Port at which the nodes of the server at `_FIRST_PORT` meet; the distance is the same for other ports."""
_MAX_GPUS = 512
"""Maximum number of GPUs of a server that is tried."""
_STOP_SECONDS = 20
"""Time for a server to end after SIGTERM."""
_SOURCE_EXTENSION = Path(glm46.__path__[0]).parent / "deploy" / "vllm"
# An installed package has no deploy: the path is then relative to a checkout.
_EXTENSION = _SOURCE_EXTENSION if _SOURCE_EXTENSION.is_dir() else Path("deploy/vllm")
_VLLM_VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(_EXTENSION)}
_PYTHON = "GLM46_VLLM_PYTHON"
"""Variable with the Python of vLLM, for servers on this machine."""
_CPU = "CPU"
_CPU_CACHE = 64 * 2**20
"""Minimum of bytes for keys and values."""
_VLLM_DRAFTS = {"method": "mtp", "num_speculative_tokens": 1}


def serve(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the commands of the servers of a config, and start them with ``--run``; see `rl_servers_command`."""
    try:
        gpu = accelerator_of(arguments.gpu or "H100")
    except ValueError as error:
        raise UserError(f"command line: --gpu {error}") from error
    hosts = read_hostfile(arguments.hosts, "--hosts") if arguments.hosts else []
    config = load_fetched(arguments.config, overrides, world_size=None)
    require_servers(config)
    if not (arguments.gpu or arguments.gpus_per_engine or hosts):
        gpu = cpu_of(config) or gpu
    folder = folder_of(config, arguments.folder)
    servers = ServerPlan(config, hosts, gpu, folder, arguments.gpus_per_engine)
    print(show(servers), flush=True)
    if not arguments.run:
        return 0
    configured = servers.rollout.urls
    if {*servers.urls} != {*configured}:
        difference = f"{list(configured)}, and these servers will be at {servers.urls}"
        raise UserError(f"rollout.urls: {difference}; correct rollout.urls, or --hosts")
    return run_servers(servers)


class Command(NamedTuple):
    """Command of one process on a host."""

    variables: dict[str, str]
    words: list[str]

    @property
    def text(self) -> str:
        """The command as a line for a shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*words, shlex.join(self.words)])


class ServerPlan:
    """The servers of a config on hosts.

    Args:
        hosts: in the order in which servers take them; if empty, the hosts of rollout.urls.
        gpu: type of the GPUs, or the part of this machine for each server.
        folder: folder of the model that the servers start with.
        gpus: number of GPUs of one server; None takes the smallest number that holds the model and leaves half of the
            room to keys and values.

    Raises:
        UserError: the config has no servers, or they do not fit.
    """

    def __init__(self, config: RunConfig, hosts: Sequence[Host], gpu: Accelerator, folder: str, gpus: int | None):
        require_servers(config)
        rollout = config.rollout
        assert config.rl is not None and rollout is not None, "it has servers"
        self.config = config
        self.rollout = rollout
        self._rl = config.rl
        self.kind = rollout.kind
        self._gpu = gpu
        self._folder = folder
        self.on_cpu = gpu.name == _CPU
        self._python = variables_that_are_set([_PYTHON]).get(_PYTHON)
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

    def _fitting(self, requested: int | None) -> ServerSplit:
        sizes = [requested] if requested else [2**power for power in range(_MAX_GPUS.bit_length())]
        for gpus in sizes:
            engine = split_model(self._shape, gpus, self._gpu.host_gpus)
            if engine is None or self._needed(engine) > self._room:
                continue
            if requested or leaves_room(self._weights(engine), self._room):
                return engine
        choice = f"--gpus-per-engine {requested}" if requested else f"no number of GPUs up to {_MAX_GPUS}"
        engine = split_model(self._shape, sizes[-1], self._gpu.host_gpus)
        if engine is None:
            raise UserError(
                f"command line: {choice}: GPUs of a server must divide model.shape.n_routed_experts = "
                f"{self._shape.n_routed_experts} and be whole hosts of {self._gpu.host_gpus}, or a part of one"
            )
        raise UserError(
            f"command line: {choice}: a {self._gpu.name} would hold {binary_size(self._needed(engine))} of weights and "
            f"one longest sample, and {self.kind} has {binary_size(self._room)} of it; take more GPUs, "
            'others with --gpu, or rollout.weights_dtype = "fp8-block"'
        )

    @property
    def _room(self) -> float:
        return self._gpu.memory_bytes * _SHARES[self.kind]

    def _weights(self, engine: ServerSplit) -> float:
        """Return the bytes of a GPU for its weights."""
        weights = inference_bytes(self._shape, engine.layout, self.config.training.mixed_precision_param)
        return weights / (2 if self.rollout.weights_dtype else 1)

    def _needed(self, engine: ServerSplit) -> float:
        """Return the bytes of a GPU for its weights, and for keys and values of one longest sample."""
        cache = inference_bytes(
            self._shape,
            engine.layout,
            self.config.training.mixed_precision_param,
            rows=1,
            length=self.context,
            copies_weights=False,
            caches_drafts=True,
        )
        return self._weights(engine) + cache

    def _hosts_of_urls(self) -> list[Host]:
        """Return the hosts of rollout.urls, with the number of GPUs of their servers."""
        counts = Counter(urlsplit(url).hostname or "" for url in self.rollout.urls)
        max_servers = self._gpu.host_gpus // self.engine.gpus
        if not counts or max(counts.values()) > max_servers:
            reason = f"a host has room for {counted(max_servers, 'server')}" if counts else "rollout.urls names no host"
            raise UserError(
                f"command line: --hosts: missing, and {reason} of {counted(self.engine.gpus, 'GPU')}; name a file with "
                "NAME slots=N on each line"
            )
        return [Host(0, name, slots=count * self.engine.gpus) for name, count in counts.items()]

    def _places(self) -> Iterator[tuple[list[tuple[Host, list[int]]], int]]:
        """Yield for each server its hosts, with the indices of their GPUs, and its port."""
        ports: dict[str, list[int]] = {}
        for url in map(urlsplit, self.rollout.urls):
            ports.setdefault(url.hostname or "", []).append(url.port or 80)
        free = [(host, list(range(host.slots or self._gpu.host_gpus))) for host in self._hosts]
        count = sum(len(gpus) for _, gpus in free) // self.engine.gpus
        if not count:
            raise UserError(f"command line: --hosts: fewer than the {counted(self.engine.gpus, 'GPU')} of a server")
        for _ in range(count):
            places: list[tuple[Host, list[int]]] = []
            missing = self.engine.gpus
            while missing > 0:
                host, gpus = free.pop(0)
                taken = gpus[:missing]
                remaining = gpus[missing:]
                places.append((host, taken))
                if remaining:
                    free.insert(0, (host, remaining))
                missing -= len(taken)
            if len({len(gpus) for _, gpus in places}) > 1:
                raise UserError(f"command line: --hosts: {host.name}: a server would have unequal parts of hosts")
            first, gpus = places[0]
            host_ports = ports.get(first.name)
            yield places, host_ports.pop(0) if host_ports else _FIRST_PORT + gpus[0] // self.engine.gpus

    def host(self, name: str) -> Host:
        """Return the host of this name."""
        return next(host for host in self._hosts if host.name == name)

    def blocks(self) -> dict[str, list[Command]]:
        """Return the commands by host."""
        blocks: dict[str, list[Command]] = {}
        for places, port in self.places:
            for node, (host, gpus) in enumerate(places):
                command = self._command(places, port, node)
                if len(gpus) < self._gpu.host_gpus and not self.on_cpu:
                    command.variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
                blocks.setdefault(host.name, []).append(command)
        return blocks

    def _command(self, places: Sequence[tuple[Host, list[int]]], port: int, node: int) -> Command:
        first = places[0][0].name
        nodes = len(places)
        engine = self.engine
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
        is_local = self._python is not None and is_loopback(places[node][0].name)
        program = [str(self._python), "-m", "vllm.entrypoints.cli.main"] if is_local else ["vllm"]
        words = [*program, "serve", self._folder, *address, "--max-model-len", str(self.context)]
        words += ["--tensor-parallel-size", str(engine.tensor)]
        words += ["--gpu-memory-utilization", str(_SHARES["vllm"])]
        if engine.replicas > 1:
            local_replicas = engine.replicas // nodes
            words += ["--data-parallel-size", str(engine.replicas)]
            words += ["--data-parallel-size-local", str(local_replicas)]
            words += ["--data-parallel-address", first, "--data-parallel-rpc-port", str(meeting)]
            words += ["--enable-expert-parallel"]
            words += ["--headless", "--data-parallel-start-rank", str(node * local_replicas)] if node else []
        lora_variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if self.rollout.send_adapters else {}
        return Command(_VLLM_VARIABLES | lora_variables, words + self._vllm_options())

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
        words += ["--speculative-config", json.dumps(_VLLM_DRAFTS)] if self._shape.num_nextn_predict_layers else []
        return words

    def _rank(self) -> list[str]:
        adapter = self.config.adapter
        assert adapter is not None, "send_adapters needs them"
        return ["--max-lora-rank", str(max(adapter.rank, adapter.expert_rank or 0))]


def require_servers(config: RunConfig) -> None:
    """Check that a run generates on servers.

    Raises:
        UserError: it has no reinforcement learning, or its ranks generate.
    """
    if config.rl is None or config.rollout is None:
        raise UserError(
            "rl: the config has no [rl], so the run has no inference servers; give the config of such a run"
        )
    if config.rollout.kind == "local":
        raise UserError(
            'rollout.kind: its ranks generate themselves, so it has no servers; set "vllm" or "sglang", or start '
            "the run alone"
        )


def longest_prompt(config: RunConfig) -> int:
    """Count the tokens of the longest prompt of training and validation.

    Raises:
        UserError: files cannot be read, or have prompts that the run would refuse.
    """
    assert config.rl is not None and config.rollout is not None
    rl = config.rl.resolved()
    tokenizer = load_tokenizer(config.model.tokenizer_path, config.model.flavor)
    max_tokens = config.training.seq_len - config.rollout.max_new_tokens
    keys = cast(PromptsConfig, rl.prompts)
    files = dict.fromkeys([keys.file, *(table.file for table in rl.validation)])
    prompt_lists = (
        read_prompts(Path(file), keys, tokenizer, most_tokens=max_tokens, needs_label=False) for file in files
    )
    return max(len(prompt.tokens) for prompts in prompt_lists for prompt in prompts)


def cpu_of(config: RunConfig) -> Accelerator | None:
    """Return a part of this machine for each server of vLLM; None if it has a GPU or a server runs elsewhere."""
    rollout = config.rollout
    machine = detect_machine(visible_gpus())
    urls = rollout.urls if rollout is not None and rollout.kind == "vllm" else ()
    if machine.gpus or not urls or not all(is_loopback(urlsplit(url).hostname or "") for url in urls):
        return None
    return Accelerator(
        name=_CPU,
        bf16_flops=0.0,
        memory_bytes=machine.memory_bytes // len(urls),
        compute_capability=0.0,
        memory_bandwidth=0.0,
        link_bandwidth=0.0,
        host_gpus=len(urls),
    )


def folder_of(config: RunConfig, folder: str | None) -> str:
    """Return the model that servers start with: its weights do not matter, its shape and types do.

    Args:
        folder: from the command line; None if it has none.

    Raises:
        UserError: neither command line nor config name a model.
    """
    checkpoint = config.checkpoint
    quantised = config.rollout is not None and config.rollout.weights_dtype
    if folder is None and (quantised or not checkpoint.initial_load_in_hf):
        reason = f'rollout.weights_dtype = "{quantised}"' if quantised else "checkpoint.initial_load_in_hf = false"
        dtype = f" --dtype {quantised}" if quantised else ""
        raise UserError(
            f"command line: --folder: missing, with {reason}; name a Hugging Face folder of `convert to-hf{dtype}`"
        )
    on_hub = config.ids.get("checkpoint.initial_load_path", "").removeprefix("hf://").partition("@")[0]
    return folder or on_hub or str(checkpoint.initial_load_path)


def show(servers: ServerPlan) -> str:
    """Return one block of commands for each host, and the URLs for the run if its config has others."""
    engine = servers.engine
    urls = json.dumps(servers.urls)
    split = f"heads over {engine.tensor}"
    split += f", {engine.replicas} replicas of attention, experts over all" if engine.replicas > 1 else ""
    place = "on the CPU of this machine" if servers.on_cpu else f"of {counted(engine.gpus, 'GPU')}: {split}"
    lines = [f"# {servers.kind}, {counted(len(servers.urls), 'server')} {place}"]
    for host, commands in servers.blocks().items():
        lines += ["", f"# on {host}", *(command.text for command in commands)]
    if servers.kind == "sglang":
        lines += ["", "# with --enable-deterministic-inference, which is slower, a resumed run has the same samples"]
    if {*servers.urls} != {*servers.rollout.urls}:
        lines += ["", f"# of the run: --rollout.urls '{urls}'"]
    return "\n".join(lines)


def run_servers(servers: ServerPlan) -> int:
    """Start all servers, show their output by host, and end all when one ends; returns its exit code.

    Raises:
        UserError: ssh is not installed.
    """
    commands = []
    for name, host_commands in servers.blocks().items():
        for command in host_commands:
            text = stoppable(command.text, _STOP_SECONDS)
            words = ["sh", "-c", text] if is_loopback(name) else client_words(servers.host(name), text)
            commands.append((name, words))
    with closing(HostProcesses(commands, _STOP_SECONDS)) as processes:
        end = cast(HostEnd, processes.next_end())
        print(f"{commands[end.command_index][0]}: ended with code {end.code}", flush=True)
        return end.code
