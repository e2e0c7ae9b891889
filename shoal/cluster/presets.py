"""Clusters by name: `load_cluster("dgx-a100")`, or by the path of a file."""

from __future__ import annotations

from pathlib import Path

from shoal.cluster import Cluster
from shoal.cluster.discover import this_machine
from shoal.cluster.toml_file import PRESETS, read_cluster
from shoal.errors import BadInput
from shoal.runtime.lab_files import DEFAULT_LAB, LabFiles, lab_names
from shoal.runtime.wording import nearest

THIS_MACHINE = "this-machine"


def preset_names() -> list[str]:
    return sorted([THIS_MACHINE, *(path.stem for path in PRESETS.glob("*.toml"))])


def load_cluster(name_or_path: str | Path) -> Cluster:
    """The cluster of a preset, this machine (`this-machine`), a lab (`lab`), or a file.

    A file goes before the lab of `lab` and `lab://NAME`.
    """
    name = str(name_or_path)
    path = Path(name_or_path)
    scheme, mark, rest = name.partition("://")
    if scheme == "lab" and not path.exists():
        lab = rest if mark else DEFAULT_LAB
        files = LabFiles(lab)
        if lab not in lab_names() or not files.is_complete:
            raise BadInput(f"there is no lab {lab!r}: shoal lab up --name {lab} builds one")
        return read_cluster(files.cluster)
    if name == THIS_MACHINE:
        return this_machine()
    if name in preset_names():
        return read_cluster(PRESETS / f"{name}.toml")
    if path.exists() or path.suffix == ".toml" or len(path.parts) > 1:
        return read_cluster(path)
    raise BadInput(f"there is no cluster preset or file {name}; {nearest(name, preset_names())}")
