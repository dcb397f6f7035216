import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.schemas import Timing, Usage
from plait.service.client import RequestFailed, Result, StreamBroken
from plait.service.summarize import BATCH_PRIORITY, Plan, Summarizer
from plait.service.token_count import counter, estimate


def words(text: str) -> int:
    return len(text.split())


class FakeClient:
    """Answers with the first words of what it is asked to summarize; `failures` come first."""

    def __init__(self, answer_words=5, failures=()):
        self.answer_words = answer_words
        self.failures = list(failures)
        self.requests = []
        self.running = self.most = 0

    async def generate(self, prompt=None, **request):
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            text = request["messages"][0]["content"].split("\n\n", 1)[1]
            if "poison" in text:
                raise RequestFailed("internal", "it broke", False, None)
            if "torn" in text:
                raise StreamBroken("event 3 is missing")
            if self.failures:
                raise self.failures.pop(0)
            answer = " ".join(text.split()[: self.answer_words])
            usage = Usage(prompt_tokens=1, completion_tokens=1)
            return Result("r", answer, [], "stop", usage, Timing(total_ms=1), [answer])
        finally:
            self.running -= 1


async def outcomes(summarizer, paths):
    return {o.path.name: o async for o in summarizer.run(paths)}


async def test_a_short_text_is_one_request_at_batch_priority():
    client = FakeClient()
    summary = await Summarizer(client, words, Plan(chunk_tokens=100)).text("one two three four five six")
    assert summary == "one two three four five"
    (request,) = client.requests
    assert request["priority"] == BATCH_PRIORITY == 1
    assert request["max_tokens"] == 25


async def test_a_long_text_is_summarized_in_rounds_until_one_is_left():
    client = FakeClient(answer_words=20)
    text = "\n\n".join(f"p{n} " + "word " * 60 for n in range(40))
    summarizer = Summarizer(client, words, Plan(chunk_tokens=80, max_in_flight=4))
    summary = await summarizer.text(text)
    assert summary.startswith("p0 word")
    sizes = [words(r["messages"][0]["content"].split("\n\n", 1)[1]) for r in client.requests]
    assert len(sizes) == 40 + 10 + 3 + 1 and max(sizes) <= 80
    assert client.most == 4
    assert summarizer.planned == summarizer.finished == len(sizes)


async def test_partial_summaries_that_do_not_get_shorter_are_an_error():
    class Echo(FakeClient):
        async def generate(self, prompt=None, **request):
            self.answer_words = 10**6
            return await super().generate(prompt, **request)

    with pytest.raises(RuntimeError, match="do not get shorter"):
        await Summarizer(Echo(), words, Plan(chunk_tokens=64)).text("word " * 1000)


async def test_a_failed_file_is_reported_and_the_others_are_finished(tmp_path):
    (tmp_path / "good.txt").write_text("some good text", encoding="utf-8-sig")
    (tmp_path / "poison.txt").write_text("fine " * 500 + "poison " + "fine " * 500)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "torn.txt").write_text("torn")
    names = ["torn.txt", "good.txt", "missing.txt", "latin.txt", "empty.txt", "poison.txt", "."]
    found = await outcomes(
        Summarizer(FakeClient(), words, Plan(chunk_tokens=64)), [tmp_path / n for n in names]
    )
    assert found["good.txt"].summary == "some good text" and not found["good.txt"].error
    assert found["missing.txt"].error == "No such file or directory"
    assert found["latin.txt"].error == "is not UTF-8 (byte 3)"
    assert found["empty.txt"].error == "there is no text in it"
    assert found["torn.txt"].error == "event 3 is missing"
    assert found["poison.txt"].error == "internal: it broke"
    assert found[tmp_path.name].error == "Is a directory"


async def test_an_overloaded_worker_is_asked_again_and_other_failures_are_not():
    busy = RequestFailed("overloaded", "later", True, 1)
    client = FakeClient(failures=[busy, busy])
    assert await Summarizer(client, words).text("a b") == "a b"
    assert len(client.requests) == 3
    client = FakeClient(failures=[RequestFailed("invalid_request", "no", False, None)])
    with pytest.raises(RequestFailed, match="invalid_request"):
        await Summarizer(client, words).text("a b")
    assert len(client.requests) == 1


async def test_many_files_stay_bounded(tmp_path):
    paths = [tmp_path / f"{n}.txt" for n in range(50)]
    for path in paths:
        path.write_text("text " * 200)
    client = FakeClient()
    found = await outcomes(Summarizer(client, words, Plan(chunk_tokens=64, max_in_flight=3)), paths)
    assert len(found) == 50 and not any(o.error for o in found.values())
    assert client.most <= 3


def test_without_an_engine_tokens_are_estimated(monkeypatch, tmp_path):
    count, note = counter(None, str(tmp_path / "no-model"))
    assert count is estimate and "estimated" in note


@given(st.text(max_size=200))
def test_the_estimate_is_never_below_a_token_per_two_bytes(text):
    assert estimate(text) * 2 >= len(text.encode())


def test_with_an_engine_its_tokenizer_counts():
    class Engine:
        class tokenizer:
            @staticmethod
            def encode(text):
                return text.split()

    count, note = counter(Engine(), "x")
    assert count("a b c") == 3 and not note
