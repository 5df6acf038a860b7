"""One model on this job's ranks: its stages, its pipeline, the shards of its parameters, and their optimizer."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glm46.compat import named_range
from glm46.compute.distributed.local_tensor import copy_to_device, local_tensor
from glm46.compute.distributed.mesh import Cluster
from glm46.compute.model.adapters import without_adapters
from glm46.compute.model.cross_entropy import HeadForm, summed_loss
from glm46.compute.model.routes import compact_routes
from glm46.compute.model.transformer import LossSums, StageOutput, Transformer, detached
from glm46.compute.optim.optimizers import OptimizerGroup, build_optimizers
from glm46.compute.parallelize.context import take_part
from glm46.compute.parallelize.float8 import GatheredScales
from glm46.compute.parallelize.float8_experts import RoundedExperts
from glm46.compute.parallelize.fsdp import release_gathered, widen_gradients
from glm46.compute.parallelize.magnitudes import Magnitudes
from glm46.compute.parallelize.pipeline import Arguments, Fields, Pipeline
from glm46.compute.parallelize.plan import parallelize
from glm46.config.model import ModelShape
from glm46.engine.training.balance import ExpertBalance, auxiliary_loss, routing_options
from glm46.engine.training.gradients import global_grad_norm
from glm46.engine.training.objective import Counts, Objective
from glm46.engine.training.trained_parts import TrainedParts, freeze_parts
from glm46.run.function import NetworkFunction, gate_factor, is_gate
from glm46.run.parameters import Head
from glm46.run.plan import Plan, replicas_reduce_once
from glm46.run.schedule import schedule_value
from glm46.storage.data.batches import Batch

_REPLAYED = ("routes", "kept")
"""Fields that are arguments of the model: choices of the engine that generated a sample."""
StageResults = list[list[LossSums | StageOutput]]
"""For each pipeline stage of this rank, or for the whole model, the detached output for each micro-batch."""


class StepSums(NamedTuple):
    """Sums of a network over the micro-batches of a step, on this rank or over all ranks."""

    objective: dict[str, Tensor]
    """`Objective.sums`, FP64."""
    aux_losses: Tensor
    """FP64 [4], see `LossSums`."""
    grad_norm: Tensor
    """Gradient norm before clipping, a scalar; without indexers."""
    index_grad_norm: Tensor
    """The same for the indexers; 0 if they are frozen."""
    tokens_per_expert: Tensor
    """int64 [MoE layers, E]."""
    overflow: Tensor
    """int64 [MoE layers]."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """One parallelised model, frozen unless it is a `TrainedNetwork`. A job may have several, such as a policy, a
    critic and a frozen reference."""

    plan: Plan
    cluster: Cluster
    models: list[Transformer]
    """The model, or this rank's pipeline stages of it in the order of their layers."""
    pipeline: Pipeline | None
    """None if this rank has all layers."""
    parameters: dict[str, nn.Parameter]
    """This rank's shards of the trained weights by name, collected once after building: during a forward the model's
    attributes are the gathered weights."""
    frozen: dict[str, nn.Parameter]
    """This rank's shards of the frozen weights: the base of adapters, all weights except the prediction layers if only
    these are trained, or all weights of a frozen network."""
    magnitudes: list[Magnitudes]
    """Magnitudes of DoRA, for each model; empty without DoRA."""
    gathered_scales: GatheredScales
    rounded_experts: RoundedExperts
    frozen_files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the files that frozen weights were read from, by name."""

    @property
    def function(self) -> NetworkFunction:
        """Function that the models compute."""
        return NetworkFunction(self.models[0].shape, self.models[0].router_temperature)

    @property
    def shape(self) -> ModelShape:
        """Shape that the models compute with: that of the plan, with the current window and RoPE scaling."""
        return self.function.shape

    def attend_as(self, shape: ModelShape) -> None:
        """Use the sliding window and the RoPE scaling of a shape from the next batch on."""
        self._compute_as(self.function._replace(shape=shape))

    def route_at(self, temperature: float) -> None:
        """Use a router temperature from the next batch on. A network begins with the temperature at the start of its
        run; each step sets the scheduled one."""
        self._compute_as(self.function._replace(router_temperature=temperature))

    @torch.no_grad()
    def take_gates(self, meta: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Scale the gates among weights that were read from a checkpoint with this meta, or from a folder of another
        program, for the temperature that the network begins with; see `gate_factor`."""
        if (factor := gate_factor(meta, self.function.router_temperature)) != 1.0:
            for name, tensor in weights.items():
                if is_gate(name):
                    local_tensor(tensor).mul_(factor)

    def _compute_as(self, function: NetworkFunction) -> None:
        is_scheduled = self.plan.config.moe.router_temperature != 1.0
        for model in self.models:
            model.compute_as(function, self.cluster.device, is_scheduled=is_scheduled)

    @property
    def is_adapted(self) -> bool:
        """True if only adapters are trained, even if this pipeline stage has no adapters."""
        return self.plan.config.adapter is not None and isinstance(self, TrainedNetwork)

    def pretrained(self) -> dict[str, Tensor]:
        """Return the weights that a pretrained checkpoint can provide: all except those that are new, which are
        trained adapters and a trained value head."""
        new = self.parameters if self.is_adapted else self.parameters.keys() & {"value_head.weight"}
        return {name: weight for name, weight in self.weights().items() if name not in new}

    def weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers of this rank by name, without gradient. Writing into them loads weights."""
        buffers = {name: buffer for model in self.models for name, buffer in model.named_buffers()}
        return {name: tensor.detach() for name, tensor in (self.parameters | self.frozen | buffers).items()}

    def loaded(self, *, new_adapters: bool) -> None:
        """Recompute values that derive from weights, after weights were loaded. Collective.

        Args:
            new_adapters: True if the base was loaded but not the adapters: these start, with magnitudes of the base.
        """
        for magnitudes in self.magnitudes:
            magnitudes.start(new_adapters)

    def state_tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return all tensors of a checkpoint by name, with this prefix; for a network with adapters, the adapters
        without their base. Writing into them loads a checkpoint."""
        weights = self.weights()
        return {f"{prefix}model.{name}": weights[name] for name in (self.parameters if self.is_adapted else weights)}

    def to_device(self, batch: Batch, fields: Sequence[str] = ()) -> Arguments:
        """Copy this rank's part of the sequences of a batch to its device: the arguments of the model, and ``fields``,
        which are [B, S], [B, K, S], or ``routes``, see `compute/model/routes.py`. A batch without `mtp_labels` trains
        no multi-token prediction; a pipeline needs them, because there every layer must take part."""
        names = ["input_ids", "positions", "labels"]
        if self.shape.num_nextn_predict_layers and "mtp_labels" in batch:
            names += ["mtp_input_ids", "mtp_labels"]
        # Passed explicitly: without document masks padding stays padding.
        tensors: dict[str, Any] = {**batch, "is_real": batch["document_ids"] >= 0}
        rows = {name: tensors[name] for name in (*names, *fields, "is_real")}
        if "routes" in rows:
            rows["routes"] = compact_routes(rows["routes"], tuple(batch["input_ids"].shape), self.plan.shape)
        window = self.shape.sliding_window
        sequence = self.cluster.meshes.sequence
        ring = self.plan.keys_travel(self.shape, batch["input_ids"].shape)
        prefix_ids = batch.get("prefix_ids")
        part = take_part(rows, self._mask_ids(batch), window, sequence, ring=ring, prefix_ids=prefix_ids)
        return {name: copy_to_device(value, self.cluster.device) for name, value in part.items()}

    def whole_rows(self, values: Tensor, batch: Batch) -> Tensor:
        """Gather full rows [N, B, S] from an output [N, B, s] for this rank's part of a batch of the loader, without
        gradient. Collective under context parallelism."""
        sequence = self.cluster.meshes.sequence
        if sequence is None:
            return values.detach()
        places = sequence.places(self._mask_ids(batch), batch["input_ids"].shape, self.shape.sliding_window)
        return sequence.restore(values.detach(), places)

    def _mask_ids(self, batch: Batch) -> Tensor | None:
        """Return the document numbers for the attention mask; None without document masks."""
        return batch["document_ids"] if self.plan.config.data.document_mask else None

    def forward_backward(
        self,
        batches: list[Arguments],
        arguments: dict[str, Any],
        objective: Callable[[LossSums, Fields], Tensor],
        auxiliary: Callable[[Tensor], Tensor],
        fields: Sequence[str] = (),
    ) -> StageResults:
        """Compute the gradients of the micro-batches of a step. Collective. For arguments and result see
        `Pipeline.train`; the batches are from `to_device`. Without a pipeline the model is the last stage."""
        with self.gathered_scales.fixed(), self.rounded_experts.kept():
            if self.pipeline is not None:
                return self.pipeline.train(batches, arguments, objective, auxiliary, fields)
            model: Any = self.models[0]  # has the methods of FSDP2
            outputs: list[LossSums | StageOutput] = []
            for remaining, batch in zip(reversed(range(len(batches))), batches, strict=True):  # to 0, after the last
                if replicas_reduce_once(self.plan):
                    model.set_requires_all_reduce(remaining == 0)
                outputs.append(self._forward_backward(batch, arguments, objective, fields))
                if remaining:
                    widen_gradients(self.parameters.values())
            return [outputs]

    def _forward_backward(
        self,
        batch: Arguments,
        arguments: dict[str, Any],
        objective: Callable[[LossSums, Fields], Tensor],
        fields: Sequence[str],
    ) -> LossSums:
        inputs = {name: tensor for name, tensor in batch.items() if name not in fields}
        output: LossSums = self.models[0](**inputs, **arguments)
        loss = objective(output, {name: batch[name] for name in fields})
        with named_range("backward"):
            loss.backward()
        return detached(output)

    @torch.no_grad()
    def evaluate(
        self, batch: Batch, form: HeadForm = summed_loss, *, replay_routes: bool = False, adapted: bool = True
    ) -> LossSums | None:
        """Compute the output for a batch of the loader; None on pipeline stages without the head. Collective. Call
        `release` after the last batch.

        Args:
            replay_routes: use the experts of the batch's ``routes``. Its ``kept`` tokens always hold.
            adapted: False computes with the base alone, without adapters.
        """
        fields = [name for name in _REPLAYED if name in batch and (replay_routes or name != "routes")]
        inputs = self.to_device(batch, fields)
        with nullcontext() if adapted else without_adapters(self.models):
            if self.pipeline is not None:
                return self.pipeline.evaluate(inputs, form)
            output: LossSums = self.models[0](**inputs, form=form)
            return output

    def release(self) -> None:
        """Free the weights that forwards without backward left gathered. Until then the parameters of the models are
        not the shards that optimizer and checkpoints use."""
        for model in self.models:
            release_gathered(model)


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork(Network):
    """A network with its optimizer and the balance of its experts."""

    optimizer: OptimizerGroup
    balance: ExpertBalance
    parts: TrainedParts

    def compute(
        self, objective: Objective, micro_batches: list[Batch], counts: Counts, real_tokens: int, clock: int
    ) -> StepSums:
        """Compute the gradients of a step, of the objective and of the auxiliary losses of the experts. Collective.

        Args:
            counts: `Objective.count` of the step over all ranks.
            real_tokens: tokens of the step over all ranks that are not padding.
            clock: tokens of the curriculum before the step; the argument of all schedules.

        Returns:
            Sums on this rank and its device, except the gradient norm, which is that of all ranks.
        """
        moe = self.plan.config.moe

        def auxiliary(aux_losses: Tensor) -> Tensor:
            return auxiliary_loss(aux_losses, real_tokens, moe, clock)

        def loss_with_auxiliary(output: LossSums, batch: Fields) -> Tensor:
            return objective.loss(output, batch, counts, clock) + auxiliary(output.aux_losses)

        self.optimizer.zero_grad()
        self.route_at(schedule_value(moe.router_temperature, clock))
        batches = [self.to_device(batch, objective.fields) for batch in micro_batches]
        options = replace(routing_options(moe), index_loss=self.parts.index_loss)
        arguments = {"options": options, "form": objective.form}
        loss_fields = [name for name in objective.fields if name not in _REPLAYED]
        outputs = self.forward_backward(batches, arguments, loss_with_auxiliary, auxiliary, loss_fields)
        return StepSums(
            self._objective_sums(objective, outputs[-1], micro_batches),
            self._aux_losses(outputs),
            self._grad_norm(self.parts.others, exist=True),
            self._grad_norm(self.parts.indexers, exist=self.parts.trains_indexers),
            *self.balance.count(outputs),
        )

    @torch.no_grad()
    def _objective_sums(
        self, objective: Objective, outputs: list[LossSums | StageOutput], micro_batches: list[Batch]
    ) -> dict[str, Tensor]:
        device = self.cluster.device
        # Created on the device: a copy from the host would be work between backward and the all-reduce.
        sums = {name: torch.zeros_like(value, device=device) for name, value in objective.empty_sums().items()}
        for output, batch in zip(outputs, micro_batches, strict=True):
            if isinstance(output, LossSums):  # else another stage has the head
                for name, value in objective.sums(output, batch).items():
                    sums[name] += value
        return sums

    def _aux_losses(self, outputs: StageResults) -> Tensor:
        total = torch.zeros(4, dtype=torch.float64, device=self.cluster.device)
        for output in chain.from_iterable(outputs):
            total += output.aux_losses
        return total

    def _grad_norm(self, parameters: list[nn.Parameter], *, exist: bool) -> Tensor:
        """``exist``: some rank has such parameters with gradients; if not, the result is 0 without communication."""
        device = self.cluster.device
        norm = (
            global_grad_norm(parameters, device, self.cluster.meshes.pipeline)
            if exist
            else torch.zeros((), device=device)
        )
        return norm.double()

    def update(self, lr_factor: float, number: int) -> None:
        """Make an optimizer step, see `OptimizerGroup.step`. Collective."""
        self.optimizer.step(lr_factor, number)
        for magnitudes in self.magnitudes:
            magnitudes.refresh()

    def state_tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """See `Network.state_tensors`."""
        named = {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state_tensors().items()}
        named |= {f"balance.{name}": tensor for name, tensor in self.balance.state_tensors().items()}
        return super().state_tensors(prefix) | {prefix + name: tensor for name, tensor in named.items()}


