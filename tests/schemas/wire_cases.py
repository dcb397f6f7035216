"""The cases behind vectors/index.json, written by hand: bytes, and what they must decode to.

`python tests/schemas/wire_cases.py` writes the file anew. Nothing here uses plait's own codec.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgpack

INDEX = Path(__file__).parent / "vectors" / "index.json"
MSGPACK, JSON = "application/msgpack", "application/json"

SAMPLING: dict[str, Any] = {
    "min_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "n": 1,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
}
REQUEST: dict[str, Any] = {
    "v": 1,
    "sampling": SAMPLING,
    "priority": 4,
    "slo": {"on_miss": "reject"},
    "stream": True,
    "metadata": {},
}
BASE: dict[str, Any] = {"request_id": "r-1", "prompt": "Hello"}
USAGE = {"prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 2}


def to_json(fields: Any) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def request_of(given: dict[str, Any]) -> dict[str, Any]:
    sampling = SAMPLING | given.get("sampling", {})
    return REQUEST | given | {"sampling": sampling, "slo": REQUEST["slo"] | given.get("slo", {})}


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "type": kind, "request_id": "r-1", "index": 3, "choice": 0, "epoch": 7, **fields}


def done(**fields: Any) -> dict[str, Any]:
    head = event("done", finish_reason="stop", finish_reasons=["stop"], usage=USAGE)
    timing = {"queue_ms": 1.5, "ttft_ms": 40.25, "tpot_ms": 11.0, "total_ms": 51.25, "preemptions": 0}
    return {**head, "timing": timing, "slo": {}, **fields}


FULL_REQUEST = {
    "v": 1,
    "request_id": "Full.request_1-a",
    "model": "smollm2",
    "tenant": "team-a@example.org",
    "messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Grüße, 世界 🌍"}],
    "sampling": {
        "max_tokens": 64,
        "min_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": -9223372036854775808,
        "n": 2,
        "stop": ["\n\n", "END"],
        "stop_token_ids": [2, 0],
        "ignore_eos": True,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.1,
        "logit_bias": {"50256": -100.0, "0": 5.5},
        "logprobs": 20,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    },
    "priority": 9,
    "slo": {"ttft_ms": 500, "tpot_ms": 50, "deadline_ms": 60000, "on_miss": "serve"},
    "response_topic": "client-7.responses",
    "stream": False,
    "created_at": 1764450000123,
    "metadata": {"job": "night", "tags": ["a", None, True, 1.5], "nested": {"k": {}}},
}


def _int_bias(request: dict[str, Any]) -> dict[str, Any]:
    bias = {int(key): value for key, value in request["sampling"]["logit_bias"].items()}
    return {**request, "sampling": {**request["sampling"], "logit_bias": bias}}


class Cases:
    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def add(self, name: str, kind: str, value: bytes | None, content_type: str | None, **rest: Any) -> None:
        text = None if value is None else base64.b64encode(value).decode()
        entry = {"name": name, "kind": kind, "content_type": content_type, "base64": text}
        self.all.append(entry | rest)

    def good(
        self, name: str, given: dict[str, Any], decoded: dict[str, Any] | None = None, **rest: Any
    ) -> None:
        """A valid request in both encodings, told by header and by first byte."""
        decoded = request_of(given) if decoded is None else decoded
        self.add(f"{name}, json", "request", to_json(given), JSON, found=JSON, decoded=decoded, **rest)
        self.add(
            f"{name}, msgpack", "request", msgpack.packb(given), None, found=MSGPACK, decoded=decoded, **rest
        )

    def event(self, name: str, given: dict[str, Any], kind: str = "event") -> None:
        """An event exactly as a worker writes it, in both encodings."""
        for found, value in ((JSON, to_json(given)), (MSGPACK, msgpack.packb(given))):
            label = found.partition("/")[2]
            self.add(f"{name}, {label}", kind, value, found, found=found, decoded=given, canonical=True)

    def bad(
        self, name: str, changes: dict[str, Any], field: str, *, by_schema: bool = True, **told: Any
    ) -> None:
        """A request that is read and refused. Null in `changes` takes a field of the good one away.

        `by_schema`: whether the JSON Schema refuses it too.
        """
        fields = {key: value for key, value in (BASE | changes).items() if value is not None}
        error = {"code": "invalid_request", "field": field, "request_id": fields.get("request_id")}
        error |= {"response_topic": fields.get("response_topic")} | told
        self.add(f"{name}, json", "request", to_json(fields), None, error=error, by_schema=by_schema)
        self.add(f"{name}, msgpack", "request", msgpack.packb(fields), None, error=error)

    def raw(
        self, name: str, value: bytes | None, field: str = "", content_type: str | None = None, **told: Any
    ) -> None:
        """Bytes that are refused as a whole, or that only one encoding can hold."""
        error = {"code": "invalid_request", "field": field, "request_id": None, "response_topic": None} | told
        self.add(name, "request", value, content_type, error=error)


def build() -> list[dict[str, Any]]:
    cases = Cases()
    _valid(cases)
    _events(cases)
    _refused(cases)
    _unreadable(cases)
    return cases.all


def _valid(cases: Cases) -> None:
    cases.good("smallest", BASE)
    cases.add(
        "every field",
        "request",
        to_json(FULL_REQUEST),
        JSON,
        found=JSON,
        decoded=FULL_REQUEST,
        canonical=True,
    )
    packed = msgpack.packb(_int_bias(FULL_REQUEST))
    cases.add(
        "every field, msgpack",
        "request",
        packed,
        MSGPACK,
        found=MSGPACK,
        decoded=FULL_REQUEST,
        canonical=True,
    )
    cases.good("token ids", {"request_id": "a", "prompt_token_ids": [0, 1, 2147483647]})
    ids = {"request_id": "a", "prompt_token_ids": list(range(4100))}
    cases.good("a long list of token ids", ids)
    digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    reference = {"url": "https://store.example.com/a?b=c", "size": 4, "sha256": digest}
    cases.good("prompt by reference", {"request_id": "a", "prompt_ref": reference})
    cases.good("unknown fields", BASE | {"later": {"x": [1]}, "sampling": {"later": 1}}, request_of(BASE))
    stop = {**BASE, "sampling": {"stop": "END"}}
    cases.good("stop as text", stop, request_of({**BASE, "sampling": {"stop": ["END"]}}))
    cases.good("top_k -1 is off", {**BASE, "sampling": {"top_k": -1}}, request_of(BASE))
    ints = {**BASE, "sampling": {"temperature": 0, "logit_bias": {"7": 1}}}
    cases.good(
        "integers for floats",
        ints,
        request_of({**BASE, "sampling": {"temperature": 0.0, "logit_bias": {"7": 1.0}}}),
    )
    nulls = BASE | {"v": None, "model": None, "messages": None, "sampling": None, "slo": {"ttft_ms": None}}
    cases.good("null is absent", nulls, request_of(BASE))
    nulls = BASE | {
        "sampling": {"temperature": None, "seed": None},
        "stream": None,
        "metadata": {"kept": None},
    }
    cases.good("null is absent, further in", nulls, request_of(BASE | {"metadata": {"kept": None}}))
    limits = {"priority": 0, "created_at": 2**53, "slo": {"deadline_ms": 604800000}, "request_id": "x" * 200}
    cases.good("limits", BASE | limits)
    utf8 = "application/JSON ; charset=UTF-8"
    for name, value, header, found in (
        ("content type with parameters", to_json(BASE), utf8, JSON),
        ("content type x-msgpack", msgpack.packb(BASE), "application/x-msgpack", MSGPACK),
        ("content type of no use", to_json(BASE), "application/octet-stream", JSON),
        ("white space first", b" \r\n\t" + to_json(BASE), None, JSON),
        ("byte order mark", b"\xef\xbb\xbf" + to_json(BASE), None, JSON),
        ("map16", b"\xde\x00\x02" + msgpack.packb(BASE)[1:], None, MSGPACK),
        ("map32", b"\xdf\x00\x00\x00\x02" + msgpack.packb(BASE)[1:], None, MSGPACK),
    ):
        cases.add(name, "request", value, header, found=found, decoded=request_of(BASE))


def _events(cases: Cases) -> None:
    cases.event("tokens", event("tokens", token_ids=[504, 28], text=" Hi 🌍"))
    cases.event("tokens of a later choice", event("tokens", token_ids=[1], text="") | {"choice": 15})
    logprobs = [{"token_id": 1, "logprob": -0.25, "top": [{"token_id": 1, "logprob": -0.25}]}]
    cases.event("tokens with logprobs", event("tokens", token_ids=[1], text="a", logprobs=logprobs))
    cases.event("done", done(metadata={"job": "night", "empty": None}))
    met = {"ttft_met": True, "tpot_met": False, "deadline_met": True}
    whole = done(slo=met, text="Hi", texts=["Hi", "Ho"], token_ids=[1, 2], logprobs=logprobs, metadata={})
    whole |= {"finish_reasons": ["stop", "length"]}
    cases.event("done with the whole answer", whole)
    early = done(metadata={}) | {"finish_reason": "cancelled", "finish_reasons": ["cancelled"]}
    cases.event("done before the first token", early | {"timing": {"total_ms": 2.0, "preemptions": 0}})
    failed = {
        "code": "overloaded",
        "message": "busy",
        "retryable": True,
        "retry_after_ms": 1500,
        "metadata": {},
    }
    cases.event("error", event("error", **failed))
    for code in (
        "invalid_request",
        "prompt_too_long",
        "model_not_found",
        "deadline_exceeded",
        "cancelled",
        "internal",
    ):
        cases.event(f"error {code}", event("error", code=code, message="why", retryable=False, metadata={}))
    cases.event("cancel", {"v": 1, "type": "cancel", "request_id": "r-1"}, "control")
    for name, kind, fields, field in (
        ("unknown type", "event", event("news"), "type"),
        ("no type", "event", {"request_id": "r-1"}, "type"),
        ("event of another version", "event", event("tokens", token_ids=[], text="") | {"v": 2}, "v"),
        ("negative index", "event", event("tokens", token_ids=[], text="") | {"index": -1}, "index"),
        ("unknown error code", "event", event("error", code="x", message="", retryable=False), "code"),
        ("control without type", "control", {"v": 1, "request_id": "r-1"}, "type"),
        ("control of unknown type", "control", {"v": 1, "type": "pause", "request_id": "r-1"}, "type"),
        ("cancel without id", "control", {"v": 1, "type": "cancel"}, "request_id"),
        ("cancel of another version", "control", {"v": 0, "type": "cancel", "request_id": "r-1"}, "v"),
    ):
        error = {"code": "invalid_request", "field": field, "request_id": fields.get("request_id")}
        error["response_topic"] = None
        cases.add(name, kind, to_json(fields), JSON, error=error, by_schema=True)


def _refused(cases: Cases) -> None:
    cases.bad("no request id", {"request_id": None}, "request_id")
    cases.bad("number as request id", {"request_id": 7}, "request_id")
    for item in cases.all[-2:]:
        item["error"]["request_id"] = None
    for name, bad_id in (
        ("empty", ""),
        ("slash", "a/b"),
        ("space", "a b"),
        ("long", "x" * 201),
        ("umlaut", "ä"),
    ):
        cases.bad(f"request id: {name}", {"request_id": bad_id}, "request_id", request_id=None)
    for name, version in (("2", 2), ("0", 0), ("text", "1"), ("true", True), ("1.5", 1.5)):
        cases.bad(f"version {name}", {"v": version, "response_topic": "answers"}, "v")
    cases.bad("no input", {"prompt": None}, "prompt")
    cases.bad("two inputs", {"messages": [{"role": "user", "content": "x"}]}, "messages")
    cases.bad("empty prompt", {"prompt": ""}, "prompt")
    cases.bad("prompt is a number", {"prompt": 3}, "prompt")
    cases.bad("no messages", {"prompt": None, "messages": []}, "messages")
    cases.bad(
        "unknown role", {"prompt": None, "messages": [{"role": "bot", "content": ""}]}, "messages[0].role"
    )
    cases.bad("no content", {"prompt": None, "messages": [{"role": "user"}]}, "messages[0].content")
    for name, ids, field in (
        ("no token ids", [], "prompt_token_ids"),
        ("negative token id", [1, -1], "prompt_token_ids[1]"),
        ("huge token id", [2**31], "prompt_token_ids[0]"),
        ("text as token id", ["1"], "prompt_token_ids[0]"),
    ):
        cases.bad(name, {"prompt": None, "prompt_token_ids": ids}, field)
    reference = {"url": "https://h/x", "size": 1, "sha256": "0" * 64}
    for key, values in {
        "url": ("", "h/x", "https://", "https://h/a b", "https://h/ä", "https://h/" + "x" * 2048, 7),
        "size": (0, -1, 2**30 + 1, "1", 1.5),
        "sha256": ("", "0" * 63, "0" * 65, "A" * 64, 0),
    }.items():
        cases.bad(
            f"reference without {key}",
            {"prompt": None, "prompt_ref": reference | {key: None}},
            f"prompt_ref.{key}",
        )
        for number, value in enumerate(values):
            changes = {"prompt": None, "prompt_ref": reference | {key: value}}
            cases.bad(f"reference, {key} {number}: {value!s:.16}", changes, f"prompt_ref.{key}")
    cases.bad("reference is text", {"prompt": None, "prompt_ref": "https://h/x"}, "prompt_ref")
    cases.bad("reference and prompt", {"prompt_ref": reference}, "prompt_ref")
    for key, values in {
        "max_tokens": (0, -1, "5", 1.5),
        "min_tokens": (-1,),
        "temperature": (-0.1, 100.5, "hot", True),
        "top_p": (0, 1.01),
        "top_k": (-2, 1.5),
        "min_p": (-0.1, 1.1),
        "seed": (2**63, "x"),
        "n": (0, 17),
        "presence_penalty": (-2.1, 2.1),
        "frequency_penalty": (-2.1, 2.1),
        "repetition_penalty": (0, 10.5),
        "logprobs": (-1, 21, True),
        "ignore_eos": (1, "yes"),
        "logit_bias": ([1], {"x": 1}, {"-1": 1}),
        "stop": (7, ["x"] * 17),
    }.items():
        for value in values:
            cases.bad(f"{key} {value!s:.20}", {"sampling": {key: value}}, f"sampling.{key}")
    cases.bad("stop: empty", {"sampling": {"stop": [""]}}, "sampling.stop[0]")
    cases.bad("stop: long", {"sampling": {"stop": ["x" * 1025]}}, "sampling.stop[0]")
    cases.bad("bias too large", {"sampling": {"logit_bias": {"5": 100.5}}}, "sampling.logit_bias[5]")
    cases.bad("bias of text", {"sampling": {"logit_bias": {"5": "1"}}}, "sampling.logit_bias[5]")
    bias = {"logit_bias": {str(i): 1 for i in range(1025)}}
    cases.bad("bias of too many", {"sampling": bias}, "sampling.logit_bias")
    twice = {"sampling": {"logit_bias": {"5": 1, "05": 1}}}
    cases.bad("bias given twice", twice, "sampling.logit_bias", by_schema=False)
    huge = {"sampling": {"logit_bias": {"9999999999": 1}}}
    cases.bad("bias of a huge id", huge, "sampling.logit_bias", by_schema=False)
    cases.bad(
        "min over max",
        {"sampling": {"min_tokens": 3, "max_tokens": 2}},
        "sampling.min_tokens",
        by_schema=False,
    )
    cases.bad("sampling is a list", {"sampling": []}, "sampling")
    cases.bad("first of two", {"priority": 10, "stream": "yes"}, "priority")
    for priority in (-1, 10, "4", 4.5, True):
        cases.bad(f"priority {priority!r}", {"priority": priority}, "priority")
    for key, limit in (("ttft_ms", 86400000), ("tpot_ms", 3600000), ("deadline_ms", 604800000)):
        cases.bad(f"{key} 0", {"slo": {key: 0}}, f"slo.{key}")
        cases.bad(f"{key} too large", {"slo": {key: limit + 1}}, f"slo.{key}")
    for topic in ("", ".", "..", "a b", "x" * 250, "ä"):
        cases.bad(f"topic {topic:.5}", {"response_topic": topic}, "response_topic", response_topic=None)
    cases.bad("stream as a number", {"stream": 1}, "stream")
    cases.bad("empty tenant", {"tenant": ""}, "tenant")
    cases.bad("tenant with a space", {"tenant": "a b"}, "tenant")
    cases.bad("empty model", {"model": ""}, "model")
    cases.bad("long model", {"model": "m" * 256}, "model")
    cases.bad("created before 1970", {"created_at": -1}, "created_at")
    cases.bad("created too late", {"created_at": 2**53 + 1}, "created_at")
    cases.bad("metadata is a list", {"metadata": [1]}, "metadata")
    cases.bad("much metadata", {"metadata": {"a": "x" * 16384}}, "metadata", by_schema=False)
    deep: Any = 1
    for _ in range(8):
        deep = [deep]
    path = "metadata.a" + "[0]" * 7
    cases.bad("deep metadata", {"metadata": {"a": deep}}, path, by_schema=False)


def _unreadable(cases: Cases) -> None:
    good = msgpack.packb(BASE)
    for name, value in (
        ("tombstone", None),
        ("empty", b""),
        ("text", b"hello"),
        ("a number", b"\x07"),
        ("a list", b"[1,2]"),
        ("a msgpack list", b"\x92\x01\x02"),
        ("null", b"null"),
        ("white space", b"  "),
        ("cut short", good[:-1]),
        ("cut in a length", b"\xdf\x00"),
        ("JSON cut short", to_json(BASE)[:-1]),
        ("two JSON objects", to_json(BASE) * 2),
        ("JSON with a comma too many", b'{"request_id":"r-1",}'),
        ("reserved byte", b"\x81\xa1a\xc1"),
        ("map that announces 4 billion", b"\xdf\xff\xff\xff\xff\xa1a\x01"),
        ("list that announces 4 billion", b"\x81\xa1a\x91\xdd\xff\xff\xff\xff"),
        ("text that announces 4 billion", b"\x81\xa1a\xdb\xff\xff\xff\xff"),
        ("list as a key", b"\x81\x91\x01\x01"),
        ("map as a key", b"\x81\x80\x01"),
        ("deep JSON", b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}"),
        ("deep msgpack", b"\x81\xa1a" + b"\x91" * 3000 + b"\x01"),
        ("UTF-16", json.dumps(BASE).encode("utf-16")),
        ("integer of 5000 digits", b'{"request_id":"r-1","x":' + b"9" * 5000 + b"}"),
    ):
        cases.raw(name, value)
    cases.raw("msgpack said to be JSON", good, content_type=JSON)
    cases.raw("JSON said to be msgpack", to_json(BASE), content_type=MSGPACK)
    cases.raw("request id given twice", b'{"request_id":"a","request_id":"b","prompt":"x"}', "request_id")
    head = b'{"request_id":"r-1","response_topic":"answers",'
    known = {"request_id": "r-1", "response_topic": "answers"}
    for name, rest, field in (
        ("key given twice", b'"prompt":"x","prompt":"y"}', "prompt"),
        ("key given twice further in", b'"prompt":"x","sampling":{"n":1,"n":2}}', "n"),
        ("NaN", b'"prompt":"x","sampling":{"temperature":NaN}}', "sampling.temperature"),
        ("Infinity", b'"prompt":"x","sampling":{"temperature":-Infinity}}', "sampling.temperature"),
        ("1e999", b'"prompt":"x","metadata":{"a":1e999}}', "metadata.a"),
        ("lone surrogate", b'"prompt":"\\ud83d"}', "prompt"),
        ("lone surrogate in a key", b'"prompt":"x","metadata":{"\\udc00":1}}', "metadata"),
        ("not UTF-8", b'"prompt":"\xff"}', "prompt"),
        ("integer of 65 bits", b'"prompt":"x","metadata":{"a":18446744073709551616}}', "metadata.a"),
        ("17 levels", b'"x":' + b"[" * 17 + b"1" + b"]" * 17 + b"}", "x" + "[0]" * 15),
    ):
        cases.raw(name, head + rest, field, **known)
    known = {"request_id": "r-1"}
    more = b"\x83" + good[1:]
    for name, value, field in (
        ("bytes after the map", good + b"\xc0", ""),
        ("number as a key", b"\x83" + good[1:] + b"\x01\x01", ""),
        ("binary as a key", b"\x83" + good[1:] + b"\xc4\x01a\x01", ""),
        ("key given twice, msgpack", more + b"\xa6prompt\xa1x", "prompt"),
        ("binary", more + b"\xa1x\xc4\x01\x00", "x"),
        ("extension type", more + b"\xa1x\xd4\x05\x00", "x"),
        ("timestamp", more + b"\xa1x\xd6\xff\x00\x00\x00\x01", "x"),
        ("NaN, msgpack", more + b"\xa1x\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", "x"),
        ("not UTF-8, msgpack", more + b"\xa1x\xa1\xff", "x"),
        ("surrogate in UTF-8", more + b"\xa1x\xa3\xed\xa0\x80", "x"),
        ("number as a key elsewhere", more + b"\xa8metadata\x81\x01\x01", "metadata"),
    ):
        cases.raw(name, value, field, **known)


if __name__ == "__main__":
    entries = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in build())
    INDEX.write_text(f"[\n{entries}\n]\n")
