"""The engine that samples on the training ranks with the weights of the policy network."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.engine.inference.decoder import Decoder
from glm46.engine.inference.generation import Continuation, Generation
from glm46.engine.inference.model_mesh import ModelMesh
from glm46.engine.inference.sampling import Sampling
from glm46.engine.training.network import Network
from glm46.tasks.rl.rollout.first_rank import run_on_first_rank
from glm46.tasks.rl.rollout.records import (
    Completion,
    Episode,
    KeptTokens,
    Request,
    SamplingRules,
    pack_groups,
    unpack_groups,
)
from glm46.tasks.rl.rollout.weights import whole_weights

Exchange = Callable[[Mapping[int, Completion]], tuple[Sequence[tuple[int, Request]], Sequence[int]] | None]
"""Takes the completions that ended since the last call, by request number. Returns new requests with their numbers and
the numbers of requests to drop; None ends the exchange."""
_STOPPED = b"stopped"


class LocalEngine:
    """An `Engine` on the ranks of a network, on any layout.

    Each rank, or each group of ranks that share one model, samples its part of the requests. It uses the policy's own
    weights if a rank holds the whole model in the dtype of its matmuls, and otherwise copies made by `update`.

    Args:
        policy: the network. Call `update` after it has changed and before the next `generate`.
        max_length: maximum number of tokens of prompt and completion together.
        mesh: the ranks that hold one model.
        rows: samples that a rank or group generates at once, and rows of the key-value cache.
        speculative: draft with the prediction layers. Tokens and log-probabilities change only by rounding.
        routes: keep the chosen experts, for requests that need them.
        is_stopped: called on each rank before each token; True ends its samples, and those of the ranks that run in
            step with it, with "abort". Not collective: ranks generate different numbers of tokens.
    """

    def __init__(
        self,
        policy: Network,
        *,
        max_length: int,
        mesh: ModelMesh,
        rows: int,
        speculative: bool = False,
        routes: bool = False,
        is_stopped: Callable[[], bool] = lambda: False,
    ):
        shape = policy.plan.shape
        assert not speculative or shape.num_nextn_predict_layers
        if not speculative:
            shape = shape.model_copy(update={"num_nextn_predict_layers": 0})
        self._mesh = mesh
        self._shape = shape
        self._model = mesh.part_of_model(shape, getattr(torch, policy.plan.config.training.mixed_precision_param))
        self._policy = policy
        self._is_stopped = is_stopped
        self._rows = rows
        self._length = max_length
        self._speculative = speculative
        self._routes = routes
        self._decoder: Decoder | None = None
        self._version = -1
        self._has_copies = True

    def update(self, version: int) -> None:
        """See `Engine.update`."""
        if self._decoder is not None:
            self._decoder.take_weights()  # first: it frees the kernels' copies of the old weights
        elif self._mesh.is_split:
            self._model.to_empty(device=self._policy.cluster.device)
        if self._has_copies:  # else the model has the policy's own memory, which the optimizer writes into
            self._take_weights()
        self._model.compute_as(self._policy.function, self._policy.cluster.device)
        if self._decoder is None:
            drafts = self._model.shape.num_nextn_predict_layers + 1 if self._speculative else 0
            self._decoder = Decoder(
                self._model,
                batch=self._rows,
                max_length=self._length + drafts,
                drafts=self._speculative,
                record=self._routes,
                mesh=self._mesh,
            )
        self._version = version

    def _take_weights(self) -> None:
        """Copy or assign the policy's weights to the model. Collective."""
        targets = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        for name, tensor in whole_weights(self._policy, self._shape):
            if not self._mesh.is_split:
                module, _, key = name.rpartition(".")
                owner = self._model.get_submodule(module)
                setattr(owner, key, tensor if key in owner._buffers else nn.Parameter(tensor, requires_grad=False))
            elif name in targets:
                local_tensor(targets[name]).copy_(_part(tensor, targets[name]))
        # Fake devices have no memory addresses to compare.
        self._has_copies = self._policy.cluster.device.type != "cpu" or self._copied_bytes() > 0

    def _copied_bytes(self) -> int:
        """Return the bytes of weights that do not share memory with the policy."""
        policy_pointers = {
            tensor.untyped_storage().data_ptr() for tensor in map(local_tensor, self._policy.weights().values())
        }
        tensors = [local_tensor(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())]
        return sum(tensor.nbytes for tensor in tensors if tensor.untyped_storage().data_ptr() not in policy_pointers)

    def generate(self, requests: Sequence[Request], rules: SamplingRules) -> list[Completion]:
        """See `Engine.generate`."""
        local = self._share(dict(enumerate(requests)), {})
        self._generation(list(local.values()), rules, is_stopped=self._is_stopped).run()
        completions = _unpacked(_of_all_ranks(self._packed(local, rules)))
        return [completions[number] for number in range(len(requests))]

    def serve(self, exchange: Exchange, rules: SamplingRules) -> None:
        """Generate requests that arrive while others are generated. A request is admitted at the next token if a row is
        free, and gets the same tokens as it would alone. Returns at the end of the exchange, or after a stop on any
        rank. Collective: all ranks admit and end the same requests at the same tokens.

        Args:
            exchange: called on rank 0 before each token. It may block until there is a request or the exchange ends.
        """
        local = dict[int, Continuation]()
        groups = dict[int, int]()

        def arriving() -> list[Continuation] | None:
            ended = {number: continuation for number, continuation in local.items() if continuation.finish is not None}
            contents = _of_all_ranks(_STOPPED if self._is_stopped() else self._packed(ended, rules))
            if _STOPPED in contents:
                return None
            completions = _unpacked(contents)
            work: Callable[[], bytes] = lambda: json.dumps(exchange(completions)).encode()  # noqa: E731
            content = work() if dist.get_world_size() == 1 else run_on_first_rank(work)
            if (exchanged := json.loads(content)) is None:
                return None
            new = {number: Request(*fields) for number, fields in exchanged[0]}
            dropped = exchanged[1]
            for number in (*completions, *dropped):
                groups.pop(number, None)
                if (continuation := local.pop(number, None)) is not None:
                    continuation.finish = continuation.finish or "abort"
            begun = self._share(new, groups)
            local.update(begun)
            return list(begun.values())

        self._generation([], rules, arriving=arriving).run()

    def _share(self, new: Mapping[int, Request], groups: dict[int, int]) -> dict[int, Continuation]:
        """Return this rank's part of new requests. Groups of ranks with the fewest open requests get the most.

        Args:
            groups: group of ranks of each open request, by request number; updated with the new requests.
        """
        numbers = list(new)
        open_ = Counter(groups.values())
        shares = sorted(_shares(list(new.values()), self._mesh.layout.dp_degree), key=len)
        for group, share in zip(sorted(range(len(shares)), key=lambda group: -open_[group]), shares, strict=True):
            groups |= {numbers[index]: group for index in share}
        return {
            number: _continuation(request) for number, request in new.items() if groups[number] == self._mesh.row_group
        }

    def _generation(self, begun: Sequence[Continuation], rules: SamplingRules, **calls: Any) -> Generation:
        assert self._decoder is not None, "no weights before the first update"
        assert self._routes or not rules.routes, "an engine that keeps no routes"
        return Generation(
            self._decoder,
            begun,
            sampling=Sampling(rules.temperature, rules.top_k, rules.top_p, records_kept=rules.are_filtered),
            stop=rules.stop,
            vocab_size=rules.vocab_size,
            **calls,
        )

    def _completion(self, sample: Continuation, rules: SamplingRules) -> Completion:
        assert sample.finish is not None, "it has ended"
        versions = [self._version] * len(sample.tokens)
        routes = sample.routes.numpy() if rules.routes and sample.routes is not None else None
        if routes is not None and routes.dtype != np.uint8:
            routes = routes.astype(np.uint16)
        return Completion(
            sample.tokens,
            sample.logprobs,
            sample.finish,
            versions,
            routes,
            (),
            sample.drafted,
            sample.accepted,
            kept=_kept_tokens(sample.kept) if rules.are_filtered else None,
        )

    def _packed(self, ended: Mapping[int, Continuation], rules: SamplingRules) -> bytes:
        """Pack completions by request number. Only the first of the ranks with the same rows sends them; it is in the
        first pipeline stage."""
        sent = ended if self._mesh.is_first_of_rows else {}
        samples = {n: Episode([self._completion(continuation, rules)]) for n, continuation in sent.items()}
        return pack_groups({n: [sample] for n, sample in samples.items()}) if samples else b""

    def close(self) -> None:
        """See `Engine.close`."""
        self._decoder = None
        self._model.to_empty(device="meta")


