"""A server as a process of its own: `python -m shoal.server.main`.

    SHOAL_RUN_DIR        its socket is server-<index>.sock in there, and the secret is, too
    SHOAL_SERVER_INDEX   which server of the run it is
    SHOAL_SERVER_LISTEN  another address to listen at (tcp:HOST:PORT), for several hosts
    SHOAL_SERVER_BEYOND  an address for other hosts beside that; the port it gets, where none is
                         asked for, stands in server-<index>.address
    SHOAL_SECRET         the secret, where there is no run directory with one

It runs until it gets SIGTERM or SIGINT, or until its parent has gone.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import traceback

_PR_SET_PDEATHSIG = 1


def main() -> int:
    _die_with_parent()
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    import torch

    from shoal.errors import BadInput
    from shoal.runtime.gone import gone_in
    from shoal.server.discovery import address_file, socket_of
    from shoal.server.protocol.handshake import read_secret
    from shoal.server.server import Server

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    try:
        secret = read_secret(os.environ)
        if secret is None:
            raise BadInput("a server needs the secret of its run: set SHOAL_SECRET")
        index = int(os.environ.get("SHOAL_SERVER_INDEX", "0"))
        listen = os.environ.get("SHOAL_SERVER_LISTEN")
        address = listen or socket_of(os.environ.get("SHOAL_RUN_DIR", "."), index)
        beyond = os.environ.get("SHOAL_SERVER_BEYOND", "")
        server = Server(address, secret, has_exited=gone_in(os.environ), remote_address=beyond)
        if beyond:
            word = address_file(os.environ.get("SHOAL_RUN_DIR", "."), index)
            word.with_suffix(".part").write_text(server.remote_address)
            os.replace(word.with_suffix(".part"), word)
    except BadInput as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 2
    with server:
        signal.sigwait(stop)
    return 0


def _die_with_parent() -> None:
    """Also when the parent is killed (Linux)."""
    parent = os.environ.get("SHOAL_SERVER_PARENT")
    if sys.platform == "linux" and parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != int(parent):
            os._exit(1)


if __name__ == "__main__":
    faulthandler.enable()  # a crash of native code says where, for whoever reads the output
    code = 1
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may still be inside torch, which a tidy end would pull away
