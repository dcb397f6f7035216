"""The prefix cache and what is kept where, case by case."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plait.engine.page_store import PageStore
from plait.engine.prefix_cache import PrefixCache
from plait.engine.sequence import Sequence, Status
from plait.engine.swap_cost import SwapCosts
from scheduling import Drive


def run(drive: Drive, *seqs: Sequence) -> None:
    while any(seq.status is not Status.FINISHED for seq in seqs):
        drive.step()


def test_tokens_are_compared_when_hashes_collide() -> None:
    """openvino.genai#3722"""
    cache = PrefixCache(2)
    prime = (1 << 61) - 1
    assert hash((5, 7)) == hash((5 + prime, 7)) and (5 + prime, 7) != (5, 7)
    page = cache.child(cache.root("a"), [5, 7])
    assert cache.match("a", [5, 7, 9], [], 1) == [page]
    assert cache.match("a", [5 + prime, 7, 9], [], 1) == []


def test_a_match_goes_on_from_what_was_known_and_still_stands() -> None:
    cache = PrefixCache(1)
    first = cache.child(cache.root("a"), [1])
    second = cache.child(first, [2])
    known = cache.match("a", [1, 2, 3, 4], [], 3)
    assert known == [first, second]
    third = cache.child(second, [3])
    assert cache.match("a", [1, 2, 3, 4], known, 3) == [first, second, third]
    assert cache.remove(second) == [third, second]
    assert cache.match("a", [1, 2, 3, 4], [first, second, third], 3) == [first]
    cache.remove(first)
    assert cache.roots == {}, "a tenant with nothing left costs nothing"


def test_the_second_of_two_equal_prompts_computes_its_last_token_alone() -> None:
    drive = Drive(num_blocks=16, block_size=4, token_budget=64, prefix_cache=True)
    first = drive.add(prompt=8, max_tokens=2)
    run(drive, first)
    second = drive.add(prompt=8, max_tokens=2)
    (chunk,) = drive.step()
    assert (second.cached_tokens, chunk.count) == (4, 4), "at least the last token gives logits"
    longer = drive.add(prompt=9, max_tokens=2)
    run(drive, second, longer)
    assert (first.cached_tokens, longer.cached_tokens) == (0, 8)
    assert drive.kv.hit_tokens == 12 and drive.kv.queried_tokens == 25


def test_a_block_is_found_only_after_it_was_written() -> None:
    """vllm#37152: two equal prompts in one iteration share nothing yet; afterwards one block serves both."""
    drive = Drive(num_blocks=16, block_size=4, token_budget=64, prefix_cache=True)
    first, second = drive.add(prompt=9, max_tokens=4), drive.add(prompt=9, max_tokens=4)
    drive.step()
    assert first.cached_tokens == second.cached_tokens == 0
    assert first.blocks[:2] == second.blocks[:2] and first.blocks[2] != second.blocks[2]
    run(drive, first, second)


def test_answers_are_found_by_the_next_turn_of_a_chat() -> None:
    drive = Drive(num_blocks=16, block_size=4, token_budget=64, prefix_cache=True)
    first = drive.add(prompt=6, max_tokens=7)
    run(drive, first)
    second = drive.add(prompt=1, max_tokens=1)
    second.tokens[:] = [*first.tokens, 77]
    drive.step()
    assert second.computed == 14 and drive.kv.hit_tokens == 12


def test_tenants_are_kept_apart() -> None:
    drive = Drive(num_blocks=16, block_size=4, token_budget=64, prefix_cache=True)
    run(drive, drive.add(prompt=9, max_tokens=2, tenant="a"))
    other, same = drive.add(prompt=9, max_tokens=2, tenant="b"), drive.add(prompt=9, max_tokens=2, tenant="a")
    run(drive, other, same)
    assert (other.cached_tokens, same.cached_tokens) == (0, 8)


def test_what_an_error_may_have_spoiled_is_forgotten() -> None:
    drive = Drive(num_blocks=16, block_size=4, token_budget=64, prefix_cache=True)
    broken = drive.add(prompt=9, max_tokens=5)
    drive.step()
    drive.scheduler.finish(broken, "error")
    again = drive.add(prompt=9, max_tokens=2)
    run(drive, again)
    assert again.cached_tokens == 0


def test_what_falls_out_of_the_device_comes_back_from_the_host() -> None:
    drive = Drive(num_blocks=4, block_size=4, token_budget=64, prefix_cache=True, host_blocks=8)
    run(drive, drive.add(prompt=13, max_tokens=2))
    run(drive, drive.add(prompt=13, max_tokens=2, shared=0))
    assert drive.kv.store.swapped_out >= 3
    again = drive.add(prompt=13, max_tokens=2)
    run(drive, again)
    assert again.cached_tokens == 12 and drive.kv.store.swapped_in == 3


def test_leaves_go_before_what_they_hang_on() -> None:
    drive = Drive(num_blocks=6, block_size=4, token_budget=64, prefix_cache=True)
    run(drive, drive.add(prompt=17, max_tokens=1))
    run(drive, drive.add(prompt=12, max_tokens=1, shared=0))
    again = drive.add(prompt=17, max_tokens=1)
    run(drive, again)
    assert 0 < again.cached_tokens < 16


