"""Memory on the GPU of a server, for pushes and pulls of one worker."""

from __future__ import annotations

from shoal.server.device_memory import offer
from shoal.server.handlers.dispatch import handles
from shoal.server.peer import Peer
from shoal.server.protocol.device_messages import DeviceAsked, DeviceOffered
from shoal.server.protocol.frames import FrameKind, Header, Refused, decode, encode


@handles(FrameKind.SHARE_DEVICE, "control")
def share_device(peer: Peer, header: Header, meta: bytes) -> None:
    """Asked once for memory, and once more when the worker has opened it."""
    model, member = peer.joined()
    asked = decode(meta, DeviceAsked)
    if member.pushes.committed:
        raise Refused("SHARE_DEVICE arrives after the first push")
    if asked.is_accepted:
        if member.offered is None:
            raise Refused(f"worker {peer.worker} was offered no memory on a GPU")
        model.attach_device(peer.worker, member.offered)
        member.offered = None
        peer.reply(encode(DeviceOffered()))
        return
    is_plain = model.compression is None and not model.is_replicated
    made = offer(asked, model.spec, model.state.shard.device) if is_plain else None
    if made is None:
        peer.reply(encode(DeviceOffered()))
        return
    member.offered, offered = made
    peer.reply(encode(offered))
