"""The configuration of a worker: a TOML file, then `PLAIT_*` variables, then flags; the last one wins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from plait.schemas.names import CONTROL_TOPIC, DLQ_TOPIC, REQUESTS_TOPIC, RESPONSES_PREFIX

DEFAULT_LANE = "default"


class SettingsError(ValueError):
    """Settings that cannot be used; the message has one line per offending key."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class KafkaSettings(Section):
    """How to reach the broker. Names are those of aiokafka and librdkafka."""

    bootstrap_servers: str = "127.0.0.1:9092"
    group_id: str = "plait"
    group_instance_id: str | None = Field(None, min_length=1, max_length=200)  # static membership (KIP-345)
    client_id: str = "plait-worker"
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = "PLAIN"
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    sasl_oauthbearer_token_endpoint_url: str | None = None  # for OAuth's client credentials
    sasl_oauthbearer_client_id: str | None = None
    sasl_oauthbearer_client_secret: SecretStr | None = None
    sasl_oauthbearer_scope: str | None = None
    sasl_oauthbearer_cafile: Path | None = None
    sasl_oauthbearer_provider: str | None = Field(None, pattern=r"^[\w.]+:\w+$")  # module:callable
    ssl_cafile: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_password: SecretStr | None = None
    ssl_check_hostname: bool = True
    session_timeout_ms: int = Field(10_000, ge=1000)
    heartbeat_interval_ms: int = Field(3_000, ge=100)
    max_poll_interval_ms: int = Field(300_000, ge=1000)
    fetch_max_wait_ms: int = Field(500, ge=1)
    metadata_max_age_ms: int = Field(
        30_000, ge=100
    )  # topics and partitions that come and go are seen after so long
    connect_timeout_s: float = Field(60, ge=0)  # at start; later the worker waits for the broker for ever
    request_timeout_ms: int = Field(40_000, ge=1000)
    on_out_of_range: Literal["earliest", "latest", "fail"] = (
        "earliest"  # the offset to read is not there any more
    )
    # Some brokers refuse commits once a rebalance has begun, and the member with them.
    commit_on_revoke: bool = True
    _tokens: Any = PrivateAttr(None)  # of service/kafka.py: one for all clients

    @model_validator(mode="after")
    def _complete(self) -> KafkaSettings:
        """Say what is missing here, not when a broker refuses it."""
        if self.security_protocol.startswith("SASL"):
            if self.sasl_mechanism != "OAUTHBEARER":
                needed: tuple[str, ...] = ("sasl_username", "sasl_password")
            elif self.sasl_oauthbearer_provider is None:
                needed = tuple(
                    f"sasl_oauthbearer_{k}" for k in ("token_endpoint_url", "client_id", "client_secret")
                )
            else:
                needed = ()
            missing = [name for name in needed if getattr(self, name) is None]
            if missing:
                raise ValueError(f"{self.sasl_mechanism} needs kafka.{', kafka.'.join(missing)}")
        if "@" in (self.sasl_oauthbearer_token_endpoint_url or ""):
            raise ValueError("kafka.sasl_oauthbearer_token_endpoint_url must hold no credentials")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("kafka.ssl_keyfile needs kafka.ssl_certfile")
        return self


class LaneSettings(Section):
    """One requests topic among several, and its part of the read-ahead."""

    name: str = Field(pattern=r"^[a-z0-9_-]{1,40}$")
    topic: str
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    reserved: float = Field(0.0, ge=0, lt=1)  # of the read-ahead, for this lane alone
    priority: int | None = Field(None, ge=0, le=9)  # of requests that name none


