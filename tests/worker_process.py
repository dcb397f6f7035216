"""Workers in processes of their own, which a test can kill, freeze and stop; and readers of what they publish."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from fakes import FakeTokenizer, fake_tokens
from plait.engine.api import GenerationRequest, SamplingParams
from plait.schemas import Event, TokensEvent
from plait.service.embedded import die_with_parent
from plait.service.event_order import EventOrder
from worker_harness import Message, Site, request

TESTS = Path(__file__).parent
PROGRAM = """
import asyncio, logging, os, signal, sys
sys.path.insert(0, sys.argv[1])
from fakes import FakeEngine, FakeTokenizer
from plait.service.local import make_engine
from plait.service.settings import Settings
from plait.service.worker import Worker

BOMB = FakeTokenizer().encode("bomb")[0]

class Engine(FakeEngine):
    def submit(self, request, on_output):
        if BOMB in request.prompt_token_ids:
            os._exit(9)  # takes the whole worker with it
        super().submit(request, on_output)

async def main():
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    settings = Settings.load(sys.argv[2])
    engine = Engine(pace=float(sys.argv[3])) if sys.argv[3] else make_engine(settings)
    # What the engine's process is run by: a test can put something else in its place.
    sys.executable = os.environ.get("ENGINE_PYTHON", sys.executable)
    worker = Worker(settings, engine)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    ready = asyncio.create_task(worker.ready.wait())
    ready.add_done_callback(lambda _: print("ready", flush=True))
    await worker.run()

asyncio.run(main())
"""


class WorkerProcess:
    """A worker with a fake engine that gives each running request a token every `pace` seconds; without a pace, with
    the engine of its settings. `environment` is added to that of the tests."""

    def __init__(self, site: Site, folder: Path, pace: float | None, **environment: str) -> None:
        self.log = folder / f"{site.name}.{id(self)}.log"
        self._config = folder / f"{site.name}.toml"
        self._pace = pace
        self._environment = os.environ | environment
        if not self._config.exists():
            sections = site.settings.model_dump(
                mode="json", include={"kafka", "topics", "http", "worker"}, exclude_none=True
            )
            sections |= site.settings.model_dump(mode="json", include={"engine"}, exclude_unset=True)
            self._config.write_text("".join(_toml(name, fields) for name, fields in sections.items()))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> WorkerProcess:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", PROGRAM, str(TESTS), str(self._config), str(self._pace or "")),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment,
                preexec_fn=die_with_parent,
            )
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            assert await self._process.stdout.readline() == b"ready\n", self.log.read_text()
        return self

    async def kill(self) -> None:
        self._signal(signal.SIGKILL)
        await self._wait()

    async def died(self, seconds: float) -> bool:
        """Whether it ends by itself within this time."""
        assert self._process is not None
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """In order, as a deployment does."""
        self._signal(signal.SIGTERM)
        code = await self._wait()
        assert code == 0, self.log.read_text()[-3000:]

    def cpu_s(self) -> float:
        """Processor time so far (Linux)."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _wait(self) -> int:
        assert self._process is not None
        async with asyncio.timeout(60):
            return await self._process.wait()


def requests(site: Site, names: list[str], length: int, topic: str | None) -> list[tuple[bytes, Any]]:
    """JSON and msgpack in turn; `topic` None: a topic for each."""
    named = {} if topic is None else {"response_topic": topic}
    sampling = {"max_tokens": length, "seed": 1, "logprobs": 0}
    return [
        request(name, "json" if i % 2 else "msgpack", sampling=sampling, **named)
        for i, name in enumerate(names)
    ]


def expected(request_id: str, length: int) -> list[int]:
    """What an undisturbed worker answers."""
    prompt = FakeTokenizer().encode(f"say {request_id}")
    return fake_tokens(GenerationRequest("", prompt, SamplingParams(max_tokens=length, seed=1)))


class Reading:
    """Events of one request as the client's reader delivers them."""

    def __init__(self, messages: list[Message]) -> None:
        order, self.tokens, self.text, self.ends = EventOrder(), [], "", []
        self.epochs: list[int] = []
        self.raw: list[Event] = [message.event() for message in messages]
        for event in self.raw:
            for ready in order.add(event):
                self.epochs.append(ready.epoch)
                if isinstance(ready, TokensEvent) and not self.ends:
                    self.tokens += ready.token_ids
                    self.text += ready.text
                elif not isinstance(ready, TokensEvent):
                    self.ends.append(ready)

    @property
    def repeated(self) -> int:
        """Tokens in the topic that a reader has already: the work that was done twice."""
        published = sum(len(e.token_ids) for e in self.raw if isinstance(e, TokensEvent))
        return published - len(self.tokens)


def _toml(name: str, fields: dict[str, Any]) -> str:
    def value(v: Any) -> str:
        return str(v).lower() if isinstance(v, bool) else repr(v)

    return f"[{name}]\n" + "".join(f"{key} = {value(v)}\n" for key, v in fields.items())
