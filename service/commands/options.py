"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

BootstrapServers = Annotated[
    str | None,
    typer.Option(
        "--bootstrap-servers",
        "-b",
        envvar="PLAIT_KAFKA_BOOTSTRAP_SERVERS",
        metavar="HOST:PORT[,...]",
        help="The Kafka brokers. Without it an embedded broker and a worker are started for this command.",
    ),
]
Brokers = Annotated[
    str,
    typer.Option(
        "--bootstrap-servers",
        "-b",
        envvar="PLAIT_KAFKA_BOOTSTRAP_SERVERS",
        metavar="HOST:PORT[,...]",
        help="The Kafka brokers.",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        envvar="PLAIT_ENGINE_MODEL",
        help="smollm2 (the bundled one), a model's directory, a GGUF file, or a hub id.",
    ),
]
RequestsTopic = Annotated[str, typer.Option("--requests-topic", help="The topic that requests go to.")]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="The longest wait for the next event.")
]
