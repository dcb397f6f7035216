"""The waiting queue against a sorted list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from plait.engine.api import GenerationRequest
from plait.engine.sequence import Sequence, Status
from plait.engine.waiting import WaitingQueue


def sequence(priority: int) -> Sequence:
    return Sequence.of(GenerationRequest("x", [1], priority=priority), now=0.0)


class Queue(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue(lambda seq: (-seq.priority,))
        self.model: list[Sequence] = []

    @rule(priorities=st.lists(st.integers(0, 9), min_size=1, max_size=40))
    def push(self, priorities: list[int]) -> None:
        for priority in priorities:
            seq = sequence(priority)
            self.queue.push(seq)
            self.model.append(seq)
        self.model.sort(key=lambda seq: -seq.priority)

    @rule()
    def pop(self) -> None:
        if not self.model:
            assert self.queue.peek() is None
            with pytest.raises(IndexError):
                self.queue.pop()
            return
        first = self.model.pop(0)
        assert self.queue.peek() is first, "not the most urgent, or not the earliest of these"
        assert self.queue.pop() is first
        first.status = Status.RUNNING

    @rule()
    def pop_and_push_back(self) -> None:
        """What preemption does."""
        if self.model:
            seq = self.queue.pop()
            self.model.remove(seq)
            self.queue.push(seq)
            at = sum(s.priority >= seq.priority for s in self.model)
            self.model.insert(at, seq)

    @rule(data=st.data(), share=st.floats(0, 1))
    def forget(self, data: st.DataObject, share: float) -> None:
        count = int(len(self.model) * share)
        for seq in data.draw(st.permutations(self.model))[:count]:
            seq.status = Status.FINISHED
            self.queue.forget(seq)
            self.model.remove(seq)

    @invariant()
    def same(self) -> None:
        assert len(self.queue) == len(self.model)
        assert set(self.queue) == set(self.model)
        assert len(self.queue._heap) <= max(64, 2 * len(self.model)) + 1, "cancelled ones pile up"


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
