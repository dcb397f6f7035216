"""Frames between the engine's process and its parent: msgpack behind a length of four bytes, big-endian.

To the engine: `["start", config]` once; then `["add", request]`, `["cancel", id, stopped]`, `["stop"]`.
From it: `["ready", model, stamps]` once, the stamps being when it had imported, was configured, had loaded, was warm,
or `["failed", message]`; then `["running", ids]` before an iteration admits sequences, and `["out", rows, stats]` after
it, a row being `[id, token_ids, logprob, finish]`.
"""

from __future__ import annotations

import select
import socket
import struct
from dataclasses import asdict
from typing import Any

import msgpack

from plait.engine.api import GenerationRequest, Objectives, SamplingParams

HEADER = struct.Struct(">I")


def pack(message: list[Any]) -> bytes:
    body = msgpack.packb(message)
    return HEADER.pack(len(body)) + body


def unpack(body: bytes) -> list[Any]:
    return msgpack.unpackb(body, strict_map_key=False)


def request_out(request: GenerationRequest) -> dict[str, Any]:
    return asdict(request)


def request_in(fields: dict[str, Any]) -> GenerationRequest:
    sampling = fields.pop("sampling")
    for name in ("stop", "stop_token_ids"):
        sampling[name] = tuple(sampling[name])
    slo = Objectives(**fields.pop("slo"))
    return GenerationRequest(**fields, sampling=SamplingParams(**sampling), slo=slo)


class Link:
    """The engine's end: blocking sends, receives that wait only when asked to."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.buffer = bytearray()
        # Not select: the parent may hold so many files that ours has a number above its limit.
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)

    def send(self, message: list[Any]) -> None:
        self.sock.sendall(pack(message))

    def receive(self, wait: float) -> list[list[Any]]:
        """All messages that have arrived; waits up to `wait` seconds for a first one. Raises EOFError at the end."""
        while self.poll.poll(wait * 1000):
            data = self.sock.recv(1 << 20)
            if not data:
                raise EOFError("the parent is gone")
            self.buffer += data
            wait = 0
        messages = []
        while len(self.buffer) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self.buffer)[0]
            if len(self.buffer) < end:
                break
            messages.append(unpack(bytes(self.buffer[HEADER.size : end])))
            del self.buffer[:end]
        return messages
