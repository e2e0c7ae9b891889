"""`shoal keys`: files that only their owner can read, and nothing secret in what is printed."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import stat
from pathlib import Path

import pytest

from shoal.commands.keys import HostNames
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig, TlsConfig
from shoal.server.consistency import Rule
from shoal.server.process.server import Server
from shoal.server.protocol.endpoint import connect
from tests.commands.terminal import shoal
from tests.server.helpers import SECRET, client_of, fill

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("SHOAL_SECRET", "SHOAL_SECRET_FILE", "SHOAL_RUN_DIR", "SHOAL_TLS_CERT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_new_key_is_found_by_runs_and_never_printed(home: Path) -> None:
    answers = [shoal("keys", "new"), shoal("keys", "show"), shoal("keys", "show", "--json")]
    assert [answer.exit_code for answer in answers] == [0, 0, 0]
    file = home / "shoal" / "key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = RunConfig.from_environment().read_secret()
    assert secret is not None and len(secret) == 32
    printed = "".join(answer.stdout for answer in answers)
    assert str(file) in printed
    assert not any(secret.hex()[i : i + 8] in printed for i in range(57))
    assert repr(RunConfig(secret=secret)).find(secret.hex()[:8]) < 0


def test_a_key_is_not_overwritten(home: Path) -> None:
    file = home / "key"
    assert shoal("keys", "new", str(file)).exit_code == 0
    before = file.read_text()
    answer = shoal("keys", "new", str(file))
    assert answer.exit_code == 2 and f"{file} is there already: remove it" in answer.stderr
    assert file.read_text() == before


def test_a_pipe_is_no_key(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open it would wait for a writer."""
    os.mkfifo(home / "pipe", 0o600)
    monkeypatch.setenv("SHOAL_SECRET_FILE", str(home / "pipe"))
    assert (
        "pipe, which holds the secret of the run: it is no regular file"
        in shoal("keys", "show").stderr
    )


def test_show_warns_of_a_key_that_others_can_read(home: Path) -> None:
    shoal("keys", "new")
    (home / "shoal" / "key").chmod(0o640)
    answer = shoal("keys", "show", "--json")
    found = json.loads(answer.stdout)
    assert answer.exit_code == 1 and found["key"] is None
    assert "chmod 600" in found["warnings"][0] and answer.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["", "a b", "ca", "-x", "a,,b", "../etc", "x" * 300])
def test_a_name_that_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        HostNames.parse(text)


@needs_openssl
def test_certificates_of_one_authority_let_hosts_in_and_others_not(home: Path) -> None:
    """Both sides show theirs: a worker without one cannot speak to a server."""
    folder = home / "tls"
    words = ("keys", "tls", str(folder), "--host")
    assert shoal(*words, "a,127.0.0.1", "--host", "b").exit_code == 0
    assert shoal(*words, "c").exit_code == 0  # by the same authority
    assert shoal(*words, "c").exit_code == 2
    assert {p.name for p in folder.glob("*.key")} == {"a.key", "b.key", "c.key", "ca.key"}
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}

    def tls(name: str) -> TlsConfig:
        return TlsConfig(f"{folder}/{name}.pem", f"{folder}/{name}.key", f"{folder}/ca.pem")

    with Server("tcp:127.0.0.1:0", SECRET, tls=tls("a")) as server:
        client = client_of([server], 0, Rule(1), tls=tls("c"))
        assert client.commit(*fill(client, 2.0)).verdict == "admitted"
        client.leave()
        client.close()
        connection = connect(server.address, TlsConfig(authority=f"{folder}/ca.pem"))
        with pytest.raises((ssl.SSLError, ConnectionError)):
            connection.sock.recv(1)
        connection.close()
    with (
        Server("tcp:127.0.0.1:0", SECRET, tls=tls("b")) as server,
        pytest.raises(BadInput, match="does not vouch"),
    ):
        connect(server.address, tls("a"))


def test_without_openssl_one_sentence_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.commands.keys.shutil.which", lambda _: None)
    answer = shoal("keys", "tls", str(home / "tls"), "--host", "a")
    assert answer.exit_code == 2 and "openssl, which is not installed" in answer.stderr
