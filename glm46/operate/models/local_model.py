"""A model in this process, for programs and notebooks: ``from glm46 import load``."""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from glm46.compute.model.transformer import Transformer
from glm46.config.errors import UserError
from glm46.config.options import VerbParser
from glm46.engine.inference.generation import Continuation, Generation, decoder_for
from glm46.engine.inference.sampling import Sampling
from glm46.engine.inference.stored_model import stored_model
from glm46.operate.launch.model_options import add_model_options
from glm46.operate.models.generate_prompts import raise_for_options, read_prompts
from glm46.operate.models.loaded_model import load_model
from glm46.operate.models.model_fit import require_fit
from glm46.operate.models.python_arguments import python_call, require_type, show_value, texts, token_ids
from glm46.run.counted_shape import CountedShape
from glm46.storage.chats.chat import ChatOptions, render
from glm46.storage.chats.chat_rows import BadConversation
from glm46.storage.chats.conversation import parse_conversation
from glm46.storage.data.batches import Batch, BatchBuilder
from glm46.storage.data.shards import NOT_A_TARGET
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.huggingface.hub import fetch_options
from glm46.tasks.pretrain.next_token import count_targets, next_token_loss

TokenIds: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | Tensor
"""Token ids, [S] or [B, S]."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LocalModel:
    """A complete model on one device with its tokenizer; created by `load`."""

    def __init__(self, module: Transformer, tokenizer: Tokenizer):
        self.module = module
        self.tokenizer = tokenizer
        self.shape = CountedShape.model_validate(module.shape.model_dump())
        self.device = next(module.parameters()).device

    def __repr__(self) -> str:
        counts = f"{self.shape.total_parameters:,} parameters, {self.shape.active_parameters:,} active per token"
        return f"LocalModel({counts}, {next(self.module.parameters()).dtype} on {self.device})"

    @python_call()
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; special tokens in the text are encoded as ordinary text."""
        require_type("text", text, str, "a text; call encode once for each text")
        ids: list[int] = self.tokenizer.encode(text).tolist()
        return ids

    @python_call()
    def decode(self, ids: TokenIds) -> Any:
        """Return the text of token ids, or a list of texts for rows of ids.

        Raises:
            UserError: an id is outside the tokenizer's vocabulary.
        """
        rows = token_ids(ids, vocab_size=self.tokenizer.vocab_size, is_empty_allowed=True)
        if rows.ndim == 1:
            return self.tokenizer.decode(rows.numpy())
        return [self.tokenizer.decode(row.numpy()) for row in rows]

    @python_call()
    def logits(self, ids: TokenIds) -> Tensor:
        """Return FP32 logits of the next token: [S, V] for ids [S], [B, S, V] for ids [B, S]. Padding rows of the head
        are dropped.

        Raises:
            UserError: the ids are not token ids of the model, or a row is too long.
        """
        positions = self.shape.max_position_embeddings
        rows = token_ids(ids, vocab_size=self.shape.vocab_size, max_tokens=positions)
        inputs = torch.atleast_2d(rows).to(self.device)
        with torch.no_grad():
            logits: Tensor = self.module(inputs)[..., : self.tokenizer.vocab_size].float()
        return logits if rows.ndim == 2 else logits[0]

    @python_call(prompt="prompts")
    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        chat: bool = False,
        system: str | None = None,
        thinking: bool = False,
        max_new_tokens: int = 128,
        seed: int = 0,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> Any:
        """Return the text that follows a prompt, as ``python -m glm46 generate`` does; a list for a list of prompts.

        Args:
            chat: treat each prompt as a user's message and return the answer.
            system, thinking: system message and thinking mode of a chat.
            temperature: 0 selects the most likely token; above 0, ``top_k``, ``top_p`` and ``min_p`` restrict the
                sampled tokens, see `Sampling`.

        Raises:
            UserError: an argument is out of range, or the model has too few positions or no chat format.
        """
        require_type("max_new_tokens", max_new_tokens, int, "an integer of at least 1")
        require_type("seed", seed, int, "an integer")
        if not -(2**63) <= seed < 2**63:
            raise UserError(f"seed = {seed}: must fit in 64 bits; take a smaller number")
        require_type("system", system, (str, type(None)), "a text, or None")
        require_type("top_k", top_k, (int, type(None)), "an integer of at least 1, or None")
        for name, value in {"temperature": temperature, "top_p": top_p, "min_p": min_p}.items():
            require_type(name, value, (int, float), "a number")
        rule = Sampling(temperature, top_k, top_p, min_p)
        if not chat and (system is not None or thinking):
            raise UserError("system and thinking belong to a chat; add chat=True")
        arguments = argparse.Namespace(
            **vars(rule),
            prompt=texts(prompts, is_chat=chat),
            chat=chat,
            system=system,
            thinking=thinking,
            keep_thoughts=False,
            reasoning_effort=None,
            max_new_tokens=max_new_tokens,
            tools=None,
            speculative=False,
            draft_tokens=None,
            stop_token=[],
        )
        raise_for_options(arguments)
        arguments.tools = ()
        ids, stop = read_prompts(arguments, self.tokenizer, self.shape)
        rows = [Continuation(prompt, max_new_tokens, seed) for prompt in ids]
        decoder = decoder_for(self.module, rows)
        Generation(decoder, rows, sampling=rule, stop=stop, vocab_size=self.tokenizer.vocab_size).run()
        answers = [self.tokenizer.decode(np.array(row.text(stop), np.int64)) for row in rows]
        return answers[0] if isinstance(prompts, str) else answers

    @python_call()
    def batch(self, rows: str | Mapping[str, Any] | Iterable[str | Mapping[str, Any]]) -> Batch:
        """Build one batch of documents, each in its own row, padded to the longest. A document is a text, whose tokens
        are all targets, or a conversation ``{"messages": [...]}``, whose targets are the assistant's messages.

        Args:
            rows: one document or several.

        Raises:
            UserError: there are no rows, a row is not a valid conversation, or a row exceeds the model's positions.
        """
        if isinstance(rows, (str, Mapping)):
            rows = [rows]
        elif isinstance(rows, (bytes, bytearray)) or not isinstance(rows, Iterable):
            raise UserError(
                f"rows = {show_value(rows)}: must be texts and conversations; give a list such as ['import os']"
            )
        documents = [tokens for number, row in enumerate(rows) for tokens in self._documents(number, row)]
        if not documents:
            raise UserError("rows: expected at least one text or conversation with a target")
        max_length = max(map(len, documents))
        positions = self.shape.max_position_embeddings
        if max_length > positions + 1:
            raise UserError(
                f"rows: the longest has {max_length:,} tokens, and the model has {positions:,} positions "
                "(max_position_embeddings); give shorter rows"
            )
        depth = self.shape.num_nextn_predict_layers
        eos = self.tokenizer.eos_id
        builder = BatchBuilder(len(documents), max_length, depth, True, eos)
        for number, tokens in enumerate(documents):
            row = np.full(builder.seq_len + 1 + depth, eos, np.int64)
            row[: len(tokens)] = tokens
            builder.add(number, row, len(tokens), [np.array([len(tokens)])], is_marked=True)
        return builder.finish()

    def _documents(self, number: int, row: str | Mapping[str, Any]) -> list[np.ndarray]:
        if isinstance(row, str):
            if not row:
                raise UserError(f"rows[{number}] = '': must not be empty; give some text, or leave the row away")
            return [np.append(self.tokenizer.encode(row), self.tokenizer.eos_id).astype(np.int64)]
        if not isinstance(row, Mapping):
            raise UserError(
                f"rows[{number}] = {show_value(row)}: must be a text or a conversation {{'messages': [...]}}; "
                "for ids give decode(ids)"
            )
        try:
            documents = render(parse_conversation(row, "messages"), self.tokenizer, ChatOptions()).documents
        except BadConversation as error:
            raise UserError(f"rows[{number}]: {error}; expected a text or {{'messages': [...]}}") from error
        return [
            np.where(document.is_target, document.ids, document.ids | NOT_A_TARGET).astype(np.int64)
            for document in documents
        ]

    @python_call()
    def loss(self, batch: Batch, *, mtp_weight: float = 0.0) -> Tensor:
        """Return the mean loss over the targets of a batch, as in training: an FP32 scalar with its autograd graph.

        Args:
            mtp_weight: weight of the loss of the prediction layers, which run only if it is not 0.
        """
        if not isinstance(batch, dict) or "labels" not in batch:
            raise UserError(f"batch = {show_value(batch)}: must be a batch; give the result of batch(rows)")
        require_type("mtp_weight", mtp_weight, (int, float), "a number")
        names = ["input_ids", "labels", "positions", "document_ids"]
        names += ["mtp_input_ids", "mtp_labels"] if mtp_weight else []
        columns: Any = batch.items()
        inputs: Any = {name: value.to(self.device) for name, value in columns if name in names}
        totals = count_targets([batch], self.shape.num_nextn_predict_layers)
        return next_token_loss(self.module(**inputs), totals, mtp_weight)

    @python_call()
    def train_step(self, batch: Batch, optimizer: torch.optim.Optimizer, *, mtp_weight: float = 0.0) -> float:
        """Update the weights with the gradient of `loss`, clipped to a norm of 1; return the loss before the update.
        The routers' selection biases do not change."""
        require_type("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer of module.parameters()")
        optimizer.zero_grad()
        loss = self.loss(batch, mtp_weight=mtp_weight)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        optimizer.step()
        return loss.item()


