"""Our models as models of lm-eval (EleutherAI's lm-evaluation-harness), which this module needs.

Texts become tokens as in lm-eval's own backend `hf`, and requests are truncated and cut nowhere else: what it gives for
the folder of a model is what this gives for the model.
"""

from collections.abc import Mapping, Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from glm46.config.errors import UserError
from glm46.engine.evaluation.answers import Answering, EvaluationPrompt, Keys
from glm46.engine.inference.sampling import Sampling
from glm46.engine.inference.scoring import ContinuationRequest
from glm46.storage.chats.chat import chat_prompt, opened_thought
from glm46.storage.chats.chat_template import format_of
from glm46.storage.chats.conversation import BadConversation, parse_prompt
from glm46.storage.data.tokenizer import END_OF_TEXT, Tokenizer

_MAX_NEW_TOKENS = 256
"""Of a task that names no number; as in lm-eval."""

_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p"}


class LmEvalModel(TemplateLM):
    """The model that lm-eval's tasks ask. It takes all requests, on rank 0.

    Args:
        positions: tokens that the model reads at most.
        keys: names in messages.
        thinking: whether the model may think before it answers in a chat.
    """

    def __init__(self, answers: Answering, tokenizer: Tokenizer, positions: int, keys: Keys, *, thinking: bool = False):
        super().__init__()
        self._thinking = thinking
        self._answers, self._tokenizer, self._positions, self._keys = answers, tokenizer, positions, keys

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Token ids of a text, in which the name of a special token is the token."""
        return self._tokenizer.encode_with_special(string).tolist()

    @property
    def tokenizer_name(self) -> str:
        """Of the files in which lm-eval would keep requests."""
        return self._tokenizer.fingerprint

    def apply_chat_template(self, chat_history: Sequence[Mapping], add_generation_prompt: bool = True) -> str:
        """The text of messages up to where the model answers; without ``add_generation_prompt`` the last message begins
        its answer.

        Raises:
            UserError: the messages are not a prompt.
        """
        asked, begun = (chat_history, []) if add_generation_prompt else (chat_history[:-1], chat_history[-1:])
        try:
            messages = parse_prompt([*asked])
        except BadConversation as error:
            raise UserError(
                f"{self._keys.names}: examples that are no chat ({error}); leave out --apply-chat-template"
            ) from error
        format = format_of(self._tokenizer)
        thinking = self._thinking and not (begun and format.opens_thought)
        prompt = self._tokenizer.decode(chat_prompt(self._tokenizer, messages, thinking=thinking))
        closed = "\n<think></think>" if begun and thinking else ""
        return prompt + closed + "".join(f"{format.line}{message['content'].strip()}" for message in begun)

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding writes it.

        Raises:
            UserError: a request has more tokens than the model's positions.
        """
        self._tasks = [request.task_name for request in requests]
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[tuple], **_: object) -> list[tuple[float, bool]]:
        found = [ContinuationRequest(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        for request, task in zip(found, self._tasks, strict=True):
            self._require_room(task, len(request.inputs), f"lower {self._keys.fewshot}, or leave it out")
        return [(one.logprob, one.is_greedy) for one in self._answers.scores(found)]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Log-probability of each text, in windows as long as the model's positions."""
        parts, owners = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self._positions, context_len=1
            )
            for context, continuation in map(make_disjoint_window, windows):
                parts.append(ContinuationRequest(tuple(context), tuple(continuation)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, found in zip(owners, self._answers.scores(parts), strict=True):
            sums[owner] += found.logprob
        return sums

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """The text after each context, up to a stop sequence.

        Raises:
            UserError: a context and its new tokens have more tokens than the model's positions, or a task wants a kind
                of sampling that there is not.
        """
        prompts, repeats = [], dict[str, int]()
        for request in requests:
            context, stated = request.args
            options = self._options(request.task_name, stated)
            tokens, until = tuple(self.tok_encode(context)), options.get("until") or []
            most = options["max_gen_toks"]
            remedy = f"lower {self._keys.fewshot}, or max_gen_toks of the task"
            self._require_room(request.task_name, len(tokens) + most, remedy)
            sampling = Sampling(
                options.get("temperature") or 0.0, options.get("top_k") or None, options.get("top_p") or 1.0,
                options.get("min_p") or 0.0,
            )  # fmt: skip
            # A text asked for again is another sample.
            seed = repeats[context] = repeats.get(context, -1) + 1
            ends = [until] if isinstance(until, str) else until
            ends = tuple(end for end in (*ends, END_OF_TEXT) if end)
            opening = f"<|assistant|>{opened_thought(self._tokenizer, self._thinking)}"
            seed, thinks = 0 if sampling.is_greedy else seed, self._thinking and context.endswith(opening)
            prompts.append(EvaluationPrompt(tokens or (self.eot_token_id,), most, ends, sampling, seed, thinks))
        return self._answers.texts(prompts)

    def _options(self, task: str, stated: dict) -> dict:
        """The generation_kwargs of a task with their defaults."""
        try:
            options = normalize_gen_kwargs(stated, _MAX_NEW_TOKENS)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self._keys.names} {task}: generation_kwargs = {stated}: {error}; correct it") from error
        until = options.get("until") or []
        if not (isinstance(until, str) or isinstance(until, list) and all(isinstance(end, str) for end in until)):
            raise UserError(f"{self._keys.names} {task}: generation_kwargs.until = {until!r}: give a list of texts")
        if unknown := [name for name in options if name not in _KNOWN]:
            raise UserError(
                f"{self._keys.names} {task}: generation_kwargs.{unknown[0]} is not supported; there are "
                f"{', '.join(sorted(_KNOWN))}"
            )
        return options

    def _require_room(self, task: str, tokens: int, remedy: str) -> None:
        if tokens > self._positions:
            raise UserError(
                f"{self._keys.names} {task}: a request has {tokens} tokens, the model {self._positions} positions "
                f"(max_position_embeddings); {remedy}"
            )
