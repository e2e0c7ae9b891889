"""Machines as clusters, from recorded outputs of nvidia-smi and recorded files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cluster.discover import discover, spec_of
from shoal.cluster.host import (
    GpuTopology,
    Host,
    Nic,
    memory_bytes,
    numa_nodes,
    parse_gpus,
    parse_topology,
    read_nics,
)

A100_QUERY = "NVIDIA A100-SXM4-80GB, 81920, 4, 16\n" * 8
LEGEND = "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"


def a100_matrix() -> str:
    """Eight GPUs on NVSwitch, a pair behind each PCIe switch with two NICs; tabs and escapes."""
    gpus = [f"GPU{i}" for i in range(8)]
    nics = [f"NIC{i}" for i in range(8)]
    head = "\t".join(["", *gpus, *nics, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = [f"\x1b[4m{head}\x1b[0m"]
    for i in range(8):
        cells = [" X " if i == j else "NV12" for j in range(8)]
        cells += ["PXB" if i // 2 == j // 2 else "SYS" for j in range(8)]
        lines.append("\t".join([f"GPU{i}", *cells, "48-63,176-191", str(i // 4), "N/A"]))
    for i in range(8):
        lines.append("\t".join([f"NIC{i}", *["SYS"] * 8, *["PIX"] * 8]))
    return "\n".join(lines) + LEGEND


PCIE_MATRIX = """        GPU0    GPU1    GPU2    GPU3    mlx4_0  CPU Affinity
GPU0     X      PIX     PHB     PHB     PHB     0-9,20-29
GPU1    PIX      X      PHB     PHB     PHB     0-9,20-29
GPU2    PHB     PHB      X      PIX     PHB     0-9,20-29
GPU3    PHB     PHB     PIX      X      PHB     0-9,20-29
mlx4_0  PHB     PHB     PHB     PHB      X
"""
BRIDGES = PCIE_MATRIX.replace("PIX", "NV4")
CPU_HOST = Host(8, 1, 1, 64e9, "CPU", 32, 3e9)


def gpu_host(query: str, matrix: str, **changes: object) -> Host:
    host = replace(CPU_HOST, gpus=parse_gpus(query), topology=parse_topology(matrix))
    return replace(host, **changes)  # type: ignore[arg-type]


def test_a_dgx_a100_is_found() -> None:
    ports = tuple(Nic(f"mlx5_{i} port 1", 25e9, "infiniband") for i in range(8))
    host = gpu_host(
        A100_QUERY, a100_matrix(), sockets=2, nics=(*ports, Nic("eno1", None, "ethernet"))
    )
    found = discover(host)
    node = found.cluster.node
    assert node.devices == 8
    assert node.fabric is not None and node.fabric.bytes_per_s == 300e9
    assert node.fabric_is_switched
    assert node.pcie is not None and node.pcie.name == "PCIe 4.0 x16"
    assert node.pcie.bytes_per_s == pytest.approx(31.5e9, rel=0.01)
    assert node.devices_per_pcie == 2
    assert node.nics == 8 and node.nic is not None and node.nic.bytes_per_s == 25e9
    assert found.cluster.device.flops_of("bf16") == 312e12
    assert found.cluster.device.memory_bytes == 80 * 2**30
    assert found.notes == ("The link between sockets is assumed: 320 Gb/s = 40 GB/s.",)


def test_gpus_that_nvlink_does_not_join_have_no_fabric() -> None:
    node = discover(gpu_host("Tesla T4, 15360, 3, 16\n" * 4, PCIE_MATRIX)).cluster.node
    assert node.fabric is None and node.devices_per_pcie == 2
    # bridges between pairs do not join all
    found = discover(gpu_host("NVIDIA RTX A6000, 49140, 4, 16\n" * 4, BRIDGES))
    assert found.cluster.node.fabric is None
    assert any("NVLink joins only some" in note for note in found.notes)


def test_two_bridged_gpus_have_the_rate_of_the_bridge() -> None:
    matrix = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-63\nGPU1\tNV4\t X \t0-63\n"
    fabric = discover(gpu_host("NVIDIA A30, 24576, 4, 16\n" * 2, matrix)).cluster.node.fabric
    assert fabric is not None and fabric.bytes_per_s == 100e9


def test_an_unknown_gpu_is_said_to_be_assumed() -> None:
    said = " ".join(discover(gpu_host("NVIDIA Q9000, 8192, [N/A], [N/A]\n", "")).notes)
    assert "NVIDIA Q9000 is not known" in said and "PCIe of the GPUs is not reported" in said


def test_other_outputs_are_no_gpus() -> None:
    assert parse_gpus("No devices were found\n") == ()
    for text in ("Failed to initialize NVML: Driver/library version mismatch", ""):
        assert parse_topology(text) == GpuTopology()


def test_datasheets_are_found_by_name() -> None:
    for name, memory_GB_per_s in (
        ("NVIDIA H200", 4800),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", 2000),
        ("NVIDIA A100 80GB PCIe", 1935),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("Tesla V100-SXM2-16GB", 900),
        ("NVIDIA B200", 8000),
    ):
        spec = spec_of(name)
        assert spec is not None and spec.memory_GB_per_s == memory_GB_per_s


def test_fewer_workers_have_more_cores_of_a_cpu_host() -> None:
    cluster = discover(CPU_HOST).cluster
    assert cluster.devices == 8
    assert cluster.device_of(8).peak_flops["fp32"] == 32 * 3e9
    assert cluster.device_of(1).peak_flops["fp32"] == 8 * 32 * 3e9
    assert cluster.device_of(2).memory_bytes == 32e9


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_interfaces_and_memory_are_read_from_files(tmp_path: Path) -> None:
    net = tmp_path / "sys/class/net"
    for name, state, speed in (("eth0", "up", "25000"), ("eth1", "down", "1000"), ("lo", "up", "")):
        write(net / name / "operstate", state)
        write(net / name / "speed", speed)
    for name in ("eth0", "eth1"):
        write(net / name / "device/vendor", "0x15b3")
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    write(port / "rate", "200 Gb/sec (4X HDR)\n")
    write(port / "state", "4: ACTIVE\n")
    write(port / "link_layer", "InfiniBand\n")
    assert read_nics(tmp_path) == (
        Nic("mlx5_0 port 1", 25e9, "infiniband"),
        Nic("eth0", 25e9 / 8, "ethernet"),
    )
    write(tmp_path / "proc/meminfo", "MemTotal:       1000000 kB\n")
    assert memory_bytes(tmp_path) == 1_024_000_000
    write(tmp_path / "sys/fs/cgroup/memory.max", "500000\n")
    assert memory_bytes(tmp_path) == 500_000
    for node in (0, 1):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    assert numa_nodes(tmp_path) == 2
