"""Work of rank 0 alone, such as talking to servers, whose result all ranks get."""

import io
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist

from glm46.config.errors import UserError
from glm46.tasks.rl.rollout.records import FINISHES, Completion, EpisodeEnd, SessionSample, VersionSpan
from glm46.tasks.rl.rollout.server_state import EngineError

_SIGN_OF_LIFE_SECONDS = 5.0
_WORKING, _ASKED, _DONE, _USER_ERROR, _ENGINE_ERROR, _FAILED = range(6)


class CollectiveRequest:
    """Collective work that `run_on_first_rank` does in the middle of rank 0's work, when this asks for it."""

    def __init__(self, work: Callable[[], None]):
        self.work = work
        self.events: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()
        """Of the thread of rank 0: its result or error, or None when it asks."""
        self.done, self.has_failed = threading.Event(), False

    def ask(self) -> None:
        """Have all ranks do it; in the thread of rank 0.

        Raises:
            RuntimeError: it failed; the error is raised where the ranks are.
        """
        self.done.clear()
        self.events.put(None)
        self.done.wait()
        if self.has_failed:
            raise RuntimeError("the ranks failed in collective work for the inference servers")


def run_on_first_rank(work: Callable[[], bytes], request: CollectiveRequest | None = None) -> bytes:
    """The result of `work`, which rank 0 runs in a thread, on all ranks. Collective.

    Work with servers may take longer than the timeout of the process group. So while it runs, rank 0 says every few
    seconds that it is alive: the other ranks' wait has the group's timeout, and lasts as long as the work.

    Args:
        request: whose `ask` the work may call.

    Raises:
        UserError, EngineError: on all ranks, if `work` raised it; the message is on rank 0.
        RuntimeError: on the other ranks, if `work` raised anything else.
    """
    if dist.get_rank() != 0:
        return _result_of_first_rank(request)
    request = request or CollectiveRequest(lambda: None)
    events = request.events

    def run() -> None:
        try:
            events.put(work())
        except BaseException as error:
            events.put(error)
            if not isinstance(error, Exception):
                raise

    threading.Thread(target=run, daemon=True).start()
    while True:
        try:
            result = events.get(timeout=_SIGN_OF_LIFE_SECONDS)
        except queue.Empty:
            _send(_WORKING, b"")
            continue
        if result is not None:
            break
        try:
            _send(_ASKED, b"")
            request.work()
        except BaseException:
            request.has_failed = True
            raise
        finally:
            request.done.set()
    if isinstance(result, bytes):
        _send(_DONE, result)
        return result
    kinds = ((EngineError, _ENGINE_ERROR), (UserError, _USER_ERROR), (BaseException, _FAILED))
    _send(next(state for kind, state in kinds if isinstance(result, kind)), b"")
    raise result


def _send(state: int, content: bytes) -> None:
    dist.broadcast(torch.tensor([state, len(content)]), 0)
    if content:
        dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0)


def _result_of_first_rank(request: CollectiveRequest | None) -> bytes:
    header = torch.tensor([_WORKING, 0])
    while header[0] in (_WORKING, _ASKED):
        dist.broadcast(header, 0)
        if header[0] == _ASKED:
            request.work()
    state, length = header.tolist()
    if state == _ENGINE_ERROR:
        raise EngineError()
    if state == _USER_ERROR:
        raise UserError()
    if state == _FAILED:
        raise RuntimeError("rank 0 failed in its work with the inference servers; its output says why")
    content = torch.empty(length, dtype=torch.uint8)
    if length:
        dist.broadcast(content, 0)
    return content.numpy().tobytes()


def pack_groups(groups: Mapping[int, Sequence[EpisodeEnd]]) -> bytes:
    """Results of groups, by their numbers, as bytes: no pickle, a few arrays whatever their number."""
    ends = [(number, end) for number, of in groups.items() for end in of]
    facts = [[number, len(end.samples), end.fault, end.score, end.is_part] for number, end in ends]
    samples = [sample for _, end in ends for sample in end.samples]
    return pack(
        [sample.completion for sample in samples],
        prompts=np.array([token for sample in samples for token in sample.prompt], np.int64),
        prompt_ends=np.cumsum([len(sample.prompt) for sample in samples], dtype=np.int64),
        ends=np.frombuffer(json.dumps(facts).encode(), np.uint8),
    )


def unpack_groups(content: bytes) -> dict[int, list[EpisodeEnd]]:
    """The inverse of `pack_groups`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        prompts = [part.tolist() for part in np.split(arrays["prompts"], arrays["prompt_ends"])]
        facts = json.loads(arrays["ends"].tobytes())
    samples, groups = map(SessionSample, prompts, unpack(content)), dict[int, list[EpisodeEnd]]()
    for number, count, *rest in facts:
        groups.setdefault(number, []).append(EpisodeEnd(list(islice(samples, count)), *rest))
    return groups


def pack(completions: Sequence[Completion], **more: np.ndarray) -> bytes:
    """Completions, and more arrays, as bytes."""
    spans = {key: [getattr(one, key) for one in completions] for key in ("spans", "replies", "contradicted")}
    arrays = more | {
        "tokens": np.array([token for one in completions for token in one.tokens], np.int64),
        "logprobs": np.array([value for one in completions for value in one.logprobs], np.float64),
        "counts": np.array(
            [
                (len(one.tokens), FINISHES.index(one.finish), *(len(of[i]) for of in spans.values()))
                for i, one in enumerate(completions)
            ],
            np.int64,
        ).reshape(-1, 5),
    }
    arrays |= {
        key: np.array([pair for of in found for pair in of], np.int64).reshape(-1, 2) for key, found in spans.items()
    }
    arrays |= {f"routes {i}": one.routes for i, one in enumerate(completions) if one.routes is not None}
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpack(content: bytes) -> list[Completion]:
    """The inverse of `pack`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        found = {key: arrays[key].tolist() for key in ("tokens", "logprobs", "spans", "replies", "contradicted")}
        completions, at = [], dict.fromkeys(found, 0)
        for index, (length, finish, *pairs) in enumerate(arrays["counts"].tolist()):
            parts = {}
            for key, count in zip(found, (length, length, *pairs), strict=True):
                parts[key] = found[key][at[key] : at[key] + count]
                at[key] += count
            completions.append(
                Completion(
                    parts["tokens"], parts["logprobs"], FINISHES[finish],
                    [VersionSpan(*span) for span in parts["spans"]], arrays.get(f"routes {index}"),
                    tuple(map(tuple, parts["replies"])), contradicted=tuple(map(tuple, parts["contradicted"])),
                )
            )  # fmt: skip
    return completions