def swapped_one(**fields: object) -> tuple[Drive, Sequence, Sequence]:
    """A sequence that another one drove out."""
    drive = Drive(num_blocks=4, block_size=4, watermark=0.0, **fields)
    late = drive.add(prompt=4, max_tokens=9, priority=0)
    drive.step()
    urgent = drive.add(prompt=4, max_tokens=9, priority=9)
    while not late.preemptions:
        drive.step()
    return drive, late, urgent


@pytest.mark.parametrize("host_blocks,computed", [(8, True), (1, False), (0, False)])
def test_a_swapped_sequence_goes_on_where_it_was_and_without_room_is_computed_again(
    host_blocks: int, computed: bool
) -> None:
    """vllm#546, #787"""
    drive, late, _ = swapped_one(host_blocks=host_blocks)
    assert (late.computed > 4) == computed
    assert (late.timeline.swaps == late.timeline.preemptions) == computed
    drive.finish_all()


def test_a_block_that_somebody_else_has_is_not_copied() -> None:
    drive = Drive(
        num_blocks=6, block_size=4, watermark=0.0, prefix_cache=True, host_blocks=8, token_budget=64
    )
    late = drive.add(prompt=9, max_tokens=12, priority=0, shared=8)
    drive.step()
    urgent = drive.add(prompt=9, max_tokens=12, priority=9, shared=8)
    while not late.preemptions:
        drive.step()
    assert late.timeline.swaps and late.pages[:2] == urgent.pages[:2]
    assert not any(page.stored for page in late.pages[:2]), "two blocks are shared, and stay where they are"
    drive.finish_all()


def test_a_swapped_sequence_that_is_cancelled_leaves_nothing() -> None:
    drive, late, _ = swapped_one(host_blocks=8)
    drive.cancel(late)
    drive.check_pool()
    drive.finish_all()
    assert sorted(drive.kv.store.host.free) == list(range(8))


def test_a_sequence_does_not_run_before_its_copy_has_come() -> None:
    """The others go on meanwhile; when there are no others the iteration waits for it."""
    drive = Drive(num_blocks=8, block_size=2, watermark=0.0, host_blocks=16, late=True, max_running=3)
    seqs = [drive.add(prompt=4, max_tokens=9, priority=i) for i in range(3)]
    waited = False
    while drive.scheduler.has_work():
        chosen = {chunk.seq for chunk in drive.step()}
        waited |= any(seq.arriving and seq not in chosen for seq in drive.scheduler.running)
    assert waited and all(seq.reason == "length" for seq in seqs)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.page_at.clear(),
        lambda s: s.page_of.clear(),
        lambda s: s.host.free.pop(),
        lambda s: setattr(next(iter(s.page_at.values())), "stored", False),
        lambda s: s.blocks.kept.clear(),
    ],
)
def test_check_finds_what_is_wrong(spoil: Callable[[PageStore], object]) -> None:
    drive = Drive(num_blocks=4, block_size=4, token_budget=64, prefix_cache=True, host_blocks=8)
    run(drive, drive.add(prompt=13, max_tokens=2))
    run(drive, drive.add(prompt=13, max_tokens=2, shared=0))
    drive.kv.check([])
    spoil(drive.kv.store)
    with pytest.raises(AssertionError):
        drive.kv.check([])


def test_the_cost_model_follows_what_is_measured() -> None:
    costs = SwapCosts(block_bytes=1_000_000, block_size=16)
    for _ in range(60):
        costs.moved(10, 10e-3, out=True)
        costs.moved(10, 5e-3, out=False)
    assert costs.transfer(10, 0) == pytest.approx(10e-3, rel=0.05)
    assert costs.transfer(0, 10) == pytest.approx(5e-3, rel=0.05)
    costs.moved(10, 100.0, out=True)
    assert costs.transfer(10, 0) < 16e-3, "one outlier moves little"
    for _ in range(20):
        costs.times.observe((256, 0, 0, 256 * 128), 256 * 2e-3)
    assert costs.recompute(256) == pytest.approx(0.5, rel=0.3)


@pytest.mark.parametrize("milliseconds,swaps", [(0.01, True), (1000.0, False)])
def test_auto_takes_what_is_cheaper(milliseconds: float, swaps: bool) -> None:
    """Of a victim, of a block that is to be demoted, of one that is to be fetched."""
    drive = Drive(num_blocks=4, block_size=4, watermark=0.0, preemption="auto", host_blocks=8)
    drive.kv.costs = drive.kv.store.costs = costs = SwapCosts(1 << 20, 4)
    for _ in range(100):
        costs.moved(1, milliseconds / 1000, out=True)
        costs.moved(1, milliseconds / 1000, out=False)
    assert costs.fetching_pays() == costs.demoting_pays() == swaps
    late = drive.add(prompt=4, max_tokens=9, priority=0)
    drive.step()
    drive.add(prompt=4, max_tokens=9, priority=9)
    drive.finish_all()
    assert bool(late.timeline.swaps) == swaps and late.preemptions
