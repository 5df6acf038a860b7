"""Client of SGLang 0.5.23's native API. Requests and replies are compared with the classes of its wheel. The client was
run only against a stub made from these classes, because there is no published CPU build of SGLang."""

import asyncio
import base64
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from glm46.config.errors import UserError
from glm46.files.threads import in_thread
from glm46.storage.huggingface.peft_export import CONFIG
from glm46.tasks.rl.rollout.event_loop import blocking, last_call
from glm46.tasks.rl.rollout.http_calls import CallError, RefusedError, call, guarded
from glm46.tasks.rl.rollout.records import Completion, Request, SamplingRules, token_versions
from glm46.tasks.rl.rollout.replies import version_of
from glm46.tasks.rl.rollout.server import ADAPTER, QUICK_SECONDS, Server, group_backend
from glm46.tasks.rl.rollout.weight_group import DEVICES, TICK_SECONDS, WeightGroup, first_sentence

_RELEASE = "0.5.23"


class SglangServer(Server):
    """See `Server`."""

    # Not /health: it generates a token, which a paused server cannot.
    _health = "/server_info"
    _path = "/generate"
    _forgotten = "not loaded"
    _checksum: tuple[int, str] | None = None
    """Version and checksum of the last broadcast."""

    async def check(self, *, routes: bool) -> None:
        """See `Server.check`."""
        facts = self._facts = await call(self.url, "/server_info", seconds=QUICK_SECONDS)
        if routes and not facts["enable_return_routed_experts"]:
            raise UserError(
                f"rollout.urls: {self.url}: does not return the experts that it chose; start it with "
                "--enable-return-routed-experts, or turn off rl.routing_replay"
            )
        # "auto" is the dtype of the folder, and folders of a policy are FP32 or BF16.
        self.dtype = "float32" if facts["dtype"] in ("float32", "float") else "bfloat16"
        self.context = facts["context_length"]
        self.note = ""
        if facts["version"] != _RELEASE:
            self.note += f"; it is SGLang {facts['version']}, and this client was written for {_RELEASE}"
        if not facts["enable_deterministic_inference"]:
            self.note += (
                "; without --enable-deterministic-inference its completions depend on the requests beside them, and a "
                "resumed run has others"
            )

    async def _generated(
        self, name: str, request: Request, rules: SamplingRules, salt: str, seconds: float, bias: dict[str, float]
    ) -> Completion:
        sampling = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": rules.temperature,
            "sampling_seed": request.seed % 2**31,
            "stop_token_ids": sorted(rules.stop),
            # Only stop tokens end a completion, and they are included in it.
            "ignore_eos": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            **({"logit_bias": bias} if bias else {}),
        }
        body = {"rid": name, "input_ids": request.prompt, "sampling_params": sampling, "cache_salt": salt}
        options = {"return_routed_experts": True, "routed_experts_start_len": request.known} if rules.routes else {}
        reply = await self._request_tokens(body | options | {"return_logprob": True}, seconds)
        meta = reply["meta_info"]
        generated = [(logprob, token) for logprob, token, *_ in meta["output_token_logprobs"]]
        reported = meta["weight_versions"] if generated else ()  # requests aborted in the queue have no versions
        spans = [(span["start"], version_of(span["version"])) for span in reported]
        fed = len(request.prompt) + len(generated) - 1
        routes = self._routes(meta, fed, request.known) if rules.routes else None
        logprobs = [value for value, _ in generated]
        tokens = [token for _, token in generated]
        versions = token_versions(spans, len(tokens))
        return Completion(tokens, logprobs, meta["finish_reason"]["type"], versions, routes)

    def _routes(self, meta: dict[str, Any], fed: int, skipped: int) -> np.ndarray | None:
        """Return the experts of the input tokens in the layers with experts; the known tokens get arbitrary ones."""
        if not meta.get("routed_experts"):
            return None
        layers, top_k = self._routed
        experts = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        experts = experts.reshape(fed - skipped, -1, top_k)[:, -layers:]
        if experts.shape[1] != layers or experts.min() < 0:
            raise ValueError(f"experts {experts.shape}, from {experts.min()} on, in {layers} layers")
        return np.pad(experts, ((skipped, 0), (0, 0), (0, 0))).astype(np.uint8 if experts.max() < 256 else np.uint16)

    async def abort(self, names: Sequence[str]) -> None:
        """See `Server.abort`."""
        for name in names:
            await call(self.url, "/abort_request", {"rid": name}, seconds=QUICK_SECONDS)

    async def load(self, folder: Path, version: int, seconds: float) -> None:
        """See `Server.load`."""
        path = str(folder.absolute())
        if (folder / CONFIG).is_file():
            self._require_room_for_adapter(json.loads((folder / CONFIG).read_text())["r"])
            await call(self.url, "/abort_request", {"abort_all": True}, seconds=QUICK_SECONDS)
            await self._unload_adapters("/unload_lora_adapter")  # returns after the adapter's requests end
            await self._pause()
            self._adapter = {"lora_path": f"{ADAPTER}{version}"}
            body = {"lora_name": self._adapter["lora_path"], "lora_path": path}
            await self._change("/load_lora_adapter", body, seconds)
        else:
            await self._pause()
            await self._change("/update_weights_from_disk", {"model_path": path}, seconds)
        await self._resume(version)

    async def join(self, version: int, seconds: float) -> WeightGroup:
        """See `Server.join`."""
        for fact, option in {"dp_size": "--dp-size", "pp_size": "--pp-size"}.items():
            if self._facts[fact] > 1:
                raise UserError(
                    f'rollout.weights = "broadcast": {self.url} has {option} {self._facts[fact]}, which its own call '
                    'refuses; start it with --tp-size and --attn-dp-size, or set rollout.weights = "disk"'
                )
        await self._pause()
        workers = self._facts["tp_size"]
        backend = group_backend(self._facts["device"])
        loop = asyncio.get_running_loop()
        group = await blocking(lambda: SglangGroup(self.url, workers, backend, seconds, loop))
        try:
            await blocking(group.meet)
        except BaseException:
            group.close()
            raise
        return group

    async def receive(self, group: WeightGroup, version: int, seconds: float) -> None:
        """See `Server.receive`."""
        await blocking(lambda: group.result(seconds))
        reply = await self._change("/weights_checker", {"action": "checksum"}, seconds)
        checksum = reply["per_engine_checksum"]
        before = self._checksum
        self._checksum = (version, checksum)
        if before is not None and before[0] == version and before != self._checksum:
            raise CallError(f"its weights have other bits than when it loaded version {version} before")
        await self._resume(version)

    async def _pause(self) -> None:
        await call(self.url, "/abort_request", {"abort_all": True}, seconds=QUICK_SECONDS)
        await call(self.url, "/pause_generation", {"mode": "retract"}, seconds=QUICK_SECONDS)
        await call(self.url, "/flush_cache", seconds=QUICK_SECONDS)

    async def _change(self, path: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the reply of a call whose reply reports success; raise CallError otherwise."""
        try:
            reply = await call(self.url, path, body, seconds=seconds)
        except RefusedError as error:  # RefusedError is only for requests for tokens
            raise CallError(str(error)) from None
        if not isinstance(reply, dict) or not reply.get("success"):
            raise CallError(f"{path}: {reply}")
        return reply

    async def _resume(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._change("/update_weight_version", body, QUICK_SECONDS)
        await call(self.url, "/continue_generation", {}, seconds=QUICK_SECONDS)

    def _require_room_for_adapter(self, rank: int) -> None:
        """Compare the rank of adapters with the options of the server; SGLang itself refuses their targets."""
        if not self._facts["enable_lora"] or (self._facts["max_lora_rank"] or 0) < rank:
            raise UserError(
                f"rollout.send_adapters: {self.url}: takes adapters up to rank {self._facts['max_lora_rank'] or 0}, "
                f"these have {rank}; start it with --enable-lora --max-lora-rank {rank} --lora-target-modules all"
            )

    async def _score_prompt(self, tokens: list[int], seconds: float) -> list[float]:
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        reply = await self._request_tokens(body, seconds)
        # The first token has no log-probability.
        places = reply["meta_info"]["input_token_logprobs"][1:]
        if [token for _, token, *_ in places] != tokens[1:]:
            raise ValueError("of other tokens")
        return [float(logprob) for logprob, *_ in places]


class SglangGroup(WeightGroup):
    """See `WeightGroup`. Rank 0 broadcasts by SGLang's own API: one request per bucket, between a begin and an end
    request, outside of which the server refuses buckets. The workers verify no checksums; `SglangServer` compares
    checksums of the weights. The workers of all nodes are in one group, each with its tensor-parallel rank + 1."""

    _name = ""
    """Group name at the server; empty if it has no group of this client."""
    _has_begun = False

    def __init__(self, url: str, workers: int, backend: str, seconds: float, loop: asyncio.AbstractEventLoop):
        """See `WeightGroup`. Calls of the server run in ``loop``, outside the thread that uses the group."""
        super().__init__(url, workers, backend, seconds)
        self._loop = loop

    def meet(self) -> None:
        """Form the group, and prepare the server for buckets.

        Raises:
            CallError: the server refuses, or its workers do not join.
        """
        self._name = f"glm46-{self._at['update']}"
        body = {"master_address": self._at["address"], "master_port": self._at["port"], "rank_offset": 1}
        body |= {"world_size": 1 + self._workers, "group_name": self._name, "backend": self.backend}
        self._reply = self._ask("/init_weights_update_group", body)
        # Prefix of the keys of torch's init_process_group, which the workers call.
        prefix = f"{self._name}/{self._name}//{DEVICES[self.backend]}/"
        formed = in_thread(lambda: self._form(prefix))
        try:
            end = time.monotonic() + self._wait
            while not (formed.done() and self._reply.done()):
                if time.monotonic() > end:
                    raise CallError(f"its workers did not join within {self._wait:g} s")
                for future in (self._reply, formed):
                    if future.done():
                        future.result()  # raises the reason
                time.sleep(TICK_SECONDS)
            self._reply.result()
            self._open()
        except RuntimeError as error:
            raise CallError(f"no group for weights ({first_sentence(error)})") from None

    def _open(self) -> None:
        try:
            self._call("/begin_weight_update", {"selector": "all"})
        except RefusedError:  # a failed update is still open; the next whole load overwrites its weights
            self._call("/end_weight_update", {})
            self._call("/begin_weight_update", {"selector": "all"})

    def announce(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """See `WeightGroup.announce`."""
        if self.fault or not tensors:
            return
        tensors = _ordered(tensors)
        body = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,  # it is empty since the pause
            "selector": "all",
        }
        self._reply = self._ask("/update_weights_from_distributed", body)

    def confirm(self) -> None:
        """See `WeightGroup.confirm`."""
        if self.fault is None:
            try:
                self._reply.result(self._wait)
            except FutureTimeoutError:
                self._fail(f"a bucket was not loaded within {self._wait:g} s")
            except CallError as error:
                self._fail(str(error))

    def bucket(self, tensors: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """See `WeightGroup.bucket`."""
        if not tensors:
            return []
        flat = [tensor.reshape(-1).view(torch.uint8) for _, tensor in _ordered(tensors)]
        return [torch.cat(flat).to(DEVICES[self.backend])]

    def begin(self, values: Tensor) -> dist.Work | None:
        """See `WeightGroup.begin`."""
        if self._has_begun:
            return super().begin(values)
        self._has_begun = True
        return self._begin_first(values)

    def result(self, seconds: float) -> Any:
        """See `WeightGroup.result`."""
        if self.fault is None:
            self._call("/end_weight_update", {}, seconds)
            wait([self._leave()])  # an error of this call does not matter
        return super().result(seconds)

    def _await_loaded(self, end: float) -> None:
        """Do nothing: SGLang's workers set no keys in the store, and the end request covers all of them."""

    def close(self) -> None:
        """See `WeightGroup.close`."""
        super().close()
        if self._name:
            self._leave()

    def _leave(self) -> Future[Any]:
        """Begin to destroy the group of the server. Its workers may wait in a broadcast, which ends only when this side
        is gone."""
        body = {"group_name": self._name}
        destroy = partial(call, self.url, "/destroy_weights_update_group", body, seconds=self._wait)
        self._name = ""
        return asyncio.run_coroutine_threadsafe(last_call(lambda: guarded(destroy)), self._loop)

    def _call(self, path: str, body: dict[str, Any], seconds: float | None = None) -> Any:
        return self._begin_call(path, body, seconds or self._wait).result()

    def _ask(self, path: str, body: dict[str, Any]) -> Future[Any]:
        """Start a call; its deadline is later than that of the bucket that waits for it."""
        return self._begin_call(path, body, 2 * self._wait)

    def _begin_call(self, path: str, body: dict[str, Any], seconds: float) -> Future[Any]:
        begin = partial(call, self.url, path, body, seconds=seconds)
        return asyncio.run_coroutine_threadsafe(guarded(begin), self._loop)


def _ordered(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Sort tensors by descending element size: a bucket has no gaps, and each tensor must be aligned to its dtype."""
    return sorted(tensors, key=lambda pair: -pair[1].element_size())
