"""Cluster files: TOML with the units in the key names.

    name = "two-nodes"
    nodes = 2
    [device]
    memory_GB = 80
    memory_GB_per_s = 2039
    peak_TFLOP_per_s = { fp16 = 312 }
    [link.infiniband]
    Gb_per_s = 200
    alpha_us = 5
    [node]
    devices = 8
    nic = "infiniband"

All rates of links are in one direction. `docs/cluster.md` lists the keys. A table may say `source`,
`reference` (free text: where the numbers were read), `assumed` (keys whose figures are typical
ones, unlike the others) and `spread` (by key, the lowest and the highest value that was seen).
"""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta, Struct

from shoal.cluster.cluster import Cluster, Node, Noise
from shoal.cluster.hardware import Curve, Device, LinkSpec, MeasuredCalls
from shoal.cluster.units import show_rate
from shoal.errors import BadInput

_Number = Annotated[float, Meta(ge=0, le=1e18)]
_Positive = Annotated[float, Meta(gt=0, le=1e18)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_AboveOne = Annotated[float, Meta(ge=1, le=1e18)]
_Count = Annotated[int, Meta(ge=1, le=10_000_000)]
_Pair = tuple[_Number, _Number]
_Points = list[tuple[_Positive, _Share]] | _Share
_Dtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"]
_SUFFIXES = {
    "GB_per_s": ("bytes_per_s", 1e9),
    "GB": ("bytes", 1e9),
    "us": ("s", 1e-6),
    "efficiency": ("efficiency", 1.0),
}
_WORDS = {  # of msgspec's errors
    "Expected": "expected",
    "`float`": "a number",
    "`int`": "a whole number",
    "`str`": "a text",
    "`bool`": "true or false",
    "`object`": "a table",
    "`array`": "a list",
    "Object missing required field": "it lacks",
}
NODE_LINKS = ("fabric", "pcie", "socket_link", "nic")


class _Table(Struct, forbid_unknown_fields=True):
    source: Literal["spec", "assumed", "measured", "fit"] = "spec"
    reference: str | None = None


class _Figures(_Table):
    assumed: list[str] = []
    spread: dict[str, _Pair] = {}


class DeviceTable(_Figures, kw_only=True):
    name: str = "device"
    memory_GB: _Positive
    memory_GB_per_s: _Positive
    peak_TFLOP_per_s: Annotated[dict[_Dtype, _Positive], Meta(min_length=1)]
    matmul_efficiency: _Points = 1.0
    memory_efficiency: _Points = 1.0
    launch_us: _Number = 0.0
    backward_launch_us: _Positive | None = None
    wait_us: _Number = 0.0
    meet_us: _Number = 0.0
    step_us: _Number = 0.0
    served_step_us: _Number = 0.0
    request_us: _Number = 0.0
    served_GB_per_s: _Positive | None = None
    served_efficiency: _Points = 1.0
    synchronous: bool = False
    update_GB_per_s: _Positive | None = None
    momentum_GB_per_s: _Positive | None = None
    update_launch_us: _Number = 0.0
    backward_matmul_efficiency: _Points | None = None
    kernel_factors: dict[str, _Positive] = {}
    threads: _Count | None = None


class CrowdedTable(DeviceTable, kw_only=True):
    workers: _Count


class LinkTable(_Figures):
    name: str | None = None
    GB_per_s: _Positive | None = None
    Gb_per_s: _Positive | None = None
    alpha_us: _Number = 0.0
    efficiency: Annotated[float, Meta(gt=0, le=1)] = 1.0
    shared: bool = False
    transport: Literal["rdma", "tcp", "ipoib"] = "rdma"


class NodeTable(_Table):
    devices: _Count = 1
    fabric: str | None = None
    fabric_is_switched: bool = True
    torus: Annotated[list[_Count], Meta(min_length=1)] | None = None
    pcie: str | None = None
    devices_per_pcie: _Count = 1
    sockets: _Count = 1
    socket_link: str | None = None
    nic: str | None = None
    nics: _Count = 1
    memory_GB_per_s: _Positive | None = None
    cores: _Count | None = None


class _RackTable(_Table):
    nodes: _Count | None = None
    uplink: str | None = None
    uplinks: _Count | None = None
    ports: _Count | None = None


class _SpineTable(_Table):
    oversubscription: _AboveOne | None = None
    alpha_us: _Number = 0.0


class _NoiseTable(_Table):
    jitter: _Number = 0.0
    straggler_share: _Share = 0.0
    straggler_slowdown: _AboveOne = 1.0


class _CallsTable(_Table, kw_only=True):
    """`points` are bytes and microseconds, `spread` quartiles in microseconds."""

    executor: str
    kind: str
    algorithm: str = ""
    ranks: Annotated[int, Meta(ge=2)]
    points: list[_Pair]
    spread: list[_Pair] = []


class _File(_Table, kw_only=True):
    name: str | None = None
    nodes: _Count = 1
    device: DeviceTable
    link: dict[str, dict[str, Any]] = {}
    node: NodeTable = msgspec.field(default_factory=NodeTable)
    rack: _RackTable = msgspec.field(default_factory=_RackTable)
    spine: _SpineTable = msgspec.field(default_factory=_SpineTable)
    noise: _NoiseTable = msgspec.field(default_factory=_NoiseTable)
    crowded: list[CrowdedTable] = []
    measured: list[_CallsTable] = []
    between: list[_CallsTable] = []


_TABLES: dict[str, type[Struct]] = {
    "": _File,
    "device": DeviceTable,
    "link": LinkTable,
    "node": NodeTable,
    "rack": _RackTable,
    "spine": _SpineTable,
    "noise": _NoiseTable,
    "crowded": CrowdedTable,
    "measured": _CallsTable,
    "between": _CallsTable,
}


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path}: byte {error.start} is not UTF-8; a cluster file is TOML"
        ) from error
    return parse_cluster(text, str(path), path.stem)


