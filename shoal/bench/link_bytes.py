"""What the links of hosts carry between workers and servers, as workers count it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shoal.server.link import ServerLink


def link_bytes(host: str, links: Sequence[ServerLink]) -> Counter[str]:
    """Bytes of one worker so far, by link and direction: `HOST out` and `HOST in`.

    Without headers of TCP. A server of the worker's own host is not reached over a link.
    """
    carried: Counter[str] = Counter()
    for link in links:
        server = link.address.removeprefix("tcp:").rpartition(":")[0]
        if link.is_unix or server == host:
            continue
        for source, target, count in (
            (host, server, link.sent_bytes),
            (server, host, link.received_bytes),
        ):
            carried[f"{source} out"] += count
            carried[f"{target} in"] += count
    return carried
