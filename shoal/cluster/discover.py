"""This machine as a cluster of one node: read, not measured.

What cannot be read is assumed, and `Discovery.notes` says so; `shoal cluster calibrate` measures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.cluster import Cluster, Node
from shoal.cluster.hardware import Curve, Device, LinkSpec
from shoal.cluster.host import Host, read_host
from shoal.cluster.units import show_rate
from shoal.runtime.wording import counted


class GpuSpec(NamedTuple):
    pattern: str
    memory_GB_per_s: float
    peak_TFLOP_per_s: dict[str, float]
    nvlink_GB_per_s: float = 0.0
    most_nvlinks: int = 0


_GPUS = msgspec.toml.decode((Path(__file__).parent / "gpus.toml").read_bytes())


def spec_of(name: str) -> GpuSpec | None:
    """The datasheet of a GPU, by the name that nvidia-smi prints."""
    words = set(name.replace("-", " ").upper().split())
    for pattern, memory, rates, nvlink, most in _GPUS["gpus"]:
        if set(pattern.upper().split()) <= words:
            fp32, tf32, fp16, fp8 = rates
            peaks = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": fp16, "fp8": fp8}
            known = {dtype: rate for dtype, rate in peaks.items() if rate}
            return GpuSpec(pattern, memory, known, nvlink, most)
    return None


_ASSUMED_HERTZ = 2.5e9
_CORE_BYTES_PER_S = 10e9
_HOST_BYTES_PER_S = 50e9  # of one NUMA node
_NIC_BYTES_PER_S = 10e9 / 8
_SOCKET_LINK = LinkSpec("socket link", 40e9, 0.5e-6, source="assumed")
_DEVICE_ASSUMED = ("launch_us", "matmul_efficiency", "memory_efficiency")
_LINK_ASSUMED = ("alpha_us", "efficiency")
_CPU_MATMUL = Curve(((1e5, 0.1), (1e6, 0.35), (1e7, 0.6), (1e8, 0.75), (1e9, 0.8)))
_GPU_MATMUL = Curve(((1e8, 0.08), (1e9, 0.3), (1e10, 0.55), (1e11, 0.7), (1e12, 0.78)))
_GPU_MEMORY = Curve(((1e5, 0.3), (1e6, 0.55), (1e7, 0.75), (1e8, 0.88)))
_UNKNOWN_GPU = GpuSpec("", 500, {"fp32": 10, "fp16": 20, "bf16": 20})


@dataclass(frozen=True)
class Discovery:
    host: Host
    cluster: Cluster
    notes: tuple[str, ...]  # what was assumed, in sentences


def this_machine() -> Cluster:
    return discover().cluster


def discover(host: Host | None = None) -> Discovery:
    """The machine as a cluster; another host than this one for tests."""
    host = read_host() if host is None else host
    notes: list[str] = []
    nic, nics = _nic(host, notes)
    node = Node(1, nic=nic, nics=nics, cores=host.cores)
    device, node = (_gpu_node if host.gpus else _cpu_node)(host, node, notes)
    return Discovery(host, Cluster("this-machine", device, node), tuple(notes))


def _cpu_node(host: Host, node: Node, notes: list[str]) -> tuple[Device, Node]:
    """A device for each core; fewer workers have several cores each."""
    if host.hertz is None:
        notes.append(f"The clock of the CPU is assumed: {_ASSUMED_HERTZ / 1e9:g} GHz.")
    memory = min(host.cores * _CORE_BYTES_PER_S, host.numa_nodes * _HOST_BYTES_PER_S)
    notes.append(f"The bandwidth of memory is assumed: {show_rate(memory)}.")
    counts = [count for count in range(1, host.cores + 1) if host.cores % count == 0]
    crowded = tuple((count, _cpu_device(host, count, memory)) for count in counts)
    bus = LinkSpec("shared memory", memory / 2, 5e-6, shared=True, source="assumed")
    found = replace(
        node,
        devices=host.cores,
        fabric=bus if host.cores > 1 else None,
        memory_bytes_per_s=memory,
        crowded=crowded,
    )
    return crowded[-1][1], found


def _cpu_device(host: Host, workers: int, memory: float) -> Device:
    threads = host.cores // workers
    flops = threads * host.flops_a_cycle * (host.hertz or _ASSUMED_HERTZ)
    name = f"{threads} of {host.cores} cores" if threads < host.cores else counted(threads, "core")
    return Device(
        name=name,
        memory_bytes=host.memory_bytes / workers,
        memory_bytes_per_s=min(threads * _CORE_BYTES_PER_S, memory),
        peak_flops={"fp64": flops / 2, "fp32": flops},
        matmul_efficiency=_CPU_MATMUL,
        memory_efficiency=Curve(((1.0, 0.8),)),
        launch_s=5e-6,
        synchronous=True,
        threads=threads,
        assumed=(*_DEVICE_ASSUMED, "memory_GB_per_s"),
    )


def _gpu_node(host: Host, node: Node, notes: list[str]) -> tuple[Device, Node]:
    names = {gpu.name for gpu in host.gpus}
    if len(names) > 1:
        notes.append(f"The GPUs differ ({', '.join(sorted(names))}); all count as the first.")
    gpu = host.gpus[0]
    spec = spec_of(gpu.name)
    if spec is None:
        notes.append(f"The datasheet of {gpu.name} is not known: its rates are assumed.")
    known = spec or _UNKNOWN_GPU
    device = Device(
        name=gpu.name,
        memory_bytes=min(one.memory_bytes for one in host.gpus),
        memory_bytes_per_s=known.memory_GB_per_s * 1e9,
        peak_flops={dtype: rate * 1e12 for dtype, rate in known.peak_TFLOP_per_s.items()},
        matmul_efficiency=_GPU_MATMUL,
        memory_efficiency=_GPU_MEMORY,
        launch_s=4e-6,
        assumed=_DEVICE_ASSUMED,
        source="spec" if spec else "assumed",
    )
    fabric, switched = _nvlink(host, known, notes)
    several = host.sockets > 1
    found = replace(
        node,
        devices=len(host.gpus),
        fabric=fabric,
        fabric_is_switched=switched,
        pcie=_pcie(host, notes),
        devices_per_pcie=min(host.topology.gpus_per_switch, len(host.gpus)),
        sockets=host.sockets,
        socket_link=_SOCKET_LINK if several else None,
        memory_bytes=host.memory_bytes,
    )
    if several:
        notes.append(f"The link between sockets is assumed: {show_rate(_SOCKET_LINK.bytes_per_s)}.")
    return device, found


def _pcie(host: Host, notes: list[str]) -> LinkSpec:
    gpu = host.gpus[0]
    rate = gpu.pcie_bytes_per_s
    if rate is None:
        notes.append("PCIe of the GPUs is not reported: 4.0 with 16 lanes is assumed.")
        return LinkSpec("PCIe", 31.5e9, 1.5e-6, 0.8, source="assumed")
    name = f"PCIe {gpu.pcie_generation}.0 x{gpu.pcie_lanes}"
    return LinkSpec(name, rate, 1.5e-6, 0.8, assumed=_LINK_ASSUMED)


def _nvlink(host: Host, spec: GpuSpec, notes: list[str]) -> tuple[LinkSpec | None, bool]:
    """The rate of all NVLinks of a GPU, and whether a switch joins them."""
    topology = host.topology
    count = len(topology.gpus)
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    links = [topology.nvlinks(one, other) for one, other in pairs]
    if not any(links):
        return None, True
    if not topology.joined_by_nvlink:
        notes.append("NVLink joins only some of the GPUs: it is left out, PCIe joins all of them.")
        return None, True
    per_gpu = [sum(topology.nvlinks(one, i) for i in range(count)) for one in range(count)]
    switched = len(set(links)) == 1 and count > 2 and per_gpu[0] > max(spec.most_nvlinks, 1)
    if not all(links):
        notes.append("Some GPUs have no NVLink to each other: a GPU's links count for all others.")
    if not spec.nvlink_GB_per_s:
        notes.append("The rate of an NVLink of this GPU is not known: 25 GB/s is assumed.")
    rate = (links[0] if switched else min(per_gpu)) * (spec.nvlink_GB_per_s or 25) * 1e9
    return LinkSpec("NVLink", rate, 5e-6, 0.77, assumed=_LINK_ASSUMED), switched


def _nic(host: Host, notes: list[str]) -> tuple[LinkSpec | None, int]:
    """The fastest kind of interface, RDMA before others; several RDMA ports work together."""
    rdma = [nic for nic in host.nics if nic.kind != "ethernet"]
    best = max(rdma or host.nics, key=lambda nic: nic.bytes_per_s or 0.0, default=None)
    if best is None:
        return None, 1
    if best.bytes_per_s is None:
        notes.append(f"The speed of {best.name} is not reported: 10 Gb/s is assumed.")
    count = sum(nic.bytes_per_s == best.bytes_per_s for nic in rdma)
    rate = best.bytes_per_s or _NIC_BYTES_PER_S
    if best.kind == "ethernet":
        link = LinkSpec(f"Ethernet ({best.name})", rate, 30e-6, 0.94, transport="tcp")
    else:
        link = LinkSpec("RoCE" if best.kind == "roce" else "InfiniBand", rate, 10e-6, 0.92)
    if best.bytes_per_s is None:
        return replace(link, source="assumed"), max(1, count)
    return replace(link, assumed=_LINK_ASSUMED), max(1, count)
