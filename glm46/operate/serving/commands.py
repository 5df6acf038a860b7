"""The commands that start vLLM and SGLang with a folder, one for each node, and scripts of them."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glm46.operate.estimate.serving import BATCHED_TOKENS, SEQUENCES, ServingPlan
from glm46.operate.serving.folder import ServedFolder
from glm46.operate.serving.layout import Machines, Wishes

RENDEZVOUS_PORT = 29501
"""On the first node, if there are several."""


@dataclass(frozen=True)
class Address:
    """Address of a server, and the name of the model for clients."""

    name: str
    host: str
    port: int
    first_node: str | None
    """Address of the first of several nodes."""


@dataclass(frozen=True)
class Service:
    """A served folder, its layout and its address."""

    folder: ServedFolder
    plan: ServingPlan
    context: int
    machines: Machines
    wishes: Wishes
    address: Address

    def vllm(self, node: int = 0) -> list[str]:
        """The command of vLLM 0.32.0 on a node."""
        plan, wishes = self.plan, self.wishes
        words = ["vllm", "serve", str(self.folder.path), *_pairs({
            "served-model-name": self.address.name,
            "host": self.address.host,
            "port": self.address.port,
            "tensor-parallel-size": plan.tp,
            "pipeline-parallel-size": plan.pp,
            "dtype": "bfloat16",
            "max-model-len": self.context,
            "max-num-seqs": SEQUENCES,
            "max-num-batched-tokens": BATCHED_TOKENS,
            "gpu-memory-utilization": f"{self.machines.utilization:g}",
        })]  # fmt: skip
        if wishes.fp8_keys:
            words += ["--kv-cache-dtype", "fp8"]
        if self.folder.chats:
            words += ["--tool-call-parser", "glm45", "--enable-auto-tool-choice", "--reasoning-parser", "glm45"]
        if wishes.drafts:
            depth = self.folder.shape.num_nextn_predict_layers
            words += ["--speculative-config", f'{{"method": "mtp", "num_speculative_tokens": {depth}}}']
        if self.machines.nodes > 1:
            words += _pairs({"nnodes": self.machines.nodes, "node-rank": node, "master-addr": self.address.first_node})
            words += ["--master-port", str(RENDEZVOUS_PORT), *(["--headless"] if node else [])]
        return words

    def sglang(self, node: int = 0) -> list[str]:
        """The command of SGLang 0.5.23 on a node. It does not draft under pipeline parallelism."""
        plan, wishes = self.plan, self.wishes
        # Weights and cache together, of the memory that is free before the start.
        share = (plan.usable - plan.work) / self.machines.memory
        words = ["python", "-m", "sglang.launch_server", *_pairs({
            "model-path": self.folder.path,
            "served-model-name": self.address.name,
            "host": self.address.host,
            "port": self.address.port,
            "tp-size": plan.tp,
            "pp-size": plan.pp,
            "dtype": "bfloat16",
            "context-length": self.context,
            "max-running-requests": SEQUENCES,
            "chunked-prefill-size": BATCHED_TOKENS,
            "mem-fraction-static": f"{int(share * 100) / 100:g}",
        })]  # fmt: skip
        if wishes.fp8_keys:
            words += ["--kv-cache-dtype", "fp8_e4m3"]
        if self.folder.chats:
            words += ["--tool-call-parser", "glm45", "--reasoning-parser", "glm45"]
        if wishes.drafts and plan.pp == 1:
            words += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"]
            words += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"]
        if self.machines.nodes > 1:
            first = f"{self.address.first_node}:{RENDEZVOUS_PORT}"
            words += _pairs({"nnodes": self.machines.nodes, "node-rank": node, "dist-init-addr": first})
        return words


def _pairs(options: dict[str, object]) -> list[str]:
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


def command_lines(words: Sequence[str]) -> str:
    """A command for a shell, one option a line."""
    lines, line = list[str](), list[str]()
    for word in words:
        if word.startswith("--") and line:
            lines.append(shlex.join(line))
            line = []
        line.append(word)
    return " \\\n    ".join([*lines, shlex.join(line)])


def script_of(words: Sequence[str], environment: Path | None) -> str:
    """A script that becomes the server; its arguments are further options, and win over those that it has.

    Args:
        environment: Python environment in which the server is installed; None: the one of the caller.
    """
    path = "" if environment is None else f"export PATH={shlex.quote(str(environment / 'bin'))}:$PATH\n"
    return f'#!/usr/bin/env bash\nset -euo pipefail\n{path}exec {command_lines(words)} "$@"\n'