def _part(whole: Tensor, local: Tensor) -> Tensor:
    """Return a view of the part of a whole tensor that this rank holds of a DTensor, or of all of it."""
    for dim, index in enumerate(global_indices(local)):
        whole = whole.narrow(dim, int(index[0]), len(index))
    return whole


def _unpacked(contents: Sequence[bytes]) -> dict[int, Completion]:
    groups = [unpack_groups(content) for content in contents if content]
    return {number: end.completion for group in groups for number, (end,) in group.items()}


def _kept_tokens(arrays: Sequence[np.ndarray]) -> KeptTokens:
    counts = np.array([len(ids) for ids in arrays], np.int32)
    return KeptTokens(np.concatenate([np.zeros(0, np.int32), *arrays]), counts)


def _continuation(request: Request) -> Continuation:
    assert request.prompt and request.max_new_tokens > 0
    return Continuation(request.prompt, request.max_new_tokens, request.seed)


def _shares(requests: Sequence[Request], ranks: int) -> list[list[int]]:
    """Split request indices evenly over ranks, keeping requests with equal prompts on one rank where possible."""
    kinds: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests):
        kinds.setdefault(tuple(request.prompt), []).append(number)
    order = [number for numbers in kinds.values() for number in numbers]
    bounds = [len(order) * rank // ranks for rank in range(ranks + 1)]
    return [order[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


def _of_all_ranks(content: bytes) -> list[bytes]:
    """Gather the bytes of each rank. Collective."""
    if dist.get_world_size() == 1:
        return [content]
    local = torch.frombuffer(bytearray(content or b"-"), dtype=torch.uint8)[: len(content)]
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(local)]))
    if not (max_size := max(map(int, sizes))):
        return [b""] * len(sizes)
    padded = torch.cat([local, local.new_zeros(max_size - len(local))])
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded)
    return [content[: int(size)].numpy().tobytes() for content, size in zip(received, sizes, strict=True)]
