"""Pipeline parallelism: ranks hold different layers and send hidden states from stage to stage.

torch.distributed.pipelining orders the work; this file adds what GLM needs beyond a plain stack of layers. Every rank
reads the whole batch of small integers, so only hidden states and the embeddings for multi-token prediction are sent.
The loss is computed on the last stage; auxiliary losses enter backward on the stage of their layer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from glm46.compat import FunctionContext
from glm46.compute.model.attention_layout import AttentionLayout
from glm46.compute.model.cross_entropy import HeadForm, summed_loss
from glm46.compute.model.transformer import LossSums, StageOutput, Transformer, detached
from glm46.config.parallelism import PIPELINE_SCHEDULES
from glm46.run.parameters import Head
from glm46.run.plan import Plan
from glm46.run.stages import rank_of_stage, split_layers, stages_of_rank

Arguments = dict[str, Any]
"""Arguments of `Transformer.forward` that differ by micro-batch, all tensors except the ``layout``; and fields."""
Fields = Mapping[str, Tensor]
"""Fields of a micro-batch that an objective reads: this rank's part of the sequences, on its device."""


class _Schedule(Protocol):
    """A schedule of `torch.distributed.pipelining`, whose classes have no common public type."""

    def step(self, *inputs: Tensor, target: Tensor, return_outputs: bool, **arguments: object) -> object:
        """Run the forward and the backward of all micro-batches of a step."""


class LocalStage:
    """One pipeline stage of this rank: its part of the model and the results of its micro-batches."""

    def __init__(self, index: int, model: Transformer):
        self.index = index
        self.model = model
        self.outputs: list[LossSums | StageOutput] = []


