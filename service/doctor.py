"""What has to be there for plait to run, checked one by one, each with a remedy."""

from __future__ import annotations

import asyncio
import operator as operators
import os
import platform
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from aiokafka.admin import AIOKafkaAdminClient

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `remedy` says what to do about a `warn` or a `fail`."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""


async def examine(bootstrap_servers: str | None, model: str) -> AsyncIterator[Check]:
    """All checks, in the order in which they build on each other."""
    yield python()
    for extra in ("", "engine", "embedded"):
        yield dependencies(extra)
    torch = await asyncio.to_thread(lambda: list(engine()))
    for check in (*torch, compiler(), cpu(), model_cache(model)):
        yield check
    if bootstrap_servers is None:
        yield Check("broker", "ok", "not checked (give --bootstrap-servers)")
        return
    async for check in broker(bootstrap_servers):
        yield check


def python() -> Check:
    version = platform.python_version()
    return Check("python", "ok", f"{version} ({platform.system()} {platform.machine()})")


def dependencies(extra: str = "") -> Check:
    """Whether the requirements of plait, or of one of its extras, are installed in versions that fit."""
    name = f"extra {extra!r}" if extra else "dependencies"
    wrong = []
    wanted = [r for r in metadata.requires("plait") or [] if _belongs(r, extra)]
    for requirement in wanted:
        package = requirement.partition(";")[0].strip()
        distribution = re.split(r"[^A-Za-z0-9._-]", package, maxsplit=1)[0]
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            wrong.append(f"{distribution} is missing")
            continue
        if not _fits(version, package.removeprefix(distribution)):
            wrong.append(f"{package} is wanted, {version} is installed")
    if not wrong:
        return Check(name, "ok", f"{len(wanted)} package{'s' if len(wanted) != 1 else ''}")
    target = f"plait[{extra}]" if extra else "plait"
    return Check(name, "warn" if extra else "fail", "; ".join(wrong), f"pip install '{target}'")


def _belongs(requirement: str, extra: str) -> bool:
    found = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
    return (found.group(1) if found else "") == extra


def _fits(version: str, wanted: str) -> bool:
    """Whether a version is in a range such as `<4,>=3.14`: dotted numbers are all that plait's pins use."""

    def numbers(text: str) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", text.partition("+")[0])[:4]]

    have = numbers(version)
    for operator, bound in re.findall(r"(==|>=|<=|<|>)\s*([\d.]+)", wanted):
        limit = numbers(bound)
        width = max(len(have), len(limit))
        left, right = (n + [0] * (width - len(n)) for n in (have, limit))
        if not _COMPARE[operator](left, right):
            return False
    return True


_COMPARE = {"==": operators.eq, ">=": operators.ge, "<=": operators.le, "<": operators.lt, ">": operators.gt}


