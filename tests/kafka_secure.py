"""Listeners of a test broker that ask for certificates and passwords: a certificate authority for one session."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from plait.service.embedded import free_port

KEY_PASSWORD = "key-pass-3141"
PASSWORDS = {
    "PLAIN": "plain-pass-2718",
    "SCRAM-SHA-256": "scram-pass-1618",
    "SCRAM-SHA-512": "scram-pass-1414",
}
USER = "tester"

PROPERTIES = """\
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,TLS:SSL,SASL:SASL_SSL
ssl.keystore.type=PEM
ssl.keystore.location={folder}/server.pem
ssl.truststore.type=PEM
ssl.truststore.location={folder}/ca.crt
listener.name.tls.ssl.client.auth=required
listener.name.sasl.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER
listener.name.sasl.plain.sasl.jaas.config={modules}.plain.PlainLoginModule required user_{user}="{plain}";
listener.name.sasl.scram-sha-256.sasl.jaas.config={modules}.scram.ScramLoginModule required;
listener.name.sasl.scram-sha-512.sasl.jaas.config={modules}.scram.ScramLoginModule required;
listener.name.sasl.oauthbearer.sasl.jaas.config={modules}.oauthbearer.OAuthBearerLoginModule required \
unsecuredLoginStringClaim_sub="broker";
"""


@dataclass
class Secure:
    """TLS with a client's certificate at `tls_servers`, SASL over TLS at `sasl_servers`."""

    folder: Path
    tls_servers: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    sasl_servers: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.ca, self.certificate, self.key = (
            self.folder / name for name in ("ca.crt", "client.crt", "client.key")
        )
        subject = ["-subj", "/CN=plait test authority", "-days", "2"]
        self._openssl("req", "-x509", *EC, "-nodes", "-keyout", "ca.key", "-out", "ca.crt", *subject)
        self._issue("server", "-nodes")
        self._issue("client", "-passout", f"pass:{KEY_PASSWORD}")
        server = (self.folder / "server.key").read_text() + (self.folder / "server.crt").read_text()
        (self.folder / "server.pem").write_text(server)

    def listeners(self) -> str:
        return f"TLS://{self.tls_servers},SASL://{self.sasl_servers}"

    def properties(self) -> str:
        modules = "org.apache.kafka.common.security"
        return PROPERTIES.format(folder=self.folder, modules=modules, user=USER, plain=PASSWORDS["PLAIN"])

    def make_users(self, bootstrap_servers: str) -> None:
        """SCRAM's users live in the cluster."""
        admin = AdminClient({"bootstrap.servers": bootstrap_servers})
        kinds = {"SCRAM-SHA-256": ScramMechanism.SCRAM_SHA_256, "SCRAM-SHA-512": ScramMechanism.SCRAM_SHA_512}
        for name, kind in kinds.items():
            wanted = UserScramCredentialUpsertion(
                USER, ScramCredentialInfo(kind, 4096), PASSWORDS[name].encode()
            )
            for made in admin.alter_user_scram_credentials([wanted]).values():
                made.result(30)

    def _issue(self, name: str, *protection: str) -> None:
        request = ["-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"]
        self._openssl("req", *EC, *protection, *request)
        (self.folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signed)

    def _openssl(self, *arguments: str) -> None:
        binary = shutil.which("openssl")
        if binary is None:
            pytest.fail("the tests of TLS make certificates: install openssl")
        done = subprocess.run([binary, *arguments], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
