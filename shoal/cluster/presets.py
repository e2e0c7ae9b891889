"""Clusters by name: `load_cluster("dgx-a100")`, or by the path of a file."""

from __future__ import annotations

from pathlib import Path

from shoal.cluster.cluster import Cluster
from shoal.cluster.discover import this_machine
from shoal.cluster.toml_block import suggestion
from shoal.cluster.toml_file import read_cluster
from shoal.errors import BadInput

FOLDER = Path(__file__).parent / "presets"
THIS_MACHINE = "this-machine"


def preset_names() -> list[str]:
    return sorted([THIS_MACHINE, *(path.stem for path in FOLDER.glob("*.toml"))])


def load_cluster(name_or_path: str | Path) -> Cluster:
    """The cluster of a preset, of this machine (`this-machine`), or of a file."""
    name = str(name_or_path)
    if name == THIS_MACHINE:
        return this_machine()
    if name in preset_names():
        return read_cluster(FOLDER / f"{name}.toml")
    path = Path(name_or_path)
    if path.exists() or path.suffix == ".toml" or len(path.parts) > 1:
        return read_cluster(path)
    raise BadInput(f"there is no cluster preset or file {name}; {suggestion(name, preset_names())}")