def engine() -> Iterator[Check]:
    """torch, and what it can compute on. Importing it takes seconds."""
    try:
        import torch
    except ImportError as error:
        yield Check("torch", "warn", str(error), "pip install 'plait[engine]' (clients do not need it)")
        return
    except OSError as error:
        yield Check("torch", "fail", str(error), "reinstall torch: its libraries cannot be loaded")
        return
    yield Check("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        yield Check("gpu", "ok", "none; the engine runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        memory = properties.total_memory / GIB
        detail = f"{properties.name}, {memory:.0f} GiB, sm_{properties.major}{properties.minor}"
        if capability < (8, 0):
            yield Check("gpu", "warn", detail, "sm_80 or newer is tested; bfloat16 needs it")
        else:
            yield Check("gpu", "ok", detail)


def compiler() -> Check:
    wanted = os.environ.get("CXX", "g++")
    if found := shutil.which(wanted):
        return Check("compiler", "ok", found)
    return Check(
        "compiler",
        "warn",
        f"no {wanted}",
        "install g++ for the compiled CPU kernels; slower ones are used without",
    )


def cpu() -> Check:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return Check("cpu", "ok", f"{count} processors")
    flags = set(
        re.findall(r"\w+", next((line for line in info.splitlines() if line.startswith("flags")), ""))
    )
    good = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    detail = f"{count} processors, {' '.join(good) or 'no AVX2'}"
    if "x86" in platform.machine() and "avx2" not in flags:
        return Check("cpu", "warn", detail, "a processor with AVX2 is several times as fast")
    return Check("cpu", "ok", detail)


def model_cache(model: str) -> Check:
    try:
        from plait.engine.models import BUNDLED, cache_dir
    except ImportError as error:
        return Check("model cache", "warn", str(error), "pip install 'plait[engine]' to run a worker here")
    cache = cache_dir()
    folder = next(p for p in (cache, *cache.parents) if p.exists())
    if not os.access(folder, os.W_OK):
        return Check(
            "model cache", "fail", f"{cache} cannot be written", "set PLAIT_CACHE to a writable folder"
        )
    free = shutil.disk_usage(folder).free / GIB
    detail = f"{cache}, {free:.0f} GiB free"
    if model == BUNDLED and any((cache / "models").glob(f"{BUNDLED}-*/config.json")):
        return Check("model cache", "ok", f"{detail}, {model} is there")
    if free < 2:
        return Check(
            "model cache", "warn", detail, "models need room: free some, or set PLAIT_CACHE elsewhere"
        )
    if model == BUNDLED:
        return Check("model cache", "ok", f"{detail}; {model} will be fetched at the first start (93 MB)")
    return Check("model cache", "ok", detail)


async def broker(bootstrap_servers: str, patience: float = 10.0) -> AsyncIterator[Check]:
    """Whether the brokers answer within `patience` seconds, and plait's topics are as a worker wants them."""
    from aiokafka.errors import KafkaError

    from plait.service.commands.connect import settings_of
    from plait.service.kafka import connection
    from plait.service.topic_admin import admin

    settings = settings_of(bootstrap_servers)
    topics = settings.topics
    try:
        async with asyncio.timeout(patience), admin(connection(settings.kafka, "doctor")) as client:
            cluster = await client.describe_cluster()
            found = {topic["topic"]: topic["partitions"] for topic in await client.describe_topics()}
            limit = await _message_limit(client, topics.requests) if topics.requests in found else None
    except (KafkaError, OSError, TimeoutError) as error:
        reason = str(error) or f"no answer within {patience:g} s"
        yield Check("broker", "fail", reason, "check the address, and that it runs")
        return
    yield Check("broker", "ok", f"{bootstrap_servers}, {len(cluster['brokers'])} in the cluster")
    for name in (*(lane.topic for lane in topics.all_lanes()), topics.control, topics.dlq):
        yield _topic(name, found.get(name))
    if limit is not None:
        yield _limit(topics.requests, limit, settings.worker.max_event_bytes)


async def _message_limit(client: AIOKafkaAdminClient, topic: str) -> int | None:
    """`max.message.bytes` of a topic; None when the broker does not tell."""
    from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

    for answer in await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)]):
        for resource in answer.to_object()["resources"]:
            for entry in resource["config_entries"]:
                if entry["config_names"] == "max.message.bytes":
                    return int(entry["config_value"])
    return None


def _limit(topic: str, limit: int, event_bytes: int) -> Check:
    detail = f"messages of up to {limit} bytes"
    if limit < event_bytes:
        remedy = f"raise max.message.bytes, or lower worker.max_event_bytes ({event_bytes})"
        return Check("message size", "warn", f"{topic}: {detail}", remedy)
    return Check("message size", "ok", f"{topic}: {detail}")


def _topic(name: str, partitions: list[dict[str, int]] | None) -> Check:
    if partitions is None:
        return Check(f"topic {name}", "warn", "is not there", "a worker makes it; or: plait topics --create")
    if any(partition["leader"] < 0 for partition in partitions):
        return Check(f"topic {name}", "fail", "a partition has no leader", "see the brokers' logs")
    return Check(f"topic {name}", "ok", f"{len(partitions)} partition{'s' if len(partitions) != 1 else ''}")
