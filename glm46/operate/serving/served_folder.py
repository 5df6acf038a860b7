"""The work of ``python -m glm46 serve-config``."""

import argparse
from pathlib import Path

from glm46.config.errors import UserError
from glm46.config.section import is_hub_address
from glm46.operate.estimate.serving import ServingPlan
from glm46.operate.serving.commands import Address, Service, command_lines, script_of
from glm46.operate.serving.folder import ServedFolder, check_served_folder, folder_of_config
from glm46.operate.serving.layout import Machines, Wishes, find_layout
from glm46.run.peaks import accelerator_of
from glm46.storage.huggingface.hub import config_folder, fetch_options

_GIB = 2**30


def serve_config(arguments: argparse.Namespace) -> int:
    """Check the folder, then print the commands or write their files; see `serve_config_command`."""
    machines = _machines(arguments)
    if machines.nodes > 1 and arguments.first_node is None:
        raise UserError(f"--gpus {machines.gpus}: {machines.nodes} nodes; give the address of one as --first-node")
    wishes = Wishes(
        arguments.tensor_parallel_degree, arguments.context, arguments.speculative, arguments.kv_cache_dtype == "fp8"
    )
    place = config_folder(arguments.model) if is_hub_address(str(arguments.model)) else arguments.model.absolute()
    if place is not None and (known := folder_of_config(place)) is not None:
        find_layout(known, machines, wishes)  # before the weights are downloaded, or the files looked at
    fetch_options(arguments, "model")
    folder = check_served_folder(arguments.model.absolute())
    plan, context = find_layout(folder, machines, wishes)
    address = Address(arguments.name or folder.path.name, arguments.host, arguments.port, arguments.first_node)
    service = Service(folder, plan, context, machines, wishes, address)
    print("\n".join(_memory_lines(folder, plan, machines, context)))
    if wishes.drafts and plan.pp > 1:
        print("SGLang does not draft under pipeline parallelism: its command leaves drafts out")
    commands = {"vllm": service.vllm, "sglang": service.sglang}
    if arguments.output is None:
        for server, command in commands.items():
            for node in range(machines.nodes):
                print(f"\n# {server}{_suffix(machines, node)}\n{command_lines(command(node))}")
        return 0
    try:
        for node in range(machines.nodes):
            of_node = {server: command(node) for server, command in commands.items()}
            _write(arguments.output / f"node{node}" if machines.nodes > 1 else arguments.output, of_node, arguments)
    except OSError as error:
        raise UserError(f"--output {arguments.output}: {error.strerror}; name a folder that can be written") from error
    return 0


def _machines(arguments: argparse.Namespace) -> Machines:
    memory, gpu = arguments.gpu_memory, arguments.gpu
    if memory is None:
        try:
            memory = accelerator_of(gpu).memory_bytes / _GIB
        except ValueError as error:
            raise UserError(f"--gpu {error}") from error
    else:
        gpu = f"GPUs of {memory:g} GiB"
    return Machines(arguments.gpus, arguments.gpus_per_node, gpu, memory * _GIB, arguments.gpu_memory_utilization)


def _memory_lines(folder: ServedFolder, plan: ServingPlan, machines: Machines, context: int) -> list[str]:
    lines = [
        f"{folder.path}: {sum(folder.stored.values()) / _GIB:.2f} GiB, {folder.format}",
        *folder.notes,
        f"{machines.gpus} x {machines.gpu}: tensor parallelism {plan.tp} x pipeline {plan.pp}",
        "stage  layers  weights GiB  buffers GiB  cache GiB  KiB/token",
    ]
    for number, stage in enumerate(plan.stages):
        cache = plan.usable - plan.work - stage.weights
        sizes = [size / _GIB for size in (stage.weights, plan.work, cache)]
        sizes += [stage.token / 1024]
        lines.append(f"{number:5}  {stage.layers:6}  {{:11.2f}}  {{:11.2f}}  {{:9.2f}}  {{:9.1f}}".format(*sizes))
    return [*lines, f"{plan.tokens:,} tokens of all requests fit; the longest request has {context:,}"]


def _write(output: Path, commands: dict[str, list[str]], arguments: argparse.Namespace) -> None:
    """The files of one node."""
    output.mkdir(parents=True, exist_ok=True)
    environment = arguments.environment and arguments.environment.absolute()
    for server, words in commands.items():
        script = (output / f"{server}.sh").absolute()
        script.write_text(script_of(words, environment), encoding="utf-8")
        script.chmod(0o755)
    names = ", ".join(sorted(path.name for path in output.iterdir()))
    print(f"{output}: {names}")


def _suffix(machines: Machines, node: int) -> str:
    return f", node {node}" if machines.nodes > 1 else ""
