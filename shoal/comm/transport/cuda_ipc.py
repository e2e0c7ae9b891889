"""Memory of a GPU that processes of one host map (CUDA IPC), by the driver's own calls.

PyTorch shares tensors, too, with counters in files that a killed process leaves behind. Here the
owner keeps the memory until its last tensor is gone; a process that maps it may end at any time.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError

HANDLE_BYTES = 64
_GRANULARITY = 2 << 20  # smaller allocations lie in one block, which would be shared as a whole
_LAZY_PEER_ACCESS = 1


class CudaIpcError(ShoalError):
    """The driver does not share this memory."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CudaMemory:
    """Memory that is released when the last tensor in it is gone."""

    def __init__(self, pointer: int, num_bytes: int, release: Callable[[int], None]):
        self.pointer = pointer
        self.num_bytes = num_bytes
        self._release = release

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        whole = (self.num_bytes,)
        return {"shape": whole, "typestr": "|u1", "data": (self.pointer, False), "version": 3}

    def __del__(self) -> None:
        self._release(self.pointer)


def allocate(device: torch.device, num_bytes: int) -> tuple[Tensor, bytes]:
    """Bytes on a GPU, which are 0, and the handle by which other processes open them."""
    with torch.cuda.device(device):
        _make_current()
        size = -(-max(num_bytes, 1) // _GRANULARITY) * _GRANULARITY
        pointer = _allocated(size)
        memory = CudaMemory(pointer, size, functools.partial(_release, "cuMemFree_v2", device))
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        data = torch.as_tensor(memory, device=device)[:num_bytes].zero_()
        torch.cuda.current_stream().synchronize()
        return data, ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)


def open_handle(device: torch.device, handle: bytes, num_bytes: int) -> Tensor:
    """The bytes that another process has allocated; CudaIpcError if they are fewer."""
    if len(handle) != HANDLE_BYTES:
        raise CudaIpcError(f"a handle of GPU memory has {HANDLE_BYTES} bytes, not {len(handle)}")
    with torch.cuda.device(device):
        _make_current()
        pointer = ctypes.c_uint64()
        size = ctypes.c_size_t()
        opened = _Handle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, _LAZY_PEER_ACCESS)
        release = functools.partial(_release, "cuIpcCloseMemHandle", device)
        memory = CudaMemory(pointer.value, num_bytes, release)
        _call("cuMemGetAddressRange_v2", None, ctypes.byref(size), pointer)
        if size.value < num_bytes:
            raise CudaIpcError(f"expected {num_bytes} bytes of GPU memory, found {size.value}")
        return torch.as_tensor(memory, device=device)


def device_name(device: torch.device) -> str:
    """What tells a GPU from all others, in all processes; empty for other devices."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _allocated(num_bytes: int) -> int:
    pointer = ctypes.c_uint64()
    try:
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
    except CudaIpcError:
        torch.cuda.empty_cache()  # PyTorch keeps memory that no tensor uses
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
    return pointer.value


def _release(function: str, device: torch.device, pointer: int) -> None:
    """Kernels that use the memory may still run."""
    torch.cuda.synchronize(device)
    getattr(_driver(), function)(ctypes.c_uint64(pointer))


def _make_current() -> None:
    """The driver's calls are about the context of the calling thread."""
    torch.cuda.current_stream().synchronize()


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaIpcError(f"there is no CUDA driver: {error}") from error
    driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
    return driver


def _call(function: str, *arguments: Any) -> None:
    status = getattr(_driver(), function)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"error").decode(errors="replace")
        raise CudaIpcError(f"{function}: {reason} ({status})")
