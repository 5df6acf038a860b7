"""vLLM 0.32 with the worker extension of ``deploy/vllm/``: tokens in and out, and weights from a disk."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glm46.config.errors import UserError
from glm46.rollout.http_calls import CallError, RefusedError, call
from glm46.rollout.inference_server import QUICK_SECONDS, checked, version_of
from glm46.rollout.records import Completion, Request, SamplingRules, Span

_EXTENSION_REVISION = 1
"""REVISION of deploy/vllm/glm_ext.py."""

_REMEDY = "start it as deploy/vllm/serve_cpu.sh does (the options marked with *)"


class VllmServer:
    """See `InferenceServer`."""

    def __init__(self, url: str, padding: range):
        """Args:
        padding: ids of the head's padding rows, which must not be drawn.
        """
        self.url, self.dtype, self.context = url, "", None
        self._bias = dict.fromkeys(map(str, padding), -100.0)  # vLLM's lowest

    def check(self, *, routes: bool) -> None:
        """See `InferenceServer.check`."""
        key = f"rollout.urls: {self.url}"
        models = call(self.url, "/v1/models", seconds=QUICK_SECONDS)
        try:
            facts = self._extension("glm46_describe")
        except CallError as error:
            raise UserError(f"{key}: runs without the worker extension ({error}); {_REMEDY}") from None
        if facts["revision"] != _EXTENSION_REVISION:
            raise UserError(
                f"{key}: has revision {facts['revision']} of glm_ext.py, not {_EXTENSION_REVISION}; {_REMEDY}"
            )
        if facts["logprobs_mode"] != "processed_logprobs":
            raise UserError(
                f"{key}: its log-probabilities ({facts['logprobs_mode']}) are those of temperature 1 only; "
                "start it with --logprobs-mode processed_logprobs"
            )
        if routes and facts["prefix_caching"]:
            raise UserError(
                f"{key}: tokens of its prefix cache meet no router, so their experts are unknown; start it with "
                "--no-enable-prefix-caching, or turn off routing replay"
            )
        if routes:
            self._extension("glm46_record_routes")
        self.dtype, self.context = facts["dtype"], models["data"][0]["max_model_len"]

    def alive(self) -> None:
        """See `InferenceServer.alive`."""
        call(self.url, "/health", seconds=QUICK_SECONDS)

    def generate(self, name: str, request: Request, rules: SamplingRules, salt: str, seconds: float) -> Completion:
        """See `InferenceServer.generate`."""
        sampling = {
            "max_tokens": request.max_new_tokens,
            "temperature": rules.temperature,
            "seed": request.seed % 2**63,
            "logprobs": 0,  # of the drawn token
            "stop_token_ids": sorted(rules.stop),
            "ignore_eos": True,  # only `stop` ends a completion, not what the folder's generation_config.json says
            "detokenize": False,
            **({"logit_bias": self._bias} if self._bias else {}),
        }
        body = {"request_id": name, "token_ids": request.prompt, "cache_salt": salt, "sampling_params": sampling}
        reply = call(self.url, "/inference/v1/generate", body, seconds=seconds)
        try:
            choice = reply["choices"][0]
            tokens, entries = choice["token_ids"], (choice["logprobs"] or {}).get("content") or []
            if [entry["token_id"] for entry in entries] != tokens:
                raise CallError("log-probabilities of other tokens")
            spans = [Span(span["start"], version_of(span["version"])) for span in choice["weight_versions"] or ()]
            encoded = choice.get("routed_experts")
        except (KeyError, TypeError, ValueError) as error:
            raise CallError(f"/inference/v1/generate: unknown reply ({type(error).__name__}: {error})") from None
        if rules.routes and encoded is None:
            encoded = self._extension("glm46_take_routes", f"generate-tokens-{name}")["routes"]
        routes = None if encoded is None else np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
        logprobs = [entry["logprob"] for entry in entries]
        return checked(request, rules, tokens, logprobs, choice["finish_reason"], spans, routes)

    def abort(self, names: Sequence[str]) -> None:
        """See `InferenceServer.abort`."""
        ids = [f"generate-tokens-{name}" for name in names]
        call(self.url, "/abort_requests", {"request_ids": ids}, seconds=QUICK_SECONDS)

    def load(self, folder: Path, version: int, seconds: float) -> None:
        """See `InferenceServer.load`. After a failed load the server stays paused: the next forward would end it, or
        draw from weights that are neither old nor new, while /health says 200."""
        call(self.url, "/abort_requests", {}, seconds=QUICK_SECONDS)  # of a run that was killed
        call(self.url, "/pause?mode=keep", {}, seconds=QUICK_SECONDS)  # drops the caches too
        try:
            loaded = self._extension("glm46_load", str(folder.absolute()), seconds=seconds)
        except CallError:
            loaded = self._extension("glm46_load", str(folder.absolute()), seconds=seconds)  # a whole load repairs it
        if loaded != {"version": version}:
            raise CallError(f"loaded {loaded}, not version {version}")
        call(self.url, "/update_weight_version", {"new_version": str(version)}, seconds=QUICK_SECONDS)
        call(self.url, "/resume", {}, seconds=QUICK_SECONDS)

    def score(self, tokens: list[int], seconds: float) -> list[float]:
        """See `InferenceServer.score`."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": tokens, "sampling_params": sampling}
        reply = call(self.url, "/inference/v1/generate", body, seconds=seconds)
        try:
            places = zip(tokens[1:], reply["prompt_logprobs"][1:], strict=True)
            return [place[str(token)]["logprob"] for token, place in places]
        except (KeyError, TypeError, ValueError) as error:
            raise CallError(f"no log-probabilities of the prompt ({type(error).__name__}: {error})") from None

    def _extension(self, method: str, *arguments: str, seconds: float = QUICK_SECONDS) -> Any:
        """The result of a method of the extension, equal on all workers."""
        try:
            reply = call(self.url, "/collective_rpc", {"method": method, "args": arguments}, seconds=seconds)
            results = reply["results"]
            found = next((one for one in results if one and one != {"routes": None}), results[0])
        except RefusedError as error:
            raise CallError(str(error)) from None
        except (KeyError, TypeError, IndexError) as error:
            raise CallError(f"/collective_rpc {method}: unknown reply ({type(error).__name__}: {error})") from None
        return found
