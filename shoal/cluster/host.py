"""What the operating system says about a host: cores, NUMA nodes, memory, network interfaces.

Everything is read below a root folder (`/`), so that recorded trees of files can be read as well.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from shoal.runtime.memory_limit import cores

QUERY = "name,memory.total,pcie.link.gen.max,pcie.link.width.max"
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_NEAR = ("PIX", "PXB")  # behind the same PCIe switch
_LINK = re.compile(r"X|NV\d+|SYS|NODE|PHB|PXB|PIX|N/A")


@dataclass(frozen=True)
class NvidiaGpu:
    name: str
    memory_bytes: float
    pcie_generation: int | None
    pcie_lanes: int | None

    @property
    def pcie_bytes_per_s(self) -> float | None:
        """In one direction."""
        if self.pcie_generation not in _LANE_BYTES_PER_S or not self.pcie_lanes:
            return None
        return _LANE_BYTES_PER_S[self.pcie_generation] * self.pcie_lanes


@dataclass(frozen=True)
class GpuTopology:
    """`nvidia-smi topo -m`: how each GPU reaches each GPU and NIC."""

    gpus: tuple[tuple[str, ...], ...] = ()
    nics: tuple[tuple[str, ...], ...] = ()

    def nvlinks(self, one: int, other: int) -> int:
        """How many NVLinks join two GPUs."""
        cell = self.gpus[one][other]
        return int(cell[2:]) if cell.startswith("NV") else 0

    @property
    def joined_by_nvlink(self) -> bool:
        """Every GPU reaches every other one over NVLinks."""
        reached = {0}
        waiting = [0] if self.gpus else []
        while waiting:
            one = waiting.pop()
            new = [i for i in range(len(self.gpus)) if self.nvlinks(one, i) and i not in reached]
            reached.update(new)
            waiting += new
        return len(self.gpus) > 1 and len(reached) == len(self.gpus)

    @property
    def gpus_per_switch(self) -> int:
        """GPUs behind one PCIe switch, also where NVLink hides it: they are near the same NIC."""
        count = len(self.gpus)
        near = (sum(self._near(one, other) for other in range(count)) for one in range(count))
        return max(near, default=1)

    def _near(self, one: int, other: int) -> bool:
        if one == other or self.gpus[one][other] in _NEAR:
            return True
        if not self.nvlinks(one, other) or not self.nics:
            return False
        pairs = zip(self.nics[one], self.nics[other], strict=True)
        return any(a in _NEAR and b in _NEAR for a, b in pairs)


def parse_gpus(text: str) -> tuple[NvidiaGpu, ...]:
    """The lines of `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and _number(cells[1]) is not None:
            memory_bytes = (_number(cells[1]) or 0) * 1024.0**2
            found.append(NvidiaGpu(cells[0], memory_bytes, _number(cells[2]), _number(cells[3])))
    return tuple(found)


def parse_topology(text: str) -> GpuTopology:
    """The matrix of `nvidia-smi topo -m`; an empty one where there is none."""
    lines = [_ESCAPES.sub("", line) for line in text.splitlines()]
    head = next((line.split() for line in lines if line.split()[:1] == ["GPU0"]), [])
    names = head[: head.index("CPU")] if "CPU" in head else head
    gpus = sum(re.fullmatch(r"GPU\d+", name) is not None for name in names)
    rows = []
    for line in lines[1:]:
        cells = line.split()
        is_row = len(cells) > len(names) and re.fullmatch(r"GPU\d+", cells[0])
        if is_row and all(_LINK.fullmatch(cell) for cell in cells[1 : len(names) + 1]):
            rows.append(cells[1:])
    if len(rows) != gpus:
        return GpuTopology()
    return GpuTopology(
        tuple(tuple(row[:gpus]) for row in rows),
        tuple(tuple(row[gpus : len(names)]) for row in rows),
    )


def _output(*arguments: str) -> str:
    """What nvidia-smi says; nothing where there is none, or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def watts() -> float | None:
    """The limit of the first GPU's power."""
    limit = _output("--query-gpu=power.limit", "--format=csv,noheader,nounits")
    return _number(next(iter(limit.splitlines()), "").strip())


def _number(cell: str) -> int | None:
    return int(float(cell)) if re.fullmatch(r"\d+(\.\d+)?", cell) else None


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
    gpus = parse_gpus(_output(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"))
    topology = parse_topology(_output("topo", "-m")) if len(gpus) > 1 else GpuTopology()
    first = _text(root / "proc/cpuinfo").split("\n\n")[0]  # processor
    pairs = [line.partition(":") for line in first.splitlines()]
    info = {key.strip(): value.strip() for key, _, value in pairs}
    packages = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/physical_package_id")
    kilohertz = _text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    megahertz = re.fullmatch(r"\d+(\.\d+)?", info.get("cpu MHz", ""))
    hertz = float(megahertz[0]) * 1e6 if megahertz else None
    flags = (info.get("flags") or info.get("Features") or "").split()
    return Host(
        cores=cores(),
        sockets=max(1, len({_text(path) for path in packages})),
        numa_nodes=numa_nodes(root),
        memory_bytes=memory_bytes(root),
        cpu=info.get("model name") or info.get("CPU part") or "CPU",
        # of a core, fp32: two units for fused multiply-adds as wide as its vectors
        flops_a_cycle=next((flops for flag, flops in _FLOPS_A_CYCLE if flag in flags), 8),
        hertz=float(kilohertz) * 1e3 if kilohertz.isdigit() else hertz,
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


def _text(path: Path) -> str:
    """The text of a file; empty where it cannot be read, as `speed` of an interface without one."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
