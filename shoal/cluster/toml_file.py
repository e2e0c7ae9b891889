"""Cluster files: TOML with the units in the key names; `docs/cluster.md` has an example of each.

All rates of links are in one direction. A table may say `source`, `reference` (free text: where
the numbers were read), `assumed` (keys whose figures are typical ones, unlike the others) and
`spread` (by key, the lowest and the highest value that was seen).
`base = "dgx-h100"` takes the keys of a preset that the file does not give.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shoal.cluster import Cluster, Node, Noise
from shoal.cluster.hardware import Curve, Device, LinkSpec, MeasuredCalls
from shoal.cluster.program import Attention, Kernels, Loss, ModelProgram, Update
from shoal.cluster.units import show_rate
from shoal.errors import BadInput
from shoal.runtime.files import read_bounded
from shoal.runtime.wording import nearest

PRESETS = Path(__file__).parent / "presets"
_MAX_BYTES = 256 << 10
_LONG = 40  # lists have a line for each of so many
_MAX_LINE = 8192  # a key of thousands of parts takes seconds

_Number = Annotated[float, Meta(ge=0, le=1e18)]
_Positive = Annotated[float, Meta(gt=0, le=1e18)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_AboveOne = Annotated[float, Meta(ge=1, le=1e18)]
_Count = Annotated[int, Meta(ge=1, le=10_000_000)]
_Pair = tuple[_Number, _Number]
_Share4 = tuple[_Positive, _Positive, _Positive, _Positive]  # sizes and shares
_Part = Annotated[float, Meta(gt=0, le=1)]
_Points = list[tuple[_Positive, _Part]] | _Part
_Dtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"]
_SUFFIXES = {
    "GB_per_s": ("bytes_per_s", 1e9),
    "GB": ("bytes", 1e9),
    "us": ("s", 1e-6),
    "hours": ("s", 3600.0),
    "efficiency": ("efficiency", 1.0),
}
_NODE_LINKS = ("fabric", "pcie", "socket_link", "nic")


class _Table(Struct, forbid_unknown_fields=True):
    source: Literal["spec", "assumed", "measured", "fit"] = "spec"
    reference: str | None = None


class _Figures(_Table):
    assumed: list[str] = []
    spread: dict[str, _Pair] = {}


class _DeviceTable(_Figures, kw_only=True):
    name: str = "device"
    memory_GB: _Positive
    memory_GB_per_s: _Positive
    peak_TFLOP_per_s: Annotated[dict[_Dtype, _Positive], Meta(min_length=1)]
    matmul_efficiency: _Points = 1.0
    memory_efficiency: _Points = 1.0
    launch_us: _Number = 0.0
    overlap_cost: _Number = 0.0
    backward_launch_us: _Positive | None = None
    wait_us: _Number = 0.0
    meet_us: _Number = 0.0
    call_us: _Number = 0.0
    step_us: _Number = 0.0
    microbatch_us: _Number = 0.0
    served_step_us: _Number = 0.0
    request_us: _Number = 0.0
    served_GB_per_s: _Positive | None = None
    served_efficiency: _Points = 1.0
    synchronous: bool = False
    update_GB_per_s: _Positive | None = None
    momentum_GB_per_s: _Positive | None = None
    update_launch_us: _Number = 0.0
    backward_matmul_efficiency: _Points | None = None
    products: list[_Share4] = []
    attention: dict[Attention, list[_Share4]] = {}
    gap_us: _Number = 0.0
    launches_us: dict[str, _Positive] = {}
    fused_update_GB_per_s: _Positive | None = None
    watts: _Positive | None = None
    power_limit_watts: _Positive | None = None
    kernel_factors: dict[str, _Positive] = {}
    threads: _Count | None = None


class _ProgramTable(_Table):
    kernels: Kernels | None = None
    attention: Attention | None = None
    loss: Loss | None = None
    update: Update | None = None


class _CrowdedTable(_DeviceTable, kw_only=True):
    workers: _Count


class _LinkTable(_Figures):
    name: str | None = None
    GB_per_s: _Positive | None = None
    Gb_per_s: _Positive | None = None
    alpha_us: _Number = 0.0
    efficiency: _Part = 1.0
    shared: bool = False
    transport: Literal["rdma", "tcp", "ipoib"] = "rdma"


class _NodeTable(_Table):
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
    memory_GB: _Positive | None = None
    memory_GB_per_s: _Positive | None = None
    cores: _Count | None = None
    mtbf_hours: _Positive | None = None
    repair_hours: _Positive | None = None
    price_per_hour: _Number | None = None
    watts: _Number | None = None


class _StorageTable(_Table):
    GB_per_s: _Positive | None = None


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
    device: _DeviceTable
    link: dict[str, dict[str, Any]] = {}
    node: _NodeTable = msgspec.field(default_factory=_NodeTable)
    rack: _RackTable = msgspec.field(default_factory=_RackTable)
    spine: _SpineTable = msgspec.field(default_factory=_SpineTable)
    noise: _NoiseTable = msgspec.field(default_factory=_NoiseTable)
    program: _ProgramTable = msgspec.field(default_factory=_ProgramTable)
    storage: _StorageTable = msgspec.field(default_factory=_StorageTable)
    crowded: list[_CrowdedTable] = []
    measured: list[_CallsTable] = []


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes."""
    try:
        text = read_bounded(path, _MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"{path}: byte {error.start} is not UTF-8; a cluster file is TOML"
        raise BadInput(problem) from error
    return parse_cluster(text, str(path), path.stem)


def tables_of(text: str, file: str) -> dict[str, Any]:
    """`file` is what mistakes name."""
    try:
        if any(len(line) > _MAX_LINE for line in text.splitlines()):
            raise ValueError(f"a line has more than {_MAX_LINE} characters")
        return msgspec.toml.decode(text)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadInput(f"{file} is not TOML: {error}") from error


def parse_cluster(text: str, file: str, default_name: str) -> Cluster:
    table = tables_of(text, file)
    try:
        return _cluster(_convert("", _on_base(table), _File), default_name)
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from error


def _on_base(table: dict[str, Any]) -> dict[str, Any]:
    """With the keys of the preset that is its `base`, where a file names one."""
    if "base" not in table:
        return table
    names = [path.stem for path in PRESETS.glob("*.toml")]
    base = table.pop("base")
    if base not in names:
        raise BadInput(f"base: there is no preset {base!r}; {nearest(str(base), names)}")
    below = msgspec.toml.decode((PRESETS / f"{base}.toml").read_bytes())
    return dict(_merged(below, table, 2))


def _merged(below: Any, above: Any, depth: int) -> Any:
    """Tables key by key, and so the tables of links; other values replace those below."""
    if not (depth and isinstance(below, dict) and isinstance(above, dict)):
        return above
    pairs = [(key, value, depth - (key != "link")) for key, value in above.items()]
    return below | {key: _merged(below.get(key), value, left) for key, value, left in pairs}


def _cluster(file: _File, default_name: str) -> Cluster:
    links = {name: _link(f"link.{name}", table) for name, table in file.link.items()}
    node = _node(file, links)
    if file.nodes > 1 and node.nic is None:
        raise BadInput(f"nodes: {file.nodes} nodes need a network, and [node] names no nic")
    each = file.rack.nodes
    if each is not None and file.nodes > each and file.nodes % each:
        raise BadInput(f"rack.nodes: {file.nodes} nodes do not fill racks of {each}")
    return Cluster(
        name=file.name or default_name,
        device=_device("device", file.device),
        node=node,
        nodes=file.nodes,
        nodes_per_rack=each,
        oversubscription=_oversubscription(file, node, links),
        uplink_alpha_s=file.spine.alpha_us * 1e-6,
        noise=Noise(**_in_si("noise", file.noise)),
        storage_bytes_per_s=_in_si("storage", file.storage)["bytes_per_s"],
        source=file.source,
        program={key: value for key, value in _said(file.program) if value is not None},
    )


def _said(table: _ProgramTable) -> Iterator[tuple[str, str | None]]:
    return ((key, getattr(table, key)) for key in ModelProgram._fields)


def _node(file: _File, links: Mapping[str, LinkSpec]) -> Node:
    values = _in_si("node", file.node)
    del values["source"]
    for key in _NODE_LINKS:
        values[key] = _named_link(f"node.{key}", values[key], links)
    crowded = {one.workers: _device("crowded", one) for one in file.crowded}
    node = Node(
        **values, crowded=tuple(sorted(crowded.items())), measured=tuple(map(_calls, file.measured))
    )
    if problem := _node_problem(node):
        raise BadInput(f"node.{problem}")
    return node


def _device(name: str, table: _DeviceTable) -> Device:
    values = _in_si(name, table)
    values.pop("workers", None)
    peaks = {key: 1e12 * rate for key, rate in values.pop("peak_TFLOP_per_s").items()}
    return Device(peak_flops=peaks, **values)


def _link(where: str, found: dict[str, Any]) -> LinkSpec:
    table = _convert(where, found, _LinkTable)
    if (table.Gb_per_s is None) == (table.GB_per_s is None):
        raise BadInput(f"{where}.GB_per_s: give either GB_per_s (bytes) or Gb_per_s (bits)")
    values = _in_si(where, table)
    bits = values.pop("Gb_per_s")
    if bits is not None:
        values["bytes_per_s"] = bits * 1e9 / 8
    return LinkSpec(**{**values, "name": table.name or where.removeprefix("link.")})


def _in_si(name: str, table: _Table) -> dict[str, Any]:
    """The values of a table by attribute, in SI units."""
    units = _units_of(type(table))
    values: dict[str, Any] = {}
    for key in table.__struct_fields__:
        attribute, unit = units.get(key, (key, 1.0))
        value = getattr(table, key)
        if key.endswith("_efficiency") and value is not None:
            value = Curve(((1.0, value),) if isinstance(value, float) else tuple(value))
        elif key == "spread":
            value = _spread(f"{name}.spread", value, units)
        elif isinstance(value, list):
            value = tuple(value)
        values[attribute] = _scaled(value, unit)
    del values["reference"]
    return values


def _scaled(value: Any, unit: float) -> Any:
    if isinstance(value, dict):
        return {key: _scaled(one, unit) for key, one in value.items()}
    return value * unit if value is not None and unit != 1.0 else value


def _spread(name: str, spread: Mapping[str, _Pair], units: Mapping[str, Any]) -> dict[str, _Pair]:
    found = {}
    for key, (low, high) in spread.items():
        if key not in units:
            raise BadInput(f"{name}.{key}: there is no such key; {nearest(key, units)}")
        if low > high:
            raise BadInput(f"{name}.{key}: the lowest value comes first")
        attribute, unit = units[key]
        found[attribute] = (low * unit, high * unit)
    return found


def _calls(table: _CallsTable) -> MeasuredCalls:
    if table.spread and len(table.spread) != len(table.points):
        raise BadInput(f"the spread of calls has {len(table.points)} pairs, as their points")
    points = tuple((size, us * 1e-6) for size, us in table.points)
    spread = tuple((low * 1e-6, high * 1e-6) for low, high in table.spread)
    return MeasuredCalls(table.executor, table.kind, table.algorithm, table.ranks, points, spread)


def _named_link(where: str, name: str | None, links: Mapping[str, LinkSpec]) -> LinkSpec | None:
    if name is not None and name not in links:
        raise BadInput(f"{where}: there is no [link.{name}]; {nearest(name, links)}")
    return None if name is None else links[name]


def _oversubscription(file: _File, node: Node, links: Mapping[str, LinkSpec]) -> float:
    """Rate towards the nodes of a rack against rate towards the spine; at least 1."""
    rack = file.rack
    stated = file.spine.oversubscription
    nodes = rack.nodes or file.nodes
    link = _named_link("rack.uplink", rack.uplink, links) or node.nic
    ratio = stated or 1.0
    if rack.uplinks is not None and link is not None and node.nic is not None:
        down = nodes * node.nics * node.nic.bytes_per_s
        up = rack.uplinks * link.bytes_per_s
        ratio = max(down / up, 1.0)
        if stated is not None and not math.isclose(ratio, stated, rel_tol=0.01):
            raise BadInput(
                f"spine.oversubscription: 1:{stated:g} is not what the ports say: {nodes} nodes "
                f"with {show_rate(down)} over {rack.uplinks} uplinks with {show_rate(up)} are "
                f"1:{down / up:.3g}"
            )
    taken = nodes * node.nics
    uplinks = rack.uplinks if rack.uplinks is not None else math.ceil(taken / ratio)
    if rack.ports is not None and taken + uplinks > rack.ports:
        raise BadInput(
            f"rack.ports: {nodes} nodes take {taken} ports and the uplinks {uplinks}, and the "
            f"switch has {rack.ports}"
        )
    return ratio


def _convert(name: str, table: Any, kind: type[Any]) -> Any:
    """A table as a value; a mistake names its key: `device.launch_us`."""
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at ")
        where = place.strip("`").replace("$", name, 1).strip(".") or name
        raise BadInput(f"{where}: {message}" if where else message) from error


def _units_of(kind: type[Struct]) -> dict[str, tuple[str, float]]:
    """Keys with a number: the attribute that each is, and what it is multiplied with."""
    found: dict[str, tuple[str, float]] = {}
    for key in kind.__struct_fields__:
        parts = re.fullmatch(rf"(.*?_|)({'|'.join(_SUFFIXES)})", key)
        if parts is not None:
            name, factor = _SUFFIXES[parts[2]]
            found[key] = (f"{parts[1]}{name}", factor)
    if issubclass(kind, _DeviceTable):
        dtypes = _Dtype.__args__  # type: ignore[attr-defined]
        found |= {f"peak_TFLOP_per_s.{one}": (f"peak_flops.{one}", 1e12) for one in dtypes}
    return found


def _node_problem(node: Node) -> str:
    """A key, and what is wrong with it; "" where nothing is."""
    if node.devices > 1 and node.fabric is None and node.pcie is None:
        return f"fabric: {node.devices} devices need a fabric or a pcie to meet"
    if node.torus is not None and node.fabric is None:
        return "torus: a torus needs a fabric, the link between neighbors"
    if node.torus is not None and math.prod(node.torus) != node.devices:
        size = " x ".join(map(str, node.torus))
        return f"torus: a torus of {size} does not have the {node.devices} devices"
    if node.sockets > 1 and node.socket_link is None:
        return f"socket_link: {node.sockets} sockets need a link between them, such as QPI"
    if node.devices_per_pcie > node.devices:
        return f"devices_per_pcie: a node has {node.devices} devices"
    return ""


def cluster_text(cluster: Cluster) -> str:
    """The text of a cluster file, which is read back as the same cluster."""
    return "\n".join(_lines(cluster)) + "\n"


def _lines(cluster: Cluster) -> Iterator[str]:
    node = cluster.node
    yield from _keys({"name": cluster.name, "nodes": cluster.nodes, "source": cluster.source})
    yield from _table("device", _device_keys(cluster.device))
    names: dict[LinkSpec, str] = {}  # a key for each different link, after its place in the node
    for key in _NODE_LINKS:
        if getattr(node, key) is not None:
            names.setdefault(getattr(node, key), key)
    for link, name in names.items():
        yield from _table(f"link.{name}", _in_units(link, _LinkTable))
    named = {key: names.get(getattr(node, key)) for key in _NODE_LINKS}
    yield from _table("node", {**_in_units(node, _NodeTable), **named})
    yield from _table("rack", {"nodes": cluster.nodes_per_rack})
    spine = {"oversubscription": cluster.oversubscription, "alpha_us": cluster.uplink_alpha_s * 1e6}
    yield from _table("spine", spine)
    yield from _table("noise", vars(cluster.noise))
    if cluster.program:
        yield from _table("program", cluster.program)
    if cluster.storage_bytes_per_s is not None:
        yield from _table("storage", {"GB_per_s": cluster.storage_bytes_per_s / 1e9})
    for workers, device in node.crowded:
        yield from _table("crowded", {"workers": workers, **_device_keys(device)}, many=True)
    for calls in node.measured:
        points = [[size, seconds * 1e6] for size, seconds in calls.points]
        spread = [[low * 1e6, high * 1e6] for low, high in calls.spread]
        keys = {**vars(calls), "points": points, "spread": spread, "source": "measured"}
        yield from _table("measured", keys, many=True)


def _device_keys(device: Device) -> dict[str, Any]:
    peaks = {dtype: flops / 1e12 for dtype, flops in device.peak_flops.items()}
    return {**_in_units(device, _DeviceTable), "peak_TFLOP_per_s": peaks}


def _in_units(of: object, kind: type[Struct]) -> dict[str, Any]:
    """The attributes of one block by key, in the units that the keys name."""
    found: dict[str, Any] = {}
    units = _units_of(kind)
    for key in kind.__struct_fields__:
        attribute, unit = units.get(key, (key, 1.0))
        value: Any = getattr(of, attribute, None)
        if isinstance(value, Curve):
            found[key] = value.points
        elif key in units and value is not None:
            found[key] = _scaled(value, 1 / unit)
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
    yield from ("", f"[[{name}]]" if many else f"[{name}]", *_keys(values))


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
        parts = list(map(_value, value))
        return f"[{(', ' if len(parts) < _LONG else f',{chr(10)}  ').join(parts)}]"
    if isinstance(value, bool | int):
        return str(value).lower()
    return f"{value:.9g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
