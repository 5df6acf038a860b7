#!/usr/bin/env python3
"""Check the answer to a task of tasks.toml. Run it in the repository root.

    python tests/agent_tasks/check.py NAME [--folder FOLDER]

FOLDER has the files of the answer, outputs/agent_tasks/NAME by default. Exit code 0: solved; 1: one line says what is
missing.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from threading import Thread

HERE = Path(__file__).resolve().parent
ROOT = Path.cwd()
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from glm46.cli import main as glm46  # noqa: E402
from glm46.config import presets  # noqa: E402
from glm46.config.errors import UserError  # noqa: E402
from glm46.config.loader import load_config  # noqa: E402
from glm46.tasks.rl import policy_loss  # noqa: E402
from glm46.tasks.rl.rewards.answer import Answer  # noqa: E402


class Unsolved(Exception):
    """What an answer lacks."""


def require(condition: object, fault: str) -> None:
    if not condition:
        raise Unsolved(fault)


def answer_file(folder: Path, name: str) -> Path:
    require((folder / name).is_file(), f"{folder / name} is missing")
    return folder / name


def quiet(*words: str) -> int:
    """The exit code of a verb."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        return glm46(list(words))


def read_config(file: Path, world_size: int | None = None):
    try:
        return load_config(file, world_size=world_size)
    except UserError as error:
        raise Unsolved(str(error)) from None


def check_recipe(folder: Path) -> None:
    file = answer_file(folder, "recipe.toml")
    config = read_config(file)
    require(config.finetune is not None and config.adapter is not None, "[finetune] and [adapter] are required")
    require((config.adapter.name, config.adapter.rank) == ("lora", 4), "LoRA of rank 4 is required")
    require(tuple(config.adapter.targets) == ("attention",), "the attention alone is adapted")
    require(config.model.flavor == "GLM-4.5-Air", "the flavor is GLM-4.5-Air")
    require(str(config.model.tokenizer_path) == "assets/glm45/tokenizer.json", "the tokenizer is another one")
    require(str(config.checkpoint.initial_load_path) == "assets/GLM-4.5-Air", "the weights are others")
    require(config.checkpoint.initial_load_in_hf, "the weights are in Hugging Face's format")
    (source,) = config.data.sources
    require(list(source.recipe.input) == ["data/chats/*.jsonl"], "the chats are others")
    require(source.packing == "best_fit", "conversations must stay whole")
    training = config.training
    require((training.seq_len, training.steps, training.global_batch_size) == (8192, 20, 16), "rows, steps or batch")
    require(quiet("plan", "--config", str(file), "--gpu", "H100", "--gpus", "8") == 0, "it does not fit on 8 H100")


def check_repair(folder: Path) -> None:
    config = read_config(answer_file(folder, "repaired.toml"), world_size=2)
    require(config.optimizer.name == "AdamW" and config.optimizer.lr == 1e-3, "the optimizer has changed")
    require(config.data.sources[0].weight == 1.0 and config.model.flavor == "debug", "the model or text has changed")
    training = config.training
    sizes = (training.steps, training.seq_len, training.local_batch_size, training.global_batch_size)
    require(sizes == (20, 256, 4, 12), "steps, rows or batch have changed")
    require(config.parallelism.tensor_parallel_degree == 2, "the ranks are to share each matrix")


def check_layout(folder: Path) -> None:
    overrides = shlex.split(answer_file(folder, "overrides.txt").read_text(encoding="utf-8"))
    allowed = (
        "--parallelism.",
        "--activation_checkpoint.",
        "--optimizer.state_offload",
        "--training.parameter_offload",
    )
    keys = [word for word in overrides if word.startswith("--")]
    require(keys and all(key.startswith(allowed) for key in keys), "only keys of the layout and of memory may change")
    command = ["plan", "--config", "train_configs/air_lora.toml", "--gpu", "H100", "--gpus", "4", *overrides]
    require(quiet(*command) == 0, "it does not fit on 4 H100")