def build_network(plan: Plan, cluster: Cluster, *, head: Head = "lm", on_samples: bool = False) -> TrainedNetwork:
    """Build a network with its initial weights. Collective.

    Args:
        head: "lm" predicts tokens; "value" returns one number per token and has no multi-token prediction.
        on_samples: True if batches are samples of a policy: their sizes vary, and the loss of multi-token prediction
            has a gradient for its own layers only, because the policy learns from rewards alone.
    """
    network = _build(plan, cluster, head, is_trained=True, on_samples=on_samples)
    named = list(network.parameters.items())
    ns_dtype = getattr(torch, plan.config.training.mixed_precision_param)
    optimizer = build_optimizers(named, plan.config.optimizer, cluster.device, plan.shape, ns_dtype)
    balance = ExpertBalance(plan.shape, network.models, plan.config.moe, cluster.device)
    parts = TrainedParts.of(network.parameters)
    return TrainedNetwork(**vars(network), optimizer=optimizer, balance=balance, parts=parts)


def build_frozen_network(plan: Plan, cluster: Cluster, *, head: Head = "lm", on_samples: bool = False) -> Network:
    """Build a network without gradients, optimizer and balance of experts. Collective."""
    return _build(plan, cluster, head, is_trained=False, on_samples=on_samples)


