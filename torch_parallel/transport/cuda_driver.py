"""The calls of the CUDA driver that torch does not offer: a stream that writes a number to memory, or waits for one.

Neither takes a multiprocessor, an event or the host: the front end of the GPU does both.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

_CAN_USE_64_BIT_STREAM_MEM_OPS = 122  # CU_DEVICE_ATTRIBUTE_...; where these are there, those of 32 bits are too
_WAIT_GEQ = 0  # until (int32)(*address - number) >= 0, so numbers may wrap around
_WRITE_DEFAULT = 0  # what the stream did before is visible to all before the number is
_PORTABLE_AND_MAPPED = 3
_NATIVE_ATOMIC_SUPPORTED = 3  # CU_DEVICE_P2P_ATTRIBUTE_...


class DriverError(RuntimeError):
    """The driver lacks what is needed, or refused a call."""


@cache
def _driver() -> ctypes.CDLL:
    """Raises DriverError where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        calls = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
        driver.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        driver.cuMemHostGetDevicePointer_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
    except (OSError, AttributeError) as error:
        raise DriverError(f"the CUDA driver has no stream memory operations: {error}") from None
    for call in calls:  # stream, address, number, flags
        call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32]
    return driver


def streams_can_wait(device_index: int) -> bool:
    """Whether streams of this GPU (as CUDA_VISIBLE_DEVICES numbers it) can wait for memory and write it."""
    value = ctypes.c_int(0)
    _check(_driver().cuDeviceGetAttribute(ctypes.byref(value), _CAN_USE_64_BIT_STREAM_MEM_OPS, device_index))
    return bool(value.value)


def atomics_reach(device_index: int, peer_index: int) -> bool:
    """Whether kernels of the one GPU can make atomic operations on the memory of the other, as they can over NVLink."""
    value = ctypes.c_int(0)
    reference = ctypes.byref(value)
    _check(_driver().cuDeviceGetP2PAttribute(reference, _NATIVE_ATOMIC_SUPPORTED, device_index, peer_index))
    return bool(value.value)


def device_address(host: Tensor) -> int:
    """Where the current GPU reaches this host memory, which starts at a page, and has pages of its own."""
    _check(_driver().cuMemHostRegister_v2(host.data_ptr(), host.nbytes, _PORTABLE_AND_MAPPED))
    address = ctypes.c_uint64()
    _check(_driver().cuMemHostGetDevicePointer_v2(ctypes.byref(address), host.data_ptr(), 0))
    return address.value


def current_stream(device_index: int) -> int:
    """The handle of torch's current stream; twenty times faster than by way of `torch.cuda.current_stream`."""
    handle: int = torch._C._cuda_getCurrentRawStream(device_index)
    return handle


def stream_write(stream: int, address: int, number: int) -> None:
    """When `stream` gets here it writes the low 32 bits of `number` to `address`."""
    _check(_driver().cuStreamWriteValue32_v2(stream, address, number & 0xFFFFFFFF, _WRITE_DEFAULT))


def stream_wait(stream: int, address: int, number: int) -> None:
    """`stream` goes no further before the 32 bits at `address` have reached `number`."""
    _check(_driver().cuStreamWaitValue32_v2(stream, address, number & 0xFFFFFFFF, _WAIT_GEQ))


def _check(code: int) -> None:
    if code != 0:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise DriverError(f"the CUDA driver failed with {(name.value or b'an unknown error').decode()} ({code})")
