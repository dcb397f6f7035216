"""Wherever a worker died, what the next one publishes joins what is there: the same text, nothing twice."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.engine.api import Finish, Output, SamplingParams, Timeline, Told
from plait.engine.text import TextStream
from plait.service.history import Published
from plait.service.joint import Joint, Mismatch
from tiny_models import byte_tokenizer

BACKEND = byte_tokenizer()
EOS = 256
A, B, C, *OTHERS = BACKEND.encode("abcé€").ids
TOKENIZER: Any = SimpleNamespace(backend=BACKEND, special_ids=frozenset({EOS, 257}))


def told(ids: list[int], sampling: SamplingParams) -> Told:
    stream = TextStream(TOKENIZER, sampling, [])
    return Told("".join([stream.push(i) for i in ids]), stream.held, stream.stopped)


def finish(reason: Any) -> Finish:
    return Finish(reason, Timeline(0.0), 1, 1)


def outputs(ids: list[int], sampling: SamplingParams, start: int = 0) -> list[Output]:
    """What the engine says from token `start` on, of a sequence that ends as its sampling and ids say."""
    stream = TextStream(TOKENIZER, sampling, [])
    for i in ids[:start]:
        stream.push(i)
    said: list[Output] = []

    def ends(i: int) -> bool:
        return i == EOS or i in sampling.stop_token_ids

    if start and (stream.stopped or ends(ids[start - 1]) or start == len(ids)):
        reason = "stop" if stream.stopped or ends(ids[start - 1]) else "length"
        return [Output("r", text=stream.finish(), finish=finish(reason))]
    for at in range(start, len(ids)):
        silent = ends(ids[at]) and not sampling.include_stop_str_in_output
        output = Output("r", [ids[at]], "" if silent else stream.push(ids[at]))
        said.append(output)
        if stream.stopped or ends(ids[at]) or at == len(ids) - 1:
            output.text += stream.finish()
            output.finish = finish("stop" if stream.stopped or ends(ids[at]) else "length")
            break
    return said


samplings = st.builds(
    SamplingParams,
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=2).map(tuple),
    stop_token_ids=st.sampled_from([(), (B,)]),
    skip_special_tokens=st.booleans(),
    include_stop_str_in_output=st.booleans(),
)


@settings(max_examples=400, deadline=None)
@given(
    ids=st.lists(st.sampled_from([A, B, C, *OTHERS, EOS, 257]), min_size=1, max_size=12),
    sampling=samplings,
    data=st.data(),
)
def test_the_parts_are_the_whole(ids: list[int], sampling: SamplingParams, data: st.DataObject) -> None:
    whole = outputs(ids, sampling)
    text, tokens = "".join(o.text for o in whole), [i for o in whole for i in o.token_ids]
    cut = data.draw(st.integers(1, len(whole)))
    before = Published([i for o in whole[:cut] for i in o.token_ids], "".join(o.text for o in whole[:cut]))
    if cut > 1 and data.draw(st.booleans()):
        # The last event was cut in two, and its second half was not published.
        last = whole[cut - 2 : cut]
        characters = "".join(o.text for o in last)
        before = Published(
            tokens[: cut - 1], "".join(o.text for o in whole[: cut - 2]) + characters[: len(characters) // 2]
        )
    count = len(before.token_ids)
    joint = Joint(
        before, told(tokens[:count], sampling), lambda: told(tokens[: count - 1], sampling), sampling
    )
    rest = outputs(ids, sampling, count)
    for output in rest:
        joint.take(output)
    assert before.text + "".join(o.text for o in rest) == text
    assert before.token_ids + [i for o in rest for i in o.token_ids] == tokens


def test_another_tokenizer() -> None:
    sampling = SamplingParams()
    with pytest.raises(Mismatch):
        Joint(Published([A, B], "xy"), told([A, B], sampling), lambda: told([A], sampling), sampling)
    joint = Joint(Published([A], "abc"), told([A], sampling), lambda: told([], sampling), sampling)
    with pytest.raises(Mismatch):
        joint.take(Output("r", [C], "c"))
