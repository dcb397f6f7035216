"""Runs a model over one iteration's chunks, laid end to end on one flat row without padding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from plait.engine import fastpath, pool
from plait.engine.config import EngineConfig
from plait.engine.probe import probe
from plait.engine.sequence import Chunk, Sequence
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
        per_block = pool.block_bytes(len(shapes), kv_heads, dim, config.block_size, self.dtype)
        self.block_size = config.block_size
        self.num_blocks = pool.plan(config, per_block, self.device)
        memory = pool.make(
            self.num_blocks, len(shapes), kv_heads, dim, config.block_size, self.dtype, self.device
        )
        self.compiled: list[Decoder | PanelLinear] = []
        self.attention = PagedAttention(memory, q_heads)
        if self.device.type == "cpu":
            self.compiled = fastpath.optimize(model, self.attention)
        longest = longest_sequence(model)
        limits = [config.max_model_len or longest, longest, self.num_blocks * self.block_size]
        self.max_tokens_total = min(limits)
        width = -(-self.max_tokens_total // self.block_size)
        self.tables = np.zeros((config.max_running, width), dtype=np.int32)
        self.owners: list[tuple[Sequence, int, int] | None] = [None] * config.max_running
        self.filled = [0] * config.max_running

    def break_down(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Split the time of the model, as far as its parts are ours: product, attention, rotary, norm."""
        parts = dict(seconds)
        for part in self.compiled:
            for name, spent in part.spent().items():
                parts[name] = parts.get(name, 0.0) + spent
                parts["model"] = parts.get("model", 0.0) - spent
        return parts

    def _table(self, seq: Sequence) -> int:
        """Bring the table row of a sequence's seat up to date; only new blocks are written, mostly."""
        seat, count = seq.seat, len(seq.blocks)
        owner = (seq, seq.preemptions, seq.replaced)
        if self.owners[seat] != owner:
            self.owners[seat], self.filled[seat] = owner, 0
        if self.filled[seat] < count:
            self.tables[seat, self.filled[seat] : count] = seq.blocks[self.filled[seat] :]
            self.filled[seat] = count
        return seat

    def run(self, chunks: list[Chunk]) -> Tensor:
        """Compute the chunks. Gives the logits [R, vocabulary] after the last token of each chunk that samples."""
        counts = np.array([c.count for c in chunks])
        starts = np.array([c.seq.computed for c in chunks])
        seats = np.array([self._table(c.seq) for c in chunks])
        tokens: list[int] = []
        for c in chunks:
            tokens += c.seq.tokens[c.seq.computed : c.seq.computed + c.count]
        ends = np.cumsum(counts)
        positions = np.arange(len(tokens)) - np.repeat(ends - counts - starts, counts)
        slots = self.tables[np.repeat(seats, counts), positions // self.block_size].astype(np.int64)
        slots = slots * self.block_size + positions % self.block_size
        lens = (starts + counts).astype(np.int32)
        longest = int(lens.max())
        batch = Batch(
            query_start=self._tensor(np.concatenate([[0], ends]).astype(np.int32)),
            seq_lens=self._tensor(lens),
            block_tables=self._tensor(self.tables[seats, : -(-longest // self.block_size)]),
            slots=self._tensor(slots),
            pool=self.attention.pool,
            max_query=int(counts.max()),
            max_seq=longest,
            num_decodes=int((counts == 1).sum()),
        )
        rows = [end - 1 for end, c in zip(ends.tolist(), chunks, strict=True) if c.samples]
        # Without a row that samples the head still gets one: transformers knows no "none".
        return self._forward(tokens, positions, batch, rows or [len(tokens) - 1])

    @torch.inference_mode()
    def _forward(self, tokens: list[int], positions: np.ndarray, batch: Batch, rows: list[int]) -> Tensor:
        self.attention.begin(batch)
        out = self.model(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=self._tensor(positions)[None],
            use_cache=False,
            logits_to_keep=torch.tensor(rows, device=self.device),
            plait=self.attention,
        )
        return out.logits[0]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def longest_sequence(model: nn.Module) -> int:
    """Tokens of one sequence that the model was made for."""
    text = model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or 1 << 20
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Its frequencies change for the whole batch as soon as one sequence is longer than this.
        longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    return longest
