"""A server on loopback that speaks the calls of vLLM and SGLang which we use, has a made-up model, and fails as
told. Not a model of either server: that is what tests/servers is for.

python -m tests.unit.tasks.rl.rollout.stub_server [PORT]: one in a process of its own, which prints its port.
"""

import base64
import hashlib
import importlib.util
import io
import json
import os
import random
import signal
import sys
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import torch

from tests.processes import free_port, wait_until
from tests.unit.tasks.rl.rollout.sglang_stub import SglangCalls

_PATH = Path(__file__).parents[5] / "deploy/vllm/glm_weights.py"
_spec = importlib.util.spec_from_file_location("glm_weights", _PATH)
glm_weights = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(glm_weights)

STOP, _LOST = 2, object()


def logprob(version: int, token: int) -> float:
    """Of the made-up model with weights of this version."""
    return -1.0 - (token * 7 + version * 3) % 11 / 10


def scores(version: int, sequences: list[list[int]]) -> list[list[float]]:
    """What a trainer with weights of this version computes."""
    return [[logprob(version, token) for token in tokens[1:]] for tokens in sequences]


def generate(prompt: list[int], seed: int, length: int, known: int = 0) -> list[int]:
    """The tokens of a request, whatever the version and the server."""
    tokens = random.Random(f"{prompt} {seed}").choices(range(3, 50), k=length)
    return [*tokens[: seed % length], STOP] if seed % 3 == 0 else tokens