def parse_cluster(text: str, file: str, default_name: str) -> Cluster:
    """`file` is what mistakes name."""
    try:
        table = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise BadInput(f"{file} is not TOML: {error}") from error
    return _Reader(file, table).cluster(default_name)


class _Reader:
    """Turns the tables of a file into a cluster; each mistake names file, table and key."""

    def __init__(self, file: str, table: dict[str, Any]):
        self._name = file
        self._file: _File = self._convert("", table, _File)
        self._links = {name: self._link(name, table) for name, table in self._file.link.items()}

    def cluster(self, default_name: str) -> Cluster:
        file = self._file
        node = self._node()
        if file.nodes > 1 and node.nic is None:
            self._refuse("", "nodes", f"{file.nodes} nodes need a network, and [node] names no nic")
        each = file.rack.nodes
        if each is not None and file.nodes > each and file.nodes % each:
            self._refuse("rack", "nodes", f"{file.nodes} nodes do not fill racks of {each}")
        noise = file.noise
        return Cluster(
            name=file.name or default_name,
            device=self._device("device", file.device),
            node=node,
            nodes=file.nodes,
            nodes_per_rack=each,
            oversubscription=self._oversubscription(node, each or file.nodes),
            uplink_alpha_s=file.spine.alpha_us * 1e-6,
            noise=Noise(
                noise.jitter, noise.straggler_share, noise.straggler_slowdown, noise.source
            ),
            between=tuple(self._calls("between", calls) for calls in file.between),
            source=file.source,
        )

    def _node(self) -> Node:
        table = self._file.node
        links: dict[str, Any] = {
            key: self._named_link("node", key, getattr(table, key)) for key in NODE_LINKS
        }
        crowded = {one.workers: self._device("crowded", one) for one in self._file.crowded}
        node = Node(
            **links,
            **{key: getattr(table, key) for key in ("devices", "devices_per_pcie", "sockets")},
            fabric_is_switched=table.fabric_is_switched,
            nics=table.nics,
            cores=table.cores,
            torus=None if table.torus is None else tuple(table.torus),
            memory_bytes_per_s=_scaled(table.memory_GB_per_s, 1e9),
            crowded=tuple(sorted(crowded.items())),
            measured=tuple(self._calls("measured", calls) for calls in self._file.measured),
        )
        problem = _node_problem(node)
        if problem is not None:
            self._refuse("node", *problem)
        return node

    def _device(self, name: str, table: DeviceTable) -> Device:
        values = self._figures(name, table)
        values.pop("workers", None)
        peaks: dict[str, float] = {key: 1e12 * rate for key, rate in table.peak_TFLOP_per_s.items()}
        del values["peak_TFLOP_per_s"]
        for key in _keys(DeviceTable):
            if key.endswith("_efficiency") and values[key] is not None:
                values[key] = self._curve(name, key, values[key])
        return Device(peak_flops=peaks, **values)

    def _link(self, name: str, found: dict[str, Any]) -> LinkSpec:
        where = f"link.{name}"
        table: LinkTable = self._convert(where, found, LinkTable)
        if (table.Gb_per_s is None) == (table.GB_per_s is None):
            self._refuse(where, "GB_per_s", "give either GB_per_s (bytes) or Gb_per_s (bits)")
        values = self._figures(where, table)
        bits = values.pop("Gb_per_s")
        if bits is not None:
            values["bytes_per_s"] = bits * 1e9 / 8
        return LinkSpec(**{**values, "name": table.name or name})

    def _figures(self, name: str, table: _Figures) -> dict[str, Any]:
        """The values of a table by attribute, in SI units."""
        units = units_of(type(table))
        keys = _keys(type(table))
        for key in table.assumed:
            if key not in keys:
                self._refuse(name, "assumed", f"the table has no {key}; {suggestion(key, keys)}")
        spread = {}
        for key, (low, high) in table.spread.items():
            if key not in units:
                known = suggestion(key, list(units))
                self._refuse(f"{name}.spread", key, f"there is no such key; {known}")
            if low > high:
                self._refuse(f"{name}.spread", key, "the lowest value comes first")
            attribute, unit = units[key]
            spread[attribute] = (low * unit, high * unit)
        values = {}
        for key in keys:
            attribute, unit = units.get(key, (key, 1.0))
            values[attribute] = _scaled(getattr(table, key), unit)
        del values["reference"]
        return {**values, "assumed": tuple(table.assumed), "spread": spread}

    def _curve(self, name: str, key: str, points: Any) -> Curve:
        try:
            return Curve(((1.0, points),) if isinstance(points, float) else tuple(points))
        except BadInput as error:
            self._refuse(name, key, str(error))

    def _calls(self, name: str, table: _CallsTable) -> MeasuredCalls:
        if table.spread and len(table.spread) != len(table.points):
            self._refuse(name, "spread", f"{len(table.points)} pairs are expected")
        points = tuple((size, us * 1e-6) for size, us in table.points)
        spread = tuple((low * 1e-6, high * 1e-6) for low, high in table.spread)
        try:
            return MeasuredCalls(
                table.executor, table.kind, table.algorithm, table.ranks, points, spread
            )
        except BadInput as error:
            self._refuse(name, "points", str(error))

    def _named_link(self, name: str, key: str, link: str | None) -> LinkSpec | None:
        if link is not None and link not in self._links:
            self._refuse(
                name, key, f"there is no [link.{link}]; {suggestion(link, list(self._links))}"
            )
        return None if link is None else self._links[link]

    def _oversubscription(self, node: Node, nodes: int) -> float:
        """Rate towards the nodes of a rack against rate towards the spine; at least 1."""
        rack = self._file.rack
        stated = self._file.spine.oversubscription
        link = self._named_link("rack", "uplink", rack.uplink) or node.nic
        ratio = stated or 1.0
        if rack.uplinks is not None and link is not None and node.nic is not None:
            down = nodes * node.nics * node.nic.bytes_per_s
            up = rack.uplinks * link.bytes_per_s
            ratio = max(down / up, 1.0)
            if stated is not None and not math.isclose(ratio, stated, rel_tol=0.01):
                ports = f"{show_rate(down)} over {rack.uplinks} uplinks with {show_rate(up)}"
                problem = f"1:{stated:g} is not what the ports say: {nodes} nodes with {ports}"
                self._refuse("spine", "oversubscription", f"{problem} are 1:{down / up:.3g}")
        taken = nodes * node.nics
        uplinks = rack.uplinks if rack.uplinks is not None else math.ceil(taken / ratio)
        if rack.ports is not None and taken + uplinks > rack.ports:
            problem = f"{nodes} nodes take {taken} ports and the uplinks {uplinks}"
            self._refuse("rack", "ports", f"{problem}, and the switch has {rack.ports}")
        return ratio

    def _convert(self, name: str, table: Any, kind: type[Any]) -> Any:
        try:
            return msgspec.convert(table, kind)
        except msgspec.ValidationError as error:
            message, _, place = str(error).partition(" - at ")
            for word, plain in _WORDS.items():
                message = message.replace(word, plain)
            path = [name] * bool(name) + re.findall(r"\.(\w+)", place)
            named = re.search("unknown field `(.*)`", message)
            if named is not None:
                known = _keys(_TABLES[path[0].split(".")[0] if path else ""])
                message = f"there is no such key; {suggestion(named[1], known)}"
                path.append(named[1])
            self._refuse(".".join(path[:-1]), path[-1] if path else "file", message)

    def _refuse(self, name: str, key: str, problem: str) -> NoReturn:
        where = f"[{name}] " if name else ""
        raise BadInput(f"{self._name}: {where}{key}: {problem}")


