"""The small recipes on a CUDA device, by their commands, in BF16 as large runs are: from first weights to an agent."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from tests.processes import PROGRAM_SECONDS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


CHAT = "--training.tokens 30_720 --lr_scheduler.warmup_tokens 6_144 --validation.freq 5"
ADAPTED = f"{CHAT} --checkpoint.initial_load_path outputs/sft_debug/huggingface/step-000010"
PAGES = " ".join(
    f'--data.sources[{n}].path data/{n} --data.sources[{n}].recipe.input ["{ROOT}/{pages}"] '
    f"--data.sources[{n}].recipe.held_out 0.1"
    for n, pages in enumerate(("glm46/config/*.py", "glm46/engine/*/*.py"))
)
PRETRAINING = f"--training.tokens 122_880 --validation.freq 10 {PAGES}"
ROLLOUTS = "--checkpoint.interval 4 --training.steps 4 --validation.freq 4 --rl.validation[0].samples 1"
CHAINS: dict[str, list[tuple[str, str]]] = {
    "finetuning": [
        ("debug", PRETRAINING),
        (
            "generate",
            "--checkpoint outputs/debug/checkpoint/step-000030 --prompt def --max-new-tokens 16 --speculative",
        ),
        ("sft_debug", f"{CHAT} --checkpoint.initial_load_path outputs/debug/huggingface/step-000030"),
        ("lora_debug", ADAPTED),
        ("lora_debug", f"{ADAPTED} --adapter.base_dtype nf4 --job.dump_folder outputs/nf4"),
        ("drafts_debug", ADAPTED),
        ("dpo_debug", ADAPTED),
        ("generate", "--checkpoint outputs/sft_debug/checkpoint/step-000010 --chat --prompt Hello!"),
        ("evaluate", "--checkpoint outputs/debug/checkpoint/step-000030 --data data/1 --lengths 256 --samples 2"),
    ],
    "latent attention": [
        ("debug_flash", PRETRAINING),
        ("sft_debug_flash", f"{CHAT} --checkpoint.initial_load_path outputs/debug_flash/huggingface/step-000030"),
        ("generate", "--checkpoint outputs/sft_debug_flash/checkpoint/step-000010 --chat --prompt Hello!"),
    ],
    "reinforcement learning": [
        ("rl_debug_labels", ""),
        ("rl_debug", "--training.steps 20 --checkpoint.interval 20 --validation.freq 20"),
        ("rl_debug_command", ROLLOUTS),
        ("rl_debug", f"{ROLLOUTS} --rl.algorithm ppo --rl.critic.lr 1e-3 --job.dump_folder outputs/ppo"),
    ],
}
"""Each command works on what those before it have left: a recipe or a verb, and its further words."""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A working directory like a checkout, whose runs and data are its own."""
    (tmp_path / "train_configs").symlink_to(ROOT / "train_configs")
    return tmp_path


@pytest.mark.parametrize("chain", CHAINS)
def test_the_commands_of_a_chain_work_in_bf16(chain, folder):
    for name, text in CHAINS[chain]:
        if "base_dtype" in text and Version(torch.__version__) < Version("2.13"):
            continue  # torch has no such base, and the run is refused
        recipe = f"train_configs/{name}.toml"
        launched = ["launch", "--config", recipe, "--nproc", "1", "--training.mixed_precision_param", "bfloat16"]
        verb = launched if (ROOT / recipe).exists() else [name]
        command = [sys.executable, "-m", "glm46", *verb, *text.split()]
        done = subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])},
            capture_output=True, text=True, timeout=PROGRAM_SECONDS,
        )  # fmt: skip
        said = f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        print(said)
        assert done.returncode == 0, said
    for file in folder.glob("outputs/*/metrics.jsonl"):
        losses = [row["loss"] for row in map(json.loads, file.read_text().splitlines()) if "loss" in row]
        assert losses and all(map(math.isfinite, losses)), (file.parent.name, losses)
        if chain != "reinforcement learning":
            assert losses[-1] < losses[0], (file.parent.name, losses)
