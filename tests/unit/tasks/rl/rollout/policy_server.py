"""A server with vLLM's calls that samples from a real GLM by this project's decoder: seconds to start, where vLLM takes
a minute. Its weights are those of the folder that it was told to load last.

python -m tests.unit.tasks.rl.rollout.policy_server PORT
"""

import queue
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import torch

from glm46.engine.inference.decoder import Decoder
from glm46.engine.inference.generation import Continuation, Generation
from glm46.engine.inference.loading import load_for_inference
from glm46.engine.inference.sampling import Sampling
from tests.unit.tasks.rl.rollout.stub_server import StubServer

ROWS, CONTEXT = 64, 256
_GATHER_SECONDS = 0.01
"""After the last request of a burst, which is then generated together."""


class _Waiting(NamedTuple):
    """A request whose call waits for its end."""

    name: str
    continuation: Continuation
    sampling: dict
    ended: threading.Event


class PolicyServer(StubServer):
    """Generates the requests that have come while it worked on those before, together, or one after another: how many
    are together changes the last bits of log-probabilities."""

    def __init__(self, *, port: int, together: bool = True):
        ThreadingHTTPServer.request_queue_size = 1024  # a rollout comes at once
        super().__init__(port=port)
        self.context, self._together = CONTEXT, together
        self._model_of: torch.nn.Module | None = None
        self._decoder: Decoder | None = None
        self._running, self._requests = threading.Lock(), queue.SimpleQueue()
        threading.Thread(target=self._generate_all, daemon=True).start()

    def _load(self, folder: Path) -> int:
        with self._running:
            model = load_for_inference(folder, tokenizer=None, dtype=torch.float32, device=torch.device("cpu"))[0]
            self._model_of, self._decoder = model, Decoder(model, batch=ROWS, max_length=CONTEXT)
            return super()._load(folder)

    def _abort_requests(self, body):
        names = body.get("request_ids")
        if names is None:
            return {}
        return super()._abort_requests(body)

    def _inference_v1_generate(self, body):
        prompt, sampling = body["token_ids"], body["sampling_params"]
        if "prompt_logprobs" in sampling:
            return self._score(prompt)
        if forced := self.forced(sampling, "max_tokens"):
            return self._reply(forced[0], [0.0] * len(forced[0]), forced[1])
        one = Continuation(prompt, sampling["max_tokens"], sampling["seed"])
        waiting = _Waiting("generate-tokens-" + body["request_id"], one, sampling, threading.Event())
        self._requests.put(waiting)
        waiting.ended.wait()
        return self._reply(one.tokens, one.logprobs, one.finish)

    def _reply(self, tokens: list[int], logprobs: list[float], finish: str) -> dict:
        content = [{"token_id": t, "logprob": v} for t, v in zip(tokens, logprobs, strict=True)]
        choice = {"token_ids": tokens, "finish_reason": finish, "logprobs": {"content": content}}
        span = {"start": 0, "end": len(tokens), "version": self.name}
        return {"choices": [choice | {"weight_versions": [span]}]}

    @torch.no_grad()
    def _score(self, tokens: list[int]) -> dict:
        with self._running:
            logprobs = self._model_of(torch.tensor([tokens]))[0].float().log_softmax(-1)
        places = [{str(token): {"logprob": logprobs[i, token].item()}} for i, token in enumerate(tokens[1:])]
        return {"prompt_logprobs": [None, *places], "choices": []}

    def _generate_all(self) -> None:
        while True:
            burst = [self._requests.get()]
            try:
                while True:
                    burst.append(self._requests.get(timeout=_GATHER_SECONDS))
            except queue.Empty:
                pass
            if not self._together:
                for waiting in burst:
                    self._generate_burst([waiting])
                continue
            burst.sort(key=lambda waiting: waiting.continuation.prompt)  # equal prompts are computed once
            self._generate_burst(burst)

    def _generate_burst(self, burst: list[_Waiting]) -> None:
        sampling = burst[0].sampling
        with self._running:
            Generation(
                self._decoder,
                [waiting.continuation for waiting in burst],
                sampling=Sampling(sampling["temperature"]),
                stop=frozenset(sampling["stop_token_ids"]),
                vocab_size=min(map(int, sampling.get("logit_bias", {})), default=self._model_of.shape.vocab_size),
                is_stopped=lambda: any(waiting.name in self._aborted for waiting in burst),
            ).run()
        for waiting in burst:
            waiting.ended.set()


if __name__ == "__main__":
    torch.set_num_threads(1)
    PolicyServer(port=int(sys.argv[1]))
    threading.Event().wait()
