"""SGLang by its native calls. Written from its documentation and clients for 0.5.23; it was tested against a stub of
them only, because no build of SGLang for CPUs is published."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.http_calls import CallError, call
from glm46.tasks.rl.rollout.inference_server import MOST_BIAS, QUICK_SECONDS, checked, version_of
from glm46.tasks.rl.rollout.records import Completion, Request, SamplingRules, VersionSpan


class SglangServer:
    """See `InferenceServer`. Seeds repeat samples only if the server has ``--enable-deterministic-inference``."""

    def __init__(self, url: str, padding: range):
        """Args:
        padding: ids of the head's padding rows, which must not be generated.
        """
        self.url, self.dtype, self.context = url, "", None
        self._bias = dict.fromkeys(map(str, padding), -MOST_BIAS)

    def check(self, *, routes: bool) -> None:
        """See `InferenceServer.check`."""
        facts = call(self.url, "/get_server_info", seconds=QUICK_SECONDS)
        if routes:
            raise UserError(
                f"rollout.urls: {self.url}: experts are not read from SGLang; turn off routing replay, or take vLLM"
            )
        # "auto" is the type of the folder, and every folder of a policy that is not FP32 is BF16.
        self.dtype = "float32" if facts.get("dtype") in ("float32", "float") else "bfloat16"
        self.context = facts.get("context_length")

    def alive(self) -> None:
        """See `InferenceServer.alive`."""
        call(self.url, "/health", seconds=QUICK_SECONDS)

    def generate(self, name: str, request: Request, rules: SamplingRules, salt: str, seconds: float) -> Completion:
        """See `InferenceServer.generate`. The cache is flushed with each update, so `salt` is not sent."""
        sampling = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": rules.temperature,
            "sampling_seed": request.seed % 2**31,
            "stop_token_ids": sorted(rules.stop),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,  # the stop token is part of the completion
            **({"logit_bias": self._bias} if self._bias else {}),
        }
        body = {"rid": name, "input_ids": request.prompt, "sampling_params": sampling, "return_logprob": True}
        meta = self._meta(call(self.url, "/generate", body, seconds=seconds))
        try:
            generated = [(logprob, token) for logprob, token, *_ in meta["output_token_logprobs"]]
            finish, version = meta["finish_reason"]["type"], version_of(meta["weight_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise CallError(f"/generate: unknown reply ({type(error).__name__}: {error})") from None
        tokens = [token for _, token in generated]
        return checked(request, rules, tokens, [value for value, _ in generated], finish, [VersionSpan(0, version)])

    def ended_by(self, token: int, stop: Sequence[int], seconds: float) -> tuple[list[int], str]:
        """See `InferenceServer.ended_by`."""
        sampling = {"max_new_tokens": 2, "logit_bias": {str(token): MOST_BIAS}, "stop_token_ids": sorted(stop)}
        sampling |= {"ignore_eos": True, "skip_special_tokens": False, "no_stop_trim": True}
        body = {"input_ids": [token], "sampling_params": sampling, "return_logprob": True}
        meta = self._meta(call(self.url, "/generate", body, seconds=seconds))
        try:
            return [generated for _, generated, *_ in meta["output_token_logprobs"]], meta["finish_reason"]["type"]
        except (KeyError, TypeError, ValueError) as error:
            raise CallError(f"/generate: unknown reply ({type(error).__name__}: {error})") from None

    def abort(self, names: Sequence[str]) -> None:
        """See `InferenceServer.abort`."""
        for name in names:
            call(self.url, "/abort_request", {"rid": name}, seconds=QUICK_SECONDS)

    def load(self, folder: Path, version: int, seconds: float) -> None:
        """See `InferenceServer.load`."""
        call(self.url, "/abort_request", {"abort_all": True}, seconds=QUICK_SECONDS)
        call(self.url, "/pause_generation", {"mode": "retract"}, seconds=QUICK_SECONDS)
        call(self.url, "/flush_cache", seconds=QUICK_SECONDS)
        body = {"model_path": str(folder.absolute()), "weight_version": str(version)}
        reply = call(self.url, "/update_weights_from_disk", body, seconds=seconds)
        if not isinstance(reply, dict) or not reply.get("success"):
            raise CallError(f"/update_weights_from_disk: {reply}")
        call(self.url, "/continue_generation", {}, seconds=QUICK_SECONDS)

    def score(self, tokens: list[int], seconds: float) -> list[float]:
        """See `InferenceServer.score`."""
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        meta = self._meta(call(self.url, "/generate", body, seconds=seconds))
        try:
            places = meta["input_token_logprobs"][1:]  # the first token has none
            assert [token for _, token, *_ in places] == tokens[1:]
            return [float(logprob) for logprob, *_ in places]
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise CallError(f"no log-probabilities of the prompt ({type(error).__name__}: {error})") from None

    @staticmethod
    def _meta(reply: Any) -> dict[str, Any]:
        if not isinstance(reply, dict) or not isinstance(reply.get("meta_info"), dict):
            raise CallError("/generate: the reply has no meta_info")
        return reply["meta_info"]