class Pipeline:
    """Runs the stages of this rank together with the stages of other ranks. Every method is collective over `group`."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup, head: Head = "lm"):
        """Make this rank's stages on the meta device; `parallelize` must prepare their models before the first step."""
        training = plan.config.training
        self._parallelism = plan.config.parallelism
        self._group = group
        self._recomputes = plan.config.activation_checkpoint.mode != "none"
        self._hidden_type = getattr(torch, training.mixed_precision_param)
        self._schedule: tuple[tuple[int, ...], _Schedule] | None = None
        self.stages: list[LocalStage] = []
        split = split_layers(plan.unrolled(plan.shape), self._parallelism.stages, training.seq_len)
        for index in stages_of_rank(self._parallelism, dist.get_rank(group)):
            with torch.device("meta"):
                model = Transformer(plan.shape, head)
            model.keep_layers(split[index])
            self.stages.append(LocalStage(index, model))

    def train(
        self,
        batches: list[Arguments],
        arguments: dict[str, Any],
        objective: Callable[[LossSums, Fields], Tensor],
        auxiliary: Callable[[Tensor], Tensor],
        fields: Sequence[str] = (),
    ) -> list[list[LossSums | StageOutput]]:
        """Compute the gradients of all micro-batches of a step. Collective.

        Args:
            batches: arguments of the model that differ by micro-batch, of equal shape. A model with prediction layers
                needs their inputs and labels, because every layer must take part.
            arguments: arguments of the model that all micro-batches share.
            objective: the loss to differentiate on the last stage, from its output and the `fields` of the batch.
            auxiliary: the loss to differentiate on other stages, from their auxiliary losses.
            fields: names in `batches` that are not arguments of the model.

        Returns:
            For each stage of this rank, the detached output for each micro-batch.
        """
        has_prediction = {"mtp_input_ids", "mtp_labels"} <= batches[0].keys()
        assert has_prediction or not self.stages[0].model.shape.num_nextn_predict_layers
        finishers = [_finish_training(stage, objective, auxiliary) for stage in self.stages]
        models: list[Any] = [stage.model for stage in self.stages]
        forwards = [model.forward for model in models]
        layouts = [batch.get("layout") for batch in batches]  # schedules divide tensors by rows, and nothing else
        for stage, model, forward, finish in zip(self.stages, models, forwards, finishers, strict=True):
            stage.outputs = []
            # Patched, not wrapped: the schedule must see an FSDP module, or it reduces gradients more than once.
            model.forward = _adapted(stage, forward, arguments, finish, fields, layouts)
        try:
            names = [name for name in batches[0] if name != "layout"]
            whole = {name: torch.cat([batch[name] for batch in batches]) for name in names}
            ids = whole.pop("input_ids")
            inputs = (ids,) if self.stages[0].index == 0 else ()
            self._schedule_for(len(batches), batches[0]).step(*inputs, target=ids, return_outputs=False, **whole)
        finally:
            for model, forward in zip(models, forwards, strict=True):
                model.forward = forward
        return [stage.outputs for stage in self.stages]

    @torch.no_grad()
    def evaluate(self, batch: Arguments, form: HeadForm = summed_loss) -> LossSums | None:
        """Return the output for one batch on the rank with the last stage, None on others. Collective."""
        carried: tuple[Tensor, ...] = ()  # what this rank's previous stage has computed, or another rank has sent
        result: LossSums | None = None
        for stage in self.stages:
            if stage.index == 0:
                output = stage.model(**batch, form=form)
            else:
                source = rank_of_stage(self._parallelism, stage.index - 1)
                if source != dist.get_rank(self._group):
                    carried = self._empty_inputs(batch, stage.model)
                    for tensor in carried:
                        dist.recv(tensor, group=self._group, group_src=source)
                rest = {name: tensor for name, tensor in batch.items() if name != "input_ids"}
                output = stage.model(**_stage_inputs(carried), **rest, form=form)
            if isinstance(output, LossSums):
                result = output
                continue
            carried = _sent_tensors(output)
            target = rank_of_stage(self._parallelism, stage.index + 1)
            if target != dist.get_rank(self._group):
                for tensor in carried:
                    dist.send(tensor.contiguous(), group=self._group, group_dst=target)
        return result

    def _empty_inputs(self, batch: Arguments, model: Transformer) -> tuple[Tensor, ...]:
        """Return empty tensors of the shapes that stages send for a batch."""
        rows, length = batch["input_ids"].shape
        # Between stages, each rank of a tensor-parallel group holds a part of the sequence.
        size = (length // self._parallelism.tensor_parallel_degree, model.shape.hidden_size)
        hidden = torch.empty(rows, *size, dtype=self._hidden_type, device=batch["input_ids"].device)
        if "mtp_input_ids" not in batch:
            return (hidden,)
        return hidden, hidden.new_empty(rows, batch["mtp_input_ids"].shape[1], *size)

    def _schedule_for(self, micro_batches: int, batch: Arguments) -> _Schedule:
        """Return the schedule for this many micro-batches of this shape; rebuilt only if a batch ramp changes them."""
        key = (micro_batches, *batch["input_ids"].shape)
        if self._schedule is None or self._schedule[0] != key:
            stages = [self._pipeline_stage(stage, batch) for stage in self.stages]
            name = self._parallelism.pipeline_parallel_schedule
            takes_one_stage = PIPELINE_SCHEDULES[name].has_one_stage
            schedule: _Schedule = get_schedule_class(name)(
                stages[0] if takes_one_stage else stages,
                n_microbatches=micro_batches,
                loss_fn=lambda objective, _: objective,  # the last stage returns it, see `_finish_training`
                scale_grads=False,  # the objective is already divided by the tokens of the whole step
            )
            self._schedule = (key, schedule)
        return self._schedule[1]

    def _pipeline_stage(self, stage: LocalStage, batch: Arguments) -> PipelineStage:
        """Return the stage for torch's schedules, with known shapes: to infer them it would run the model once more."""
        carried = tuple(
            torch.empty_like(tensor, device="meta").requires_grad_()
            for tensor in self._empty_inputs(batch, stage.model)
        )
        is_first = stage.index == 0
        is_last = stage.index == self._parallelism.stages - 1
        return PipelineStage(
            stage.model,
            stage.index,
            self._parallelism.stages,
            batch["input_ids"].device,
            input_args=batch["input_ids"].to("meta") if is_first else carried,
            output_args=torch.empty((), device="meta").requires_grad_() if is_last else carried,
            group=self._group,
            # Schedules that split backward take the gradients of weights parameter by parameter, and would compute a
            # layer again for each: an MoE layer fifteen times. So backward is whole in its first half, and the second
            # one has nothing to do.
            dw_builder=(lambda: lambda: None) if self._recomputes else None,
        )


def _adapted(
    stage: LocalStage,
    forward: Callable[..., Any],
    arguments: dict[str, Any],
    finish: Callable[[LossSums | StageOutput, Fields], Tensor | tuple[Tensor, ...]],
    fields: Sequence[str],
    layouts: Sequence[AttentionLayout | None],
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """Return the model's forward as a schedule calls it: tensors in, tensors out. Other results go to
    ``stage.outputs``."""

    def adapted(*received: Tensor, **batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        inputs = {"input_ids": received[0]} if stage.index == 0 else _stage_inputs(received)
        for_objective = {name: batch.pop(name) for name in fields}
        layout = layouts[len(stage.outputs)]  # every schedule runs the micro-batches of a stage in their order
        output = forward(**inputs, **batch, layout=layout, **arguments)
        # Without the tensors that are sent to the next stage, which would stay in memory for the whole step.
        kept = output if isinstance(output, LossSums) else output._replace(hidden=None, mtp_embeddings=None)
        stage.outputs.append(detached(kept))
        return finish(output, for_objective)

    return adapted


def _finish_training(
    stage: LocalStage, objective: Callable[[LossSums, Fields], Tensor], auxiliary: Callable[[Tensor], Tensor]
) -> Callable[[LossSums | StageOutput, Fields], Tensor | tuple[Tensor, ...]]:
    """Return the function that makes what a schedule takes from the output of a stage: the objective on the last stage,
    the tensors to send on others."""

    def finish(output: LossSums | StageOutput, batch: Fields) -> Tensor | tuple[Tensor, ...]:
        if isinstance(output, LossSums):
            return objective(output, batch)
        hidden = output.hidden
        if output.aux_losses.requires_grad:
            hidden = _WithLoss.apply(hidden, auxiliary(output.aux_losses))
        embeddings = output.mtp_embeddings
        if stage.index > 0 and embeddings is not None:
            # A copy: schedules that split backward detach the outputs in place, which fails for a view of an input.
            embeddings = embeddings.clone()
        return _sent_tensors(output._replace(hidden=hidden, mtp_embeddings=embeddings))

    return finish


def _sent_tensors(output: StageOutput) -> tuple[Tensor, ...]:
    return (output.hidden,) if output.mtp_embeddings is None else (output.hidden, output.mtp_embeddings)


def _stage_inputs(carried: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(("hidden", "mtp_embeddings"), carried, strict=False))


class _WithLoss(torch.autograd.Function):
    """Returns a copy of `x`. Backward adds a gradient of 1 for `loss`, which no other output depends on."""

    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, loss: Tensor) -> Tensor:  # noqa: ARG004 - autograd's
        return x.clone()

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004 - autograd's
        return grad, grad.new_ones((), dtype=torch.float32)
