"""Frames between the engine's process and its parent."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from plait.engine.api import GenerationRequest, Objectives, SamplingParams
from plait.engine.link import Link, pack, request_in, request_out, unpack


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Link]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Link(theirs)


def test_a_request_comes_out_as_it_went_in() -> None:
    sampling = SamplingParams(
        max_tokens=7,
        temperature=0.3,
        seed=2**64 - 1,
        stop=("é🎉", "\n"),
        stop_token_ids=(1, 2),
        logit_bias={0: -1.5, 151_000: 99.0},
        logprobs=3,
    )
    slo = Objectives(1.0, 0.1, 60.5)
    request = GenerationRequest("a.b-c_1", [0, 2**31 - 1], sampling, 9, "tenant", 1.25, [5, 6], slo)
    assert request_in(unpack(pack(["add", request_out(request)])[4:])[1]) == request


def test_frames_arrive_whole_however_they_are_cut(ends: tuple[socket.socket, Link]) -> None:
    sock, link = ends
    messages = [["cancel", "x" * n, True] for n in (0, 1, 300, 70_000)]
    data = b"".join(map(pack, messages))
    got = []
    for at in range(0, len(data), 4097):
        sock.sendall(data[at : at + 4097])
        got += link.receive(0)
    assert got == messages
    assert link.receive(0) == []


def test_a_message_that_comes_late_ends_the_wait(ends: tuple[socket.socket, Link]) -> None:
    sock, link = ends
    timer = threading.Timer(0.05, sock.sendall, [pack(["stop"])])
    timer.start()
    assert link.receive(30) == [["stop"]]
    timer.join()


def test_the_end_of_the_parent_is_noticed(ends: tuple[socket.socket, Link]) -> None:
    sock, link = ends
    sock.close()
    with pytest.raises(EOFError):
        link.receive(30)


def test_a_parent_with_many_files_open() -> None:
    """The child's end keeps its number, which may be beyond what select can do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = 1500
    if soft <= number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number + 1, hard))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.dup2(theirs.fileno(), number)
        with socket.socket(fileno=number) as far:
            ours.sendall(pack(["stop"]))
            assert Link(far).receive(30) == [["stop"]]
