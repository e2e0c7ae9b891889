"""The cluster file of this machine, measured once and kept in the user's cache folder.

It is measured again on another host, with another version of torch or another number of cores.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.cluster.cluster import Cluster

Say = Callable[[str], None]


def calibrated_cluster(seconds: float = 60.0, say: Say = lambda text: None) -> Cluster:
    """This machine, from the cache; measured for about `seconds` where it is not there."""
    raise NotImplementedError("this machine cannot be measured yet")
