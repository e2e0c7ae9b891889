"""TLS between workers and servers, with certificates made on the spot."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from shoal.errors import BadInput, ShoalError
from shoal.runtime.config import TlsConfig
from shoal.server.consistency import Rule
from shoal.server.process.server import Server
from shoal.server.protocol import FrameKind, Header
from shoal.server.protocol.endpoint import PLAIN, Listener, connect
from shoal.server.protocol.handshake import AuthenticationError, authenticate
from tests.server.helpers import SECRET, client_of, fill, weights

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="there is no openssl to make certificates with"
)
pytestmark = needs_openssl


def certificate(folder: Path, name: str, hosts: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """A certificate of these hosts that signs itself, and its key."""
    key = folder / f"{name}.key"
    cert = folder / f"{name}.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", f"subjectAltName={hosts}", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return cert, key


@pytest.fixture
def tls(tmp_path: Path) -> TlsConfig:
    """The configuration of a run whose servers show a certificate."""
    cert, key = certificate(tmp_path, "server")
    return TlsConfig(str(cert), str(key), authority=str(cert))


def test_pushes_and_pulls_go_through_tls(tls: TlsConfig) -> None:
    with Server("tcp:127.0.0.1:0", SECRET, tls=tls) as server:
        client = client_of([server], 0, Rule(1), tls=tls)
        for link in client.links:
            assert isinstance(link.connection("push").sock, ssl.SSLSocket)
            link.connection("push").abort()  # it is opened again
        assert client.commit(*fill(client, 2.0)).verdict == "admitted"
        assert torch.any(weights(client, version=1) == -2.0)
        client.leave()
        client.close()


def test_a_certificate_of_another_authority_is_refused(tls: TlsConfig, tmp_path: Path) -> None:
    other, _ = certificate(tmp_path, "other")
    refused = pytest.raises(BadInput, match=r"a certificate that SHOAL_TLS_CA does not vouch")
    with Server("tcp:127.0.0.1:0", SECRET, tls=tls) as server, refused:
        client_of([server], 0, Rule(1), tls=TlsConfig(authority=str(other)))


def test_a_worker_without_tls_is_refused(tls: TlsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.server.protocol.service.HANDSHAKE_S", 0.3)
    monkeypatch.setattr("shoal.server.client.route.START_TIMEOUT_S", 1.0)
    with Server("tcp:127.0.0.1:0", SECRET, tls=tls) as server:
        with pytest.raises(ShoalError, match="connecting to server 0"):
            client_of([server], 0, Rule(1))
        assert server.refused["silent or broken before HELLO"] >= 1
        assert not server.models


def test_a_server_without_tls_is_refused(tls: TlsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.server.protocol.service.HANDSHAKE_S", 0.3)
    refused = pytest.raises(BadInput, match="does not speak TLS")
    with Server("tcp:127.0.0.1:0", SECRET) as server, refused:
        client_of([server], 0, Rule(1), tls=tls)


def test_tls_lets_a_listener_go_beyond_loopback(tls: TlsConfig) -> None:
    with pytest.raises(BadInput, match=r"in the clear.*SHOAL_TRUSTED_NETWORK=1"):
        Listener("tcp:0.0.0.0:0", PLAIN)
    Listener("tcp:0.0.0.0:0", TlsConfig(trusted_network=True)).close()
    Listener("tcp:0.0.0.0:0", tls).close()
    with pytest.raises(BadInput, match=r"SHOAL_TLS_CERT .*nowhere"):
        Listener("tcp:0.0.0.0:0", TlsConfig(certificate="/nowhere.pem"))


def test_a_worker_does_not_speak_in_the_clear_beyond_loopback() -> None:
    with pytest.raises(BadInput, match=r"SHOAL_TRUSTED_NETWORK=1"):
        connect("tcp:192.0.2.1:7", PLAIN)
    with pytest.raises(BadInput, match=r"unix:PATH or tcp:HOST:PORT"):
        connect("tcp:nowhere")


def test_a_proof_cannot_be_passed_on_by_one_who_shows_another_certificate(
    tls: TlsConfig, tmp_path: Path
) -> None:
    """Someone in between with a valid certificate passes every byte on, both ways."""
    cert, key = certificate(tmp_path, "between")
    both = tmp_path / "both.pem"
    assert tls.certificate is not None
    both.write_text(cert.read_text() + Path(tls.certificate).read_text())
    between = Listener("tcp:127.0.0.1:0", TlsConfig(str(cert), str(key)))

    def pass_on(server: Server) -> None:
        accepted = between.accept()
        assert accepted is not None
        accepted.settimeout(20.0)
        with between.secure(accepted).sock as worker, connect(server.address, tls).sock as sock:
            worker.sendall(sock.recv(4096))  # CHALLENGE
            sock.sendall(worker.recv(4096))  # HELLO
            worker.sendall(sock.recv(4096))

    with Server("tcp:127.0.0.1:0", SECRET, tls=tls) as server, ThreadPoolExecutor(1) as pool:
        passed_on = pool.submit(pass_on, server)
        connection = connect(between.address, TlsConfig(authority=str(both)))
        with pytest.raises(AuthenticationError, match="does not prove the secret"):
            authenticate(connection, SECRET, "control", Header(FrameKind.HELLO, 0, 7, 1))
        passed_on.result()
        connection.close()
        between.close()
