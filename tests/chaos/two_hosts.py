"""A ps run over two hosts with TLS: sniffed, and with a stranger at its store and its servers.

    python -m tests.chaos.two_hosts [--count 4] [--seed 0] [--only overwrite]

Hosts are network namespaces, which need root. In each of `count` runs the stranger does something
else; a run has to end with the weights of the run without one, or with a refusal.
"""

from __future__ import annotations

import argparse
import base64
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.cluster import Cluster, finish
from tests.namespaces import Host, Sniffer, two_hosts, why_not
from tests.server.strangers import STRANGERS, at_the_servers, at_the_store

NAMES = ["servers", *STRANGERS]


def pieces_of(secret: bytes) -> list[bytes]:
    """Every 8 bytes of it, as bytes and hexadecimal: a packet's border cannot hide all of them."""
    found = [base64.b64encode(secret)[:16]]
    for i in range(0, len(secret) - 7):
        piece = secret[i : i + 8]
        found += [piece, piece.hex().encode(), piece.hex().upper().encode()]
    return found


def free_port(host: Host) -> int:
    def body() -> int:
        with socket.socket() as sock:
            sock.bind((host.address, 0))
            return int(sock.getsockname()[1])

    return host.call(body)


def sniffed(cluster: Cluster) -> tuple[list[str], str]:
    """The undisturbed run: its weights, and what is wrong with it."""
    sniffer = Sniffer(cluster.hosts[0])
    try:
        ended = finish(cluster.start(free_port(cluster.hosts[0])))
    finally:
        sniffer.close()
    everything = b"\n".join(sniffer.packets)
    hits = sum(everything.count(piece) for piece in pieces_of(cluster.secret))
    is_seen = b"hello/1" in everything  # a key of the store, in the clear: the sniffer works
    print(
        f"sniffed: {len(sniffer.packets)} packets, {len(everything)} bytes, "
        f"pieces of the secret in them: {hits}, exit statuses {ended.statuses}",
        flush=True,
    )
    wrong = []
    if hits or not is_seen:
        wrong.append("the secret was in the packets" if hits else "the sniffer saw nothing")
    if ended.statuses != (0, 0) or len(ended.weights) != 1:
        wrong.append(f"the undisturbed run failed: {ended.output[-3000:]}")
    return wrong, next(iter(ended.weights), "")


def disturbed(cluster: Cluster, name: str, expected: str, chance: random.Random) -> list[str]:
    """What is wrong with a run that a stranger disturbs."""
    ending = threading.Event()
    port = free_port(cluster.hosts[0])
    counts: dict[str, int] = {}

    def act() -> None:
        if name == "servers":
            counts["connections"] = at_the_servers(cluster, ending)
        else:
            counts["values written"] = at_the_store(cluster, port, name, ending, chance)

    stranger = threading.Thread(target=act)
    stranger.start()
    start_s = time.monotonic()
    try:
        ended = finish(cluster.start(port))
    finally:
        ending.set()
        stranger.join()
    reason = refusal_in(ended.output)
    is_same = ended.statuses == (0, 0) and ended.weights == {expected}
    how = "the same weights" if is_same else f"refused: {reason}" if reason else "WRONG"
    took_s = time.monotonic() - start_s
    print(f"stranger ({name}): {counts}, after {took_s:.0f} s {how}", flush=True)
    changed = ended.weights - {expected}
    if changed or "HANGS" in ended.output or not (is_same or reason):
        return [f"stranger ({name}): {ended.statuses}, weights {changed}: {ended.output[-3000:]}"]
    return []


def refusal_in(output: str) -> str:
    words = (
        *("does not know the secret", "without the secret", "has no secret"),
        *("was overwritten by another process", "has given up the rendezvous"),
    )
    for line in output.splitlines():
        if any(word in line for word in words):
            return line.strip()[-200:]
    return ""


def end_at_signal(number: int, _: object) -> None:
    """What it has started is ended, and namespaces are removed, on the way out."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--only", choices=NAMES, help="what the stranger does in every run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"two_hosts: skipped: {reason}")
        return 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end_at_signal)
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder, two_hosts() as hosts:
        cluster = Cluster(hosts, Path(folder))
        wrong, expected = sniffed(cluster)
        names = NAMES if options.only is None else [options.only]
        for i in range(0 if wrong else options.count):
            wrong += disturbed(cluster, names[i % len(names)], expected, chance)
    for problem in wrong:
        print(f"WRONG: {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
