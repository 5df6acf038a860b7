"""SGLang 0.5.23 by its native calls. Its requests and replies are compared with the classes of its wheel; it was run
against a stub that is made from them only, because no build of SGLang for CPUs is published."""

import base64
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from glm46.config.errors import UserError
from glm46.storage.huggingface.peft_export import CONFIG
from glm46.tasks.rl.rollout.http_calls import CallError, RefusedError, call, in_thread
from glm46.tasks.rl.rollout.inference_server import ADAPTER, QUICK_SECONDS, InferenceServer, version_of
from glm46.tasks.rl.rollout.records import Request, SamplingRules, VersionSpan
from glm46.tasks.rl.rollout.weight_group import DEVICES, TICK_SECONDS, WeightGroup, first_sentence

_RELEASE = "0.5.23"


class SglangServer(InferenceServer):
    """See `InferenceServer`."""

    # Its own /health generates a token, which a paused server does not.
    _health, _path, _forgotten = "/server_info", "/generate", "not loaded"
    _checksum: tuple[int, str] | None = None
    """Of the version that was broadcast last."""

    def check(self, *, routes: bool) -> None:
        """See `InferenceServer.check`."""
        facts = self._facts = call(self.url, "/server_info", seconds=QUICK_SECONDS)
        if routes and not facts["enable_return_routed_experts"]:
            raise UserError(
                f"rollout.urls: {self.url}: does not return the experts that it chose; start it with "
                "--enable-return-routed-experts, or turn off rl.routing_replay"
            )
        # "auto" is the type of the folder, and every folder of a policy that is not FP32 is BF16.
        self.dtype = "float32" if facts["dtype"] in ("float32", "float") else "bfloat16"
        self.context, self.note = facts["context_length"], ""
        if facts["version"] != _RELEASE:
            self.note += f"; it is SGLang {facts['version']}, and this client was written for {_RELEASE}"
        if not facts["enable_deterministic_inference"]:
            self.note += (
                "; without --enable-deterministic-inference its completions depend on the requests beside them, and a "
                "resumed run has others"
            )

    def _generated(
        self, name: str, request: Request, rules: SamplingRules, salt: str, seconds: float, bias: dict[str, float]
    ) -> tuple[list[int], list[float], str, list[VersionSpan], np.ndarray | None]:
        sampling = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": rules.temperature,
            "sampling_seed": request.seed % 2**31,
            "stop_token_ids": sorted(rules.stop),
            # Only stop tokens end a completion, and they are part of it.
            "ignore_eos": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            **({"logit_bias": bias} if bias else {}),
        }
        body = {"rid": name, "input_ids": request.prompt, "sampling_params": sampling, "cache_salt": salt}
        wanted = {"return_routed_experts": True, "routed_experts_start_len": request.known} if rules.routes else {}
        meta = self._ask(body | wanted | {"return_logprob": True}, seconds)["meta_info"]
        generated = [(logprob, token) for logprob, token, *_ in meta["output_token_logprobs"]]
        spans = meta["weight_versions"] if generated else ()  # what was aborted in the queue has none
        versions = [VersionSpan(span["start"], version_of(span["version"])) for span in spans]
        fed = len(request.prompt) + len(generated) - 1
        routes = self._routes(meta, fed, request.known) if rules.routes else None
        logprobs, tokens = [value for value, _ in generated], [token for _, token in generated]
        return tokens, logprobs, meta["finish_reason"]["type"], versions, routes

    def _routes(self, meta: dict[str, Any], fed: int, known: int) -> np.ndarray | None:
        """Experts of the tokens that were fed, of the layers that have some; any of the known ones."""
        if not meta.get("routed_experts"):
            return None
        layers, top_k = self._routed
        found = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        found = found.reshape(fed - known, -1, top_k)[:, -layers:]
        if found.shape[1] != layers or found.min() < 0:
            raise ValueError(f"experts {found.shape}, from {found.min()} on, in {layers} layers")
        return np.pad(found, ((known, 0), (0, 0), (0, 0))).astype(np.uint8 if found.max() < 256 else np.uint16)

    def abort(self, names: Sequence[str]) -> None:
        """See `InferenceServer.abort`."""
        for name in names:
            call(self.url, "/abort_request", {"rid": name}, seconds=QUICK_SECONDS)

    def load(self, folder: Path, version: int, seconds: float) -> None:
        """See `InferenceServer.load`."""
        path = str(folder.absolute())
        if (folder / CONFIG).is_file():
            self._require_room_for_adapter(json.loads((folder / CONFIG).read_text())["r"])
            call(self.url, "/abort_request", {"abort_all": True}, seconds=QUICK_SECONDS)
            self._unload_adapters("/unload_lora_adapter")  # it waits for the requests of an adapter
            self._pause()
            self._adapter = {"lora_path": f"{ADAPTER}{version}"}
            body = {"lora_name": self._adapter["lora_path"], "lora_path": path}
            self._change("/load_lora_adapter", body, seconds)
        else:
            self._pause()
            self._change("/update_weights_from_disk", {"model_path": path}, seconds)
        self._resume(version)

    def join(self, version: int, seconds: float) -> WeightGroup:
        """See `InferenceServer.join`."""
        for fact, option in {"dp_size": "--dp-size", "pp_size": "--pp-size"}.items():
            if self._facts[fact] > 1:
                raise UserError(
                    f'rollout.weights = "broadcast": {self.url} has {option} {self._facts[fact]}, which its own call '
                    'refuses; start it with --tp-size and --attn-dp-size, or set rollout.weights = "disk"'
                )
        self._pause()
        group = SglangGroup(self.url, self._facts["tp_size"], self._group_backend, seconds)
        group.meet()
        return group

    def receive(self, group: WeightGroup, version: int, seconds: float) -> None:
        """See `InferenceServer.receive`."""
        group.result(seconds)
        checksum = self._change("/weights_checker", {"action": "checksum"}, seconds)["per_engine_checksum"]
        before, self._checksum = self._checksum, (version, checksum)
        if before is not None and before[0] == version and before != self._checksum:
            raise CallError(f"its weights have other bits than when it loaded version {version} before")
        self._resume(version)

    def _pause(self) -> None:
        call(self.url, "/abort_request", {"abort_all": True}, seconds=QUICK_SECONDS)
        call(self.url, "/pause_generation", {"mode": "retract"}, seconds=QUICK_SECONDS)
        call(self.url, "/flush_cache", seconds=QUICK_SECONDS)

    def _change(self, path: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The reply of a call that says whether it has succeeded."""
        try:
            reply = call(self.url, path, body, seconds=seconds)
        except RefusedError as error:  # no fault of a request for tokens
            raise CallError(str(error)) from None
        if not isinstance(reply, dict) or not reply.get("success"):
            raise CallError(f"{path}: {reply}")
        return reply

    def _resume(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        self._change("/update_weight_version", body, QUICK_SECONDS)
        call(self.url, "/continue_generation", {}, seconds=QUICK_SECONDS)

    def _require_room_for_adapter(self, rank: int) -> None:
        """Compare the rank of adapters with the options of the server; SGLang itself refuses their targets."""
        if not self._facts["enable_lora"] or (self._facts["max_lora_rank"] or 0) < rank:
            raise UserError(
                f"rollout.send_adapters: {self.url}: takes adapters up to rank {self._facts['max_lora_rank'] or 0}, "
                f"these have {rank}; start it with --enable-lora --max-lora-rank {rank} --lora-target-modules all"
            )

    def _of_prompt(self, tokens: list[int], top_k: int, seconds: float) -> list[dict[int, float]]:
        body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}}
        wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top_k}
        meta = self._ask(body | wanted, seconds)["meta_info"]
        own = meta["input_token_logprobs"][1:]  # the first token has none
        others = meta["input_top_logprobs"][1:] if top_k else [()] * len(own)
        places = ((*top, one) for one, top in zip(own, others, strict=True))
        return [{token: float(logprob) for logprob, token, *_ in place} for place in places]


class SglangGroup(WeightGroup):
    """See `WeightGroup`. Rank 0 broadcasts by SGLang's own calls: a request of each bucket, between a begin and an end,
    outside of which the server refuses it. The workers check no sums; `SglangServer` asks for those of the weights. All
    workers of all nodes are in one group: 1 + their rank of tensor parallelism."""

    _name = ""
    """Empty: the server knows no group of ours."""
    _has_begun = False

    def meet(self) -> None:
        """Form the group, and have the server await buckets.

        Raises:
            CallError: the server refuses, or its workers do not come.
        """
        self._name = f"glm46-{self._at['update']}"
        body = {"master_address": self._at["address"], "master_port": self._at["port"], "rank_offset": 1}
        body |= {"world_size": 1 + self._workers, "group_name": self._name, "backend": self.backend}
        self._reply = self._ask("/init_weights_update_group", body)
        # Where torch's own init_process_group, which the workers call, puts the keys of a group.
        prefix = f"{self._name}/{self._name}//{DEVICES[self.backend]}/"
        formed = in_thread(lambda: self._form(prefix), RuntimeError)
        try:
            end = time.monotonic() + self._wait
            while not (formed.done() and self._reply.done()):
                if time.monotonic() > end:
                    raise CallError(f"its workers did not join within {self._wait:g} s")
                for one in (self._reply, formed):
                    if one.done():
                        one.result()  # raises the reason
                time.sleep(TICK_SECONDS)
            self._reply.result()
            self._open()
        except RuntimeError as error:
            self.close()
            raise CallError(f"no group for weights ({first_sentence(error)})") from None
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        try:
            self._call("/begin_weight_update", {"selector": "all"})
        except RefusedError:  # one that has failed is still open; a whole load repairs what it has left
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
            self._leave()
        return super().result(seconds)

    def _await_loaded(self, end: float) -> None:
        """Its workers say nothing in the store; the end of the update is for all of them."""

    def close(self) -> None:
        """See `WeightGroup.close`."""
        super().close()
        if self._name:  # its workers wait in a broadcast, which ends when this side has gone
            in_thread(self._leave)

    def _leave(self) -> None:
        name, self._name = self._name, ""
        with suppress(CallError):
            self._call("/destroy_weights_update_group", {"group_name": name})

    def _call(self, path: str, body: dict[str, Any], seconds: float | None = None) -> Any:
        return call(self.url, path, body, seconds=seconds or self._wait)

    def _ask(self, path: str, body: dict[str, Any]) -> Future[Any]:
        """The reply that will come, at the latest when no bucket waits for it any more."""
        return in_thread(lambda: self._call(path, body, 2 * self._wait))


def _ordered(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Wide types first: tensors of a bucket lie without gaps, and each must begin at a multiple of its type."""
    return sorted(tensors, key=lambda pair: -pair[1].element_size())
