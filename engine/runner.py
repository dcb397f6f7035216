"""Runs a model over one iteration's chunks, laid end to end on one flat row without padding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from plait.engine import fastpath, fused, graphs, pool
from plait.engine.config import EngineConfig
from plait.engine.graphs import DecodeGraphs
from plait.engine.movers import make_mover
from plait.engine.probe import probe
from plait.engine.sequence import Chunk
from plait.engine.staging import Staging
from plait.engine.swap_cost import SwapCosts
from plait.engine.tables import BlockTables
from plait.kernels.attention import PagedAttention
from plait.kernels.batch import Batch
from plait.kernels.decoder import Decoder, PanelLinear


class Runner:
    """The model, the KV pool, and the block tables by seat."""

    def __init__(self, model: nn.Module, config: EngineConfig):
        self.model = model
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        shapes = probe(model, self.device)
        q_heads, kv_heads, dim = shapes[0]
        self.block_size = config.block_size
        text = model.config.get_text_config()
        graphs_bytes = 0
        if self.device.type == "cuda":
            fused.fuse(model)
            torch.cuda.empty_cache()  # what fusing freed is the pool's to take
            if config.cuda_graphs:
                graphs_bytes = graphs.memory(config.max_running, text.vocab_size, self.dtype.itemsize)
        per_block = pool.block_bytes(len(shapes), kv_heads, dim, config.block_size, self.dtype)
        self.num_blocks = pool.plan(config, per_block, self.device, graphs_bytes)
        memory = pool.make(
            self.num_blocks, len(shapes), kv_heads, dim, config.block_size, self.dtype, self.device
        )
        self.costs = SwapCosts(per_block, config.block_size)
        self.host_blocks = pool.plan_host(config, per_block, self.device)
        self.mover = make_mover(memory, self.host_blocks, self.costs)
        self.compiled: list[Decoder | PanelLinear] = []
        self.attention = PagedAttention(memory, q_heads)
        if self.device.type == "cpu":
            self.compiled = fastpath.optimize(model, self.attention, config.dtype == "int8")
        self.direct = fastpath.direct(model) if self.compiled else None
        longest = longest_sequence(model)
        limits = [config.max_model_len or longest, longest, self.num_blocks * self.block_size]
        self.max_tokens_total = min(limits)
        width = -(-self.max_tokens_total // self.block_size)
        self.tables = BlockTables(config.max_running, width, self.device)
        self.staging = Staging(self.device)
        self.wants_graphs = config.cuda_graphs and self.device.type == "cuda"
        self.graphs = DecodeGraphs(self._forward, self.tables, memory, self.max_tokens_total)

    def break_down(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Split the time of the model, as far as its parts are ours: product, attention, rotary, norm; and tell the
        time of copies, which on a GPU pass beside all else."""
        parts = dict(seconds)
        for part in self.compiled:
            for name, spent in part.spent().items():
                parts[name] = parts.get(name, 0.0) + spent
                parts["model"] = parts.get("model", 0.0) - spent
        if self.mover is not None:
            parts["swapping"] = self.mover.seconds
            if not self.mover.ahead:
                parts["scheduling"] = parts.get("scheduling", 0.0) - self.mover.seconds
        return parts

    def warm_up(self) -> None:
        """Capture what is to run as CUDA graphs."""
        if self.wants_graphs:
            self.graphs.capture(graphs.recorder())

    def rehearse_copies(self) -> None:
        """Copy a few blocks of no content, so that the cost model knows what it takes."""
        if self.mover is not None:
            pairs = [(i, i) for i in range(min(16, self.host_blocks, self.num_blocks))]
            for _ in range(3):
                self.mover.out(pairs)
                self.mover.into(pairs)

    def run(self, chunks: list[Chunk]) -> Tensor:
        """Compute the chunks. Gives the logits [R, vocabulary] after the last token of each chunk that samples.

        They are valid until the next call.
        """
        if self.mover is not None:
            self.mover.settle(c.seq.blocks for c in chunks)
        counts = np.array([c.count for c in chunks])
        starts = np.array([c.seq.computed for c in chunks])
        seats = np.array([self.tables.seat(c.seq) for c in chunks])
        tokens: list[int] = []
        for c in chunks:
            tokens += c.seq.tokens[c.seq.computed : c.seq.computed + c.count]
        ends = np.cumsum(counts)
        positions = np.arange(len(tokens)) - np.repeat(ends - counts - starts, counts)
        slots = self.tables.host[np.repeat(seats, counts), positions // self.block_size].astype(np.int64)
        slots = slots * self.block_size + positions % self.block_size
        lens = (starts + counts).astype(np.int32)
        ids = np.array(tokens)
        # Without a row that samples the head still gets one: transformers knows no "none".
        rows = np.array([end - 1 for end, c in zip(ends.tolist(), chunks, strict=True) if c.samples] or [0])
        self.tables.flush()
        if len(tokens) == len(chunks) and self.graphs.takes(len(chunks)):
            logits = self.graphs.run(ids, positions, slots, seats, lens)
            return logits if len(rows) == len(chunks) else logits[rows]
        query_start = np.concatenate([[0], ends]).astype(np.int32)
        tokens_, positions_, slots_, seats_, rows_, query_start_, lens_ = self.staging.sent(
            ids, positions, slots, seats, rows, query_start, lens
        )
        longest = int(lens.max())
        batch = Batch(
            query_start=query_start_,
            seq_lens=lens_,
            block_tables=self.tables.rows[:, : -(-longest // self.block_size)].index_select(0, seats_),
            slots=slots_,
            pool=self.attention.pool,
            max_query=int(counts.max()),
            max_seq=longest,
            num_decodes=int((counts == 1).sum()),
        )
        return self._forward(tokens_, positions_, batch, rows_)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, positions: Tensor, batch: Batch, rows: Tensor | None) -> Tensor:
        self.attention.begin(batch)
        if self.direct is not None:
            return self.direct(tokens, positions, rows, self.attention)
        out = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
            plait=self.attention,
        )
        return out.logits[0]


def longest_sequence(model: nn.Module) -> int:
    """Tokens of one sequence that the model was made for."""
    text = model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or 1 << 20
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Its frequencies change for the whole batch as soon as one sequence is longer than this.
        longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    return longest