def suggestion(name: str, known: list[str]) -> str:
    """The known name that is closest, as a question; all of them where none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def _keys(kind: type[Struct]) -> list[str]:
    return list(kind.__struct_fields__)


def units_of(kind: type[Struct]) -> dict[str, tuple[str, float]]:
    """Keys with a number: the attribute that each is, and what it is multiplied with."""
    found: dict[str, tuple[str, float]] = {}
    for key in _keys(kind):
        parts = re.fullmatch(rf"(.*?_|)({'|'.join(_SUFFIXES)})", key)
        if parts is not None:
            name, factor = _SUFFIXES[parts[2]]
            found[key] = (f"{parts[1]}{name}", factor)
    if issubclass(kind, DeviceTable):
        dtypes = _Dtype.__args__  # type: ignore[attr-defined]
        found |= {f"peak_TFLOP_per_s.{one}": (f"peak_flops.{one}", 1e12) for one in dtypes}
    return found


def _scaled(value: Any, unit: float) -> Any:
    return value * unit if value is not None and unit != 1.0 else value


def _node_problem(node: Node) -> tuple[str, str] | None:
    """A key, and what is wrong with it."""
    if node.devices > 1 and node.fabric is None and node.pcie is None:
        return "fabric", f"{node.devices} devices need a fabric or a pcie to meet"
    if node.torus is not None:
        if node.fabric is None:
            return "torus", "a torus needs a fabric, the link between neighbors"
        if math.prod(node.torus) != node.devices:
            size = " x ".join(map(str, node.torus))
            return "torus", f"a torus of {size} does not have the {node.devices} devices"
    if node.sockets > 1 and node.socket_link is None:
        return "socket_link", f"{node.sockets} sockets need a link between them, such as QPI"
    if node.devices_per_pcie > node.devices:
        return "devices_per_pcie", f"a node has {node.devices} devices"
    return None
