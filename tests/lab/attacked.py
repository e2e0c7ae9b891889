"""A run in a lab, what is recorded of it, and strangers on a host that has no rank of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from shoal.lab.lab import Lab
from shoal.lab.namespaces import Namespace
from shoal.runtime.secret import new_secret
from tests.namespaces import Host, Sniffer

ROOT = Path(__file__).parents[2]
SHOAL = (sys.executable, "-m", "shoal")
_LOOK_S = 0.02
_RUN_S = 280.0
_MOST_RECORDED = 4096
_SYN, _SYN_ACK = 2, 18


class Told(NamedTuple):
    """What strangers report at their end."""

    tried: dict[str, int]
    let_in: list[str]
    received: bytes


class AttackedLab:
    """The last host is that of the strangers."""

    def __init__(self, lab: Lab, folder: Path):
        self.lab = lab
        self.folder = folder
        self.secret = new_secret()
        self.key_file = folder / "secret"
        self.key_file.touch(mode=0o600)
        self.key_file.write_text(self.secret.hex() + "\n")
        (folder / "recorded").mkdir()
        self._victims = [host.namespace for host in lab.hosts[:-1]] + lab.switches
        self._outside = lab.hosts[-1].namespace

    def run(self, *words: str, on_line: Callable[[str], None] = lambda line: None) -> str:
        """`shoal run` on the lab, in the folder; its output, with its exit status at the end."""
        with subprocess.Popen(
            [*SHOAL, "run", "--on", f"lab://{self.lab.design.name}", *words],
            cwd=self.folder,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            limit = threading.Timer(_RUN_S, process.send_signal, [signal.SIGKILL])
            limit.start()
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                on_line(line)
            limit.cancel()
        return "".join(lines) + f"exit status {process.returncode}\n"

    def join(self) -> None:
        """`shoal join` for the run of this lab."""
        subprocess.run([*SHOAL, "join"], env=self._environ, check=True, stdout=subprocess.DEVNULL)

    @property
    def _environ(self) -> dict[str, str]:
        """Runs of other tests have other folders for temporary files."""
        given = {"SHOAL_SECRET_FILE": str(self.key_file), "TMPDIR": str(self.folder)}
        return {**os.environ, **given, "PYTHONPATH": str(ROOT)}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """What ranks and servers send to what listens, in the block, is kept for replay."""
        host = self.lab.hosts[0]
        sniffer = Sniffer(Host(host.namespace.name, host.address, host.device))
        try:
            yield
        finally:
            sniffer.close()
        for index, data in enumerate(sent_by_those_who_connect(sniffer.packets)):
            (self.folder / "recorded" / f"{index}").write_bytes(data)

    @contextmanager
    def strangers(
        self, told: list[Told], keys: Sequence[str] = ("", "", new_secret().hex())
    ) -> Iterator[list[subprocess.Popen[str]]]:
        """One for each key, in the block; at its end `told` has their reports."""
        (self.folder / "targets").touch()
        with self._scouting():
            started = [self._start(number, key) for number, key in enumerate(keys)]
            try:
                for process in started:
                    assert process.stdout is not None and process.stdout.readline() == "ready\n"
                yield started
                told += [self._end(number, process) for number, process in enumerate(started)]
            finally:
                for process in started:
                    process.kill()
                    process.communicate()

    def _start(self, number: int, key: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "tests.lab.stranger", str(self.folder), str(number), key]
        return subprocess.Popen(
            self._outside.command(words),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _end(self, number: int, process: subprocess.Popen[str]) -> Told:
        said = json.loads(process.communicate("\n", 60.0)[0].splitlines()[-1])
        received = (self.folder / f"received.{number}").read_bytes()
        return Told(said["tried"], said["let_in"], received)

    @contextmanager
    def _scouting(self) -> Iterator[None]:
        """Keeps the file of targets as it is on the hosts."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(_LOOK_S):
                now = {pair for victim in self._victims for pair in listening(victim)}
                text = "".join(f"{host} {port}\n" for host, port in sorted(now))
                (self.folder / "targets.new").write_text(text)
                (self.folder / "targets.new").rename(self.folder / "targets")

        scout = threading.Thread(target=look)
        scout.start()
        try:
            yield
        finally:
            over.set()
            scout.join()


def listening(namespace: Namespace) -> list[tuple[str, int]]:
    """What other hosts reach in it."""
    text = ""
    with suppress(OSError):
        text = namespace.call(lambda: Path("/proc/thread-self/net/tcp").read_text())
    found = []
    for words in (line.split() for line in text.splitlines()[1:]):
        host, _, port = words[1].partition(":")
        name = socket.inet_ntoa(struct.pack("<I", int(host, 16)))
        if words[3] == "0A" and not name.startswith("127."):
            found.append((name, int(port, 16)))
    return found


def sent_by_those_who_connect(packets: list[bytes]) -> list[bytes]:
    """The first bytes of each connection, in that direction."""
    flows: dict[bytes, bytes] = {}
    for packet in packets:
        if packet[12:14] != b"\x08\x00" or packet[23] != socket.IPPROTO_TCP:
            continue
        tcp = 14 + 4 * (packet[14] & 15)
        flow = packet[26:34] + packet[tcp : tcp + 4]  # addresses and ports
        if packet[tcp + 13] & _SYN_ACK == _SYN:
            flows[flow] = b""
        begin, end = tcp + 4 * (packet[tcp + 12] >> 4), 14 + int.from_bytes(packet[16:18], "big")
        if flow in flows and len(flows[flow]) < _MOST_RECORDED:
            flows[flow] += packet[begin:end]
    return [data for data in flows.values() if data]
