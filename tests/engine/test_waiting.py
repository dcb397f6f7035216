"""The waiting queue against a sorted list."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from plait.engine.api import GenerationRequest
from plait.engine.config import EngineConfig
from plait.engine.lengths import Lengths
from plait.engine.outlook import Outlook
from plait.engine.policies.base import Policy
from plait.engine.sequence import Sequence, Status
from plait.engine.time_model import TimeModel
from plait.engine.waiting import MOVES, WaitingQueue


class ByRoom(Policy):
    """Keys are priorities, which expire one second after they were made and are then worse by five; tenants are
    lanes, and `favour` moves a whole lane."""

    favour: str = ""

    def lane(self, seq: Sequence) -> str:
        return seq.tenant

    def key(self, seq: Sequence, now: float) -> tuple[float, float]:
        return -float(seq.priority), now + 1

    def expired(self, seq: Sequence) -> float:
        return 5.0 - seq.priority

    def rank(self, seq: Sequence) -> float:
        return seq.key - 100 * (seq.tenant == self.favour)


class Queue(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy = ByRoom(EngineConfig(), Outlook(TimeModel(), Lengths(), 256))
        self.queue = WaitingQueue(self.policy)
        self.model: list[Sequence] = []
        self.first: list[Sequence] = []
        self.now = 0.0
        self.made = 0

    def push_one(self, seq: Sequence, first: bool = False) -> None:
        self.queue.push(seq, self.now, first)
        (self.first if first else self.model).append(seq)

    @rule(priorities=st.lists(st.integers(0, 9), min_size=1, max_size=40), tenant=st.sampled_from("abc"))
    def push(self, priorities: list[int], tenant: str) -> None:
        for priority in priorities:
            request = GenerationRequest("x", [1], priority=priority, tenant=tenant)
            seq = Sequence.of(request, now=float(priority * 7 % 10))
            self.made += 1
            seq.number, seq.long = self.made, priority == 3
            self.push_one(seq)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0]), favour=st.sampled_from(["", "a", "b"]))
    def wait(self, seconds: float, favour: str) -> None:
        self.now += seconds
        self.policy.favour = favour

    @rule(with_long=st.booleans(), back=st.sampled_from(["no", "again", "first"]))
    def take(self, with_long: bool, back: str) -> None:
        """Admission, and preemption when it comes back."""
        seq = self.queue.first(self.now, with_long)
        allowed = [s for s in self.model if with_long or not s.long]
        assert (seq is None) == (not allowed)
        if seq is None:
            return
        # Of each lane, the first as its keys stood; compared by what the keys are now.
        assert self.queue._moves <= MOVES
        if self.queue._moves == MOVES:
            return
        assert not seq.expires <= self.now, "an expired key decided"
        better = [s for s in allowed if (self.policy.rank(s), s.number) < (self.policy.rank(seq), seq.number)]
        assert not better
        seq.status = Status.RUNNING
        self.queue.remove(seq)
        self.model.remove(seq)
        if back != "no":
            seq.status = Status.WAITING
            self.push_one(seq, first=back == "first")

    @rule(data=st.data(), share=st.floats(0, 1))
    def forget(self, data: st.DataObject, share: float) -> None:
        everyone = self.model + self.first
        for seq in data.draw(st.permutations(everyone))[: int(len(everyone) * share)]:
            seq.status = Status.FINISHED
            self.queue.remove(seq)
            (self.first if seq in self.first else self.model).remove(seq)

    @invariant()
    def same(self) -> None:
        everyone = self.model + self.first
        age = lambda s: (s.timeline.arrived, s.number)  # noqa: E731
        assert len(self.queue) == len(everyone)
        assert set(self.queue) == set(everyone)
        assert self.queue.oldest() is min(everyone, key=age, default=None)
        assert self.queue.privileged() is min(self.first, key=age, default=None)
        assert len(self.queue.lanes) <= len({(s.long, s.tenant) for s in self.model}) + 1
        for heap in [*self.queue.lanes.values(), self.queue._ages]:
            assert len(heap.entries) <= max(64, 2 * heap.size) + 1, "those that left pile up"


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
