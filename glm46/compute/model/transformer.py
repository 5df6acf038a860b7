"""The GLM-4.5/4.6 model: embedding, decoder layers, head, multi-token prediction."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from glm46.compute.model.attention_layout import AttentionLayout, attention_layout
from glm46.compute.model.block import TransformerBlock
from glm46.compute.model.cross_entropy import HeadForm, HeadOutput, VocabularyPart, summed_loss
from glm46.compute.model.indexer import is_index_weight
from glm46.compute.model.layers import Linear, RMSNorm, local_weight
from glm46.compute.model.mtp import MTPLayer
from glm46.compute.model.rope import rotary_tables
from glm46.compute.model.router import Router, RoutingOptions, RoutingStatistics
from glm46.compute.model.sparse_attention import SparseState
from glm46.config.model import ModelShape
from glm46.run.function import NetworkFunction
from glm46.run.parameters import Head


class LossSums(NamedTuple):
    """Result of a forward pass over labelled tokens. Sums, not means: only the caller knows the token count of the
    whole optimizer step over all ranks."""

    loss: Tensor | None
    """FP32 scalar: negative log-likelihood summed over the labels; None if the head's form is not `summed_loss`."""
    mtp_losses: Tensor
    """FP32 [K]: the same sum for each multi-token prediction depth."""
    aux_losses: Tensor
    """FP32 [4], sums over real tokens and layers: balance loss and z-loss of MoE layers; index loss, and attention mass
    on the keys that indexers would choose, see `index_loss`."""
    tokens_per_expert: Tensor
    """int64 [MoE layers, E]: real tokens of each expert; multi-token prediction layers last."""
    overflow: Tensor
    """int64 [MoE layers]: assignments dropped by the capacity."""
    predictions: Tensor
    """int64 [1 + K, B, S]: most likely token of the model, then of each prediction depth."""
    logprobs: Tensor | None = None
    """See `HeadOutput`; for the main model, not for a prediction depth."""
    entropy: Tensor | None = None
    """See `HeadOutput`; for the main model."""
    values: Tensor | None = None
    """FP32 [B, S]: output of the value head, one value per token."""


class StageOutput(NamedTuple):
    """Result of a part of the model without the last layer."""

    hidden: Tensor
    """[B, S, D], input of the next part."""
    mtp_embeddings: Tensor | None
    """[B, K, S, D]: embeddings of the tokens that the prediction depths read. The first part computes them, the last
    part uses them."""
    aux_losses: Tensor
    """See `LossSums`; for the layers of this part only, like the next two fields."""
    tokens_per_expert: Tensor
    overflow: Tensor


_Output = TypeVar("_Output", LossSums, StageOutput)


def detached(output: _Output) -> _Output:
    """Return the same values without gradient."""
    return output._replace(**{name: x.detach() for name, x in output._asdict().items() if x is not None})


