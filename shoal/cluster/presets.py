"""Clusters by name: `load_cluster("dgx-a100")`, or by the path of a file."""

from __future__ import annotations

from pathlib import Path

from shoal.cluster import Cluster
from shoal.cluster.discover import this_machine
from shoal.cluster.toml_file import read_cluster, suggestion
from shoal.errors import BadInput
from shoal.runtime.lab_files import DEFAULT_LAB, LabFiles, lab_names

FOLDER = Path(__file__).parent / "presets"
THIS_MACHINE = "this-machine"


def preset_names() -> list[str]:
    return sorted([THIS_MACHINE, *(path.stem for path in FOLDER.glob("*.toml"))])


def load_cluster(name_or_path: str | Path) -> Cluster:
    """The cluster of a preset, this machine (`this-machine`), a lab (`lab`), or a file."""
    name = str(name_or_path)
    lab = _lab_name(name)
    if lab is not None:
        return _lab_cluster(lab)
    if name == THIS_MACHINE:
        return this_machine()
    if name in preset_names():
        return read_cluster(FOLDER / f"{name}.toml")
    path = Path(name_or_path)
    if path.exists() or path.suffix == ".toml" or len(path.parts) > 1:
        return read_cluster(path)
    raise BadInput(f"there is no cluster preset or file {name}; {suggestion(name, preset_names())}")


def _lab_name(name: str) -> str | None:
    """Of `lab` and `lab://NAME`; a file with that name goes first."""
    scheme, mark, rest = name.partition("://")
    if scheme != "lab" or Path(name).exists():
        return None
    return rest if mark else DEFAULT_LAB


def _lab_cluster(name: str) -> Cluster:
    files = LabFiles(name)
    if name not in lab_names() or not files.is_complete:
        raise BadInput(f"there is no lab {name!r}: shoal lab up --name {name} builds one")
    return read_cluster(files.cluster)