def check_cost(folder: Path) -> None:
    answer = json.loads(answer_file(folder, "cost.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "plan.json"
        command = ["plan", "--config", "train_configs/air_lora.toml", "--gpu", "H100", "--gpus", "8", "--price", "3"]
        require(quiet(*command, "--json", str(file)) == 0, "the plan failed")
        plan = json.loads(file.read_text(encoding="utf-8"))
    gib = max(stage["total"] for stage in plan["memory"]) / 2**30
    require(math.isclose(answer["dollars"], plan["dollars"], rel_tol=0.01), "the dollars are others")
    require(math.isclose(answer["gib"], gib, rel_tol=0.01), "the GiB are others")


def check_reward(folder: Path) -> None:
    spec = spec_from_file_location("agent_rewards", answer_file(folder, "rewards.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    cases = {
        ("The result is 14", True): 1.0,
        ("15", True): 0.0,
        ("<think>is it 3?</think>Yes: 8.", True): 1.0,
        ("<think>it is 12", False): 0.0,
        ("<think>2</think>", True): 0.0,
        ("no digit", True): 0.0,
        ("the number is 4", False): 0.0,
    }
    for (text, is_finished), expected in cases.items():
        answer = Answer("?", text, None, text.startswith("<think>"), 9, is_finished)
        require(module.even(answer) == expected, f"{text!r}, finished: {is_finished}: {expected} is right")


class _Policy(BaseHTTPRequestHandler):
    """Answers requests for completions with the next reply, and keeps the messages that it was sent."""

    def __init__(self, replies: list[str], requests: list[list[dict]], *arguments) -> None:
        self._replies = replies
        self._requests = requests
        super().__init__(*arguments)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._requests.append(body["messages"])
        message = {"role": "assistant", "content": self._replies[len(self._requests) - 1]}
        reply = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200 if self.path == "/v1/chat/completions" else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_arguments) -> None:
        """Print nothing."""


def check_environment(folder: Path) -> None:
    program = answer_file(folder, "agent.py")
    for replies, score in ((["a blue door"], 1.0), (["a red door", "blue"], 0.5), (["red", "green"], 0.0)):
        requests: list[list[dict]] = []
        with HTTPServer(("127.0.0.1", 0), partial(_Policy, replies, requests)) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_port}/v1"
            row = json.dumps({"prompt": "Which door?", "word": "blue"})
            variables = {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": "key", "GLM46_TASK": row}
            run = subprocess.run(
                [sys.executable, program], env=os.environ | variables, capture_output=True, text=True, timeout=60
            )
            server.shutdown()
        require(run.returncode == 0, f"the program failed: {run.stderr[-200:]}")
        require(len(requests) == len(replies), f"{len(requests)} requests for the replies {replies}")
        require(requests[0] == [{"role": "user", "content": "Which door?"}], "the first request is not the prompt")
        turns = [message["content"] for message in requests[-1]]
        require(len(replies) == 1 or turns == ["Which door?", replies[0], "Again."], f"the second request is {turns}")
        require(float(run.stdout.split()[-1]) == score, f"{score} is the score of {replies}")


def check_hang(folder: Path) -> None:
    answer = json.loads(answer_file(folder, "hang.json").read_text(encoding="utf-8"))
    expected = {"rank": 2, "host": "node07", "step": 412, "cause": "data loader"}
    wrong = [key for key, value in expected.items() if answer.get(key) != value]
    require(not wrong, f"{', '.join(wrong)}: not what the report says")


def check_convert(folder: Path) -> None:
    from tests.builders import model_folder, random_model

    script = answer_file(folder, "convert.sh").resolve()
    with tempfile.TemporaryDirectory() as made:
        shape = presets.PRESETS["debug"].model_copy(update={"num_hidden_layers": 2})
        source = model_folder(Path(made) / "model", random_model(shape))
        output = Path(made) / "fp8"
        # The script calls `python`: the interpreter of the check, also where its environment is not activated.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
        run = subprocess.run(["bash", script, source, output], env=environment, capture_output=True, text=True)
        require(run.returncode == 0, f"the script failed: {run.stderr[-300:]}")
        require((output / "config.json").is_file(), "no config.json in the new folder")
        written = json.loads((output / "config.json").read_text(encoding="utf-8")).get("quantization_config", {})
        require("128" in json.dumps(written), "its weights have no blocks of 128")
        require(list(output.glob("*.safetensors")), "no weights in the new folder")


def check_flavor(_folder: Path) -> None:
    config = json.loads((HERE / "mini_config.json").read_text(encoding="utf-8"))
    require("GLM-4.6-Mini" in presets.PRESETS, "there is no flavor GLM-4.6-Mini")
    shape = presets.PRESETS["GLM-4.6-Mini"].model_dump()
    wrong = [key for key, value in config.items() if key in shape and shape[key] != value]
    require(not wrong, f"{', '.join(wrong)}: not as in mini_config.json")


def check_loss(_folder: Path) -> None:
    require(hasattr(policy_loss, "sigmoid_loss"), "policy_loss.py has no sigmoid_loss")
    generator = torch.Generator().manual_seed(0)
    ratio = (1 + torch.randn(40, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(40, generator=generator, dtype=torch.float64)
    losses = policy_loss.sigmoid_loss(ratio, advantages, 2.0)
    expected = -(4 / 2.0) / (1 + torch.exp(-2.0 * (ratio - 1))) * advantages
    torch.testing.assert_close(losses.loss, expected)
    (gradient,) = torch.autograd.grad(losses.loss.sum(), ratio, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), ratio)[0])
    require(torch.equal(losses.is_clipped, (ratio - 1).abs() > 0.5), "is_clipped is not |r - 1| > 1 / t")


CHECKS: dict[str, Callable[[Path], None]] = {
    "recipe": check_recipe,
    "repair": check_repair,
    "layout": check_layout,
    "cost": check_cost,
    "reward": check_reward,
    "environment": check_environment,
    "hang": check_hang,
    "convert": check_convert,
    "flavor": check_flavor,
    "loss": check_loss,
}


def fault_of(name: str, folder: Path) -> str | None:
    """What the answer to a task lacks; None if it is solved."""
    try:
        CHECKS[name](folder)
    except Unsolved as error:
        return str(error)
    except Exception as error:  # an answer may raise anything
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CHECKS)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    fault = fault_of(arguments.name, arguments.folder or Path("outputs/agent_tasks") / arguments.name)
    print(f"{arguments.name}: {fault or 'solved'}")
    sys.exit(1 if fault else 0)
