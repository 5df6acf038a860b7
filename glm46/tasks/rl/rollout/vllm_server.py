"""Client of vLLM 0.32 with the worker extension of ``deploy/vllm/``: token requests, and weights or adapters from a
disk, or weights by broadcast."""

import asyncio
import base64
import io
import json
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from glm46.compute.distributed.process import nccl_version
from glm46.config.errors import UserError
from glm46.storage.huggingface.peft_export import CONFIG, is_for_experts
from glm46.tasks.rl.rollout.event_loop import blocking
from glm46.tasks.rl.rollout.http_calls import CallError, RefusedError, StatusError, call, exchange, guarded
from glm46.tasks.rl.rollout.records import Completion, Request, SamplingRules, token_versions
from glm46.tasks.rl.rollout.replies import known_form, version_of
from glm46.tasks.rl.rollout.server import ADAPTER, QUICK_SECONDS, Server, group_backend
from glm46.tasks.rl.rollout.weight_group import WeightGroup

_EXTENSION_REVISION = 8
"""Required REVISION of deploy/vllm/glm_ext.py."""

_REMEDY = "start it as deploy/vllm/serve_cpu.sh does (the options marked with *)"


class VllmServer(Server):
    """See `Server`."""

    _health = "/health"
    _path = "/inference/v1/generate"
    _forgotten = "NotFoundError"

    async def check(self, *, routes: bool) -> None:
        """See `Server.check`."""
        key = f"rollout.urls: {self.url}"
        models = await call(self.url, "/v1/models", seconds=QUICK_SECONDS)
        try:
            facts = await self._extension("glm46_describe")
        except StatusError as error:
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
        if routes and not facts["returns_routes"]:
            if facts["prefix_caching"]:
                raise UserError(
                    f"{key}: tokens of its prefix cache meet no router, so their experts are unknown; start it with "
                    "--enable-return-routed-experts on a GPU, with --no-enable-prefix-caching on a CPU, or turn off "
                    "routing replay"
                )
            await self._extension("glm46_record_routes")
        self._facts = facts
        self.dtype = facts["dtype"]
        self.context = models["data"][0]["max_model_len"]

    async def _generated(
        self, name: str, request: Request, rules: SamplingRules, salt: str, seconds: float, bias: dict[str, float]
    ) -> Completion:
        sampling = {
            "max_tokens": request.max_new_tokens,
            "temperature": rules.temperature,
            "seed": request.seed % 2**63,
            "logprobs": 0,  # only of the generated token
            "stop_token_ids": sorted(rules.stop),
            "ignore_eos": True,  # only `stop` ends a completion, not the folder's generation_config.json
            "detokenize": False,
            **({"logit_bias": bias} if bias else {}),
        }
        body = {"request_id": name, "token_ids": request.prompt, "cache_salt": salt, "sampling_params": sampling}
        choice = (await self._request_tokens(body, seconds))["choices"][0]
        tokens = choice["token_ids"]
        entries = (choice["logprobs"] or {}).get("content") or []
        if [entry["token_id"] for entry in entries] != tokens:
            raise CallError("log-probabilities of other tokens")
        spans = [(span["start"], version_of(span["version"])) for span in choice["weight_versions"] or ()]
        encoded = choice.get("routed_experts")
        routes = None
        skipped = self._facts["dense_layers"]  # vLLM's own routes have zero rows for dense layers
        if rules.routes and encoded is None:
            encoded = (await self._extension("glm46_take_routes", f"generate-tokens-{name}"))["routes"]
            skipped = 0
        if encoded is not None:
            routes = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)[:, skipped:]
        logprobs = [entry["logprob"] for entry in entries]
        versions = token_versions(spans, len(tokens))
        return Completion(tokens, logprobs, choice["finish_reason"], versions, routes)

    async def abort(self, names: Sequence[str]) -> None:
        """See `Server.abort`."""
        ids = [f"generate-tokens-{name}" for name in names]
        await call(self.url, "/abort_requests", {"request_ids": ids}, seconds=QUICK_SECONDS)

    async def load(self, folder: Path, version: int, seconds: float) -> None:
        """See `Server.load`. After a failed load the server stays paused: the next forward could crash, or use
        a mix of old and new weights, while /health still returns 200."""
        is_adapter = (folder / CONFIG).is_file()
        if is_adapter:
            self._require_room_for_adapter(json.loads((folder / CONFIG).read_text()))
        await self._pause()
        path = str(folder.absolute())
        if is_adapter:
            loaded = await self._extension("glm46_check", path, seconds=seconds)
            await self._unload_adapters("/v1/unload_lora_adapter")
            self._adapter = {"model": f"{ADAPTER}{version}"}
            body = {"lora_name": self._adapter["model"], "lora_path": path}
            await exchange(self.url, "/v1/load_lora_adapter", body, seconds=seconds)  # it answers in plain text
        else:
            try:
                loaded = await self._extension("glm46_load", path, seconds=seconds)
            except CallError:
                # Loading all weights again repairs a partial load.
                loaded = await self._extension("glm46_load", path, seconds=seconds)
        await self._resume(loaded, version)

    async def join(self, version: int, seconds: float) -> WeightGroup:
        """See `Server.join`."""
        backend = group_backend(self._facts["device"])
        if backend == "nccl" and (theirs := self._facts["nccl"]) != (ours := nccl_version()):
            raise UserError(
                f'{self.url} has NCCL {theirs}, this process has {ours}; install one or set rollout.weights = "disk"'
            )
        await self._pause()
        workers = self._facts["replicas"] * self._facts["workers"]
        loop = asyncio.get_running_loop()

        def invite(invitation: str) -> Future[Any]:
            begin = partial(self._extension, "glm46_receive", invitation, seconds=seconds)
            return asyncio.run_coroutine_threadsafe(guarded(begin), loop)

        group = await blocking(lambda: WeightGroup(self.url, workers, backend, seconds))
        await blocking(lambda: group.join(version, invite))
        return group

    async def receive(self, group: WeightGroup, version: int, seconds: float) -> None:
        """See `Server.receive`."""
        await self._resume(await blocking(lambda: group.result(seconds)), version)

    async def _pause(self) -> None:
        await call(self.url, "/abort_requests", {}, seconds=QUICK_SECONDS)  # requests of a killed run
        await call(self.url, "/pause?mode=keep", {}, seconds=QUICK_SECONDS)  # drops the caches too

    async def _resume(self, loaded: Any, version: int) -> None:
        if loaded != {"version": version}:
            raise CallError(f"loaded {loaded}, not version {version}")
        await call(self.url, "/update_weight_version", {"new_version": str(version)}, seconds=QUICK_SECONDS)
        await call(self.url, "/resume", {}, seconds=QUICK_SECONDS)

    def _require_room_for_adapter(self, config: dict[str, Any]) -> None:
        """Compare an adapter_config.json with the options of the server."""
        key = f"rollout.send_adapters: {self.url}"
        rank = config["r"]
        if self._facts["lora_rank"] < rank:
            raise UserError(
                f"{key}: takes adapters up to rank {self._facts['lora_rank']}, these have {rank}; start it with "
                f"--enable-lora --max-lora-rank {rank}, or the next rank that vLLM knows, and with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        if is_for_experts(config) and not self._facts["expert_adapters"]:
            raise UserError(
                f'{key}: on a CPU vLLM ignores the adapters of experts; remove "experts" from adapter.targets, or '
                "rollout.send_adapters"
            )

    async def _score_prompt(self, tokens: list[int], seconds: float) -> list[float]:
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        reply = await self._request_tokens({"token_ids": tokens, "sampling_params": sampling}, seconds)
        places = reply["prompt_logprobs"][1:]
        return [float(place[str(token)]["logprob"]) for token, place in zip(tokens[1:], places, strict=True)]

    async def _extension(self, method: str, *arguments: str, seconds: float = QUICK_SECONDS) -> Any:
        """Call a method of the extension and return its result, which is equal on all workers."""
        try:
            reply = await call(self.url, "/collective_rpc", {"method": method, "args": arguments}, seconds=seconds)
        except RefusedError as error:  # RefusedError is only for requests for tokens
            raise StatusError(str(error)) from None
        with known_form(f"/collective_rpc {method}: unknown reply"):
            results = reply["results"]
            failed = [entry["failed"] for entry in results if entry and "failed" in entry]
            result = next((entry for entry in results if entry and entry != {"routes": None}), results[0])
        if failed:
            raise CallError(f"{method} failed: {failed[0]}")
        return result
