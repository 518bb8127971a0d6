"""Loading machine code and launching it on torch's current stream.

A kernel takes one argument, a struct by value, which Python holds as a `ctypes.Structure`: filling
in a few fields and one driver call is all that a launch costs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from oscarkv.errors import CacheError, OscarError
from oscarkv.kernels.cuda.compile import CompileError, compiled


class Kernel:
    """One kernel of one variant, on one device."""

    def __init__(self, module: Any, name: str, shared_bytes: int) -> None:
        from cuda.bindings import driver

        self._launch, self._module = driver.cuLaunchKernel, module
        self._handle = _checked(driver.cuModuleGetFunction(module, name.encode()))
        self._shared_bytes = shared_bytes
        self._device = torch.cuda.current_device()
        self._configured: tuple[Any, ...] | None = None  # grid, threads, stream
        self._launch_config, self._early_config = driver.cuLaunchKernelEx, None
        if torch.cuda.get_device_capability() >= (9, 0):
            attribute = driver.CUlaunchAttribute()
            attribute.id = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            config = driver.CUlaunchConfig()
            config.blockDimY = config.blockDimZ = 1
            config.sharedMemBytes = shared_bytes
            config.attrs, config.numAttrs = [attribute], 1
            self._early_config = config
        if shared_bytes > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self._handle, attribute, shared_bytes))

    def launch(
        self, grid: tuple[int, int, int], threads: int, *arguments: Any, early: bool = False
    ) -> None:
        """Arguments are ctypes objects, passed by value in their order.

        `early`: the kernel may start while the one before it in the stream still runs; it waits
        for that one itself, where it must (compute capability 9.0 and newer).
        """
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        stream = _current_stream(self._device)
        if early and self._early_config is not None:
            config = self._early_config
            if self._configured != (grid, threads, stream):  # rarely: layers are alike
                config.gridDimX, config.gridDimY, config.gridDimZ = grid
                config.blockDimX, config.hStream = threads, stream
                self._configured = grid, threads, stream
            result = self._launch_config(config, self._handle, ctypes.addressof(addresses), 0)
        else:
            result = self._launch(
                self._handle,
                *grid,
                threads,
                1,
                1,
                self._shared_bytes,
                stream,
                ctypes.addressof(addresses),
                0,
            )
        if result[0] != 0:
            _checked(result)


@lru_cache(maxsize=256)
def load(
    source: str,
    kernels: tuple[tuple[str, int], ...],
    macros: tuple[tuple[str, int], ...],
    device: int,
) -> tuple[Kernel, ...]:
    """Compile (or find on disk) one variant, and load some of its kernels: (name, bytes of dynamic
    shared memory) each. Whatever fails of that is a CompileError: there are other backends."""
    with torch.cuda.device(device):
        torch.cuda.current_blas_handle()  # makes the device's primary context current
        arch = architecture(device)
        try:
            from cuda.bindings import driver

            code = compiled(source, dict(macros), arch)
            module = _checked(driver.cuModuleLoadData(code))  # stays loaded as long as the process
            return tuple(Kernel(module, name, shared) for name, shared in kernels)
        except CompileError:
            raise
        except Exception as error:  # such as code from a newer NVRTC than the driver knows
            raise CompileError(f"{source} for {arch} could not be loaded: {error}") from error


def _current_stream(device: int) -> int:
    """As `torch.cuda.current_stream(device).cuda_stream`, without an object for it: what Triton's
    and torch.compile's launchers ask, and a fifth of the time."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def refuse_capture() -> None:
    """For what must be there before: kernels, and memory that starts as zeros."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CacheError("run a batch of this size once before it is captured in a graph")


def variant(macros: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(macros.items()))


@lru_cache(maxsize=16)
def architecture(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or an error that names what went wrong."""
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        reason = text.decode() if isinstance(text, bytes) else str(status)
        raise OscarError(f"CUDA driver: {reason} ({status.name})")
    return values[0] if values else None
