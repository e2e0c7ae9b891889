"""A cluster as the text of a cluster file, which `toml_file` reads back as the same cluster."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shoal.cluster.cluster import Cluster, Node
from shoal.cluster.hardware import Curve, Device, LinkSpec, MeasuredCalls
from shoal.cluster.toml_file import DEVICE_UNITS, LINK_UNITS

_LINKS = ("fabric", "pcie", "socket_link", "nic")


def cluster_text(cluster: Cluster) -> str:
    """The text of a cluster file."""
    return "\n".join(_lines(cluster)) + "\n"


def _lines(cluster: Cluster) -> Iterator[str]:
    yield from _keys({"name": cluster.name, "nodes": cluster.nodes, "source": cluster.source})
    yield from _table("device", _device(cluster.device))
    links = {key: getattr(cluster.node, key) for key in _LINKS}
    names = _link_names(links)
    for link, name in names.items():
        yield from _table(f"link.{name}", _link(link))
    yield from _table("node", _node(cluster.node, links, names))
    if cluster.nodes_per_rack is not None:
        yield from _table("rack", {"nodes": cluster.nodes_per_rack})
    if cluster.oversubscription > 1 or cluster.uplink_alpha_s:
        alpha_us = cluster.uplink_alpha_s * 1e6
        yield from _table(
            "spine", {"oversubscription": cluster.oversubscription, "alpha_us": alpha_us}
        )
    yield from _table("noise", vars(cluster.noise))
    for workers, device in cluster.node.crowded:
        yield from _table("crowded", {"workers": workers, **_device(device)}, many=True)
    for calls in cluster.node.measured:
        yield from _table("measured", _calls(calls), many=True)
    for calls in cluster.between:
        yield from _table("between", _calls(calls), many=True)


def _link_names(links: Mapping[str, LinkSpec | None]) -> dict[LinkSpec, str]:
    """A key for each different link, after its place in the node."""
    names: dict[LinkSpec, str] = {}
    for key, link in links.items():
        if link is not None:
            names.setdefault(link, key)
    return names


def _device(device: Device) -> dict[str, Any]:
    peaks = {dtype: flops / 1e12 for dtype, flops in device.peak_flops.items()}
    return {
        "name": device.name,
        **_in_units(device, DEVICE_UNITS),
        "peak_TFLOP_per_s": peaks,
        "kernel_factors": dict(device.kernel_factors),
        "synchronous": device.synchronous or None,
        "threads": device.threads,
        "source": device.source,
        "assumed": list(device.assumed) or None,
        "spread": _spread(device.spread, DEVICE_UNITS),
    }


def _link(link: LinkSpec) -> dict[str, Any]:
    units = {key: unit for key, unit in LINK_UNITS.items() if key != "Gb_per_s"}
    return {
        "name": link.name,
        **_in_units(link, units),
        "shared": link.shared,
        "transport": link.transport,
        "source": link.source,
        "assumed": list(link.assumed) or None,
        "spread": _spread(link.spread, units),
    }


def _node(
    node: Node, links: Mapping[str, LinkSpec | None], names: Mapping[LinkSpec, str]
) -> dict[str, Any]:
    rate = node.memory_bytes_per_s
    return {
        "devices": node.devices,
        **{key: names[link] for key, link in links.items() if link is not None},
        "fabric_is_switched": node.fabric_is_switched,
        "torus": node.torus,
        "devices_per_pcie": node.devices_per_pcie,
        "sockets": node.sockets,
        "nics": node.nics,
        "memory_GB_per_s": None if rate is None else rate / 1e9,
        "cores": node.cores,
    }


def _calls(calls: MeasuredCalls) -> dict[str, Any]:
    return {
        "executor": calls.executor,
        "kind": calls.kind,
        "algorithm": calls.algorithm,
        "ranks": calls.ranks,
        "points": [[size, seconds * 1e6] for size, seconds in calls.points],
        "spread": [[low * 1e6, high * 1e6] for low, high in calls.spread],
        "source": "measured",
    }


def _in_units(of: object, units: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
    """The attributes of one block by key, in the units that the keys name."""
    found = {}
    for key, (attribute, unit) in units.items():
        value = getattr(of, attribute, None)
        if isinstance(value, Curve):
            found[key] = [[size, share] for size, share in value.points]
        elif value is not None:
            found[key] = value / unit
    return found


def _spread(
    spread: Mapping[str, tuple[float, float]], units: Mapping[str, tuple[str, float]]
) -> dict[str, Any]:
    keys = {attribute: (key, unit) for key, (attribute, unit) in units.items()}
    known = {keys[name]: pair for name, pair in spread.items() if name in keys}
    return {key: [low / unit, high / unit] for (key, unit), (low, high) in known.items()}


def _table(name: str, values: Mapping[str, Any], many: bool = False) -> Iterator[str]:
    yield ""
    yield f"[[{name}]]" if many else f"[{name}]"
    yield from _keys(values)


def _keys(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if value is not None and value != {}:
            yield f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quoted(value)
    return _number(value)


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    text = f"{value:.9g}" if math.isfinite(value) else "0"
    return text.replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def _key(key: str) -> str:
    return f'"{key}"' if "." in key or " " in key else key


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(one if one.isprintable() else " " for one in escaped) + '"'
