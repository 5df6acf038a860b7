"""DeepEP 2 as `compute/parallelize/deepep.py` sees it, on gloo: the signatures of its `ElasticBuffer`, and what its
kernels demand of types, shapes and arguments.

Rows are not there before their event is awaited; without `deterministic` they arrive in any order.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

topk_idx_t = torch.int64


class EventOverlap:
    """The end of a kernel that is on its way."""

    def __init__(self, finish: Any):
        self._finish = finish

    def current_stream_wait(self, release_handle: bool = False) -> None:
        assert self._finish is not None, "an event of a call that the stream has waited for, or for the second time"
        self._finish()
        self._finish = None


class ElasticBuffer:
    """Sends rows to the ranks of a group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ):
        assert num_bytes is None and num_max_tokens_per_rank > 0 and hidden > 0 and num_topk > 0
        self.group, self.num_max_tokens_per_rank, self.deterministic = group, num_max_tokens_per_rank, deterministic
        self._hidden, self._num_topk = hidden, num_topk
        self.calls: list[str] = []
        """Of this rank: dispatch, cached (a dispatch by a handle) and combine, with + for weights."""

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Any = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple:
        self._check_rows(x)
        assert len(x) <= self.num_max_tokens_per_rank and not do_expand
        ranks, me = self.group.size(), self.group.rank()
        if handle is None:
            self.calls.append("dispatch+")
            assert topk_idx is not None and topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous()
            assert topk_weights is not None and topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
            assert topk_idx.shape == topk_weights.shape == (len(x), self._num_topk)
            assert num_experts is not None and num_experts % ranks == 0 and int(topk_idx.max()) < num_experts
            here = num_experts // ranks
            goes_RT = (topk_idx.unsqueeze(0) // here == torch.arange(ranks).view(-1, 1, 1)).any(2)
            tokens_R = [goes_T.nonzero().flatten() for goes_T in goes_RT]
            send = [len(tokens) for tokens in tokens_R]
            receive = self._to_all(torch.tensor(send), [1] * ranks, [1] * ranks).tolist()
            order = torch.arange(sum(receive))
            if not self.deterministic:
                order = order[torch.randperm(len(order))]
            handle = SimpleNamespace(topk_idx=topk_idx.clone(), tokens=torch.cat(tokens_R), send=send, receive=receive)
            handle.order = order
            local = self._to_all(topk_idx[handle.tokens], send, receive)[order] - me * here
            weights = self._to_all(topk_weights[handle.tokens], send, receive)[order]
            local = local.masked_fill((local < 0) | (local >= here), -1)
            handle.num_recv_tokens_per_expert_list = [int((local == expert).sum()) for expert in range(here)]
        else:
            self.calls.append("cached")
            assert topk_idx is None and topk_weights is None and not do_cpu_sync
            assert len(x) == len(handle.topk_idx)
            local = weights = None
        rows = self._to_all(x[handle.tokens], handle.send, handle.receive)[handle.order]
        (rows, local, weights), event = self._later((rows, local, weights), async_with_compute_stream)
        return rows, local, weights, handle, event

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple:
        self.calls.append("combine" if topk_weights is None else "combine+")
        self._check_rows(x)
        assert len(x) == len(handle.order)
        place = torch.empty_like(handle.order)
        place[handle.order] = torch.arange(len(place))
        back = self._to_all(x[place], handle.receive, handle.send)
        total = torch.zeros(len(handle.topk_idx), x.shape[1]).index_add(0, handle.tokens, back.float()).to(x.dtype)
        weights = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
            assert topk_weights.shape == (len(x), self._num_topk)
            parts = self._to_all(topk_weights[place], handle.receive, handle.send)
            weights = torch.zeros(handle.topk_idx.shape).index_add(0, handle.tokens, parts)
            weights = weights.masked_fill(handle.topk_idx < 0, 0.0)
        (total, weights), event = self._later((total, weights), async_with_compute_stream)
        return total, weights, event

    def _check_rows(self, x: Tensor) -> None:
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1:] == (self._hidden,)
        assert x.shape[1] * x.element_size() % 32 == 0, "kernels copy 32 bytes"

    def _to_all(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=self.group)
        return out

    def _later(self, tensors: tuple, is_async: bool) -> tuple[tuple, EventOverlap]:
        if not is_async:
            return tensors, EventOverlap(None)
        empty = tuple(
            None if t is None else torch.full_like(t, -7 if t.dtype == topk_idx_t else torch.nan) for t in tensors
        )

        def finish() -> None:
            for to, of in zip(empty, tensors, strict=True):
                if to is not None:
                    to.copy_(of)

        return empty, EventOverlap(finish)
