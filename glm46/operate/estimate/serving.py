"""Memory of a server's GPUs: weights split as vLLM splits them, keys and values per token, and the context that fits.

Sources: vLLM 0.32.0 `model_executor/models/glm4_moe.py` and `glm4_moe_mtp.py`, `distributed/utils.py`
(`get_pp_indices`), `model_executor/layers/fused_moe` (buffers of the experts). SGLang splits the weights in the same
way.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from glm46.config.model import ModelShape
from glm46.operate.estimate.memory import PROCESS_BYTES
from glm46.run.parameters import Parameter, dimensions, find_parameter

BATCHED_TOKENS = 8192
"""Tokens that a server computes at once, which decides the size of its buffers."""
SEQUENCES = 256
"""Requests that it computes at once."""
GRAPH_BYTES = 2**30
"""CUDA graphs of a process: an allowance, not measured."""
_BLOCK = 16
"""Tokens of a block of the cache."""
_BF16, _FP32 = 2, 4
_HIDDEN_BUFFERS = 6
"""Tensors of [tokens, hidden_size] that exist at once: hidden states, residual, and what a layer computes."""


@dataclass(frozen=True)
class ServingStage:
    """A GPU of a pipeline stage; the GPUs of a stage hold equal amounts."""

    layers: int
    """Of the main model."""
    weights: float
    """Bytes."""
    token: float
    """Bytes of the keys and values of one token."""


@dataclass(frozen=True)
class ServingPlan:
    """A model on ``tp * pp`` GPUs."""

    tp: int
    pp: int
    stages: tuple[ServingStage, ...]
    work: float
    """Bytes of buffers, CUDA graphs and the process, assumed equal on all GPUs."""
    usable: float
    """Bytes of a GPU that the server may take."""

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values fit, of all requests together; 0 if the weights do not fit."""
        rooms = [(self.usable - self.work - stage.weights) / stage.token for stage in self.stages if stage.token]
        return max(int(min(rooms)) // _BLOCK * _BLOCK, 0)


def plan_serving(
    shape: ModelShape,
    stored: Mapping[str, float],
    degrees: tuple[int, int],
    *,
    usable: float,
    drafts: bool = False,
    key_width: int = _BF16,
) -> ServingPlan:
    """The memory of a server with these degrees.

    Args:
        shape: of the model that is served.
        stored: our name -> bytes of the whole parameter in the server's memory, quantised or not.
        degrees: of tensor and of pipeline parallelism; `degrees_refused` has nothing against them.
        usable: bytes of a GPU that the server may take.
        drafts: the server drafts with the prediction layers: they are on the last stage, with the repeats of embedding
            and head that they read.
        key_width: bytes of an element of keys and values.
    """
    tp, pp = degrees
    counts = layers_of_stages(shape.num_hidden_layers, pp)
    weights = [0.0] * pp
    starts = [sum(counts[:stage]) for stage in range(pp)]
    for name, size in stored.items():
        row, size = find_parameter(name), size / _parts(find_parameter(name), shape, tp)
        part, number, *_ = name.split(".")
        if part == "mtp":
            weights[-1] += size if drafts else 0.0
        elif part == "layers":
            weights[max(stage for stage in range(pp) if starts[stage] <= int(number))] += size
        else:
            weights[0 if row.part == "embedding" else -1] += size
            weights[-1] += size if drafts and row.hf_repeat else 0.0
    heads = max(shape.num_key_value_heads // tp, 1)
    token = 2 * heads * shape.head_dim * key_width
    layers = [*counts[:-1], counts[-1] + (shape.num_nextn_predict_layers if drafts else 0)]
    stages = [ServingStage(*of) for of in zip(counts, weights, [count * token for count in layers], strict=True)]
    return ServingPlan(tp, pp, tuple(stages), _work(shape, tp), usable)


def layers_of_stages(layers: int, pp: int) -> list[int]:
    """The layers of each pipeline stage: the last stage, and with few left over the first, get no additional one."""
    counts = [layers // pp] * pp
    for place in range(2, layers % pp + 2):
        counts[-place] += 1
    return counts


def degrees_refused(shape: ModelShape, tp: int, pp: int) -> list[str]:
    """Parts of a model that cannot be split so; the servers would refuse it when they start."""
    heads, keys = shape.num_attention_heads, shape.num_key_value_heads
    faults = [
        f"{name} = {size} is not a multiple of {tp}"
        for name, size in (
            ("num_attention_heads", heads),
            ("moe_intermediate_size", shape.moe_intermediate_size),
            ("intermediate_size", shape.intermediate_size if shape.first_k_dense_replace else 0),
        )
        if size % tp
    ]
    if keys % tp and tp % keys:
        faults.append(f"num_key_value_heads = {keys} is neither a multiple nor a divisor of {tp}")
    if tp > shape.n_routed_experts:
        faults.append(f"n_routed_experts = {shape.n_routed_experts} is less than {tp}")
    if pp > shape.num_hidden_layers:
        faults.append(f"num_hidden_layers = {shape.num_hidden_layers} is less than {pp} stages")
    return faults


def _parts(row: Parameter, shape: ModelShape, tp: int) -> int:
    """GPUs that share a parameter; each of more GPUs than key heads holds one head."""
    if row.dims.startswith("K"):
        return min(tp, shape.num_key_value_heads)
    return tp if row.is_expert or row.tensor_dim is not None else 1


def _work(shape: ModelShape, tp: int) -> float:
    """Buffers of one pass over `BATCHED_TOKENS`, the logits of `SEQUENCES`, CUDA graphs and the process."""
    sizes = dimensions(shape)
    assigned = BATCHED_TOKENS * shape.num_experts_per_tok
    experts = assigned * (max(sizes["2F"] // tp, sizes["D"]) + sizes["F"] // tp) * _BF16
    hidden = _HIDDEN_BUFFERS * BATCHED_TOKENS * sizes["D"] * _BF16
    logits = 2 * SEQUENCES * sizes["V"] * _FP32
    return experts + hidden + logits + GRAPH_BYTES + PROCESS_BYTES["gpu"]
