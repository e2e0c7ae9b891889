"""What `write_tensors` writes is a safetensors file, and what it says is its digest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.train.checkpoints import files
from shoal.train.checkpoints.files import Checkpoint
from shoal.train.checkpoints.tensor_file import CHUNK_BYTES, file_digest, write_tensors

_SAVED = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


def random_bytes(num_bytes: int) -> Tensor:
    return torch.randint(256, (num_bytes,), dtype=torch.uint8)


def written(tensors: dict[str, Tensor], folder: Path) -> Path:
    """The file, after a look at what is said of it."""
    file = folder / "ours.safetensors"
    said = write_tensors(tensors, file)
    with open(file, "rb") as handle:
        digest = file_digest(handle.fileno())
    assert said == {"name": file.name, "bytes": file.stat().st_size, "xxh3": digest}
    return file


def test_a_file_is_that_of_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor(1.5), "ü": torch.zeros(0, 3), '"': torch.ones(2, 3, 4)}
    for name in _SAVED:
        dtype = getattr(torch, name)
        values = torch.zeros(3, dtype=torch.bool) if name == "bool" else random_bytes(24)
        tensors[name] = values.view(dtype)
    save_file(tensors, tmp_path / "theirs")
    ours, theirs = (load_file(file) for file in (written(tensors, tmp_path), tmp_path / "theirs"))
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, tensor in ours.items():
        for other in (theirs[name], tensors[name]):
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
            assert tensor.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float4_e2m1fn_x2])
def test_what_safetensors_cannot_hold_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=f"cannot hold tensors of {dtype}"):
        files.write(tmp_path, Checkpoint({"a": torch.zeros(1, dtype=dtype)}))


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("chunks", [1, 3])
def test_files_of_about_whole_chunks(tmp_path: Path, chunks: int, more: int) -> None:
    size, header_bytes = chunks * CHUNK_BYTES + more, 0
    for _ in range(2):  # the first file says how long the header is
        rest = size - header_bytes
        tensors = {"a": random_bytes(rest - rest // 2), "b": random_bytes(rest // 2)}
        (tmp_path / "ours.safetensors").unlink(missing_ok=True)
        file = written(tensors, tmp_path)
        header_bytes = file.stat().st_size - rest
    assert file.stat().st_size == size
    assert all(tensor.equal(tensors[name]) for name, tensor in load_file(file).items())


def test_any_byte_that_changes_changes_the_digest(tmp_path: Path) -> None:
    file = written({"a": random_bytes(2 * CHUNK_BYTES)}, tmp_path)
    with open(file, "r+b") as handle:
        digests = {file_digest(handle.fileno())}
        for at in (0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES):
            byte = os.pread(handle.fileno(), 1, at)
            os.pwrite(handle.fileno(), bytes([byte[0] ^ 1]), at)
            digests.add(file_digest(handle.fileno()))
            os.pwrite(handle.fileno(), byte, at)
    assert len(digests) == 5
