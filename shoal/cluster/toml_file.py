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

All rates of links are in one direction. `docs/cluster.md` lists the keys.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from shoal.cluster.cluster import Cluster, Node, Noise
from shoal.cluster.hardware import Device, LinkSpec
from shoal.cluster.toml_block import TomlBlock, suggestion
from shoal.cluster.toml_measured import measured_calls
from shoal.cluster.topology_checks import check_node, oversubscription_of_ports
from shoal.errors import BadInput

TRANSPORTS = ("rdma", "tcp", "ipoib")
DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
DEVICE_UNITS = {
    "memory_GB": ("memory_bytes", 1e9),
    "memory_GB_per_s": ("memory_bytes_per_s", 1e9),
    "launch_us": ("launch_s", 1e-6),
    "backward_launch_us": ("backward_launch_s", 1e-6),
    "wait_us": ("wait_s", 1e-6),
    "meet_us": ("meet_s", 1e-6),
    "step_us": ("step_s", 1e-6),
    "served_step_us": ("served_step_s", 1e-6),
    "request_us": ("request_s", 1e-6),
    "served_GB_per_s": ("served_bytes_per_s", 1e9),
    "served_efficiency": ("served_efficiency", 1.0),
    "update_GB_per_s": ("update_bytes_per_s", 1e9),
    "momentum_GB_per_s": ("momentum_bytes_per_s", 1e9),
    "update_launch_us": ("update_launch_s", 1e-6),
    "backward_matmul_efficiency": ("backward_matmul_efficiency", 1.0),
    "matmul_efficiency": ("matmul_efficiency", 1.0),
    "memory_efficiency": ("memory_efficiency", 1.0),
} | {f"peak_TFLOP_per_s.{dtype}": (f"peak_flops.{dtype}", 1e12) for dtype in DTYPES}
LINK_UNITS = {
    "GB_per_s": ("bytes_per_s", 1e9),
    "Gb_per_s": ("bytes_per_s", 1e9 / 8),
    "alpha_us": ("alpha_s", 1e-6),
    "efficiency": ("efficiency", 1.0),
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
        table: dict[str, Any] = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise BadInput(f"{file} is not TOML: {error}") from error
    top = TomlBlock(file, "", table)
    links = _links(top.block("link"))
    device = _device(top.block("device"))
    node = replace(
        _node(top.block("node"), links),
        crowded=_crowded(top.blocks("crowded")),
        measured=tuple(measured_calls(block) for block in top.blocks("measured")),
    )
    name = top.text("name", default_name)
    nodes = top.count("nodes", 1)
    top.has("reference")
    source = top.source()
    nodes_per_rack = _nodes_per_rack(top, nodes)
    oversubscription, uplink_alpha_s = _network(top, node, nodes_per_rack or nodes, links)
    noise = _noise(top.block("noise"))
    between = tuple(measured_calls(block) for block in top.blocks("between"))
    top.finish()
    if nodes > 1 and node.nic is None:
        top.refuse("nodes", f"{nodes} nodes need a network, and [node] names no nic")
    return Cluster(
        name=name,
        device=device,
        node=node,
        nodes=nodes,
        nodes_per_rack=nodes_per_rack,
        oversubscription=oversubscription,
        uplink_alpha_s=uplink_alpha_s,
        noise=noise,
        between=between,
        source=source,
    )


def _device(block: TomlBlock) -> Device:
    rates = block.block("peak_TFLOP_per_s")
    for dtype in rates.table:
        if dtype not in DTYPES:
            rates.refuse(dtype, f"there is no such data type; {suggestion(dtype, list(DTYPES))}")
    peaks = {dtype: rates.positive(dtype) * 1e12 for dtype in rates.table}
    if not peaks:
        block.refuse("peak_TFLOP_per_s", "it is required, such as { fp32 = 19.5, fp16 = 312 }")
    device = Device(
        name=block.text("name", "device"),
        memory_bytes=block.positive("memory_GB") * 1e9,
        memory_bytes_per_s=block.positive("memory_GB_per_s") * 1e9,
        peak_flops=peaks,
        matmul_efficiency=block.curve("matmul_efficiency"),
        memory_efficiency=block.curve("memory_efficiency"),
        launch_s=block.number("launch_us", 0.0) * 1e-6,
        backward_launch_s=_optional(block, "backward_launch_us", 1e-6),
        wait_s=block.number("wait_us", 0.0) * 1e-6,
        meet_s=block.number("meet_us", 0.0) * 1e-6,
        step_s=block.number("step_us", 0.0) * 1e-6,
        served_step_s=block.number("served_step_us", 0.0) * 1e-6,
        request_s=block.number("request_us", 0.0) * 1e-6,
        served_bytes_per_s=_optional(block, "served_GB_per_s"),
        served_efficiency=block.curve("served_efficiency"),
        synchronous=block.flag("synchronous", False),
        update_bytes_per_s=_optional(block, "update_GB_per_s"),
        momentum_bytes_per_s=_optional(block, "momentum_GB_per_s"),
        update_launch_s=block.number("update_launch_us", 0.0) * 1e-6,
        backward_matmul_efficiency=(
            block.curve("backward_matmul_efficiency")
            if block.has("backward_matmul_efficiency")
            else None
        ),
        kernel_factors=_factors(block.block("kernel_factors")),
        threads=block.count("threads") if block.has("threads") else None,
        source=block.source(),
        assumed=block.assumed(),
        spread=block.spread(DEVICE_UNITS),
    )
    block.finish()
    return device


def _factors(block: TomlBlock) -> dict[str, float]:
    """How much longer than a plain one a kernel takes, by the end of its name."""
    return {name: block.positive(name) for name in block.table}


def _links(block: TomlBlock) -> dict[str, LinkSpec]:
    found = {}
    for name in block.table:
        found[name] = _link(block.block(name), name)
    return found


def _link(block: TomlBlock, name: str) -> LinkSpec:
    bits = block.has("Gb_per_s")
    if bits == block.has("GB_per_s"):
        block.refuse("GB_per_s", "give either GB_per_s (bytes) or Gb_per_s (bits)")
    key = "Gb_per_s" if bits else "GB_per_s"
    link = LinkSpec(
        name=block.text("name", name),
        bytes_per_s=block.positive(key) * LINK_UNITS[key][1],
        alpha_s=block.number("alpha_us", 0.0) * 1e-6,
        efficiency=_above_0(block, "efficiency"),
        shared=block.flag("shared", False),
        transport=block.choice("transport", "rdma", TRANSPORTS),
        source=block.source(),
        assumed=block.assumed(),
        spread=block.spread(LINK_UNITS),
    )
    block.finish()
    return link


def _above_0(block: TomlBlock, key: str) -> float:
    value = block.share(key, 1.0)
    if value == 0:
        block.refuse(key, "a share above 0 is expected, not 0")
    return value


def _named_link(block: TomlBlock, key: str, links: dict[str, LinkSpec]) -> LinkSpec | None:
    if not block.has(key):
        return None
    name = block.text(key)
    if name not in links:
        defined = suggestion(name, list(links)) if links else "the file defines no link"
        block.refuse(key, f"there is no [link.{name}]; {defined}")
    return links[name]


def _node(block: TomlBlock, links: dict[str, LinkSpec]) -> Node:
    node = Node(
        devices=block.count("devices", 1),
        fabric=_named_link(block, "fabric", links),
        fabric_is_switched=block.flag("fabric_is_switched", True),
        torus=block.sizes("torus"),
        pcie=_named_link(block, "pcie", links),
        devices_per_pcie=block.count("devices_per_pcie", 1),
        sockets=block.count("sockets", 1),
        socket_link=_named_link(block, "socket_link", links),
        nic=_named_link(block, "nic", links),
        nics=block.count("nics", 1),
        memory_bytes_per_s=_optional(block, "memory_GB_per_s"),
        cores=block.count("cores") if block.has("cores") else None,
    )
    block.source()
    block.finish()
    problem = check_node(node)
    if problem is not None:
        block.refuse(*problem)
    return node


def _optional(block: TomlBlock, key: str, unit: float = 1e9) -> float | None:
    return block.positive(key) * unit if block.has(key) else None


def _crowded(blocks: list[TomlBlock]) -> tuple[tuple[int, Device], ...]:
    """Devices by the number of workers that compute at the same time."""
    found = {block.count("workers"): _device(block) for block in blocks}
    return tuple(sorted(found.items()))


def _nodes_per_rack(top: TomlBlock, nodes: int) -> int | None:
    rack = top.block("rack")
    if not rack.has("nodes"):
        return None
    each = rack.count("nodes")
    if nodes > each and nodes % each:
        rack.refuse("nodes", f"{nodes} nodes do not fill racks of {each}")
    return each


def _network(
    top: TomlBlock, node: Node, nodes: int, links: dict[str, LinkSpec]
) -> tuple[float, float]:
    """The oversubscription of a rack of so many nodes, and what the spine adds to a message."""
    rack = top.block("rack")
    rack.has("nodes")
    spine = top.block("spine")
    stated = spine.number("oversubscription", least=1.0) if spine.has("oversubscription") else None
    alpha_s = spine.number("alpha_us", 0.0) * 1e-6
    uplink = _named_link(rack, "uplink", links)
    uplinks = rack.count("uplinks") if rack.has("uplinks") else None
    ports = rack.count("ports") if rack.has("ports") else None
    for block in (rack, spine):
        block.source()
        block.finish()
    by_ports, problem = oversubscription_of_ports(node, nodes, uplinks, uplink, ports, stated)
    if problem is not None:
        place = spine if problem[0] == "oversubscription" else rack
        place.refuse(*problem)
    return by_ports, alpha_s


def _noise(block: TomlBlock) -> Noise:
    noise = Noise(
        jitter=block.number("jitter", 0.0),
        straggler_share=block.share("straggler_share", 0.0),
        straggler_slowdown=block.number("straggler_slowdown", 1.0, least=1.0),
        source=block.source(),
    )
    block.finish()
    return noise
