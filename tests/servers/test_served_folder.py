"""A real vLLM takes the command of docs/deployment.md, and the client of deploy/ talks to it: `pytest -m servers`."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from glm46.compute.model.init import fill_parameter
from glm46.compute.model.transformer import Transformer
from glm46.config.model import ModelConfig
from glm46.config.presets import resolve_shape
from glm46.engine.inference.sampling import continue_tokens
from glm46.storage.chats.chat import chat_prompt
from glm46.storage.chats.conversation import Message
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.merge_adapter import merge_adapter
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.peft_export import export_adapter, is_adaptable
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids
from tests.processes import free_port
from tests.servers.vllm_process import PYTHON, VllmProcess, reason_to_skip

_REASON = reason_to_skip()
pytestmark = [pytest.mark.servers, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
# What a CPU needs beside the command; see deploy/vllm/serve_cpu.sh.
ON_A_CPU = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--kv-cache-memory-bytes", "67108864"]
ON_A_CPU += ["--distributed-executor-backend", "uni", "--max-num-seqs", "16", "--max-num-batched-tokens", "2048"]
QUESTION = "What is a list?"
RANK, SCALE = 8, 2.0


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables with which the program `vllm` starts on a CPU."""
    # The CPU build is a package of another name, and the program looks for its own.
    info = tmp_path_factory.mktemp("packages")
    (info / "vllm-0.32.0+cpu.dist-info").mkdir()
    (info / "vllm-0.32.0+cpu.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return {
        "PYTHONPATH": str(info), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip


@pytest.fixture(scope="module")
def model():
    made = Transformer(resolve_shape(ModelConfig(flavor="debug"))).eval()
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            places = [torch.arange(size) for size in tensor.shape]
            fill_parameter(tensor, places, tensor.shape, seed=0, name=name, std=0.02)
        made.lm_head.weight.mul_(6)  # an initial model finds all tokens about equally likely
    return made


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """LoRA of all targets, merged. The adapters are added to `model` too, by the formula."""
    tokenizer, root = load_tokenizer("builtin"), tmp_path_factory.mktemp("models")
    config = config_of(model.shape, None, eos_ids=stop_ids(tokenizer), dtype="float32")
    files = files_beside_weights(tokenizer, max_length=model.shape.max_position_embeddings)
    options = ExportOptions(dtype=torch.float32, other_files=files)
    export_weights(root / "base", model.shape, config, model.state_dict(), options=options)
    adapters, generator = {}, torch.Generator().manual_seed(0)
    for name, entry in HFNames(model.shape, repeat_shared=False).entries.items():
        if is_adaptable(entry):
            weight = model.get_parameter(name)
            *experts, outputs, inputs = weight.shape
            a = torch.randn((*experts, RANK, inputs), generator=generator) / inputs**0.5
            b = torch.randn((*experts, outputs, RANK), generator=generator) * 0.02
            with torch.no_grad():
                weight += SCALE * b @ a
            names = [name.removesuffix(".weight") + ("_" if experts else ".") + kind for kind in ("lora_A", "lora_B")]
            adapters |= dict(zip(names, (a, b), strict=True))
    assert any(".experts." in name for name in adapters)
    export_adapter(root / "adapter", model.shape, adapters, scale=SCALE, base=str(root / "base"))
    merge_adapter(root / "base", root / "adapter", root / "mine")
    return root / "mine"


def test_the_command_of_the_page_serves_and_the_client_gets_our_answer(model, folder, environment, tmp_path):
    (command,) = re.findall(r"^vllm serve (.*?)(?<!\\)$", PAGE, re.M | re.S)
    command = command.replace("\\\n", "").replace("models/mine", str(folder)).replace("-size 8", "-size 1")
    words = shlex.split(command)
    port = free_port()
    program = [Path(os.environ[PYTHON]).with_name("vllm"), "serve", *words, "--port", str(port), *ON_A_CPU]
    server = VllmProcess(program, port, tmp_path / "server.log", environment)
    try:
        print(f"vLLM answers after {server.wait():.1f} s")
        found = subprocess.run(
            [os.environ[PYTHON], ROOT / "deploy/chat_client.py", "--url", f"{server.url}/v1", "--model", "mine",
             "--max-tokens", "24", "--temperature", "0", "--no-thinking", QUESTION],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    finally:
        server.kill()
    assert found.returncode == 0, found.stderr
    tokenizer = load_tokenizer("builtin")
    ours = continue_tokens(
        model, chat_prompt(tokenizer, [Message("user", QUESTION)], thinking=False), max_new_tokens=24, temperature=0.0,
        stop=frozenset(stop_ids(tokenizer)), vocab_size=tokenizer.vocab_size, device=torch.device("cpu"),
    )  # fmt: skip
    assert len(ours) > 8 and found.stdout.strip() == tokenizer.decode(ours).strip()


def test_vllm_knows_every_option_of_the_page(environment):
    program = Path(os.environ[PYTHON]).with_name("vllm")
    told = subprocess.run(
        [program, "serve", "--help=all"], capture_output=True, text=True, env=os.environ | environment
    )
    assert told.returncode == 0, told.stderr
    (command,) = re.findall(r"^vllm serve .*?(?<!\\)$", PAGE, re.M | re.S)
    rows = [line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| ") and line.count(" | ") == 2]
    options = set(re.findall(r"--[a-z-]+", " ".join([command, *rows])))
    assert len(options) > 10 and options - set(re.findall(r"--[a-z-]+", told.stdout)) == set()
