"""Layouts of several world sizes, runs of them by the engine's own step, the same in one process by a plain loop, and
the differences."""

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tomli
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.compute.distributed.mesh import Cluster, build_cluster
from glm46.compute.distributed.process import Process
from glm46.compute.model.adapters import add_adapters
from glm46.compute.model.cross_entropy import token_logprobs
from glm46.compute.model.indexer import is_index_weight
from glm46.compute.model.init import fill_normal
from glm46.compute.model.quantised_weights import columns_of, in_compute_type
from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.routes import compact_routes, moe_layers
from glm46.compute.model.transformer import LossSums, Transformer
from glm46.compute.optim.optimizers import build_optimizers
from glm46.compute.parallelize.magnitudes import Magnitudes
from glm46.compute.parallelize.plan import initialise
from glm46.config.adapter import AdapterConfig
from glm46.config.model import ModelShape, RopeScalingConfig
from glm46.config.moe import MoEConfig
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.engine.training.gradients import global_grad_norm, scale_gradients
from glm46.engine.training.network import Network, build_network
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from glm46.operate.estimate.requirement import SPLIT_BACKWARD_TORCH
from glm46.run.parameters import base_families, find_parameter, scales_name
from glm46.run.plan import Plan, resolve_plan
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.import_weights import import_weights, quantise_base
from glm46.storage.huggingface.int4 import Int4
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.schemes import CONFIG_KEY, FP8_SCHEMES, config_of_scheme
from glm46.tasks.pretrain.next_token import NextToken, count_targets, next_token_loss
from glm46.tasks.weights.weight_folders import ModelFiles
from tests.builders import model_table, with_shape

# Small and uneven on purpose: 68 columns and 516 rows leave unequal shards.
SHAPE = {
    "flavor": "debug", "num_hidden_layers": 5, "hidden_size": 68, "vocab_size": 516, "intermediate_size": 100,
    "moe_intermediate_size": 36, "num_experts_per_tok": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "num_nextn_predict_layers": 2,
}  # fmt: skip
QUANTISED = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 32, "vocab_size": 516,
}  # fmt: skip
"""Whole blocks of 128, and two of them where tensor parallelism splits columns."""
LATENT = {
    "flavor": "debug-flash", "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "v_head_dim": 16,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "q_lora_rank": 20, "kv_lora_rank": 11,
}  # fmt: skip
"""Latent attention; some widths are odd."""
SPARSE = LATENT | {"index_n_heads": 3, "index_head_dim": 10, "index_topk": 5}
"""Sparse attention of fewer keys than most documents have."""
INDEXERS = {3: ["full", "full", "shared"], 5: ["full", "full", "full", "shared", "full"]}
"""By number of layers: one layer shares a choice, and each of four stages can begin with an indexer."""
FOLDERS = {"float8": FP8_SCHEMES["fp8-block"], "int4": Int4(32)}
DEPTHS, VOCABULARY = SHAPE["num_nextn_predict_layers"], SHAPE["vocab_size"]


