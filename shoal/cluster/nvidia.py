"""What `nvidia-smi` says about GPUs and the links between them."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

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
    """`nvidia-smi topo -m`: how each GPU reaches each GPU and NIC, and its NUMA node."""

    gpus: tuple[tuple[str, ...], ...] = ()
    nics: tuple[tuple[str, ...], ...] = ()
    numa: tuple[str, ...] = ()

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
        most = 1
        for one in range(len(self.gpus)):
            near = [other for other in range(len(self.gpus)) if self._near(one, other)]
            most = max(most, len(near))
        return most

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
        tuple(row[len(names) + 1] if len(row) > len(names) + 1 else "" for row in rows),
    )


def read_gpus() -> tuple[tuple[NvidiaGpu, ...], GpuTopology]:
    """The GPUs of this machine; none where there is no nvidia-smi or it fails."""
    query = _output(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    gpus = parse_gpus(query)
    return gpus, parse_topology(_output("topo", "-m")) if len(gpus) > 1 else GpuTopology()


def _output(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def _number(cell: str) -> int | None:
    return int(float(cell)) if re.fullmatch(r"\d+(\.\d+)?", cell) else None
