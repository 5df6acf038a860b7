"""Adapter of our models to lm-eval (EleutherAI's lm-evaluation-harness), which this module requires.

Texts are tokenized and requests truncated like in lm-eval's own backend `hf`, so that both backends return the same
results for a model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from glm46.config.errors import UserError
from glm46.engine.evaluation.answers import Answers, EvaluationPrompt
from glm46.engine.inference.sampling import Sampling
from glm46.engine.inference.scoring import ContinuationRequest
from glm46.storage.chats.chat import chat_prompt, opened_thought
from glm46.storage.chats.chat_rows import BadConversation
from glm46.storage.chats.chat_template import format_of
from glm46.storage.chats.conversation import parse_prompt
from glm46.storage.data.tokenizer import END_OF_TEXT, Tokenizer

_MAX_NEW_TOKENS = 256
"""Default for a task without max_gen_toks, the same as in lm-eval."""

_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p"}


class LmEvalModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """Model for the tasks of lm-eval. It receives all requests on rank 0.

    Args:
        positions: maximum number of tokens that the model can read.
        thinking: True if the model may think before it answers in a chat.
    """

    def __init__(self, answers: Answers, tokenizer: Tokenizer, positions: int, *, thinking: bool = False):
        super().__init__()
        self._answers = answers
        self._tokenizer = tokenizer
        self._positions = positions
        self._thinking = thinking

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Tokenize a text; names of special tokens become these tokens."""
        ids: list[int] = self._tokenizer.encode_with_special(string).tolist()
        return ids

    @property
    def tokenizer_name(self) -> str:
        """Name for the files in which lm-eval would cache requests."""
        return self._tokenizer.fingerprint

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Format messages as text up to the start of the model's answer; without ``add_generation_prompt`` the last
        message is the begin of the answer.

        Raises:
            UserError: the messages are not a prompt.
        """
        history, answer_start = (chat_history, []) if add_generation_prompt else (chat_history[:-1], chat_history[-1:])
        try:
            messages = parse_prompt([*history])
        except BadConversation as error:
            raise UserError(f"--tasks: examples that are no chat ({error}); leave out --apply-chat-template") from error
        format = format_of(self._tokenizer)
        thinking = self._thinking and not (answer_start and format.opens_thought)
        prompt = self._tokenizer.decode(chat_prompt(self._tokenizer, messages, thinking=thinking))
        closed = "\n<think></think>" if answer_start and thinking else ""
        return prompt + closed + "".join(f"{format.line}{message['content'].strip()}" for message in answer_start)

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Compute the log-probability of each continuation, and whether greedy decoding generates it.

        Raises:
            UserError: a request has more tokens than the model's positions.
        """
        self._tasks = [request.task_name for request in requests]
        results: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return results

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, ...]], **_: object) -> list[tuple[float, bool]]:
        converted = [ContinuationRequest(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        for request, task in zip(converted, self._tasks, strict=True):
            self._require_room(task, len(request.inputs), "lower --fewshot, or leave it out")
        return [(result.logprob, result.is_greedy) for result in self._answers.scores(converted)]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Compute the log-probability of each text, in windows as long as the model's positions."""
        parts = []
        owners = []
        for number, request in enumerate(requests):
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self._positions, context_len=1
            )
            for context, continuation in map(make_disjoint_window, windows):
                parts.append(ContinuationRequest(tuple(context), tuple(continuation)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, window_score in zip(owners, self._answers.scores(parts), strict=True):
            sums[owner] += window_score.logprob
        return sums

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Generate the text after each context, up to a stop sequence.

        Raises:
            UserError: a context and its new tokens have more tokens than the model's positions, or a task
                requests an unsupported kind of sampling.
        """
        prompts = []
        repeats = dict[str, int]()
        for request in requests:
            context, task_options = request.args
            options = self._options(request.task_name, task_options)
            tokens = tuple(self.tok_encode(context))
            until = options.get("until") or []
            max_new_tokens = options["max_gen_toks"]
            remedy = "lower --fewshot, or max_gen_toks of the task"
            self._require_room(request.task_name, len(tokens) + max_new_tokens, remedy)
            sampling = Sampling(
                options.get("temperature") or 0.0,
                options.get("top_k") or None,
                options.get("top_p") or 1.0,
                options.get("min_p") or 0.0,
            )
            # A repeated request is another sample.
            seed = repeats[context] = repeats.get(context, -1) + 1
            ends = [until] if isinstance(until, str) else until
            ends = tuple(end for end in (*ends, END_OF_TEXT) if end)
            opening = f"<|assistant|>{opened_thought(self._tokenizer, self._thinking)}"
            seed = 0 if sampling.is_greedy else seed
            thinks = self._thinking and context.endswith(opening)
            prompts.append(
                EvaluationPrompt(tokens or (self.eot_token_id,), max_new_tokens, ends, sampling, seed, thinks)
            )
        return self._answers.texts(prompts)

    def _options(self, task: str, task_options: dict[str, Any]) -> dict[str, Any]:
        """Return the generation_kwargs of a task with their defaults."""
        try:
            options: dict[str, Any] = normalize_gen_kwargs(task_options, _MAX_NEW_TOKENS)
        except (TypeError, ValueError) as error:
            raise UserError(f"--tasks {task}: generation_kwargs = {task_options}: {error}; correct it") from error
        until = options.get("until") or []
        if not (isinstance(until, str) or isinstance(until, list) and all(isinstance(end, str) for end in until)):
            raise UserError(f"--tasks {task}: generation_kwargs.until = {until!r}: give a list of texts")
        if unknown := [name for name in options if name not in _KNOWN]:
            raise UserError(
                f"--tasks {task}: generation_kwargs.{unknown[0]} is not supported; there are "
                f"{', '.join(sorted(_KNOWN))}"
            )
        return options

    def _require_room(self, task: str, tokens: int, remedy: str) -> None:
        if tokens > self._positions:
            raise UserError(
                f"--tasks {task}: a request has {tokens} tokens, the model {self._positions} positions "
                f"(max_position_embeddings); {remedy}"
            )