def _build(plan: Plan, cluster: Cluster, head: Head, *, is_trained: bool, on_samples: bool) -> Network:
    if head == "value":
        plan = replace(plan, shape=plan.shape.model_copy(update={"num_nextn_predict_layers": 0}))
    group = cluster.meshes.pipeline
    pipeline = None if group is None else Pipeline(plan, group, head)
    if pipeline is not None:
        models = [stage.model for stage in pipeline.stages]
    else:
        with torch.device("meta"):
            models = [Transformer(plan.shape, head=head)]
    for model in models:
        model.mtp_alone = on_samples
        model.requires_grad_(is_trained)
        if is_trained and plan.config.trains_only_drafts:
            model.train_only_drafts()
        freeze_parts(model, plan, is_trained=is_trained)
        parallelize(model, plan, cluster, sizes_vary=on_samples)
    adapter = plan.config.adapter
    named = {name: parameter for model in models for name, parameter in model.named_parameters()}
    parameters = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    network = Network(
        plan=plan,
        cluster=cluster,
        models=models,
        pipeline=pipeline,
        parameters=parameters,
        magnitudes=(
            [Magnitudes(model, adapter, cluster.meshes) for model in models]
            if is_trained and adapter is not None and adapter.name == "dora"
            else []
        ),
        gathered_scales=GatheredScales(named.values(), cluster.meshes.dense),
        rounded_experts=RoundedExperts(models, plan),
        frozen={name: parameter for name, parameter in named.items() if name not in parameters},
    )
    network.route_at(schedule_value(plan.config.moe.router_temperature, plan.config.lr_scheduler.start_tokens))
    return network
