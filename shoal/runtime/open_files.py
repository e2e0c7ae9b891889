"""How many files a process may have open: connections to hundreds of ranks need more than usual."""

from __future__ import annotations

import resource

from shoal.errors import BadInput

_OTHERS = 512  # files, pipes, servers, connections of strangers that have not proven a key


def require_open_files(connections: int) -> None:
    """Raise the soft limit of this process where they need it; BadInput beyond the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHERS
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise BadInput(
            f"{connections} connections to other ranks need {needed} open files, and this process "
            f"may have {hard}: raise the limit with ulimit -n {needed}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
