"""The split of a folder over GPUs: the degrees that hold it, or the fewest GPUs that could."""

from dataclasses import dataclass, replace

from glm46.config.errors import UserError
from glm46.operate.estimate.serving import ServingPlan, degrees_refused, plan_serving
from glm46.operate.serving.folder import ServedFolder

_LEAST_CONTEXT = 2048
"""Tokens of the shortest context worth serving, where the user names none."""
_MOST_NODES = 16
"""Nodes up to which the fewest GPUs are searched."""
_MOST_OF_NODE = 128
"""GPUs of a node up to which the fewest are searched."""
_BLOCK = 16


@dataclass(frozen=True)
class Machines:
    """The GPUs of a server."""

    gpus: int
    gpus_per_node: int
    gpu: str
    """For messages."""
    memory: float
    """Bytes of a GPU."""
    utilization: float
    """Share of it that the server may take."""

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True)
class Wishes:
    """The options of a user."""

    tp: int | None
    """None: the largest degree inside a node that the model allows."""
    context: int | None
    """Tokens of the longest request; None: as many as fit, up to the positions of the model."""
    drafts: bool
    fp8_keys: bool
    """Keys and values in FP8."""


def find_layout(folder: ServedFolder, machines: Machines, wishes: Wishes) -> tuple[ServingPlan, int]:
    """The plan of a server and the length of its longest request, in tokens.

    Raises:
        UserError: a degree cannot split the model, or the GPUs cannot hold it; names the fewest that can.
    """
    faults, positions = [], folder.shape.max_position_embeddings
    if wishes.context is not None and wishes.context > positions:
        faults.append(
            f"--context {wishes.context}: the model has {positions} positions (max_position_embeddings); ask for fewer "
            "tokens"
        )
    if wishes.drafts and not folder.shape.num_nextn_predict_layers:
        faults.append("--speculative: the model has no prediction layers (num_nextn_predict_layers); leave it out")
    degrees, refused = _degrees(folder, machines, wishes)
    if machines.gpus > machines.gpus_per_node and machines.gpus % machines.gpus_per_node:
        faults.append(
            f"--gpus {machines.gpus}: is not a multiple of --gpus-per-node {machines.gpus_per_node}; take whole nodes"
        )
    elif not degrees:
        faults.append(refused)
    if faults:
        raise UserError(*faults)
    plans = [_plan(folder, machines, wishes, tp) for tp in degrees]
    for plan in plans:
        context = min(plan.tokens // _BLOCK * _BLOCK, folder.shape.max_position_embeddings)
        if context >= _least(folder, wishes):
            return plan, wishes.context or context
    best = max(plans, key=lambda plan: plan.tokens)
    need = f"weights of {_gib(max(s.weights for s in best.stages))} and buffers of {_gib(best.work)}"
    raise UserError(
        f"--gpus {machines.gpus}: {machines.gpus} x {machines.gpu} cannot hold {folder.path}: tensor parallelism "
        f"{best.tp} x pipeline {best.pp} needs {need} on a GPU, of which the server may take {_gib(best.usable)}, and "
        f"leaves room for {best.tokens} tokens where {_least(folder, wishes)} are needed; "
        f"{_fewest(folder, machines, wishes)}"
    )


def _degrees(folder: ServedFolder, machines: Machines, wishes: Wishes) -> tuple[list[int], str]:
    """Tensor-parallel degrees to try, the largest first, and why the last one that was refused cannot split the
    model."""
    # A larger degree divides no number of heads.
    largest = min(machines.gpus, machines.gpus_per_node, folder.shape.num_attention_heads)
    fit, fault = [], ""
    for tp in [wishes.tp] if wishes.tp is not None else range(largest, 0, -1):
        if machines.gpus % tp:
            fault = f"--tensor-parallel-degree {tp}: does not divide --gpus {machines.gpus}; take a divisor"
            continue
        refused = degrees_refused(folder.shape, tp, machines.gpus // tp) + folder.quantisation_refused(tp)
        if refused:
            fault = f"--tensor-parallel-degree {tp}: {', '.join(refused)}; take another degree or --gpus"
        else:
            fit.append(tp)
    if wishes.tp is None:
        fault = f"--gpus {machines.gpus}: no tensor-parallel degree splits the model so, not even {fault.lstrip('-')}"
    return fit, fault


def _plan(folder: ServedFolder, machines: Machines, wishes: Wishes, tp: int) -> ServingPlan:
    return plan_serving(
        folder.shape,
        folder.stored,
        (tp, machines.gpus // tp),
        usable=machines.memory * machines.utilization,
        drafts=wishes.drafts,
        key_width=1 if wishes.fp8_keys else 2,
    )


def _least(folder: ServedFolder, wishes: Wishes) -> int:
    return wishes.context or min(_LEAST_CONTEXT, folder.shape.max_position_embeddings // _BLOCK * _BLOCK)


def _fewest(folder: ServedFolder, machines: Machines, wishes: Wishes) -> str:
    """A remedy: the fewest of these GPUs that hold the folder, in one node or in whole nodes."""
    node = min(machines.gpus_per_node, _MOST_OF_NODE)
    for gpus in (*range(1, node + 1), *(node * count for count in range(2, _MOST_NODES + 1))):
        free, candidate = replace(wishes, tp=None), replace(machines, gpus=gpus)
        plans = [_plan(folder, candidate, free, tp) for tp in _degrees(folder, candidate, free)[0]]
        for plan in plans:
            if plan.tokens >= _least(folder, wishes):
                return f"the fewest that can are {gpus} ({plan.tp} x {plan.pp}); or take FP8 or INT4 weights"
    return f"{_MOST_NODES} nodes are not enough; take GPUs with more memory, or FP8 or INT4 weights"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
