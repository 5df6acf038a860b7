"""The calls of SGLang that we use, for `StubServer`. A body is refused unless its fields are those of the class in
SGLang's wheel, and replies have the fields that the wheel has: see `sglang_contract`."""

import base64
import hashlib
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tests.unit.tasks.rl.rollout.sglang_contract import read_table

CONTRACT = read_table()
PATHS = {path.strip("/").replace("/", "_"): path for path in CONTRACT["requests"] if path != "/v1/models"}


def contract_fault(path: str, body: dict) -> str | None:
    """Why the server would refuse a body: a field that it does not know, or one that is missing."""
    fields = CONTRACT["requests"][path]
    if fields is None:
        return f"{path} takes no body" if body else None
    unknown = body.keys() - fields.keys()
    unknown |= body.get("sampling_params", {}).keys() - set(CONTRACT["sampling"])
    missing = {name for name, is_needed in fields.items() if is_needed} - body.keys()
    return f"{path}: unknown {sorted(unknown)}, missing {sorted(missing)}" if unknown or missing else None


def received_bucket(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> list[tuple[str, torch.Tensor]]:
    """Tensors of a bucket without gaps, as the server lays it out, and its bytes as the first one."""
    rows, at = [], 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        kind = getattr(torch, dtype)
        if at % kind.itemsize:
            raise ValueError(f"Unaligned received tensor {name}: byte offset {at}, dtype {kind}")
        rows.append((name, kind, shape, at))
        at += torch.Size(shape).numel() * kind.itemsize
    flat = torch.empty(at, dtype=torch.uint8)
    ends = [row[3] for row in rows[1:]] + [at]
    found = [("", flat)]
    for (name, kind, shape, start), end in zip(rows, ends, strict=True):
        found.append((name, flat[start:end].view(kind).reshape(shape)))
    return found


class SglangCalls:
    """Of a server with one worker for each rank of tensor parallelism."""

    def start_sglang(self) -> None:
        """Set the attributes. `facts`: of ``/server_info``. `refused`: bodies that broke the contract."""
        options = dict.fromkeys(CONTRACT["options"].values())
        self.facts = options | {"tp_size": 1, "dp_size": 1, "pp_size": 1, "enable_lora": False, "device": "cpu"}
        self.facts |= {"enable_return_routed_experts": False, "enable_deterministic_inference": True}
        self.paused, self.in_session, self.has_received, self.refused, self.all_layers = False, False, False, [], None
        self._groups: dict[str, list[dist.ProcessGroup]] = {}
        self._scheduler = threading.Lock()

    def answer_sglang(self, path: str, body: dict):
        """The reply of a call that is SGLang's alone, the number of an error, or None for other calls."""
        if path not in PATHS:
            return None
        if (fault := contract_fault(PATHS[path], body)) is not None:
            self.refused.append(fault)
            return 422
        known = getattr(self, f"_{path}")
        if path in ("generate", "server_info", "abort_request"):
            return known(body)
        with self._scheduler:
            return known(body)

    def _server_info(self, body):
        facts = {"dtype": self.dtype, "context_length": self.context, "version": CONTRACT["version"]}
        return self.facts | facts | {"tp_size": self.workers, "device": self.device}

    def _pause_generation(self, body):
        self.paused = True
        return {"status": "ok"}

    def _continue_generation(self, body):
        self.paused = False
        return {"status": "ok"}

    def _flush_cache(self, body):
        return {}

    def _abort_request(self, body):
        self._aborted |= {body.get("rid")}
        return {}

    def _said(self, success: bool, message: str = ""):
        return {"success": True, "message": message} if success else 400

    def _update_weights_from_disk(self, body):
        self._load(Path(body["model_path"]))
        return {"success": True, "message": "", "num_paused_requests": 0}

    def _load_lora_adapter(self, body):
        if body["lora_name"] in self.adapters:
            return 400
        self.adapters.append(body["lora_name"])
        self._load(Path(body["lora_path"]))
        return {"success": True, "error_message": None, "loaded_adapters": {body["lora_name"]: body["lora_path"]}}

    def _unload_lora_adapter(self, body):
        self.adapters.remove(body["lora_name"])
        return {"success": True, "error_message": None, "loaded_adapters": {}}

    def _init_weights_update_group(self, body):
        """As torch's own init_process_group with an address, in each worker."""
        try:
            self._break("called")
        except ValueError:
            return 400
        name, wait, found = body["group_name"], timedelta(seconds=600), []

        def join(worker: int) -> None:
            store = dist.TCPStore(
                body["master_address"], body["master_port"], body["world_size"], False, wait, multi_tenant=True
            )
            for prefix in (name, f"{name}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            found.append(dist.ProcessGroupGloo(store, body["rank_offset"] + worker, body["world_size"], wait))

        self._in_workers(join)
        self._groups[name] = found
        return self._said(len(found) == self.workers)

    def _in_workers(self, work) -> list[str]:
        errors: list[str] = []

        def run(worker: int) -> None:
            try:
                work(worker)
            except (OSError, RuntimeError, ValueError) as error:
                errors.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=run, args=(worker,)) for worker in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.errors += errors
        return errors

    def _begin_weight_update(self, body):
        if self.in_session:
            return 400  # a weight-update session is already open
        self.in_session, self._loaded = True, [[] for _ in range(self.workers)]
        return self._said(True)

    def _update_weights_from_distributed(self, body):
        if not self.in_session or body["load_format"] != "flattened_bucket" or body["group_name"] not in self._groups:
            return 400
        groups = self._groups[body["group_name"]]

        def take(worker: int) -> None:
            breaks = self._break if worker == self.workers - 1 else lambda where: None
            breaks(len(self._loaded[worker]))
            (_, flat), *tensors = received_bucket(body["names"], body["dtypes"], body["shapes"])
            groups[worker].broadcast(flat, 0).wait()
            self._loaded[worker] += tensors

        return self._said(not self._in_workers(take))

    def _end_weight_update(self, body):
        if not self.in_session:
            return 400
        self.in_session, self.received, self.has_received = False, self._loaded, True
        return self._said(True)

    def _destroy_weights_update_group(self, body):
        return self._said(self._groups.pop(body["group_name"], None) is not None)

    def _weights_checker(self, body):
        digest = hashlib.sha256()
        for name, tensor in self.received[0] if self.received else ():
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        ranks = [{"checksums": {}, "per_gpu_checksum": digest.hexdigest()}] * self.workers
        return {"success": True, "message": "", "ranks": ranks, "per_engine_checksum": digest.hexdigest()}

    def _generate(self, body):
        prompt, sampling = body["input_ids"], body["sampling_params"]
        if self.paused:
            return 503  # the server itself answers when it goes on
        if "lora_path" in body and body["lora_path"] not in self.adapters:
            return 400, f"The following requested LoRA adapters are not loaded: {body['lora_path']}"
        if "logprob_start_len" in body:
            places = [[None, prompt[0], None], *([self._given(token), token, None] for token in prompt[1:])]
            return {"meta_info": {"input_token_logprobs": places}}
        generated = self.forced(sampling, "max_new_tokens")
        generated = generated or self._sample(
            body["rid"], prompt, sampling["sampling_seed"], sampling["max_new_tokens"]
        )
        if isinstance(generated, int):
            return generated
        tokens, finish = generated
        places = [[value, token, None] for value, token in zip(self._reported(tokens), tokens, strict=True)]
        spans = [{"version": self._named(), "start": 0, "end": len(tokens)}]
        meta = {"output_token_logprobs": places, "finish_reason": {"type": finish}, "weight_versions": spans}
        if body.get("return_routed_experts") and self.all_layers is not None:
            rows = len(prompt) + len(tokens) - 1 - body["routed_experts_start_len"]
            routes = np.resize(self.all_layers, (rows, *self.all_layers.shape)).astype(np.int32)
            meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
        return {"meta_info": {} if self.fault == "no choices" else meta}
