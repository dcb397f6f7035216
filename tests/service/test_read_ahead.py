"""Reserves are kept, weights divide the rest, and the bounds hold whatever happens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.service.read_ahead import ReadAhead
from plait.service.settings import LaneSettings, Settings, SettingsError, WorkerSettings


def read_ahead(lanes: dict[str, tuple[float, float]], requests: int = 100, size: int = 1000) -> ReadAhead:
    limits = WorkerSettings(max_in_flight=requests, max_in_flight_bytes=size)
    made = [
        LaneSettings(name=name, topic=name, weight=weight, reserved=reserved)
        for name, (weight, reserved) in lanes.items()
    ]
    return ReadAhead(limits, made)


def fill(ahead: ReadAhead, lane: str, size: int = 1) -> int:
    """Read all that the lane may, and want more."""
    count = 0
    while ahead.room(lane):
        ahead.take(lane, size)
        count += 1
    ahead.want(lane, True)
    return count


def test_one_lane_has_everything() -> None:
    ahead = read_ahead({"a": (1, 0)})
    assert fill(ahead, "a") == 100
    ahead.give_back("a", 1)
    assert ahead.room("a") == 1


def test_a_backlog_leaves_the_reserve_of_the_others() -> None:
    ahead = read_ahead({"urgent": (1, 0.25), "batch": (1, 0)})
    assert fill(ahead, "batch") == 75
    assert ahead.room("urgent") == 25 and ahead.room("batch") == 0


def test_what_becomes_free_goes_to_the_hungry_by_weight() -> None:
    ahead = read_ahead({"a": (3, 0), "b": (1, 0)})
    assert fill(ahead, "b") == 100
    ahead.want("a", True)  # it is held, without room
    for _ in range(75):
        assert ahead.room("b") == 0, "over its share: the other is first"
        ahead.give_back("b", 1)
        ahead.take("a", 1)
    assert ahead.room("a") == 0
    ahead.give_back("b", 1)
    assert ahead.room("a") == 0 and ahead.room("b") == 1, "from now on each keeps its share"
    ahead.want("b", False)
    assert ahead.room("a") == 1, "nobody else wants it"


def test_bytes_are_divided_as_requests_are() -> None:
    ahead = read_ahead({"urgent": (1, 0.25), "batch": (1, 0)})
    assert fill(ahead, "batch", 300) == 3, "one more than the 750 bytes, at most"
    assert ahead.room("urgent") == 25 + 38, "its reserve and its share"
    ahead.take("urgent", 250)
    assert ahead.room("urgent") == 0, "of the bytes only its reserve was left"
    assert ahead.byte_limit("urgent") == 1000 and ahead.byte_limit("batch") == 750


def test_the_smallest_share_gets_through() -> None:
    ahead = read_ahead({"a": (1000, 0), "b": (0.001, 0)}, requests=1)
    ahead.want("a", True)
    assert ahead.room("b") == 1


LANES = st.lists(
    st.tuples(st.floats(0.01, 100), st.sampled_from([0.0, 0.01, 0.1, 0.3])), min_size=1, max_size=3
)
STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["read", "end", "hungry", "full"]), st.integers(1, 200))
)


@settings(deadline=None)
@given(LANES, STEPS, st.integers(1, 40), st.integers(1, 1000))
def test_the_bounds_hold(
    parts: list[tuple[float, float]], steps: list[tuple[int, str, int]], requests: int, size: int
) -> None:
    ahead = read_ahead({str(i): part for i, part in enumerate(parts)}, requests, size)
    out: dict[str, list[int]] = {str(i): [] for i in range(len(parts))}
    for number, step, amount in steps:
        lane = str(number % len(parts))
        if step == "read" and ahead.room(lane):
            ahead.take(lane, amount)
            out[lane].append(amount)
        elif step == "end" and out[lane]:
            ahead.give_back(lane, out[lane].pop())
        else:
            ahead.want(lane, step == "hungry")
        total = sum(map(len, out.values()))
        assert total <= requests
        assert sum(map(sum, out.values())) < size + 200 * len(parts), "over by the last message, at most"
        for name, (_, reserved) in enumerate(parts):
            mine, kept = out[str(name)], int(reserved * requests)
            if len(mine) < kept and sum(mine) < int(reserved * size):
                assert ahead.room(str(name)) >= kept - len(mine)
        assert total or any(ahead.room(name) for name in out), "somebody can always go on"


def test_lanes_of_a_file() -> None:
    lanes = [
        {"name": "interactive", "topic": "plait.requests.interactive", "weight": 4, "reserved": 0.25},
        {"name": "batch", "topic": "plait.requests.batch", "priority": 1},
    ]
    topics = Settings.load(topics={"lanes": lanes}).topics
    assert [lane.name for lane in topics.all_lanes()] == ["default", "interactive", "batch"]
    groups = [topics.group_of(lane.topic, "g") for lane in topics.all_lanes()]
    assert groups == ["g", "g.plait.requests.interactive", "g.plait.requests.batch"]
    lanes[0]["topic"] = "plait.requests"
    assert [lane.name for lane in Settings.load(topics={"lanes": lanes}).topics.all_lanes()] == [
        "interactive",
        "batch",
    ]


@pytest.mark.parametrize(
    ("lane", "why"),
    [
        ({"name": "default", "topic": "x"}, "two lanes have the same name"),
        ({"name": "b", "topic": "a"}, "two lanes have the same topic"),
        ({"name": "b", "topic": "plait.dlq"}, "are no lanes"),
        ({"name": "b", "topic": "x", "reserved": 0.6}, "must be left unreserved"),
        ({"name": "b", "topic": "x", "weight": 0}, r"topics\.lanes\.1\.weight"),
    ],
)
def test_lanes_that_make_no_sense(lane: dict[str, object], why: str) -> None:
    first = {"name": "a", "topic": "a", "reserved": 0.5}
    with pytest.raises(SettingsError, match=why):
        Settings.load(topics={"lanes": [first, lane]})
