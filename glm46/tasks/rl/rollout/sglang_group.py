"""Weights that rank 0 broadcasts to SGLang 0.5.23, by its own calls: a request for each bucket, between a begin and an
end, outside of which the server refuses them. Its workers check no sums; `SglangServer` asks for those of its weights.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.tasks.rl.rollout.http_calls import CallError, RefusedError, call
from glm46.tasks.rl.rollout.weight_group import DEVICES, TICK_SECONDS, WeightGroup, first_sentence


class SglangGroup(WeightGroup):
    """See `WeightGroup`. All workers of all nodes are in one group: 1 + their rank of tensor parallelism."""

    _name = ""
    """Empty: the server knows no group of ours."""
    _has_begun = False

    def meet(self) -> None:
        """Form the group, and have the server await buckets.

        Raises:
            CallError: the server refuses, or its workers do not come.
        """
        self._name = f"glm46-{self._at['update']}"
        body = {"master_address": self._at["address"], "master_port": self._at["port"], "rank_offset": 1}
        body |= {"world_size": 1 + self._workers, "group_name": self._name, "backend": self.backend}
        self._reply = self._ask("/init_weights_update_group", body)
        # Where torch's own init_process_group, which the workers call, puts the keys of a group.
        prefix = f"{self._name}/{self._name}//{DEVICES[self.backend]}/"
        formed = _in_thread(lambda: self._form(prefix))
        try:
            end = time.monotonic() + self._wait
            while not (formed.done() and self._reply.done()):
                if time.monotonic() > end:
                    raise CallError(f"its workers did not join within {self._wait:g} s")
                for one in (self._reply, formed):
                    if one.done():
                        one.result()  # raises the reason
                time.sleep(TICK_SECONDS)
            self._reply.result()
            self._open()
        except RuntimeError as error:
            self.close()
            raise CallError(f"no group for weights ({first_sentence(error)})") from None
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        try:
            self._call("/begin_weight_update", {"selector": "all"})
        except RefusedError:  # one that has failed is still open; a whole load repairs what it has left
            self._call("/end_weight_update", {})
            self._call("/begin_weight_update", {"selector": "all"})

    def announce(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """See `WeightGroup.announce`."""
        if self.fault or not tensors:
            return
        tensors = _ordered(tensors)
        body = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,  # it is empty since the pause
            "selector": "all",
        }
        self._reply = self._ask("/update_weights_from_distributed", body)

    def confirm(self) -> None:
        """See `WeightGroup.confirm`."""
        if self.fault is None:
            try:
                self._reply.result(self._wait)
            except FutureTimeoutError:
                self._fail(f"a bucket was not loaded within {self._wait:g} s")
            except CallError as error:
                self._fail(str(error))

    def bucket(self, tensors: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """See `WeightGroup.bucket`."""
        if not tensors:
            return []
        flat = [tensor.reshape(-1).view(torch.uint8) for _, tensor in _ordered(tensors)]
        return [torch.cat(flat).to(DEVICES[self.backend])]

    def begin(self, values: Tensor) -> dist.Work | None:
        """See `WeightGroup.begin`."""
        if self._has_begun:
            return super().begin(values)
        self._has_begun = True
        return self._begin_first(values)

    def result(self, seconds: float) -> Any:
        """See `WeightGroup.result`."""
        if self.fault is None:
            self._call("/end_weight_update", {}, seconds)
            self._leave()
        return super().result(seconds)

    def _await_loaded(self, end: float) -> None:
        """Its workers say nothing in the store; the end of the update is for all of them."""

    def close(self) -> None:
        """See `WeightGroup.close`."""
        super().close()
        if self._name:  # its workers wait in a broadcast, which ends when this side has gone
            _in_thread(self._leave)

    def _leave(self) -> None:
        name, self._name = self._name, ""
        with contextlib.suppress(CallError):
            self._call("/destroy_weights_update_group", {"group_name": name})

    def _call(self, path: str, body: dict[str, Any], seconds: float | None = None) -> Any:
        return call(self.url, path, body, seconds=seconds or self._wait)

    def _ask(self, path: str, body: dict[str, Any]) -> Future[Any]:
        """The reply that will come, at the latest when no bucket waits for it any more."""
        return _in_thread(lambda: self._call(path, body, 2 * self._wait))


def _ordered(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Wide types first: tensors of a bucket lie without gaps, and each must begin at a multiple of its type."""
    return sorted(tensors, key=lambda pair: -pair[1].element_size())


def _in_thread(work: Any) -> Future[Any]:
    """The result of work in a thread that does not hold up the end of the process."""
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except (CallError, RuntimeError) as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found
