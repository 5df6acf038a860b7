"""Builds all parts of a run in the order of their dependencies."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from glm46.checkpoint.manager import CheckpointManager
from glm46.config.model import ModelShape
from glm46.config.presets import resolve_shape
from glm46.config.run_config import RunConfig
from glm46.data.corpus import check_epochs, load_text
from glm46.data.manifest import Manifest
from glm46.data.tokenizer import Tokenizer
from glm46.distributed.collective_errors import run_on_all_ranks
from glm46.distributed.mesh import Meshes, build_meshes
from glm46.distributed.process import Process
from glm46.model.transformer import Transformer
from glm46.optim.optimizers import OptimizerGroup, build_optimizers
from glm46.parallelize.pipeline import Pipeline, split_model
from glm46.parallelize.plan import parallelize
from glm46.planner.curriculum import plan_stages
from glm46.planner.layout import Layout, resolve_layout
from glm46.training.balance import ExpertBalance


@dataclass(frozen=True)
class Parts:
    """All parts of a run on this rank. It has no behaviour; the functions of this room use it."""

    config: RunConfig
    shape: ModelShape
    process: Process
    layout: Layout
    meshes: Meshes
    tokenizer: Tokenizer
    manifests: dict[str, Manifest]
    models: list[Transformer]
    """The model, or this rank's pipeline stages of it in the order of their layers."""
    pipeline: Pipeline | None
    """None if this rank has all layers."""
    parameters: dict[str, nn.Parameter]
    """This rank's shards by name, taken once after building: during a forward the model's attributes are the gathered
    weights."""
    optimizer: OptimizerGroup
    balance: ExpertBalance
    checkpoints: CheckpointManager

    @property
    def rows_per_micro_batch(self) -> int:
        """Sequences of one micro-batch over all ranks."""
        return self.config.training.local_batch_size * self.layout.dp_degree

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank: ranks with the same number read the same sequences."""
        return self.layout.dp_rank(self.process.rank)

    def buffers(self) -> dict[str, Tensor]:
        """The buffers of this rank's layers, by name."""
        return {name: buffer for model in self.models for name, buffer in model.named_buffers()}

    def stream_fingerprint(self) -> str:
        """Hash of everything that maps sample numbers to text."""
        config = self.config
        # The depth matters: rows need one more token per depth, so a source can have fewer rows.
        identity: list = [config.debug.seed, config.training.seq_len, self.shape.num_nextn_predict_layers]
        for source in config.data.sources:
            manifest = self.manifests[source.name]
            shards = [(shard.sha256, shard.tokens) for shard in manifest.splits["train"].shards]
            identity.append([source.name, source.weight, source.packing, shards])
        if config.data.stages:
            identity.append([stage._asdict() for stage in plan_stages(config)])
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def build(config: RunConfig, process: Process) -> Parts:
    """Build all parts of a run on this rank. Collective.

    Raises:
        UserError: the data, the layout or the checkpoint folder do not match the configuration.
    """
    layout = resolve_layout(config.parallelism, process.world_size)
    tokenizer, manifests = run_on_all_ranks(lambda: load_text(config))
    check_epochs(config, manifests, config.training.local_batch_size * layout.dp_degree)
    return assemble(config, process, tokenizer, manifests)


def assemble(config: RunConfig, process: Process, tokenizer: Tokenizer, manifests: dict[str, Manifest]) -> Parts:
    """`build` with the text already loaded. Collective."""
    if config.debug.deterministic:
        torch.use_deterministic_algorithms(True)
    shape, layout = resolve_shape(config.model), resolve_layout(config.parallelism, process.world_size)
    meshes = build_meshes(layout, process.device.type)
    stages = [] if meshes.pipeline is None else split_model(shape, config, meshes.pipeline)
    models = [stage.model for stage in stages]
    if not stages:
        with torch.device("meta"):
            models = [Transformer(shape)]
    for model in models:
        parallelize(model, meshes, config, process.device)
    parameters = {name: parameter for model in models for name, parameter in model.named_parameters()}
    return Parts(
        config=config,
        shape=shape,
        process=process,
        layout=layout,
        meshes=meshes,
        tokenizer=tokenizer,
        manifests=manifests,
        models=models,
        pipeline=Pipeline(stages, config, meshes.pipeline) if stages else None,
        parameters=parameters,
        optimizer=build_optimizers(list(parameters.items()), config.optimizer),
        balance=ExpertBalance(shape, models, config.moe, process.device),
        checkpoints=CheckpointManager(
            Path(config.job.dump_folder) / config.checkpoint.folder,
            keep_latest_k=config.checkpoint.keep_latest_k,
            keep_every=config.checkpoint.keep_every,
            keep_best_k=config.checkpoint.keep_best_k,
            node_local_folder=Path(local) if (local := config.checkpoint.node_local_folder) else None,
        ),
    )