class Layout(NamedTuple):
    """Degrees and options of one run."""

    replicate: int = 1
    experts_over: int = 1
    num_experts: int = 6
    context: int = 1
    tensor: int = 1
    key_heads: int = 4
    pipeline: int = 1
    schedule: str = "1F1B"
    reshard: str = "default"
    checkpointing: str = "none"
    every: int = 1
    """The first of so many layers is checkpointed."""
    recompute: tuple[str, ...] = ()
    """Results that selective checkpointing does not keep."""
    host: bool = False
    """What checkpointing keeps waits in host memory."""
    micro_batches: int = 2
    document_mask: bool = True
    window: int | None = None
    compiled: bool = False
    backend: str = "aot_eager"
    """Tracing, graph breaks and guards are those of the default one; what this leaves out is a C++ compiler."""
    stages: bool = False
    """Each step has the window and RoPE scaling of `ATTENTION_OF_STEP`, as in a stage of text of its own."""
    ring: bool = False
    """Keys pass from rank to rank, as those of rows that are too long to gather them."""
    offload: bool = False
    """Weights, gradients and states in host memory."""
    adapter: str = ""
    """lora or dora of all targets on a frozen base; without prediction layers."""
    base: str = ""
    """How the base is held, see `AdapterConfig.base_dtype`; one process has it converted."""
    adapted: tuple[int, int] | None = None
    """The layers with adapters."""
    routes: bool = False
    """The experts of most tokens are given, see `make_routes`."""
    of_host: int = 0
    """Ranks of a host, between which and inside which tokens travel in two levels; 0: one host, all to all."""

    chunks: int | None = None
    """Parts in which tokens travel."""
    latent: bool = False
    """The attention is that of GLM-4.7-Flash."""
    sparse: bool = False
    """The attention is that of GLM-5."""
    indexer: str = "frozen"
    """What is trained of sparse attention, see [indexer]."""
    shared: bool = False
    """One prediction layer learns both depths."""
    alone: bool = False
    """It learns alone, and everything else is frozen."""
    favourites: int = 0
    """The first experts, which every token chooses: with as many as a token chooses other ranks get no token."""
    padding: int = 0
    """The last rows that are padding alone: so is what some ranks have of a micro-batch."""

    @property
    def layers(self) -> int:
        """A dense layer and two that are alike; where a pipeline cuts them, enough for unequal stages."""
        return SHAPE["num_hidden_layers"] if self.pipeline > 1 else 3

    @property
    def steps(self) -> int:
        """The second one has states, other documents and other weights of the losses; a stage of text has one step."""
        return len(ATTENTION_OF_STEP) if self.stages else 2

    def tables(self) -> dict[str, dict[str, Any]]:
        """[parallelism] and [activation_checkpoint]."""
        parallelism = {
            "data_parallel_replicate_degree": self.replicate,
            "expert_parallel_degree": self.experts_over,
            "context_parallel_degree": self.context,
            "tensor_parallel_degree": self.tensor,
            "pipeline_parallel_degree": self.pipeline,
            "pipeline_parallel_schedule": self.schedule,
            "fsdp_reshard_after_forward": self.reshard,
        }
        if self.of_host:
            parallelism["expert_exchange"] = "two_level"
        if self.chunks:
            parallelism["expert_exchange_chunks"] = self.chunks
        checkpointing = {
            "mode": self.checkpointing,
            "every_n_layers": self.every,
            "recompute": self.recompute,
            "cpu_checkpointing": self.host,
        }
        return {"parallelism": parallelism, "activation_checkpoint": checkpointing}

    @property
    def reference(self) -> tuple:
        """What decides what one process computes."""
        options = self.layers, self.num_experts, self.key_heads, self.document_mask, self.window, self.stages
        kinds = self.latent, self.sparse, self.indexer, self.shared, self.alone, self.favourites, self.padding
        return *options, self.adapter, self.base, self.adapted, self.routes, *kinds

    @property
    def by_token(self) -> dict[str, Any]:
        """Arguments of a model that computes the log-probability of each token."""
        losses = {"frozen": "none", "alone": "dense", "joint": "sparse"}
        return BY_TOKEN | {"options": replace(OPTIONS, index_loss=losses[self.indexer])}

    @property
    def name(self) -> str:
        """All that is not the default, for example "pp2-tp2-DualPipeV-micro4"; "fsdp" if every degree is 1."""
        degrees = {"hsdp": self.replicate, "pp": self.pipeline, "cp": self.context, "tp": self.tensor}
        degrees["ep"] = self.experts_over
        return "-".join([
            *([f"{key}{degree}" for key, degree in degrees.items() if degree > 1] or ["fsdp"]),
            *([f"experts{self.num_experts}"] if self.num_experts != 6 else []),
            *([f"keys{self.key_heads}"] if self.key_heads != 4 else []),
            *([self.schedule] if self.pipeline > 1 else []),
            *([f"micro{self.micro_batches}"] if self.micro_batches != 2 else []),
            *([f"reshard_{self.reshard}"] if self.reshard != "default" else []),
            *([f"{self.checkpointing}_ac"] if self.checkpointing != "none" else []),
            *([f"every{self.every}"] if self.every > 1 else []),
            *(f"no_{name}" for name in self.recompute),
            *(["on_host"] if self.host else []),
            *([] if self.document_mask else ["no_documents"]),
            *([f"window{self.window}"] if self.window else []),
            *(["compiled"] if self.compiled else []),
            *([self.backend] if self.backend != "aot_eager" else []),
            *(["stages"] if self.stages else []),
            *(["ring"] if self.ring else []),
            *(["offload"] if self.offload else []),
            *([self.adapter] if self.adapter else []),
            *([f"in_{self.base}"] if self.base else []),
            *(["layers{}to{}".format(*self.adapted)] if self.adapted else []),
            *(["routes"] if self.routes else []),
            *([f"hosts_of_{self.of_host}"] if self.of_host else []),
            *([f"chunks{self.chunks}"] if self.chunks else []),
            *(["latent"] if self.latent else []),
            *(["sparse"] if self.sparse else []),
            *([f"index_{self.indexer}"] if self.indexer != "frozen" else []),
            *(["shared"] if self.shared else []),
            *(["alone"] if self.alone else []),
            *([f"favourites{self.favourites}"] if self.favourites else []),
            *([f"padding{self.padding}"] if self.padding else []),
        ])  # fmt: skip


