"""A model in this process, for programs and notebooks: ``from glm46 import load``."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from glm46.compute.model.transformer import Transformer
from glm46.config.errors import UserError
from glm46.config.options import VerbParser
from glm46.engine.inference.generation import Continuation, Generation, decoder_for
from glm46.engine.inference.sampling import Sampling
from glm46.engine.inference.stored_model import stored_model
from glm46.operate.launch.ranks import add_model_options
from glm46.operate.models.counted_shape import CountedShape
from glm46.operate.models.generate_prompts import raise_for_options, read_prompts
from glm46.operate.models.loaded_model import load_model
from glm46.operate.models.model_fit import require_fit
from glm46.storage.chats.chat import ChatOptions, render
from glm46.storage.chats.conversation import BadConversation, parse_conversation
from glm46.storage.data.batches import Batch, BatchBuilder
from glm46.storage.data.shards import NOT_A_TARGET
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.huggingface.hub import fetch_options
from glm46.tasks.pretrain.next_token import count_targets, next_token_loss


class LocalModel:
    """A whole model on one device, with its tokenizer; `load` makes it."""

    def __init__(self, module: Transformer, tokenizer: Tokenizer):
        self.module, self.tokenizer = module, tokenizer
        self.shape = CountedShape.model_validate(module.shape.model_dump())
        self.device = next(module.parameters()).device

    def __repr__(self) -> str:
        counts = f"{self.shape.total_parameters:,} parameters, {self.shape.active_parameters:,} active per token"
        return f"LocalModel({counts}, {next(self.module.parameters()).dtype} on {self.device})"

    def encode(self, text: str) -> list[int]:
        """The token ids of a text; special tokens in it are text."""
        return self.tokenizer.encode(text).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(np.array(ids, np.int64))

    def logits(self, ids: Sequence[int]) -> Tensor:
        """FP32 [S, V]: after each token those of the next one, without padding rows of the head."""
        with torch.no_grad():
            return self.module(torch.tensor([ids], device=self.device))[0, :, : self.tokenizer.vocab_size].float()

    def generate(
        self, prompts: str | Sequence[str], *, chat: bool = False, system: str | None = None, thinking: bool = False,
        max_new_tokens: int = 128, seed: int = 0, **sampling: Any,
    ) -> Any:  # fmt: skip
        """The text that follows a prompt, as ``python -m glm46 generate`` writes it; a list for a list of prompts.

        Args:
            chat: each prompt is a user's message, and the text is the answer.
            system, thinking: of a chat.
            sampling: fields of `Sampling`: ``temperature``, ``top_k``, ``top_p``, ``min_p``. Without a temperature the
                most likely tokens are taken.

        Raises:
            UserError: an option is out of range, or the model has too few positions or no chat format.
        """
        rule = Sampling(**sampling)
        arguments = argparse.Namespace(
            **vars(rule), prompt=[prompts] if isinstance(prompts, str) else list(prompts), chat=chat, system=system,
            thinking=thinking, keep_thoughts=False, max_new_tokens=max_new_tokens, tools=None, speculative=False,
            stop_token=[],
        )  # fmt: skip
        raise_for_options(arguments)
        arguments.tools = ()
        ids, stop = read_prompts(arguments, self.tokenizer, self.shape)
        rows = [Continuation(prompt, max_new_tokens, seed) for prompt in ids]
        decoder = decoder_for(self.module, rows)
        Generation(decoder, rows, sampling=rule, stop=stop, vocab_size=self.tokenizer.vocab_size).run()
        texts = [self.decode(row.text(stop)) for row in rows]
        return texts[0] if isinstance(prompts, str) else texts

    def batch(self, rows: Sequence[str | Mapping]) -> Batch:
        """Documents as one batch, each in rows of its own, as long as the longest: a text, whose tokens are all
        targets, or a conversation ``{"messages": [...]}``, of which the targets are what the model says.

        Raises:
            UserError: there are no rows, or one is no conversation.
        """
        documents = [tokens for number, row in enumerate(rows) for tokens in self._documents(number, row)]
        if not documents:
            raise UserError("rows: expected at least one text or conversation with a target")
        depth, eos = self.shape.num_nextn_predict_layers, self.tokenizer.eos_id
        builder = BatchBuilder(len(documents), max(map(len, documents)), depth, True, eos)
        for number, tokens in enumerate(documents):
            row = np.full(builder.seq_len + 1 + depth, eos, np.int64)
            row[: len(tokens)] = tokens
            builder.add(number, row, len(tokens), [np.array([len(tokens)])], is_marked=True)
        return builder.finish()

    def _documents(self, number: int, row: str | Mapping) -> list[np.ndarray]:
        if isinstance(row, str):
            return [np.append(self.tokenizer.encode(row), self.tokenizer.eos_id).astype(np.int64)]
        try:
            documents = render(parse_conversation(row, "messages"), self.tokenizer, ChatOptions()).documents
        except BadConversation as error:
            raise UserError(f"row {number}: {error}; expected a text or {{'messages': [...]}}") from error
        return [np.where(one.is_target, one.ids, one.ids | NOT_A_TARGET).astype(np.int64) for one in documents]

    def loss(self, batch: Batch, *, mtp_weight: float = 0.0) -> Tensor:
        """FP32 scalar with its graph: the mean over the targets of a batch, as training computes it.

        Args:
            mtp_weight: of the prediction layers, which run if it is not 0.
        """
        names = ["input_ids", "labels", "positions", "document_ids"]
        names += ["mtp_input_ids", "mtp_labels"] if mtp_weight else []
        columns: Any = batch.items()
        inputs: Any = {name: value.to(self.device) for name, value in columns if name in names}
        totals = count_targets([batch], self.shape.num_nextn_predict_layers)
        return next_token_loss(self.module(**inputs), totals, mtp_weight)

    def train_step(self, batch: Batch, optimizer: torch.optim.Optimizer, *, mtp_weight: float = 0.0) -> float:
        """Update the weights by the gradient of `loss`, clipped to a norm of 1; returns the loss before the update.
        Selection biases of routers stay."""
        optimizer.zero_grad()
        loss = self.loss(batch, mtp_weight=mtp_weight)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        optimizer.step()
        return loss.item()


def load(
    folder: str | Path, *, adapter: str | Path | None = None, tokenizer: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None, device: str | None = None,
) -> LocalModel:  # fmt: skip
    """Load a model into this process.

    Args:
        folder: a Hugging Face folder, a step folder (``.../checkpoint/step-000100``), or ``hf://owner/name``.
        adapter: PEFT folder that is added to the weights.
        tokenizer: file or folder; None: the model's own.
        dtype: of the weights; None: bfloat16 on a GPU, else float32.
        device: such as "cpu" or "cuda:0"; None: a GPU if there is one.

    Raises:
        UserError: the folder holds no model, or the model does not fit on this machine.
    """
    if dtype not in (None, "float32", "bfloat16"):
        raise UserError(f"dtype = {dtype!r}: expected 'float32' or 'bfloat16'")
    parser = VerbParser()
    add_model_options(parser)
    arguments = parser.parse_args(["--model", str(folder), "--nproc", "1"])
    vars(arguments).update(
        adapter=None if adapter is None else Path(adapter), tokenizer=tokenizer, dtype=dtype, device=device
    )
    fetch_options(arguments, "model", "adapter", "tokenizer")
    require_fit(arguments, [stored_model(arguments.model).shape], drafts=True)
    module, found, _ = load_model(arguments)
    return LocalModel(module.requires_grad_(True), found)
