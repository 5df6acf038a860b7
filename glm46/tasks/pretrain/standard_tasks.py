"""Tasks of lm-eval in validations: rank 0 runs them, and all ranks answer with the network that is trained."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.config.errors import UserError
from glm46.config.training import ValidationTaskConfig
from glm46.engine.evaluation.answers import Answering, EvaluationPrompt, FirstRankLeads, Keys, has_ended, text_of
from glm46.engine.evaluation.rows import Figures, Row
from glm46.engine.evaluation.standard import StandardTasks, find_tasks, run_tasks
from glm46.engine.inference.scoring import ContinuationRequest, ContinuationScore
from glm46.engine.training.network import Network
from glm46.storage.data.batches import IGNORE, Batch
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.huggingface.tokenizer_files import stop_ids
from glm46.tasks.pretrain.network_rows import batch_of_rows, greedy_answers, measured_figures, tokens_at_once


class StandardMeasure:
    """The tasks of one entry of [[validation.tasks]]."""

    def __init__(self, task: ValidationTaskConfig, place: str, tokenizer: Tokenizer, positions: int):
        """Load the tasks and their data on rank 0, and make all requests once, so that each fault is found before the
        first step.

        Args:
            place: of the entry, for messages.
            positions: of the model.

        Raises:
            UserError: see `find_tasks` and `LmEvalModel`, or a task generates its answers.
        """
        self._tokenizer, self._positions = tokenizer, positions
        self._tasks: StandardTasks | None = None
        if dist.get_rank() != 0:
            return
        code = "judge a step with evaluate --run-code"
        keys = Keys(names := f"{place}.names", names, f"{place}.fewshot", code, others=())
        self._tasks = find_tasks(task.names, [], fewshot=task.fewshot, limit=task.samples, keys=keys)
        self._run(self._tasks, _NoAnswers(keys))

    def columns(self, network: Network) -> dict[str, float]:
        """The metrics by ``task/<task>/<metric>``. Collective."""
        answers = NetworkAnswers(network, self._tokenizer)
        work = answers.follow if self._tasks is None else partial(self._lead, self._tasks, answers)
        found: list[Any] = [run_on_all_ranks(work)]
        dist.broadcast_object_list(found, src=0)
        return {f"task/{name}": value for name, value in found[0].items()}

    def _lead(self, tasks: StandardTasks, answers: "NetworkAnswers") -> dict[str, float]:
        try:
            return self._run(tasks, answers)
        finally:
            answers.end()

    def _run(self, tasks: StandardTasks, answers: Answering) -> dict[str, float]:
        from glm46.engine.evaluation.lm_eval_model import LmEvalModel

        model = LmEvalModel(answers, self._tokenizer, self._positions, tasks.keys)
        return run_tasks(tasks, model, has_errors=False)["columns"]


class _NoAnswers:
    """Takes requests and refuses those that a validation cannot answer."""

    def __init__(self, keys: Keys):
        self._keys = keys

    def scores(self, requests: Sequence[ContinuationRequest]) -> list[ContinuationScore]:
        return [ContinuationScore(0.0, False)] * len(requests)

    def texts(self, prompts: Sequence[EvaluationPrompt]) -> list[str]:
        for prompt in prompts:
            if not prompt.sampling.is_greedy:
                raise UserError(
                    f"{self._keys.names}: a task with generation_kwargs.temperature {prompt.sampling.temperature:g} "
                    "generates its answers; a validation takes the most likely tokens: judge a step with evaluate"
                )
        return [""] * len(prompts)


class NetworkAnswers(FirstRankLeads):
    """Answers requests with a network on any layout; see `Answering`."""

    def __init__(self, network: Network, tokenizer: Tokenizer):
        super().__init__(network.plan.layout.world_size)
        self._network, self._tokenizer, self._stop = network, tokenizer, frozenset(stop_ids(tokenizer))

    def scores(self, requests: Sequence[ContinuationRequest]) -> list[ContinuationScore]:
        """See `Answering`. The others run `follow`."""
        return self._lead("_score", requests)

    def texts(self, prompts: Sequence[EvaluationPrompt]) -> list[str]:
        """See `Answering`. The others run `follow`."""
        return self._lead("_continue", prompts)

    def _score(self, requests: Sequence[ContinuationRequest]) -> list[ContinuationScore]:
        """Collective."""
        figures = measured_figures(self._network, _Requests(requests))
        found = (figures[str(number)] for number in range(len(requests)))
        return [ContinuationScore(logprob, others == 0) for logprob, others in found]

    def _continue(self, prompts: Sequence[EvaluationPrompt]) -> list[str]:
        """Collective."""
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number].tokens))
        texts: dict[int, str] = {}
        while left := order[len(texts) :]:
            most = max(prompts[number].max_new_tokens for number in left)
            length = len(prompts[left[0]].tokens) + most
            rows = max(1, tokens_at_once(self._network.plan) // length) * self._network.plan.layout.dp_degree
            some = [prompts[number] for number in left[:rows]]
            answers = greedy_answers(
                self._network, [one.tokens for one in some], max_new_tokens=most, has_ended=partial(self._is_done, some)
            )
            for number, prompt, tokens in zip(left, some, answers, strict=False):
                written = tokens[:-1] if tokens[-1] in self._stop else tokens
                texts[number] = text_of(self._tokenizer, written, prompt)
        return [texts[number] for number in range(len(prompts))]

    def _is_done(self, prompts: Sequence[EvaluationPrompt], number: int, tokens: Sequence[int]) -> bool:
        if tokens[-1] in self._stop or len(tokens) >= prompts[number].max_new_tokens:
            return True
        return has_ended(self._tokenizer, tokens, prompts[number])


class _Requests:
    """Requests as rows of a `Measure`: the log-probability, and the number of tokens that are not the most likely."""

    width = 2

    def __init__(self, requests: Sequence[ContinuationRequest]):
        # Few lengths, so that a compiled model is compiled few times.
        lengths = [1 << (len(one.inputs) - 1).bit_length() for one in requests]
        rows = (
            Row(str(number), length, partial(_row, one, length))
            for number, (one, length) in enumerate(zip(requests, lengths, strict=True))
        )
        self.rows = sorted(rows, key=lambda row: -row.length)

    def figures(self, labels_S: np.ndarray, logprobs_S: np.ndarray, predictions_S: np.ndarray) -> list[float]:
        asked = labels_S != IGNORE
        return [float(logprobs_S[asked].sum()), float((predictions_S != labels_S)[asked].sum())]

    def result(self, figures: Figures) -> dict[str, Any]:
        return {"columns": {}}


def _row(request: ContinuationRequest, length: int) -> Batch:
    """One document with padding behind it, whose labels are those of the continuation."""
    batch = batch_of_rows([request.inputs], length)
    batch["labels"][0, len(request.context) - 1 : len(request.inputs)] = torch.tensor(request.continuation)
    return batch