def read_layouts(file: Path) -> dict[int, dict[str, Layout]]:
    """Layouts by number of ranks and name, from a file with a table of each."""
    with file.open("rb") as stream:
        rows = tomli.load(stream)
    layouts = {int(ranks): [Layout(**_with_tuples(row)) for row in of_ranks] for ranks, of_ranks in rows.items()}
    return {ranks: {layout.name: layout for layout in of_ranks} for ranks, of_ranks in layouts.items()}


def _with_tuples(row: dict[str, Any]) -> dict[str, Any]:
    """The row with tuples instead of lists, so that layouts can be keys."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


LAYOUTS = read_layouts(Path(__file__).with_name("layouts.toml"))
"""By number of ranks and name."""
ROWS, SEQ_LEN = 8, 24
MTP_WEIGHT = 0.3
AUX_WEIGHTS = ((0.01, 0.001), (0.02, 0.0), (0.005, 0.002))
"""Of the balance loss and the z-loss in each step: schedules in the engine, plain numbers in the reference."""
MOE = MoEConfig(
    balance="none",
    sequence_aux_loss_weight=tuple((step, balance) for step, (balance, _) in enumerate(AUX_WEIGHTS)),
    z_loss_weight=tuple((step, z) for step, (_, z) in enumerate(AUX_WEIGHTS)),
)
OPTIONS = RoutingOptions(balance_loss=True, z_loss=True)
BY_TOKEN = {"options": OPTIONS, "form": partial(token_logprobs, entropy=True)}
ATTENTION_OF_STEP = (
    {"sliding_window": 5, "rope_scaling": RopeScalingConfig(rope_type="linear", factor=2.0)},
    {
        "sliding_window": None,
        "rope_scaling": RopeScalingConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=8),
    },
    {"sliding_window": 3, "rope_scaling": None},
)
LAYOUTS_AT_ONCE = 3
"""Then new ranks: each process group has threads that wake up a hundred times a second. Five take an eighth longer."""


def may_compile(allowed: bool, context: int) -> AbstractContextManager:
    """Where it is not allowed, a compilation is an error. torch 2.11 compiles layers under context parallelism again
    when the number of documents changes."""
    is_checked = not allowed and (context == 1 or TorchVersion(torch.__version__) >= (2, 13))
    return torch.compiler.set_stance("fail_on_recompile" if is_checked else "default")


def schedule_here(schedule: str) -> str:
    """A schedule with split backward, or Interleaved1F1B where the launcher refuses it."""
    return schedule if TorchVersion(torch.__version__) >= SPLIT_BACKWARD_TORCH else "Interleaved1F1B"


def make_batch(step: int, document_mask: bool = True, padding: int = 0) -> dict[str, Tensor]:
    """All rows of one step; documents of unequal length, some labels missing, so that ranks see unequal counts. Without
    document masks also padding behind some rows, and a row of nothing else; with them the last ``padding`` rows."""
    generator = torch.Generator().manual_seed(step)
    depth = DEPTHS

    def tokens(*size: int) -> Tensor:
        return torch.randint(0, VOCABULARY, size, generator=generator)

    lengths = torch.randint(3, 20, (ROWS, SEQ_LEN), generator=generator)
    ends = lengths.cumsum(1)
    document_ids = (torch.arange(SEQ_LEN).view(1, -1, 1) >= ends.unsqueeze(1)).sum(-1)
    positions = torch.arange(SEQ_LEN) - torch.where(
        document_ids > 0, ends.gather(1, (document_ids - 1).clamp(min=0)), torch.zeros_like(document_ids)
    )
    missing = torch.rand(ROWS, SEQ_LEN, generator=generator) < torch.linspace(0.0, 0.7, ROWS).unsqueeze(1)
    real = [SEQ_LEN] * (ROWS - padding) + [0] * padding if document_mask else [SEQ_LEN] * 5 + [SEQ_LEN - 5, 7, 0]
    is_padding = torch.arange(SEQ_LEN).expand(ROWS, -1) >= torch.tensor(real).unsqueeze(1)
    missing |= is_padding
    document_ids = document_ids.masked_fill(is_padding, -1)
    positions = (positions if document_mask else torch.arange(SEQ_LEN)).masked_fill(is_padding, 0)
    return {
        "input_ids": tokens(ROWS, SEQ_LEN),
        "positions": positions,
        "document_ids": document_ids,
        "labels": tokens(ROWS, SEQ_LEN).masked_fill(missing, -100),
        "mtp_input_ids": tokens(ROWS, depth, SEQ_LEN),
        "mtp_labels": tokens(ROWS, depth, SEQ_LEN).masked_fill(missing.unsqueeze(1), -100),
    }


def loss_of_step(batch: dict[str, Tensor], step: int = 0) -> Callable[[LossSums], Tensor]:
    """The loss of a step of this whole batch, or a rank's part of it, from the sums over the tokens."""
    # The index loss has a weight of 1, and the attention mass after it is only reported.
    weights = torch.tensor([*AUX_WEIGHTS[step], 1.0, 0.0]) / int((batch["document_ids"] >= 0).sum())
    totals = count_targets([batch], batch["mtp_labels"].shape[1])
    return lambda sums: next_token_loss(sums, totals, MTP_WEIGHT) + (weights * sums.aux_losses).sum()