class OutputHead(nn.Module):
    """Projection to the vocabulary, or directly to the loss or log-probabilities of labels."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    product = staticmethod(Linear.product)

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, form: HeadForm = summed_loss
    ) -> Tensor | HeadOutput:
        """Compute logits [B, S, V] from [B, S, D]; with labels, the result of `form`, computed in chunks."""
        if labels is None:
            return self.product(hidden, self.weight, None)
        return form(hidden, self.weight, labels, None)


def _frozen_head_loss(hidden: Tensor, weight: Tensor, labels: Tensor, part: VocabularyPart | None) -> HeadOutput:
    """`summed_loss` without a gradient of the weight."""
    return summed_loss(hidden, weight.detach(), labels, part)


class ValueHead(nn.Module):
    """Projection to one number per token."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size))

    product = staticmethod(Linear.product)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, S, D] to FP32 [B, S]."""
        # A copy, not a view: FSDP puts hooks on the outputs of the model and warns about views.
        return self.product(hidden, local_weight(self.weight), None).squeeze(-1).to(torch.float32, copy=True)


class Transformer(nn.Module):
    """GLM-4.5/4.6 mixture-of-experts decoder, or a part of it with consecutive layers.

    Layers are in dictionaries keyed by their number, so that parameters of a part keep their names.
    """

    def __init__(self, shape: ModelShape, head: Head = "lm"):
        super().__init__()
        self.shape = shape
        self.embed_tokens: nn.Embedding | None = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleDict()
        for i in range(shape.num_hidden_layers):
            is_dense = i < shape.first_k_dense_replace
            self.layers[str(i)] = TransformerBlock(shape, is_dense=is_dense, has_indexer=shape.has_indexer(i))
        self.norm: RMSNorm | None = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = OutputHead(shape.vocab_size, shape.hidden_size) if head == "lm" else None
        self.value_head = ValueHead(shape.hidden_size) if head == "value" else None
        self.router_temperature = 1.0
        """See `NetworkFunction`; `compute_as` sets it."""
        self._temperature: Tensor | None = None
        """The same as an argument of compiled layers, see `RoutingOptions.temperature`."""
        self.mtp_alone = False
        """Whether the losses of the prediction layers give gradients only to these layers, and no gradient to what they
        share with the main model: hidden states, embedding and head."""
        self.mtp = nn.ModuleDict({str(k): MTPLayer(shape) for k in range(shape.num_nextn_predict_layers)})

    def cast(self, dtype: torch.dtype) -> "Transformer":
        """Change the dtype of all parameters in place. Selection biases stay FP32: BF16 is too coarse for them."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def train_only_drafts(self) -> None:
        """Freeze everything except the prediction layers, in place."""
        self.mtp_alone = True
        self.requires_grad_(False)
        self.mtp.requires_grad_(True)

    def compute_as(self, function: NetworkFunction, device: torch.device, *, is_scheduled: bool = False) -> None:
        """Use the sliding window, the RoPE scaling and the router temperature of a function from the next call on.
        Weights and compiled layers are unchanged: layers get the rotary tables, the attention layout and the
        temperature as arguments.

        Args:
            device: device of the weights.
            is_scheduled: the temperature may change, so compiled layers get a tensor even if it is 1.
        """
        changes = {name: getattr(function.shape, name) for name in ("sliding_window", "rope_scaling")}
        self.shape = self.shape.model_copy(update=changes)
        self.router_temperature = function.router_temperature
        has_temperature = is_scheduled or function.router_temperature != 1.0
        # Filled on the device, without a copy from the host.
        self._temperature = torch.full((), function.router_temperature, device=device) if has_temperature else None

    def routing(self, options: RoutingOptions) -> RoutingOptions:
        """Return the options with the temperature of this model."""
        return options if self._temperature is None else replace(options, temperature=self._temperature)

    def keep_layers(self, layers: range) -> None:
        """Keep only these layers, in place. The embedding stays with the first layer; norm, head and multi-token
        prediction stay with the last."""
        for i in range(self.shape.num_hidden_layers):
            if i not in layers:
                del self.layers[str(i)]
        if layers.start > 0:
            self.embed_tokens = None
        if layers.stop < self.shape.num_hidden_layers:
            self.norm = None
            self.lm_head = None
            self.value_head = None
            self.mtp = nn.ModuleDict()

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        hidden: Tensor | None = None,
        mtp_embeddings: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        layout: AttentionLayout | None = None,
        is_real: Tensor | None = None,
        labels: Tensor | None = None,
        mtp_input_ids: Tensor | None = None,
        mtp_labels: Tensor | None = None,
        routes: Tensor | None = None,
        kept: Tensor | None = None,
        options: RoutingOptions = RoutingOptions(),  # noqa: B008 - frozen
        form: HeadForm = summed_loss,
    ) -> "Tensor | LossSums | StageOutput":
        """Compute logits, or loss sums if labels are given. A part without the head computes the next part's input.

        Args:
            input_ids: int64 [B, S]; a part without the embedding takes hidden and mtp_embeddings instead.
            hidden, mtp_embeddings: outputs of the previous part, see `StageOutput`.
            positions: integer [B, S]; None counts from 0.
            document_ids: integer [B, S], -1 for padding; tokens attend within their document. None: one document.
            layout: which tokens attend to which. None: derived from document_ids and the window, which waits for the
                device; required under context parallelism.
            is_real: boolean [B, S], false for padding, which is not routed and not counted. None: derived from
                document_ids, or no padding.
            labels: int64 [B, S], -100 without a target.
            mtp_input_ids, mtp_labels: int64 [B, K, S], see docs/data.md. Depth k runs layer k modulo the number of
                multi-token prediction layers. Without these tensors they do not run.
            routes: [B, S, L, A] of `route_type`, for the whole model: experts to use instead of the routers' choice,
                see `compute/model/routes.py`. A part uses the routes of its own layers.
            kept: integer [B, K, S]: token ids to which the distribution of a label is restricted, see `token_logprobs`,
                which must be the form.
            options: routing options of training; the temperature is replaced by the model's.
            form: form of the head for `labels`; `mtp_labels` always use `summed_loss`.

        Returns:
            Logits [B, S, V], or `LossSums`, or `StageOutput`.
        """
        if hidden is None:
            assert self.embed_tokens is not None and input_ids is not None, "a later part takes hidden states"
            hidden = self.embed_tokens(input_ids)
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
        if is_real is None and document_ids is not None:
            is_real = document_ids >= 0
        layout = layout or self._layout(document_ids, positions)
        # Built here, not passed in: every pipeline stage builds its own from the same small integers.
        context = rotary_tables(positions, self.shape, hidden.dtype), layout, is_real, self.routing(options)
        statistics: list[RoutingStatistics] = []
        sparse = SparseState()
        if options.index_loss != "none":
            sparse = SparseState(losses=torch.zeros(2, device=hidden.device, requires_grad=torch.is_grad_enabled()))
        for i, layer in self.layers.items():
            moe_index = int(i) - self.shape.first_k_dense_replace
            layer_routes = None if routes is None or moe_index < 0 else routes[:, :, moe_index]
            hidden, layer_statistics, added = layer(hidden, *context, layer_routes, sparse)
            sparse = sparse if added is None else sparse.followed_by(added)
            if layer_statistics is not None:
                statistics.append(layer_statistics)
        if self.embed_tokens is not None and mtp_input_ids is not None:
            mtp_embeddings = torch.stack([self.embed_tokens(ids) for ids in mtp_input_ids.unbind(1)], dim=1)
        if self.norm is None:
            return StageOutput(hidden, mtp_embeddings, *self._sums(statistics, sparse.losses, hidden))
        hidden = self.norm(hidden)
        if self.value_head is not None:
            no_losses = hidden.new_zeros(0, dtype=torch.float32)
            predictions = torch.empty(0, *positions.shape, dtype=torch.int64, device=hidden.device)
            values = self.value_head(hidden)
            return LossSums(None, no_losses, *self._sums(statistics, sparse.losses, hidden), predictions, values=values)
        if labels is None:
            assert self.lm_head is not None, "the last part has one of the two heads"
            logits: Tensor = self.lm_head(hidden)
            return logits
        restriction: dict[str, Any] = {} if kept is None else {"kept": kept}
        form = partial(form, **restriction)
        mtp_inputs = None if mtp_embeddings is None or mtp_labels is None else (mtp_embeddings, mtp_labels)
        return self._loss_sums(hidden, labels, form, mtp_inputs, statistics, sparse.losses, context)

    def _layout(self, document_ids: Tensor | None, positions: Tensor) -> AttentionLayout | None:
        layout = attention_layout(document_ids, positions.shape, self.shape.sliding_window)
        return None if layout is None else layout.to(positions.device)

    def _loss_sums(
        self,
        hidden: Tensor,
        labels: Tensor,
        form: HeadForm,
        mtp_inputs: tuple[Tensor, Tensor] | None,
        statistics: list[RoutingStatistics],
        index_losses: Tensor | None,
        context: tuple[object, ...],
    ) -> LossSums:
        """Apply the head, and the prediction depths if there are embeddings and labels for them. ``context``: further
        arguments of a layer."""
        assert self.lm_head is not None, "the last part has one of the two heads"
        heads = [self.lm_head(hidden, labels, form)]
        if mtp_inputs is not None:
            mtp_embeddings, mtp_labels = mtp_inputs
            if self.mtp_alone:
                # Same values, but the gradient is zeros instead of None: pipeline stages send it back.
                mtp_embeddings = mtp_embeddings + (mtp_embeddings.detach() - mtp_embeddings)
                hidden = hidden.detach()
            layers = list(self.mtp.values())
            layer_statistics: list[RoutingStatistics] = []
            depths = mtp_labels.shape[1] if layers else 0  # a model without prediction layers ignores their targets
            for k in range(depths):
                index = k % len(layers)
                # Each depth makes its own choice of keys.
                state = SparseState(losses=index_losses)
                hidden, call_statistics, added = layers[index](hidden, mtp_embeddings[:, k], *context, state)
                index_losses = None if added is None else added.losses
                if k < len(layers):
                    layer_statistics.append(call_statistics)
                else:
                    layer_statistics[index] = layer_statistics[index].with_call(call_statistics)
                depth_form = _frozen_head_loss if self.mtp_alone else summed_loss
                heads.append(self.lm_head(hidden, mtp_labels[:, k], depth_form))
            statistics += layer_statistics
        mtp_losses = [head.loss for head in heads[1:]]
        return LossSums(
            heads[0].loss,
            torch.stack(mtp_losses) if mtp_losses else hidden.new_zeros(0, dtype=torch.float32),
            *self._sums(statistics, index_losses, hidden),
            predictions=torch.stack([head.predictions for head in heads]),
            logprobs=heads[0].logprobs,
            entropy=heads[0].entropy,
        )

    def _sums(
        self, statistics: list[RoutingStatistics], index_losses: Tensor | None, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return auxiliary losses, tokens per expert and overflow; works without any MoE layer too."""
        no_losses = hidden.new_zeros(2, dtype=torch.float32)
        router_losses = torch.stack([layer.aux_losses for layer in statistics]).sum(0) if statistics else no_losses
        losses = torch.cat([router_losses, no_losses if index_losses is None else index_losses])
        if not statistics:
            counts = hidden.new_zeros(0, self.shape.n_routed_experts, dtype=torch.int64)
            return losses, counts, counts.new_zeros(0)
        counts = torch.stack([layer.tokens_per_expert for layer in statistics])
        return losses, counts, torch.stack([layer.overflow for layer in statistics])

    def freeze_indexers(self) -> None:
        """Exclude the indexers from training, in place."""
        for name, parameter in self.named_parameters():
            if is_index_weight(name):
                parameter.requires_grad_(False)

    def train_only_indexers(self) -> None:
        """Freeze everything except the indexers, in place."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_index_weight(name))

    def routers(self) -> dict[str, Router]:
        """Return the routers of this part by name, in the order of `LossSums.tokens_per_expert`."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Router)}


def router_names(shape: ModelShape) -> list[str]:
    """List the names of the routers of the whole model, in the order of `LossSums.tokens_per_expert`."""
    layers = [f"layers.{i}.mlp.router" for i in range(shape.first_k_dense_replace, shape.num_hidden_layers)]
    return layers + [f"mtp.{k}.block.mlp.router" for k in range(shape.num_nextn_predict_layers)]
