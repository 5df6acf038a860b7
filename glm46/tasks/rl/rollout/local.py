"""The engine that samples inside the training job, on its ranks, with the weights of the policy network."""

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
    EpisodeEnd,
    Request,
    SamplingRules,
    SessionSample,
    VersionSpan,
    pack_groups,
    unpack_groups,
)
from glm46.tasks.rl.rollout.weights import whole_weights

Exchange = Callable[[Mapping[int, Completion]], tuple[Sequence[tuple[int, Request]], Sequence[int]] | None]
"""Takes the completions that have ended since the last call, by the numbers of their requests; gives new requests with
their numbers, and the numbers of those that are not wanted any more; None at the end."""
_STOPPED = b"stopped"


class LocalEngine:
    """An `Engine` on the ranks of a network, on any layout.

    Each rank, or each group of ranks that hold the parts of one model, samples its share of the requests: with the
    policy's own weights where a rank needs the whole model and holds it in the type of its products, and otherwise with
    copies, which `update` makes.

    Args:
        policy: the network. When it has changed, `update` must come before the next `generate`.
        max_length: tokens of the longest sample, prompt and completion.
        mesh: the ranks that hold one model.
        rows: samples that a rank or group generates at once; the cache of keys and values has so many rows.
        speculative: draft with the prediction layers. It changes no token and no log-probability beyond rounding.
        routes: keep the chosen experts, for requests that ask for them.
        is_stopped: asked on each rank before each token; true ends its samples, and those of the ranks that run in step
            with it, with "abort". Not collective: ranks generate different numbers of tokens.
    """

    def __init__(
        self, policy: Network, *, max_length: int, mesh: ModelMesh, rows: int, speculative: bool = False,
        routes: bool = False, is_stopped: Callable[[], bool] = lambda: False,
    ):  # fmt: skip
        shape = policy.plan.shape
        assert not speculative or shape.num_nextn_predict_layers
        if not speculative:
            shape = shape.model_copy(update={"num_nextn_predict_layers": 0})
        self._mesh, self._shape = mesh, shape
        self._model = mesh.part_of_model(shape, getattr(torch, policy.plan.config.training.mixed_precision_param))
        self._policy, self._is_stopped = policy, is_stopped
        self._rows, self._length, self._speculative, self._routes = rows, max_length, speculative, routes
        self._decoder: Decoder | None = None
        self._version = -1
        self._has_copies = True

    def update(self, version: int) -> None:
        """See `Engine.update`."""
        if self._decoder is not None:
            self._decoder.take_weights()  # first: it frees what the kernels hold of the old weights
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
        """Give the model the policy's weights. Collective."""
        own = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        for name, tensor in whole_weights(self._policy, self._shape):
            if not self._mesh.is_split:
                module, _, key = name.rpartition(".")
                owner = self._model.get_submodule(module)
                setattr(owner, key, tensor if key in owner._buffers else nn.Parameter(tensor, requires_grad=False))
            elif name in own:
                local_tensor(own[name]).copy_(_part(tensor, own[name]))
        # A device without hardware has no addresses of memory.
        self._has_copies = self._policy.cluster.device.type != "cpu" or self._copied_bytes() > 0

    def _copied_bytes(self) -> int:
        """Bytes of weights that are not the policy's own memory."""
        own = {tensor.untyped_storage().data_ptr() for tensor in map(local_tensor, self._policy.weights().values())}
        tensors = [local_tensor(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())]
        return sum(one.nbytes for one in tensors if one.untyped_storage().data_ptr() not in own)

    def generate(self, requests: Sequence[Request], rules: SamplingRules) -> list[Completion]:
        """See `Engine.generate`."""
        own = self._share(dict(enumerate(requests)), {})
        self._generation(list(own.values()), rules, is_stopped=self._is_stopped).run()
        found = _unpacked(_of_all_ranks(self._packed(own, rules)))
        return [found[number] for number in range(len(requests))]

    def serve(self, exchange: Exchange, rules: SamplingRules) -> None:
        """Generate requests that come while others are generated: each is admitted at the next token if a row is free,
        with the tokens that it would have alone. Until the end of the exchange, or a stop on any rank. Collective: all
        ranks admit and end the same requests at the same tokens.

        Args:
            exchange: called on rank 0 before each token. It may wait, for a request or its own ends.
        """
        own, groups = dict[int, Continuation](), dict[int, int]()

        def arriving() -> list[Continuation] | None:
            ended = {number: one for number, one in own.items() if one.finish is not None}
            of_ranks = _of_all_ranks(_STOPPED if self._is_stopped() else self._packed(ended, rules))
            if _STOPPED in of_ranks:
                return None
            found = _unpacked(of_ranks)
            work = lambda: json.dumps(exchange(found)).encode()  # noqa: E731
            content = work() if dist.get_world_size() == 1 else run_on_first_rank(work)
            if (given := json.loads(content)) is None:
                return None
            new, dropped = {number: Request(*of) for number, of in given[0]}, given[1]
            for number in (*found, *dropped):
                groups.pop(number, None)
                if (one := own.pop(number, None)) is not None:
                    one.finish = one.finish or "abort"
            begun = self._share(new, groups)
            own.update(begun)
            return list(begun.values())

        self._generation([], rules, arriving=arriving).run()

    def _share(self, new: Mapping[int, Request], groups: dict[int, int]) -> dict[int, Continuation]:
        """This rank's part of new requests, of which the ranks with the fewest get the most.

        Args:
            groups: of ranks, by the numbers of open requests, to which the new ones are added.
        """
        numbers, open_ = list(new), Counter(groups.values())
        shares = sorted(_shares(list(new.values()), self._mesh.layout.dp_degree), key=len)
        for group, share in zip(sorted(range(len(shares)), key=lambda one: -open_[one]), shares, strict=True):
            groups |= {numbers[index]: group for index in share}
        return {number: _continuation(one) for number, one in new.items() if groups[number] == self._mesh.row_group}

    def _generation(self, begun: Sequence[Continuation], rules: SamplingRules, **calls: Any) -> Generation:
        assert self._decoder is not None, "no weights before the first update"
        assert self._routes or not rules.routes, "an engine that keeps no routes"
        return Generation(
            self._decoder,
            begun,
            sampling=Sampling(rules.temperature),
            stop=rules.stop,
            vocab_size=rules.vocab_size,
            **calls,
        )

    def _completion(self, one: Continuation, rules: SamplingRules) -> Completion:
        assert one.finish is not None, "it has ended"
        spans = [VersionSpan(0, self._version)] if one.tokens else []
        routes = one.routes.numpy() if rules.routes and one.routes is not None else None
        if routes is not None and routes.dtype != np.uint8:
            routes = routes.astype(np.uint16)
        return Completion(one.tokens, one.logprobs, one.finish, spans, routes, (), one.drafted, one.accepted)

    def _packed(self, ended: Mapping[int, Continuation], rules: SamplingRules) -> bytes:
        """Completions by their numbers. Of the ranks with the same rows the first sends them; they are of the first
        stage."""
        sent = ended if self._mesh.is_first_of_rows else {}
        samples = {n: SessionSample([], self._completion(one, rules)) for n, one in sent.items()}
        return pack_groups({n: [EpisodeEnd([one])] for n, one in samples.items()}) if samples else b""

    def close(self) -> None:
        """See `Engine.close`."""
        self._decoder = None
        self._model.to_empty(device="meta")


