"""What the operating system says about a host: cores, NUMA nodes, memory, network interfaces.

Everything is read below a root folder (`/`), so that recorded trees of files can be read as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from shoal.cluster.nvidia import GpuTopology, NvidiaGpu, read_gpus
from shoal.runtime.cores import cores

_ARM_PARTS = {
    "0xd08": "Cortex-A72",
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
}
_FLOPS_A_CYCLE = (("avx512f", 64), ("avx2", 32), ("avx", 16), ("sve", 32), ("asimd", 16))


@dataclass(frozen=True)
class Nic:
    name: str
    bytes_per_s: float | None  # None: the driver does not say
    kind: str  # ethernet, infiniband, roce


@dataclass(frozen=True)
class Host:
    cores: int
    sockets: int
    numa_nodes: int
    memory_bytes: float
    cpu: str
    flops_a_cycle: int  # of a core, fp32
    hertz: float | None
    nics: tuple[Nic, ...] = ()
    gpus: tuple[NvidiaGpu, ...] = ()
    topology: GpuTopology = field(default_factory=GpuTopology)


def read_host() -> Host:
    """This machine."""
    root = Path("/")
    gpus, topology = read_gpus()
    info = _cpu_info(root)
    return Host(
        cores=cores(),
        sockets=_sockets(root),
        numa_nodes=numa_nodes(root),
        memory_bytes=memory_bytes(root),
        cpu=_cpu_name(info),
        flops_a_cycle=_flops_a_cycle(info),
        hertz=_hertz(root, info),
        nics=read_nics(root),
        gpus=gpus,
        topology=topology,
    )


def numa_nodes(root: Path) -> int:
    return max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*"))))


def memory_bytes(root: Path) -> float:
    """Of the host, or of the control group where that has less."""
    match = re.search(r"MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"))
    total = float(match[1]) * 1024 if match else 0.0
    limits = [root / "sys/fs/cgroup/memory.max"]
    limits.append(root / "sys/fs/cgroup/memory/memory.limit_in_bytes")
    given = [float(text) for path in limits if (text := _text(path)).isdigit()]
    return min([total or 1e9, *given])


def read_nics(root: Path) -> tuple[Nic, ...]:
    """Interfaces with a device behind them that are up; InfiniBand and RoCE ports first."""
    rdma = [
        nic
        for port in sorted((root / "sys/class/infiniband").glob("*/ports/*"))
        if (nic := _rdma_port(port)) is not None
    ]
    net = root / "sys/class/net"
    found = [_ethernet(path) for path in sorted(net.glob("*")) if (path / "device").exists()]
    return (*rdma, *(nic for nic in found if nic is not None))


def _rdma_port(port: Path) -> Nic | None:
    rate = re.match(r"([\d.]+) Gb/sec", _text(port / "rate"))
    if "ACTIVE" not in _text(port / "state") or rate is None:
        return None
    kind = "roce" if _text(port / "link_layer") == "Ethernet" else "infiniband"
    return Nic(f"{port.parent.parent.name} port {port.name}", float(rate[1]) * 1e9 / 8, kind)


def _ethernet(path: Path) -> Nic | None:
    if _text(path / "operstate") not in ("up", "unknown") or _text(path / "type") == "32":
        return None  # 32 is IP over InfiniBand, whose port is listed
    speed = _text(path / "speed")
    megabits = int(speed) if speed.isdigit() else 0
    return Nic(path.name, megabits * 1e6 / 8 if megabits else None, "ethernet")


def _cpu_info(root: Path) -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    first = _text(root / "proc/cpuinfo").split("\n\n")[0]
    pairs = [line.partition(":") for line in first.splitlines()]
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu_name(info: dict[str, str]) -> str:
    part = info.get("CPU part", "")
    return info.get("model name") or _ARM_PARTS.get(part) or part or "CPU"


def _flops_a_cycle(info: dict[str, str]) -> int:
    """Of a core, fp32: two units for fused multiply-adds as wide as its vectors."""
    flags = (info.get("flags") or info.get("Features") or "").split()
    return next((flops for flag, flops in _FLOPS_A_CYCLE if flag in flags), 8)


def _hertz(root: Path, info: dict[str, str]) -> float | None:
    kilohertz = _text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    if kilohertz.isdigit():
        return float(kilohertz) * 1e3
    megahertz = re.fullmatch(r"\d+(\.\d+)?", info.get("cpu MHz", ""))
    return float(megahertz[0]) * 1e6 if megahertz else None


def _sockets(root: Path) -> int:
    paths = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/physical_package_id")
    return max(1, len({_text(path) for path in paths}))


def _text(path: Path) -> str:
    """The text of a file; empty where it cannot be read, as `speed` of an interface without one."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