class TopicSettings(Section):
    """Topic names, and what the worker makes and removes."""

    requests: str = REQUESTS_TOPIC
    lanes: list[LaneSettings] = []
    responses_prefix: str = RESPONSES_PREFIX
    control: str = CONTROL_TOPIC
    dlq: str = DLQ_TOPIC
    create: bool = True  # the requests, control and dead-letter topics, where they are missing
    create_named_responses: bool = True  # a response topic that a request names, where it is missing
    # Which topics a request may name, as a regular expression for the whole name.
    named_responses: str = "plait[.](clients|answers)[.].+"
    request_partitions: int = Field(8, ge=1)
    replication_factor: int = Field(-1, ge=-1)  # -1: the broker's default
    response_ttl_s: float = Field(600, gt=0)  # after the terminal event
    response_retention_ms: int = Field(3_600_000, ge=1000)
    orphan_after_s: float = Field(3_600, gt=0)  # without a new record, whoever made it

    @field_validator("named_responses")
    @classmethod
    def _is_a_pattern(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        return value

    def all_lanes(self) -> list[LaneSettings]:
        """The lanes to read. `requests` is one of them whether it is listed or not: nothing sent there is left
        unread."""
        if any(lane.topic == self.requests for lane in self.lanes):
            return list(self.lanes)
        return [LaneSettings(name=DEFAULT_LANE, topic=self.requests), *self.lanes]

    def group_of(self, topic: str, group_id: str) -> str:
        """The consumer group that reads a lane's topic. That of `requests` is `kafka.group_id` itself, so that
        lanes can be added without losing its offsets."""
        return group_id if topic == self.requests else f"{group_id}.{topic}"


class EngineSettings(Section):
    """The fields of plait.engine.config.EngineConfig; `max_restarts` follows from worker.max_attempts."""

    model: str = "smollm2"
    dtype: Literal["auto", "bfloat16", "float32", "float16", "int8"] = "auto"
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    max_running: int = Field(64, ge=1)
    token_budget: int = Field(0, ge=0)
    block_size: int = Field(16, ge=1)
    kv_cache_bytes: int = Field(0, ge=0)
    num_blocks: int = Field(0, ge=0)
    max_model_len: int = Field(0, ge=0)
    cuda_graphs: bool = True
    policy: Literal["default", "fcfs", "spt", "priority", "fair", "slo"] = "default"
    admission: Literal["auto", "predict", "off"] = "auto"
    batching: Literal["continuous", "dynamic", "static"] = "continuous"
    batch_window_ms: float = Field(0, ge=0)
    max_wait_seconds: float = Field(600, ge=0)
    aging_seconds: float = Field(10, ge=0)
    tenant_weights: dict[str, PositiveFloat] = {}
    long_tokens: int = Field(0, ge=0)
    long_share: float = Field(0.25, ge=0, lt=1)
    record: str = ""
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    swap_bytes: int = Field(-1, ge=-1)
    prefix_cache: bool = True
    threads: int = Field(0, ge=0)
    max_waiting: int = Field(10_000, ge=1)
    max_preemptions: int = Field(3, ge=0)
    watermark: float = Field(0.02, ge=0, lt=1)
    high_watermark: float = Field(0.1, ge=0, lt=1)
    stall_seconds: float = Field(120.0, gt=0)

    def to_config(self, max_attempts: int) -> Any:
        """The engine's own configuration; imports the engine. A request that has a part in `max_attempts`
        crashes of the engine ends with an error."""
        from plait.engine.config import EngineConfig

        return EngineConfig(**self.model_dump(), max_restarts=max_attempts - 1)


class WorkerSettings(Section):
    """Limits of the worker itself."""

    max_in_flight: int = Field(256, ge=1)  # requests read and not yet answered
    max_in_flight_bytes: int = Field(64 * 1024 * 1024, ge=1)  # of their messages
    max_window: int = Field(10_000, ge=1)  # records of a partition delivered beyond its first unfinished one
    max_event_bytes: int = Field(900_000, ge=20_000)  # of one event, below the broker's message.max.bytes
    commit_interval_s: float = Field(1.0, gt=0)
    drain_seconds: float = Field(25.0, ge=0)
    # What a reader that knows no epochs sees when workers die: "transactional" costs latency, see docs/delivery.md.
    delivery: Literal["idempotent", "transactional"] = "idempotent"
    transaction_interval_s: float = Field(0.1, gt=0)  # events become visible so often
    # Crashes of the engine, or of workers, that a request may have a part in; then it is a dead letter.
    max_attempts: int = Field(2, ge=2)
    model_aliases: list[str] = []  # further names under which the served model is asked for
    tenant_header: str | None = None  # the header that says who asks; the request itself is not believed
    remember_cancels: int = Field(10_000, ge=0)
    remember_cancels_s: float = Field(600, gt=0)


class ClaimSettings(Section):
    """Prompts by reference: which stores they are fetched from. None, unless hosts are named."""

    hosts: list[str] = []  # names, or *.name for those below it; with :port where it is not the scheme's own
    schemes: list[Literal["https", "http"]] = ["https"]
    allow_private: bool = False  # loopback, link-local and private addresses
    max_bytes: int = Field(16 * 1024 * 1024, ge=1)  # of one prompt
    timeout_s: float = Field(30.0, gt=0)  # for all of one fetch
    max_concurrent: int = Field(8, ge=1)


class HttpSettings(Section):
    """The admin endpoint; port 0 takes a free one."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65_535)
    stalled_after_s: float = Field(30, gt=0)  # /livez fails when a loop has shown no sign of life for so long


class TelemetrySettings(Section):
    """Traces. Without an endpoint here or in OTEL_EXPORTER_OTLP_*, none are made, only passed on."""

    otlp_endpoint: str | None = None  # http://host:4318
    service_name: str | None = None  # else OTEL_SERVICE_NAME, else plait-worker
    sample_ratio: float = Field(1.0, ge=0, le=1)  # of requests whose producer made no decision


class Settings(BaseSettings):
    """Everything a worker can be told. Environment: `PLAIT_<SECTION>_<KEY>`, e.g. PLAIT_KAFKA_GROUP_ID."""

    model_config = SettingsConfigDict(
        env_prefix="PLAIT_",
        env_nested_delimiter="_",
        env_nested_max_split=1,
        extra="forbid",
        nested_model_default_partial_update=True,
    )

    kafka: KafkaSettings = KafkaSettings()
    topics: TopicSettings = TopicSettings()
    engine: EngineSettings = EngineSettings()
    worker: WorkerSettings = WorkerSettings()
    claims: ClaimSettings = ClaimSettings()
    http: HttpSettings = HttpSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _own_topics_differ(self) -> Settings:
        names = [self.topics.requests, self.topics.control, self.topics.dlq]
        if len(set(names)) < len(names):
            raise ValueError("topics.requests, topics.control and topics.dlq must be three topics")
        lanes = self.topics.all_lanes()
        for what, values in (
            ("name", [lane.name for lane in lanes]),
            ("topic", [lane.topic for lane in lanes]),
        ):
            if len(set(values)) < len(values):
                raise ValueError(f"topics.lanes: two lanes have the same {what}, of {', '.join(values)}")
        if {lane.topic for lane in lanes} & set(names[1:]):
            raise ValueError("topics.lanes: topics.control and topics.dlq are no lanes")
        if lanes[1:] and sum(lane.reserved for lane in lanes) > 0.95:
            raise ValueError("topics.lanes: at least 0.05 of the read-ahead must be left unreserved")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        given = dict(init_settings.init_kwargs) if isinstance(init_settings, InitSettingsSource) else {}
        file = given.pop("toml_file", None)
        sources: list[PydanticBaseSettingsSource] = [InitSettingsSource(settings_cls, given), env_settings]
        if file is not None:
            sources.append(TomlConfigSettingsSource(settings_cls, file))
        return tuple(sources)

    @classmethod
    def load(cls, toml_file: Path | str | None = None, /, **flags: dict[str, Any]) -> Settings:
        """Settings from file, environment and flags, e.g. `load("plait.toml", kafka={"group_id": "g"})`.

        Raises SettingsError, whose message names each key that is unknown or wrong, and the file when it
        cannot be read.
        """
        source = {}
        if toml_file is not None:
            path = Path(toml_file)
            if not path.is_file():
                raise SettingsError(f"{path}: no such file")
            source["toml_file"] = path
        try:
            return cls(**source, **flags)  # type: ignore[arg-type]
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, e['loc'])) or 'settings'}: {_say(e)}" for e in error.errors()]
            raise SettingsError("\n".join(lines)) from None
        except ValueError as error:
            raise SettingsError(f"{toml_file}: {error}" if toml_file else str(error)) from None


def _say(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown key"
    return str(error["msg"])