def _part(whole: Tensor, own: Tensor) -> Tensor:
    """The part of a whole tensor that this rank has of a DTensor, or all of it; a view."""
    for dim, index in enumerate(global_indices(own)):
        whole = whole.narrow(dim, int(index[0]), len(index))
    return whole


def _unpacked(of_ranks: Sequence[bytes]) -> dict[int, Completion]:
    groups = [unpack_groups(content) for content in of_ranks if content]
    return {number: end.completion for of in groups for number, (end,) in of.items()}


def _continuation(request: Request) -> Continuation:
    assert request.prompt and request.max_new_tokens > 0
    return Continuation(request.prompt, request.max_new_tokens, request.seed)


def _shares(requests: Sequence[Request], ranks: int) -> list[list[int]]:
    """The numbers of each rank's requests: equally many, and those of one prompt on one rank as far as possible."""
    kinds: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests):
        kinds.setdefault(tuple(request.prompt), []).append(number)
    order = [number for numbers in kinds.values() for number in numbers]
    bounds = [len(order) * rank // ranks for rank in range(ranks + 1)]
    return [order[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


def _of_all_ranks(content: bytes) -> list[bytes]:
    """The content of each rank. Collective."""
    if dist.get_world_size() == 1:
        return [content]
    own = torch.frombuffer(bytearray(content or b"-"), dtype=torch.uint8)[: len(content)]
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)]))
    if not (longest := max(map(int, sizes))):
        return [b""] * len(sizes)
    padded = torch.cat([own, own.new_zeros(longest - len(own))])
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [content[: int(size)].numpy().tobytes() for content, size in zip(found, sizes, strict=True)]
