"""The engine that samples inside the training job, on its ranks, with the weights of the policy network."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.compute.model.routes import no_routes
from glm46.engine.inference.decoder import Decoder
from glm46.engine.inference.generation import Continuation, Generation
from glm46.engine.inference.model_mesh import ModelMesh
from glm46.engine.inference.sampling import Sampling
from glm46.engine.training.network import Network
from glm46.tasks.rl.rollout.records import FINISHES, Completion, Request, SamplingRules, VersionSpan
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
        found: list[Completion | None] = [None] * len(requests)
        # Of the ranks with the same rows the first sends them; they are of the first stage.
        of_ranks = self._exchanged(mine if self._mesh.is_first_of_rows else [], rules.routes)
        for share, completions in zip(shares, of_ranks[: layout.dp_degree * layout.tp : layout.tp], strict=True):
            for number, completion in zip(share, completions, strict=True):
                found[number] = completion
        return found

    def close(self) -> None:
        """See `Engine.close`."""
        self._decoder = None
        self._model.to_empty(device="meta")

    def describe(self) -> str:
        """One line: rows, memory of the cache and of copied weights; after the first `update`."""
        sizes = (f"{size / 2**20:,.1f} MiB" for size in (self._decoder.cache_bytes, self._copied_bytes()))
        layout = self._mesh.layout
        holders = "each rank"
        if self._mesh.is_split:
            holders = f"each group (tensor {layout.tp}, expert {layout.ep}, pipeline {layout.pp}); on this rank"
        return (
            f"rollouts in this job: {self._rows} rows of {self._decoder.max_length} tokens on {holders}, "
            "{} of keys and values, {} of copied weights".format(*sizes)
        )

    def _exchanged(self, mine: list[Continuation], with_routes: bool) -> list[list[Completion]]:
        """The completions of all ranks. Collective."""
        routes = [one.routes for one in mine if one.routes is not None] if with_routes else []
        fed = [0 if one.routes is None else len(one.routes) for one in mine] if with_routes else [0] * len(mine)
        ends = [
            [len(one.tokens), n, FINISHES.index(one.finish), one.drafted, one.accepted]
            for one, n in zip(mine, fed, strict=True)
        ]
        heads = _of_all_ranks(torch.tensor(ends, dtype=torch.int64).view(-1, 5))
        tokens = _of_all_ranks(torch.tensor([token for one in mine for token in one.tokens], dtype=torch.int64))
        logprobs = _of_all_ranks(torch.tensor([x for one in mine for x in one.logprobs], dtype=torch.float32))
        # As bytes: gloo does not send int16.
        none = no_routes((0,), self._model.shape)
        sent = torch.cat([none, *routes]).view(torch.uint8)
        experts = [x.view(none.dtype) for x in _of_all_ranks(sent)] if with_routes else [none] * len(heads)
        return [self._completions(*of_rank) for of_rank in zip(heads, tokens, logprobs, experts, strict=True)]

    def _completions(self, heads: Tensor, tokens: Tensor, logprobs: Tensor, experts: Tensor) -> list[Completion]:
        """Those of one rank, from [length, tokens with routes, finish, drafted, accepted] of each and the values of
        all."""
        lengths, fed, finishes, drafted, accepted = heads.t().tolist()
        ids, of_ids, completions, start = tokens.tolist(), logprobs.tolist(), [], 0
        rows = zip(lengths, experts.split(fed), finishes, zip(drafted, accepted, strict=True), strict=True)
        for length, routes, finish, drafts in rows:
            own = slice(start, start := start + length)
            spans = [VersionSpan(0, self._version)] if length else []
            record = _as_record(routes) if len(routes) else None
            completions.append(Completion(ids[own], of_ids[own], FINISHES[finish], spans, record, (), *drafts))
        return completions


def _part(whole: Tensor, own: Tensor) -> Tensor:
    """The part of a whole tensor that this rank has of a DTensor, or all of it; a view."""
    for dim, index in enumerate(global_indices(own)):
        whole = whole.narrow(dim, int(index[0]), len(index))
    return whole


def _as_record(routes: Tensor) -> np.ndarray:
    found = routes.numpy()
    return found if found.dtype == np.uint8 else found.astype(np.uint16)


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


def _of_all_ranks(values: Tensor) -> list[Tensor]:
    """A tensor on the CPU of each rank, whose first dimension may differ. Collective."""
    if dist.get_world_size() == 1:
        return [values]
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(values)]))
    longest = max(int(size) for size in sizes)
    padded = torch.cat([values, values.new_zeros(longest - len(values), *values.shape[1:])])
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [tensor[: int(size)] for tensor, size in zip(found, sizes, strict=True)]
