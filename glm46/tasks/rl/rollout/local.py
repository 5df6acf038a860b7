"""The engine that samples inside the training job, on its ranks, with the weights of the policy network."""

from collections.abc import Callable, Sequence

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
from glm46.tasks.rl.rollout.records import NOTHING, Completion, Request, SamplingRules, VersionSpan, pack, unpack
from glm46.tasks.rl.rollout.weights import whole_weights


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
        assert self._decoder is not None, "no weights before the first update"
        assert self._routes or not rules.routes, "an engine that keeps no routes"
        layout = self._mesh.layout
        shares = _shares(requests, layout.dp_degree)
        mine = [_continuation(requests[number]) for number in shares[self._mesh.row_group]]
        assert all(len(one.prompt) + one.max_new_tokens <= self._length for one in mine)
        Generation(
            self._decoder,
            mine,
            sampling=Sampling(rules.temperature),
            stop=rules.stop,
            vocab_size=rules.vocab_size,
            is_stopped=self._is_stopped,
        ).run()
        found = [NOTHING] * len(requests)
        # Of the ranks with the same rows the first sends them; they are of the first stage.
        sent = mine if self._mesh.is_first_of_rows else []
        of_ranks = _of_all_ranks([_completion(one, self._version, with_routes=rules.routes) for one in sent])
        for share, completions in zip(shares, of_ranks[: layout.dp_degree * layout.tp : layout.tp], strict=True):
            for number, completion in zip(share, completions, strict=True):
                found[number] = completion
        return found

    def close(self) -> None:
        """See `Engine.close`."""
        self._decoder = None
        self._model.to_empty(device="meta")


def _part(whole: Tensor, own: Tensor) -> Tensor:
    """The part of a whole tensor that this rank has of a DTensor, or all of it; a view."""
    for dim, index in enumerate(global_indices(own)):
        whole = whole.narrow(dim, int(index[0]), len(index))
    return whole


def _completion(one: Continuation, version: int, *, with_routes: bool) -> Completion:
    assert one.finish is not None, "it has ended"
    spans = [VersionSpan(0, version)] if one.tokens else []
    routes = one.routes.numpy() if with_routes and one.routes is not None else None
    if routes is not None and routes.dtype != np.uint8:
        routes = routes.astype(np.uint16)
    return Completion(one.tokens, one.logprobs, one.finish, spans, routes, (), one.drafted, one.accepted)


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


def _of_all_ranks(completions: list[Completion]) -> list[list[Completion]]:
    """The completions of each rank. Collective."""
    if dist.get_world_size() == 1:
        return [completions]
    own = torch.frombuffer(bytearray(pack(completions)), dtype=torch.uint8)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)]))
    padded = torch.cat([own, own.new_zeros(max(map(int, sizes)) - len(own))])
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [unpack(content[: int(size)].numpy().tobytes()) for content, size in zip(found, sizes, strict=True)]