class Job(NamedTuple):
    """A task as far as a step needs it: one network, on batches of this file."""

    plan: Plan
    cluster: Cluster
    networks: dict[str, Network]
    objectives: dict[str, NextToken]

    @property
    def network(self) -> Network:
        return self.networks["model"]


def build_job(config: RunConfig, process: Process, host_ranks: int | None = None) -> Job:
    """Build the network of a config; collective."""
    plan = resolve_plan(config, process.world_size, host_ranks=host_ranks)
    cluster = build_cluster(plan, process)
    network = build_network(plan, cluster)
    return Job(plan, cluster, {"model": network}, {"model": NextToken(network)})


def make_routes(step: int, shape: ModelShape) -> Tensor:
    """Of the rows of a step: random experts, no route for one token in five."""
    generator = torch.Generator().manual_seed(step)
    size = ROWS, SEQ_LEN, moe_layers(shape), shape.n_routed_experts
    routes = torch.rand(size, generator=generator).argsort(-1)[..., : shape.num_experts_per_tok]
    return routes.masked_fill(torch.rand(ROWS, SEQ_LEN, 1, 1, generator=generator) < 0.2, -1)


def make_token_weights() -> Tensor:
    """Of the labels of any step: weights of log-probability and of entropy, [ROWS, 2, SEQ_LEN]."""
    return torch.randn(ROWS, 2, SEQ_LEN, generator=torch.Generator().manual_seed(3))


def weighted(sums: LossSums, weights: Tensor) -> Tensor:
    """What a policy gradient makes of the head's form by token; weights [B, 2, S]."""
    return (weights[:, 0] * sums.logprobs + weights[:, 1] * sums.entropy).sum()


def token_objective(sums: LossSums, weights: Tensor) -> Tensor:
    """`weighted`, beside what the other layers add."""
    return weighted(sums, weights) + 0.1 * sums.mtp_losses.sum() + sums.aux_losses.sum()


