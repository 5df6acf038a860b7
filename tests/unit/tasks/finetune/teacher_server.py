"""A server on loopback that has a real model and says the log-probabilities of prompts as vLLM and as SGLang do."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from tests.unit.tasks.rl.rollout.sglang_stub import contract_fault


class TeacherServer:
    """Closed at the end of its context. ``most``: tokens of a place that it says at most, as ``--max-logprobs``;
    ``faults``: errors that it answers with before it answers."""

    def __init__(self, model, *, most: int = 8192, faults: int = 0, name: str = "teacher"):
        self._model, self._most, self.faults, self._name = model, most, faults, name
        self.asked, self.refused, self._lock = [], [], threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._reply({"data": [{"id": server._name}]} if self.path == "/v1/models" else 404)

            def do_POST(self):
                self._reply(server.answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

            def _reply(self, reply):
                content = b"refused" if isinstance(reply, int) else json.dumps(reply).encode()
                self.send_response(reply if isinstance(reply, int) else 200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def __enter__(self) -> "TeacherServer":
        return self

    def __exit__(self, *_) -> None:
        self._http.shutdown()
        self._http.server_close()

    @torch.no_grad()
    def answer(self, path: str, body: dict):
        """The reply, or the number of an error."""
        with self._lock:
            if self.faults > 0:
                self.faults -= 1
                return 503
            is_vllm = path == "/inference/v1/generate"
            if not is_vllm and (fault := contract_fault(path, body)):
                self.refused.append(fault)
                return 422
            tokens = body["token_ids" if is_vllm else "input_ids"]
            count = body["sampling_params"]["prompt_logprobs"] if is_vllm else body["top_logprobs_num"]
            if count > self._most:
                return 400
            self.asked.append(tokens)
            logprobs = self._model(torch.tensor([tokens]))[0].float().log_softmax(-1)
        places, tops = [None], [None]
        own = [[None, tokens[0], None]]
        for row, token in zip(logprobs, tokens[1:], strict=False):
            best = row.topk(count)
            pairs = [*zip(best.indices.tolist(), best.values.tolist(), strict=True)]
            own.append([row[token].item(), token, None])
            tops.append([[value, one, None] for one, value in pairs])
            # The token of the prompt comes first, and is one more if it is not among the most likely ones.
            ranked = {token: row[token].item()} | dict(pairs)
            places.append({
                str(one): {"logprob": value, "rank": 1 + int((row > value).sum()), "decoded_token": None}
                for one, value in ranked.items()
            })  # fmt: skip
        if is_vllm:
            return {"request_id": "one", "choices": [{"index": 0, "token_ids": [5]}], "prompt_logprobs": places}
        return {"text": "", "output_ids": [5], "meta_info": {"input_token_logprobs": own, "input_top_logprobs": tops}}