@python_call(model="folder")
def load(
    folder: str | os.PathLike[str],
    *,
    adapter: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: Literal["float32", "bfloat16"] | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> LocalModel:
    """Load a model into this process.

    Args:
        folder: a Hugging Face folder, a step folder (``.../checkpoint/step-000100``), or ``hf://owner/name``.
        adapter: PEFT folder to merge into the weights.
        tokenizer: file or folder; None for the model's own tokenizer.
        dtype: type of the weights, as a name or a `torch.dtype`; None for bfloat16 on a GPU, else float32.
        device: a name such as "cpu" or "cuda:0", or a `torch.device`; None for a GPU if there is one.

    Raises:
        UserError: the folder contains no model, or the model does not fit on this machine.
    """
    require_type("folder", folder, (str, os.PathLike), "a folder, or hf://owner/name")
    require_type("adapter", adapter, (str, os.PathLike, type(None)), "a folder, hf://owner/name, or None")
    require_type("tokenizer", tokenizer, (str, os.PathLike, type(None)), "a file or folder, or None")
    require_type("device", device, (str, torch.device, type(None)), "a name such as 'cpu' or 'cuda:0'")
    if dtype not in (None, *_DTYPES, *_DTYPES.values()):
        raise UserError(f"dtype = {dtype!r}: expected 'float32' or 'bfloat16'")
    parser = VerbParser()
    add_model_options(parser)
    arguments = parser.parse_args([f"--model={folder}", "--nproc", "1"])
    vars(arguments).update(
        adapter=None if adapter is None else Path(adapter),
        tokenizer=None if tokenizer is None else str(tokenizer),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        device=None if device is None else str(device),
    )
    fetch_options(arguments, "model", "adapter", "tokenizer")
    require_fit(arguments, stored_model(arguments.model).shape, drafts=True)
    module, local_tokenizer, _ = load_model(arguments)
    return LocalModel(module.requires_grad_(True), local_tokenizer)
