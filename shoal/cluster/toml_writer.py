"""A cluster as the text of a cluster file, which `toml_file` reads back as the same cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from shoal.cluster.cluster import Cluster
from shoal.cluster.hardware import Curve, Device, LinkSpec, MeasuredCalls
from shoal.cluster.toml_file import NODE_LINKS, DeviceTable, LinkTable, NodeTable, units_of


def cluster_text(cluster: Cluster) -> str:
    """The text of a cluster file."""
    return "\n".join(_lines(cluster)) + "\n"


def _lines(cluster: Cluster) -> Iterator[str]:
    node = cluster.node
    yield from _keys({"name": cluster.name, "nodes": cluster.nodes, "source": cluster.source})
    yield from _table("device", _device(cluster.device))
    names: dict[LinkSpec, str] = {}  # a key for each different link, after its place in the node
    for key in NODE_LINKS:
        if getattr(node, key) is not None:
            names.setdefault(getattr(node, key), key)
    for link, name in names.items():
        yield from _table(f"link.{name}", _in_units(link, LinkTable))
    named = {key: names.get(getattr(node, key)) for key in NODE_LINKS}
    yield from _table("node", {**_in_units(node, NodeTable), **named})
    yield from _table("rack", {"nodes": cluster.nodes_per_rack})
    alpha_us = cluster.uplink_alpha_s * 1e6
    yield from _table("spine", {"oversubscription": cluster.oversubscription, "alpha_us": alpha_us})
    yield from _table("noise", vars(cluster.noise))
    for workers, device in node.crowded:
        yield from _table("crowded", {"workers": workers, **_device(device)}, many=True)
    for name, many in (("measured", node.measured), ("between", cluster.between)):
        for calls in many:
            yield from _table(name, _calls(calls), many=True)


def _device(device: Device) -> dict[str, Any]:
    peaks = {dtype: flops / 1e12 for dtype, flops in device.peak_flops.items()}
    return {**_in_units(device, DeviceTable), "peak_TFLOP_per_s": peaks}


def _calls(calls: MeasuredCalls) -> dict[str, Any]:
    return {
        **vars(calls),
        "points": [[size, seconds * 1e6] for size, seconds in calls.points],
        "spread": [[low * 1e6, high * 1e6] for low, high in calls.spread],
        "source": "measured",
    }


def _in_units(of: object, kind: type[Struct]) -> dict[str, Any]:
    """The attributes of one block by key, in the units that the keys name."""
    found: dict[str, Any] = {}
    units = units_of(kind)
    for key in kind.__struct_fields__:
        attribute, unit = units.get(key, (key, 1.0))
        value: Any = getattr(of, attribute, None)
        if isinstance(value, Curve):
            found[key] = value.points
        elif key in units and value is not None:
            found[key] = value / unit
        elif key == "spread":
            found[key] = {
                key: [end / unit for end in value[attribute]]
                for key, (attribute, unit) in units.items()
                if attribute in value
            }
        else:
            found[key] = value
    return found


def _table(name: str, values: Mapping[str, Any], many: bool = False) -> Iterator[str]:
    yield ""
    yield f"[[{name}]]" if many else f"[{name}]"
    yield from _keys(values)


def _keys(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if value is not None and value not in ({}, ()):
            yield f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{json.dumps(key)} = {_value(one)}" for key, one in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, str):
        return json.dumps("".join(one if one.isprintable() else " " for one in value))
    if isinstance(value, Iterable):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool | int):
        return str(value).lower()
    text = f"{value:.9g}" if math.isfinite(value) else "0"
    return text.replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