def begin_adapters(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Move adapters away from where they begin, where B is zero and so the gradient of A."""
    for name, parameter in parameters.items():
        if "lora_B" in name or "magnitude" in name:
            part = local_tensor(parameter)
            noise = torch.empty_like(part)
            places = global_indices(parameter), tuple(parameter.shape)
            fill_normal(noise, *places, seed=3, name=name, std=0.1)
            part.copy_(noise if "lora_B" in name else part * (1 + noise))


def write_base(model: Transformer, folder: Path, base_dtype: str) -> None:
    """A folder of the model in FP8 or INT4, whose groups have different scales, or in FP32 for NF4; the model gets the
    weights of a base that is made of the folder."""
    names, scheme = HFNames(model.shape, repeat_shared=False), FOLDERS.get(base_dtype)
    base = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    base |= dict(model.named_buffers())
    for tensor in base.values():
        if tensor.ndim > 1:
            rows, columns = tensor.shape[-2:]
            tensor *= torch.linspace(0.4, 1.4, rows).unsqueeze(1) * torch.linspace(0.5, 1.5, columns)
    config = config_of(model.shape, None, eos_ids=[0], dtype="float32")
    if scheme is not None:
        config[CONFIG_KEY] = config_of_scheme(scheme, names)
    options = ExportOptions(dtype=torch.float32, scheme=scheme)
    export_weights(folder, model.shape, config, base, options=options)
    import_weights(folder, model.shape, base)
    for name, weight in base.items() if scheme is None else ():
        if find_parameter(name).fp8_family in base_families(model.shape, base_dtype):
            rows = weight.view(-1, weight.shape[-1])
            rows.copy_(in_compute_type(*quantise_base(rows, base_dtype), torch.float32))


def favour(model: torch.nn.Module, favourites: int) -> None:
    """Let every token choose the first experts."""
    for name, bias in model.named_buffers():
        if favourites and name.endswith("e_score_correction_bias"):
            bias[:favourites] = 10.0


def new_model(config: RunConfig, **options: str) -> Transformer:
    """The model of one process with the weights that every layout begins with; its base is not quantised."""
    with torch.device("meta"):
        model = Transformer(resolve_shape(config.model), **options)
        if config.indexer.train == "frozen":
            model.freeze_indexers()
        elif config.indexer.train == "alone":
            model.train_only_indexers()
        if config.adapter is not None:
            add_adapters(model, config.adapter.model_copy(update={"base_dtype": None}))
    model.to_empty(device="cpu")
    initialise(model, config.debug.seed)
    if config.trains_only_drafts:
        model.train_only_drafts()
    return model


def run_reference(config: RunConfig, layout: Layout, base: Path | None = None) -> tuple:
    """Of one process, in a plain loop without any transform: initial weights, value and gradients of `token_objective`,
    losses, counts and norms, first gradients and last weights of some steps, and the weights before these.

    Args:
        base: folder to write a quantised base to, and to compute with what it holds.
    """
    model = new_model(config)
    favour(model, layout.favourites)
    if base is not None:
        write_base(model, base, layout.base)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    magnitudes = Magnitudes(model, config.adapter or AdapterConfig(), None)
    magnitudes.start()
    begin_adapters(parameters)
    magnitudes.refresh()
    begun = {name: p.detach().clone() for name, p in parameters.items()}
    unseen = () if config.data.document_mask else ("document_ids",)
    first, token_weights = make_batch(0, config.data.document_mask, layout.padding), make_token_weights()
    is_real = first["document_ids"] >= 0
    given = [
        compact_routes(make_routes(step, model.shape), (ROWS, SEQ_LEN), model.shape) for step in range(layout.steps)
    ]
    given = given if layout.routes else [None] * layout.steps
    seen = {n: t for n, t in first.items() if n not in unseen}
    sums = model(**seen, is_real=is_real, routes=given[0], **layout.by_token)
    token_objective(sums, token_weights).backward()
    size = weighted(sums._replace(logprobs=-sums.logprobs), token_weights.abs()).item()  # without cancellation
    by_token = weighted(sums, token_weights).item(), {name: p.grad.clone() for name, p in parameters.items()}, size
    optimizer = build_optimizers(list(parameters.items()), config.optimizer, None, model.shape, torch.float32)
    figures, gradients = [], {}
    for step in range(layout.steps):
        batch = make_batch(step, config.data.document_mask, layout.padding)
        is_real = batch["document_ids"] >= 0
        seen = {n: t for n, t in batch.items() if n not in unseen}
        optimizer.zero_grad()
        if layout.stages:
            model.shape = model.shape.model_copy(update=ATTENTION_OF_STEP[step])
        sums = model(**seen, is_real=is_real, routes=given[step], options=layout.by_token["options"])
        assigned = sums.tokens_per_expert.sum(1)
        assert not layout.favourites or not sums.tokens_per_expert[:, layout.favourites :].any()
        calls = torch.ones_like(assigned)
        if layout.shared:
            calls[-1] = DEPTHS
        assert assigned.eq(calls * is_real.sum() * model.shape.num_experts_per_tok).all(), "padding was counted"
        loss_of_step(batch, step)(sums).backward()
        indexers = [p for name, p in parameters.items() if is_index_weight(name)]
        others = [p for name, p in parameters.items() if not is_index_weight(name)]
        groups = indexers, others
        norms = [global_grad_norm(group, torch.device("cpu")) for group in groups]
        for group, norm in zip(groups, norms, strict=True):
            scale_gradients(group, (config.training.max_norm / (norm + 1e-6)).clamp(max=1.0))
        gradients = gradients or {name: p.grad.clone() for name, p in parameters.items()}
        optimizer.step(1.0)
        magnitudes.refresh()
        loss = sums.loss.item() + sums.aux_losses[2].item()
        figures.append((loss, sums.tokens_per_expert, math.hypot(*(norm.item() for norm in norms))))
    return initial, by_token, figures, gradients, {name: p.detach() for name, p in parameters.items()}, begun


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Held(NamedTuple):
    """What a rank holds of a tensor, and which elements of the whole it is."""

    part: Tensor
    places: list[Tensor]

    def of(self, other: Tensor) -> Tensor:
        """The same elements of another tensor, which is whole."""
        return other[torch.meshgrid(*self.places, indexing="ij")]


def held(tensor: Tensor) -> Held:
    """A copy; no rank sends anything."""
    return Held(local_tensor(tensor).detach().cpu().clone(), [index.cpu() for index in global_indices(tensor)])


def squares(found: dict[str, Held], reference: dict[str, Tensor]) -> dict[tuple, tuple[int, float]]:
    """By name and first place: of how many elements, and the sum of their squared differences from the reference."""
    found_squares = {}
    for name, held in found.items():
        if held.part.numel():
            square = (held.part - held.of(reference[name])).double().square().sum().nan_to_num(math.inf)
            found_squares[(name, *(int(index[0]) for index in held.places))] = (held.part.numel(), square.item())
    return found_squares


def distances(ranks: list[dict[tuple, tuple[int, float]]], reference: dict[str, Tensor]) -> dict[str, float]:
    """`squares` of all ranks as norms of whole tensors, of each part the worst of its copies."""
    worst: dict[tuple, tuple[int, float]] = {}
    for rank in ranks:
        for key, (size, square) in rank.items():
            worst[key] = (size, max(square, worst.get(key, (size, 0.0))[1]))
    for name, tensor in reference.items():
        assert sum(size for key, (size, _) in worst.items() if key[0] == name) == tensor.numel(), name
    return {name: math.sqrt(sum(square for key, (_, square) in worst.items() if key[0] == name)) for name in reference}


def make_config(layout: Layout, layers: int | None = None) -> RunConfig:
    """The run of a layout; ``layers`` is for what compares layouts with one another."""
    model, optimizer = {"num_hidden_layers": layers or layout.layers}, {}
    if layout.adapter:
        # The rate: the steps move adapters, which are small, by a part of themselves like other weights.
        model["num_nextn_predict_layers"], optimizer = 0, {"name": "AdamW", "lr": 2e-4}
    if layout.base:
        model |= QUANTISED
    if layout.latent:
        model |= LATENT
    if layout.sparse:
        model |= SPARSE | {"indexer_types": INDEXERS[model["num_hidden_layers"]]}
    if layout.shared:
        model["num_nextn_predict_layers"] = 1
    adapter = {"name": layout.adapter, "rank": 4, "expert_rank": 8, "alpha": 6.0}
    adapter["base_dtype"] = layout.base or None
    return RunConfig.model_validate_json(
        json.dumps(
            {
                "model": model_table(
                    **SHAPE
                    | {
                        "n_routed_experts": layout.num_experts,
                        "num_key_value_heads": layout.key_heads,
                        "sliding_window": layout.window,
                    }
                    | model
                ),
                "training": {
                    "mixed_precision_param": "float32",
                    "seq_len": SEQ_LEN,
                    "parameter_offload": layout.offload,
                },
                "optimizer": {
                    "lr": 1e-3,
                    # Above the rounding of gradients: AdamW divides by their size, and a tiny one is mostly rounding.
                    "eps": 1e-4,
                    "state_offload": "cpu" if layout.offload else "none",
                }
                | optimizer,
                "adapter": adapter | {"layers": layout.adapted} if layout.adapter else None,
                "finetune": {"train_only": "prediction_layers"} if layout.alone else None,
                "indexer": {"train": layout.indexer},
                "moe": MOE.model_dump(),
                "mtp": {"loss_weight": MTP_WEIGHT, "depths": DEPTHS if layout.shared else None},
                "data": {"document_mask": layout.document_mask},
                "compile": {"enable": layout.compiled},
            }
            | layout.tables()
        )
    )


def bf16_run(layout: Layout, exchange: str = "auto"):
    """`make_config` in BF16, without clipping, so that gradients compare as they are, and with widths that `grouped_mm`
    (multiples of 16 bytes) and DeepEP (32) take in BF16."""
    config = with_shape(make_config(layout, layers=4), hidden_size=80, moe_intermediate_size=40)
    # DeepEP asks for the rows of a micro-batch beforehand.
    batch = {"global_batch_size": ROWS, "local_batch_size": ROWS // layout.micro_batches}
    training = config.training.model_copy(update={"mixed_precision_param": "bfloat16", "max_norm": 1e9} | batch)
    parallelism = config.parallelism.model_copy(update={"expert_exchange": exchange})
    return config.model_copy(update={"training": training, "parallelism": parallelism})


def micro_batches(job: Job, step: int, count: int, padding: int = 0) -> list[dict[str, Tensor]]:
    """This rank's micro-batches of a step: each is a block of rows, of which each reader takes its share."""
    batch = make_batch(step, job.plan.config.data.document_mask, padding) | {"weights": make_token_weights()}
    return share_of(batch | {"routes": make_routes(step, job.plan.shape)}, job.plan, job.cluster, count)


def share_of(rows: dict[str, Tensor], plan: Plan, cluster: Cluster, count: int) -> list[dict[str, Tensor]]:
    """The part of whole rows that this rank reads, in so many micro-batches."""
    share = ROWS // count // plan.layout.dp_degree
    first = [micro * (ROWS // count) + cluster.dp_rank * share for micro in range(count)]
    return [{name: tensor[start : start + share] for name, tensor in rows.items()} for start in first]


def run_by_token(job: Job, layout: Layout) -> tuple[float, dict[str, Held]]:
    """Value and gradients of `token_objective` over all rows, by the engine's own forward and backward; collective."""
    network, fields = job.network, ("weights",)
    taken = (*fields, *job.objectives["model"].fields)
    batches = micro_batches(job, 0, layout.micro_batches, layout.padding)
    batches = [network.to_device(batch, taken) for batch in batches]
    *_, outputs = network.forward_backward(
        batches,
        layout.by_token,
        objective=lambda sums, batch: token_objective(sums, batch["weights"]),
        auxiliary=lambda aux_losses: aux_losses.sum(),
        fields=fields,
    )
    value = total_of(outputs, batches, layout)
    if layout.routes and not layout.compiled:  # a forward without gradient has graphs of its own
        whole = micro_batches(job, 0, layout.micro_batches)
        outputs = [network.evaluate(batch, BY_TOKEN["form"], replay_routes=True) for batch in whole]
        network.release()
        assert relative(total_of(outputs, batches, layout), value) < 1e-6
    return value, {name: held(p.grad) for name, p in network.parameters.items()}


def total_of(outputs: list, batches: list[dict[str, Tensor]], layout: Layout) -> float:
    """The sum of `weighted` over all micro-batches and ranks; collective."""
    value = torch.zeros((), dtype=torch.float64)
    for sums, batch in zip(outputs, batches, strict=True):
        if isinstance(sums, LossSums):  # the ranks of tensor parallelism have the same
            value += weighted(sums, batch["weights"]).double().cpu() / layout.tensor
    dist.all_reduce(value)
    return value.item()


def assert_adapters_change_nothing(job: Job, layout: Layout) -> None:
    """New adapters leave each log-probability as the base has it, to the bit; collective."""
    batch = micro_batches(job, 0, layout.micro_batches)[0]
    with_adapters, base = (job.network.evaluate(batch, BY_TOKEN["form"], adapted=adapted) for adapted in (True, False))
    job.network.release()
    assert base is None or torch.equal(with_adapters.logprobs, base.logprobs), layout.name


def converted(parameters: dict[str, Tensor]) -> dict[str, tuple[Tensor, Held]]:
    """Parameters whole, and what is here of them; those of a quantised base converted."""
    found, scales = {}, {scales_name(name) for name in parameters}
    for name, parameter in parameters.items():
        if scales_name(name) in parameters:
            own = local_tensor(parameters[scales_name(name)])
            values = in_compute_type(local_tensor(parameter), own, torch.float32)
            if isinstance(parameter, DTensor):  # of whole groups, so its placements are those of the converted weight
                size = (*parameter.shape[:-1], columns_of(parameter, own))
                values = DTensor.from_local(
                    values, parameter.device_mesh, parameter.placements, run_check=False, shape=size,
                    stride=torch.empty(size, device="meta").stride(),
                )  # fmt: skip
            found[name] = whole(values).cpu().clone(), held(values)
        elif name not in scales:
            found[name] = whole(parameter).cpu().clone(), held(parameter)
    return found


def run_layout(process: Process, layout: Layout, base: Path | None) -> tuple:
    """The same as `run_reference`, by the engine's own step, of the parameters that are here: initial weights whole,
    and of each kind the parts that this rank holds, with their places in the whole. From the second step on nothing may
    be compiled."""
    torch.compiler.reset()  # other layouts of this process may have compiled the same layers
    counters.clear()
    job = build_job(make_config(layout), process, layout.of_host or None)
    for model in job.network.models:
        favour(model, layout.favourites)
    job.objectives["model"].fields = ("routes",) if layout.routes else ()
    parameters, frozen = job.network.parameters, job.network.frozen
    if layout.base:
        files, weights = ModelFiles(job.network, base), job.network.weights()
        files.read({name: weights[name] for name in files.names})  # adapters start below, after `initial` is taken
    frozen_parts = {name: held(p).part for name, p in frozen.items()}
    initial = converted(parameters | frozen)
    job.network.loaded(new_adapters=True)
    if layout.adapter and not layout.compiled:  # a forward without gradient has graphs of its own
        assert_adapters_change_nothing(job, layout)
    begin_adapters(parameters)
    job.network.loaded(new_adapters=False)
    by_token = run_by_token(job, layout)
    figures, gradients = [], {}
    for step in range(layout.steps):
        if layout.stages:
            job.network.attend_as(job.network.shape.model_copy(update=ATTENTION_OF_STEP[step]))
        totals = count_step(job, [make_batch(step, layout.document_mask, layout.padding)])
        batches = micro_batches(job, step, layout.micro_batches, layout.padding)
        with may_compile(not layout.compiled or step == 0, layout.context):
            # The clock of the schedules counts steps here.
            outcome = train_step(job, batches, totals, step, 1.0).main
        gradients = gradients or {name: held(p.grad) for name, p in parameters.items()}
        loss = outcome.objective["loss"].item() + outcome.aux_losses[2].item()
        norm = math.hypot(outcome.grad_norm.item(), outcome.index_grad_norm.item())
        figures.append((loss, outcome.tokens_per_expert.cpu(), norm))
    assert all(p.grad is None and torch.equal(held(p).part, frozen_parts[name]) for name, p in frozen.items())
    return initial, by_token, figures, gradients, {name: held(p) for name, p in parameters.items()}


def gradient_errors(ranks: list[dict[tuple, tuple]], reference: dict[str, Tensor]) -> list[tuple[float, str]]:
    """`distances` of gradients over their norms. Gradients that are zero in exact arithmetic (key biases) are pure
    rounding: a floor of 1e-4 of the whole norm. The bias of index keys moves most scores of a query together, which
    softmax does not see, so its gradient is a small difference of large terms: a floor of 1e-3."""
    total = math.sqrt(sum(g.double().square().sum() for g in reference.values()))
    return [
        (distance / (reference[name].norm().item() + (1e-3 if name.endswith("k_norm.bias") else 1e-4) * total), name)
        for name, distance in distances(ranks, reference).items()
    ]


def relative(found: float, wanted: float) -> float:
    """Relative error; infinite if it is not a number, so that the largest of several shows it."""
    error = abs(found / wanted - 1.0)
    return math.inf if math.isnan(error) else error


def step_error(found: list[float], wanted: list[float]) -> tuple[float, str]:
    """The largest relative error of any step, and its values."""
    steps = enumerate(zip(found, wanted, strict=True), 1)
    return max((relative(*pair), f"{pair[0]!r} instead of {pair[1]!r} in step {step}") for step, pair in steps)


def compare(layout: Layout, found: tuple, reference: tuple) -> dict:
    """Relative differences between a layout and one process, each the largest with its place; collective, because ranks
    hold different layers."""
    initial, by_token, figures, gradients, final = found
    initial0, by_token0, figures0, gradients0, final0, begun0 = reference
    here = (
        {
            name
            for name, (whole, held) in initial.items()
            if not (torch.equal(whole, initial0[name]) and torch.equal(held.part, held.of(initial0[name])))
        },
        set(initial),
        squares(by_token[1], by_token0[1]),
        squares(gradients, gradients0),
        squares(final, final0),
        sum(counters["graph_break"].values()),
        counters["stats"]["unique_graphs"],
    )
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, here)
    different, names, token_squares, gradient_squares, final_squares, breaks, graphs = zip(*ranks, strict=True)
    last = distances(final_squares, final0)
    moved = {
        n: distance / (final0[n] - begun0[n]).norm().item()
        for n, distance in last.items()
        if not n.endswith("k_proj.bias")
    }
    apart = {n: distance / final0[n].norm().item() for n, distance in last.items() if not n.endswith("bias")}
    return {
        # Of the ranks: kinds of layers have one code each, so that depth adds nothing.
        "graph_breaks": max(breaks),
        "graphs": max(graphs),
        "initial_weights_different": sorted(set.union(*different, set.union(*names) ^ set(initial0))),
        "loss_error": step_error([row[0] for row in figures], [row[0] for row in figures0]),
        "norm_error": step_error([row[2] for row in figures], [row[2] for row in figures0]),
        "steps_of_different_counts": [
            step for step, (a, b) in enumerate(zip(figures, figures0, strict=True), 1) if not torch.equal(a[1], b[1])
        ],
        "token_error": (abs(by_token[0] - by_token0[0]) / by_token0[2], f"{by_token[0]} instead of {by_token0[0]}"),
        "token_gradient_error": max(gradient_errors(token_squares, by_token0[1])),
        "gradient_error": max(gradient_errors(gradient_squares, gradients0)),
        "update_error": max((error, name) for name, error in moved.items()),
        "weight_error": max((error, name) for name, error in apart.items()),
    }


def base_of(folder: Path, layout: Layout) -> Path | None:
    """The folder of the base of a layout that has a quantised one."""
    return folder / repr(layout.reference) if layout.base else None
