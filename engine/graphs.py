"""CUDA graphs of iterations that only decode: what a GPU is to do goes to it in one call instead of hundreds.

One graph for each of some batch sizes; a batch is padded to the next of them. All read their inputs from the same
places, and fill one tensor with logits. A graph holds for sequences of every length up to the longest.
"""

from __future__ import annotations

import logging
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from plait.engine.pool import free_bytes
from plait.engine.staging import Staging
from plait.engine.tables import BlockTables
from plait.kernels.batch import Batch

log = logging.getLogger(__name__)

# What the driver keeps for one graph of some hundred kernels, generously.
GRAPH_BYTES = 16 << 20

Forward = Callable[[Tensor, Tensor, Batch, Tensor | None], Tensor]
"""Tokens [T], positions [T], the batch and the rows that need logits (None is all of them) to logits [R, V]."""
Replay = Callable[[], None]


class DecodeGraphs:
    def __init__(self, forward: Forward, tables: BlockTables, pool: Tensor, longest: int):
        self.forward, self.tables, self.pool, self.longest = forward, tables, pool, longest
        self.sizes = sizes(len(tables.host))
        self.captured: list[int] = []
        self.replays: dict[int, Replay] = {}
        self.staging = Staging(pool.device)
        self.query_start = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=pool.device)
        self.logits: Tensor | None = None

    @torch.inference_mode()
    def capture(self, record: Callable[[Replay], Replay]) -> None:
        """Capture all sizes, largest first: the others reuse its memory. What fails runs eagerly, and is named."""
        began, free = time.monotonic(), free_bytes(self.pool.device)
        none = np.zeros(0, dtype=np.int64)
        try:
            for size in reversed(self.sizes):
                self._send(size, none, none, none, none, none.astype(np.int32))
                with refusing_to_wait(self.pool.device):
                    self._decode(size)
                self.replays[size] = record(lambda size=size: self._decode(size))
        except Exception as error:
            log.warning(
                "%d of %d sizes of decodes are captured in CUDA graphs, the others run eagerly, slower: %s: %s",
                len(self.replays),
                len(self.sizes),
                type(error).__name__,
                error,
            )
        self.captured = sorted(self.replays)
        log.info(
            "%d graphs captured in %.1f s, with %.0f MiB",
            len(self.captured),
            time.monotonic() - began,
            (free - free_bytes(self.pool.device)) / (1 << 20),
        )

    def takes(self, decodes: int) -> bool:
        return bool(self.captured) and decodes <= self.captured[-1]

    @torch.inference_mode()
    def run(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        seats: np.ndarray,
        lens: np.ndarray,
    ) -> Tensor:
        """Logits [B, V] of B sequences with one token each, valid until the next call.

        tokens, positions, slots and seats [B] int64, lens [B] int32. The tables must be on the device.
        """
        size = self.captured[bisect_left(self.captured, len(tokens))]
        self._send(size, tokens, positions, slots, seats, lens)
        self.replays[size]()
        return self.logits[: len(tokens)]

    def _send(self, size: int, *arrays: np.ndarray) -> None:
        """Padding writes nowhere (slot -1), and reads nothing (length 0)."""
        fills = (0, 0, -1, 0, 0)
        padded = [np.full(size, fill, dtype=a.dtype) for a, fill in zip(arrays, fills, strict=True)]
        for whole, array in zip(padded, arrays, strict=True):
            whole[: len(array)] = array
        self.staging.send(*padded)
        self.layout = padded

    def _decode(self, size: int) -> None:
        tokens, positions, slots, seats, lens = self.staging.views(*self.layout)
        batch = Batch(
            query_start=self.query_start[: size + 1],
            seq_lens=lens,
            block_tables=self.tables.rows.index_select(0, seats),
            slots=slots,
            pool=self.pool,
            max_query=1,
            max_seq=self.longest,
            num_decodes=size,
        )
        logits = self.forward(tokens, positions, batch, None)
        if self.logits is None:
            self.logits = torch.empty_like(logits)
        # Into one tensor for all: kept apart, those of each size would stay in memory.
        self.logits[:size].copy_(logits)


def sizes(largest: int) -> list[int]:
    """Batch sizes that get a graph: padding wastes at most half of a small one, an eighth of a large one."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, largest + 16, 16)]
    return [n for n in steps if n < largest] + [largest]


def memory(largest: int, vocab: int, itemsize: int) -> int:
    """Bytes to leave free for the graphs of batches up to `largest`: their nodes, and logits in and outside."""
    return len(sizes(largest)) * GRAPH_BYTES + 3 * largest * vocab * itemsize


def recorder() -> Callable[[Replay], Replay]:
    """Captures calls in CUDA graphs that share one pool of memory; gives what replays them."""
    pool = torch.cuda.graph_pool_handle()

    def record(call: Replay) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            call()
        return graph.replay

    return record


@contextmanager
def refusing_to_wait(device: torch.device) -> Iterator[None]:
    """What waits for the device cannot be captured: here it raises, and leaves no capture half done."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