def digest(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """Of names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class JoinedReceiver(glm_weights.Receiver):
    """Breaks between its word that it joins and the group."""

    def __init__(self, breaks, *arguments):
        super().__init__(*arguments)
        self._breaks = breaks

    def _form(self, *arguments):
        self._breaks("joined")
        return super()._form(*arguments)


class StubServer(SglangCalls):
    """Set the attributes at any time; they hold for the next call.

    Attributes:
        fault: "hang", "aborts", "500", "400", "400 at stop", "500 at stop", "truncated", "other version",
            "bad logprobs", "null logprobs", "no choices", "restarted"; it holds for generation. "null scores": of
            given tokens.
        model: log-probability of a token by version and token.
        raw: added to the log-probabilities of generated tokens, not to those of given ones.
        stale: loading answers 200 and changes nothing.
        half: loading leaves a model that is neither the old nor the new one.
        dies_after: completions after which the server ends.
        lora_rank: largest rank of adapters, on a server that has none of its own weights loaded.
        goes_on_behind: stop tokens that end nothing.
        routes: chosen experts that each reply has.
        received: tensors of the last broadcast, all workers' in turn.
        workers: of a replica, that take a broadcast.
        replicas: of which the first one answers, as in vLLM.
        breaks_at: where its last worker breaks, once, in a broadcast: "called", "joined" (before the group is formed),
            behind so many tensors, or "answer", which is then lost.
        breaks_by: "error", "stall" (until `stalls` is false), "stop" (until it is sent SIGCONT), "kill".
        calls: paths in order, with the bodies.
    """

    def __init__(self, *, port: int | None = None):
        self.fault, self.stale, self.half, self.dies_after = "", False, False, None
        self.dtype, self.context, self.logprobs_mode = "float32", 64, "processed_logprobs"
        self.version, self.name, self.calls = 0, "default", []
        self.lora_rank, self.adapters, self.routes, self.device = 0, [], None, "cpu"
        self.goes_on_behind = ()
        self.model, self.raw = logprob, 0.0
        self.received, self.errors, self.workers, self.replicas = [], [], 1, 1
        self.breaks_at, self.breaks_by, self.stalls = None, "error", True
        self._aborted, self._lock, self._engine = set(), threading.Lock(), threading.Lock()
        self.generated: list[tuple] = []
        self.start_sglang()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._answer({})

            def do_POST(self):
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body):
                stub.calls.append((self.path, body))
                reply = stub.answer(self.path.partition("?")[0].strip("/").replace("/", "_"), body)
                if reply is _LOST:
                    return
                status, said = reply if isinstance(reply, tuple) else (reply, "NotFoundError")
                status, said = (status, said) if isinstance(status, int) else (200, json.dumps(reply))
                content = said.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if stub.fault == "truncated" else content)

            def log_message(self, *_):
                pass

        # One that this server still finds free when it is started again.
        self._server = ThreadingHTTPServer(("127.0.0.1", port or free_port()), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuse all connections from now on."""
        self._server.shutdown()
        self._server.server_close()

    def paths(self) -> list[str]:
        """The calls so far without their bodies."""
        return [path for path, _ in self.calls]

    def answer(self, path: str, body: dict):
        """The reply, or the number of an error."""
        biases = body.get("sampling_params", {}).get("logit_bias", {})
        if self.fault in ("400 at stop", "500 at stop") and max(biases.values(), default=0) > 0:
            return int(self.fault[:3])
        if (reply := self.answer_sglang(path, body)) is not None:
            return reply
        known = getattr(self, f"_{path}", None)
        with self._engine if path in ("pause", "resume", "collective_rpc") else nullcontext():  # as vLLM does
            return 404 if known is None else known(body)

    def _health(self, body):
        return {}

    _pause = _resume = _reset_prefix_cache = _health

    def _v1_models(self, body):
        return {"data": [{"id": "base", "max_model_len": self.context}, *({"id": name} for name in self.adapters)]}

    def _v1_load_lora_adapter(self, body):
        self.adapters.append(body["lora_name"])
        return "" if self._load(Path(body["lora_path"])) else 500

    def _v1_unload_lora_adapter(self, body):
        self.adapters.remove(body["lora_name"])
        return ""

    def _collective_rpc(self, body):
        if body["method"] == "glm46_describe":
            facts = {"revision": 8, "dtype": self.dtype, "logprobs_mode": self.logprobs_mode, "prefix_caching": True}
            facts |= {"lora_rank": self.lora_rank, "expert_adapters": False}
            facts |= {"device": self.device, "workers": self.workers, "replicas": self.replicas, "nccl": "2.27.5"}
            return {"results": [facts | {"returns_routes": self.routes is not None, "dense_layers": 1}]}
        if body["method"] == "glm46_check":
            return {
                "results": [{"version": json.loads((Path(body["args"][0]) / "version.json").read_text())["version"]}]
            }
        if body["method"] == "glm46_receive":
            return self._receive(body["args"][0])
        if body["method"] != "glm46_load":
            return 500
        return {"results": [{"version": self._load(Path(body["args"][0]))}]}

    def _receive(self, invitation: str):
        self.received, errors = [], {}

        def take(worker: int) -> None:
            breaks = self._break if worker == self.replicas * self.workers - 1 else lambda where: None
            try:
                breaks("called")
                found = []
                with JoinedReceiver(breaks, invitation, worker, torch.device("cpu")) as tensors:
                    breaks(0)
                    for pair in tensors:
                        found.append(pair)
                        breaks(len(found))
                    breaks("loaded")
                self.received.append(found)
            except (OSError, RuntimeError, ValueError) as error:
                errors[worker] = f"{type(error).__name__}: {error}"

        threads = [threading.Thread(target=take, args=(worker,)) for worker in range(self.replicas * self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.errors = list(errors.values())
        if answered := [errors[worker] for worker in range(self.workers) if worker in errors]:
            return {"results": [{"failed": error} for error in answered]}
        if not self.stale:
            self.version = json.loads(invitation)["version"]
        try:
            self._break("answer")
        except ValueError:
            return _LOST
        return {"results": [{"version": json.loads(invitation)["version"]}] * self.workers}

    def _break(self, where: str | int) -> None:
        if where != self.breaks_at:
            return
        self.breaks_at = None
        if self.breaks_by == "stall":
            wait_until(lambda: not self.stalls)
        elif self.breaks_by == "error":
            raise ValueError(f"told to break at {where}")
        else:
            os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}[self.breaks_by])

    def _stub(self, body):
        """Set attributes of a stub in a process of its own."""
        vars(self).update(body)
        return {"version": self.version, "digests": [digest(found) for found in self.received]}

    def _load(self, folder: Path) -> int:
        version = json.loads((folder / "version.json").read_text())["version"]
        if not self.stale:
            self.version = version
        return version

    def _update_weight_version(self, body):
        self.name = body["new_version"]
        if self.has_received and not self.stale:
            self.version = int(self.name)
        self.has_received = False
        return {"success": True}

    def _abort_requests(self, body):
        self._aborted |= set(body.get("request_ids", ()))
        return {}

    def _model(self, token: int) -> float:
        return self.model(self.version, token) - 0.4 * self.half * (token % 2)

    def _given(self, token: int) -> float | None:
        return None if self.fault == "null scores" else self._model(token)

    def _sample(self, name: str, prompt: list[int], seed: int, length: int):
        """Tokens and finish reason, or the number of an error."""
        if self.fault in ("400", "500"):
            return int(self.fault)
        with self._lock:
            self.generated.append((tuple(prompt), seed))
            if self.dies_after is not None and len(self.generated) > self.dies_after:
                threading.Thread(target=self.stop, daemon=True).start()
                return 500
        tokens = generate(prompt, seed, length)
        if self.fault == "aborts":
            return tokens[: len(tokens) // 2], "abort"
        if self.fault == "hang":
            waiting = threading.Event()
            while name not in self._aborted and not waiting.wait(0.02):
                pass
            return tokens[: len(tokens) // 2], "abort"
        return tokens, "stop" if tokens[-1] == STOP else "length"

    def _reported(self, tokens: list[int]) -> list[float]:
        """Log-probabilities of generated tokens."""
        wrong = {"bad logprobs": float("nan"), "null logprobs": None}
        return [wrong.get(self.fault, self._model(token) + self.raw) for token in tokens]

    def _named(self) -> str:
        """The version that a reply names."""
        return {"other version": "77", "restarted": "default"}.get(self.fault, self.name)

    def forced(self, sampling: dict, length: str):
        """Tokens and finish if only one token is possible."""
        token = next((int(token) for token, bias in sampling.get("logit_bias", {}).items() if bias > 0), None)
        if token is None:
            return None
        ends = token in sampling["stop_token_ids"] and token not in self.goes_on_behind
        return ([token], "stop") if ends else ([token] * sampling[length], "length")

    def _inference_v1_generate(self, body):
        prompt, sampling = body["token_ids"], body["sampling_params"]
        if "model" in body and body["model"] not in self.adapters:
            return 404
        if "prompt_logprobs" in sampling:
            places = [{str(token): {"logprob": self._given(token)}} for token in prompt[1:]]
            return {"prompt_logprobs": [None, *places], "choices": []}
        if len(prompt) >= self.context:
            return 400
        name = "generate-tokens-" + body["request_id"]
        generated = self.forced(sampling, "max_tokens")
        generated = generated or self._sample(name, prompt, sampling["seed"], sampling["max_tokens"])
        if isinstance(generated, int):
            return generated
        tokens, finish = generated
        values = self._reported(tokens)
        span = {"start": 0, "end": len(tokens), "version": self._named()}
        content = [{"token_id": t, "logprob": v} for t, v in zip(tokens, values, strict=True)]
        choice = {"token_ids": tokens, "finish_reason": finish, "logprobs": {"content": content}}
        if self.routes is not None:
            file = io.BytesIO()
            np.save(file, self.routes)
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return {"choices": [] if self.fault == "no choices" else [choice | {"weight_versions": [span]}]}


if __name__ == "__main__":
    print(StubServer(port=int(sys.argv[1]) if len(sys.argv) > 1 else None).port, flush=True)
    threading.Event().wait()
