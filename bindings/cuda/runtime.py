"""The CUDA runtime behind `Device`: by ctypes, found through torch, or by cupy.

Written from the CUDA runtime's documented interface; what runs here without a GPU is its loading, its error translation
and, against a library of the tests' own, the arguments of every call.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpool.bindings.cuda.device import Device, DeviceError
from kvpool.bindings.errors import NotFound

__all__ = ["CudartDevice", "CupyDevice", "TorchDevice", "find_device"]

REGISTER_FLAGS = 0x1 | 0x2  # portable: for all contexts; mapped: with a device pointer
DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses
NON_BLOCKING, NO_TIMING = 1, 2
NOT_READY = 600

_P, _N, _I, _U = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaSetDevice": (_I,),
    "cudaHostRegister": (_P, _N, _U),
    "cudaHostUnregister": (_P,),
    "cudaHostGetDevicePointer": (ctypes.POINTER(_P), _P, _U),
    "cudaStreamCreateWithFlags": (ctypes.POINTER(_P), _U),
    "cudaStreamDestroy": (_P,),
    "cudaStreamSynchronize": (_P,),
    "cudaStreamWaitEvent": (_P, _P, _U),
    "cudaMemcpyAsync": (_P, _P, _N, _I, _P),
    "cudaMemcpy2DAsync": (_P, _N, _P, _N, _N, _N, _I, _P),
    "cudaEventCreateWithFlags": (ctypes.POINTER(_P), _U),
    "cudaEventRecord": (_P, _P),
    "cudaEventQuery": (_P,),
    "cudaEventSynchronize": (_P,),
    "cudaEventDestroy": (_P,),
}


class CudartDevice:
    """`Device` over a loaded libcudart. Each thread that uses it selects the device once."""

    def __init__(self, library: Any, index: int = 0) -> None:
        """`library`: a ctypes.CDLL. Raises `DeviceError` if the device cannot be selected, `NotFound` if a function is
        missing.
        """
        self.index = index
        self._library = library
        self._selected = threading.local()
        self._name = library.cudaGetErrorName
        self._name.restype, self._name.argtypes = ctypes.c_char_p, (_I,)
        for name, arguments in _SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise NotFound(f"{library} has no {name}: it is no CUDA runtime") from error
            function.restype, function.argtypes = _I, arguments
        self._select()

    def _select(self) -> None:
        if not getattr(self._selected, "done", False):
            self._check("cudaSetDevice", self._library.cudaSetDevice(self.index))
            self._selected.done = True

    def _check(self, call: str, code: int) -> None:
        if code:
            text = self._name(code)
            raise DeviceError(call, code, text.decode(errors="replace") if text else "unknown")

    def _call(self, name: str, *arguments: Any) -> None:
        self._select()
        self._check(name, getattr(self._library, name)(*arguments))

    def _made(self, name: str, *arguments: Any) -> int:
        """What a function writes through its first argument."""
        out = _P()
        self._call(name, ctypes.byref(out), *arguments)
        return out.value or 0

    def register(self, address: int, size: int) -> None:
        """cudaHostRegister, portable and mapped."""
        self._call("cudaHostRegister", address, size, REGISTER_FLAGS)

    def unregister(self, address: int) -> None:
        """cudaHostUnregister."""
        self._call("cudaHostUnregister", address)

    def device_pointer(self, address: int) -> int:
        """cudaHostGetDevicePointer."""
        return self._made("cudaHostGetDevicePointer", address, 0)

    def new_stream(self) -> int:
        """cudaStreamCreateWithFlags, non-blocking."""
        return self._made("cudaStreamCreateWithFlags", NON_BLOCKING)

    def end_stream(self, stream: int) -> None:
        """cudaStreamDestroy."""
        self._call("cudaStreamDestroy", stream)

    def drain(self, stream: int) -> None:
        """cudaStreamSynchronize."""
        self._call("cudaStreamSynchronize", stream)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """cudaMemcpyAsync."""
        self._call("cudaMemcpyAsync", target, source, size, DEFAULT, stream)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """cudaMemcpy2DAsync."""
        self._call("cudaMemcpy2DAsync", target, target_pitch, source, source_pitch, width, rows, DEFAULT, stream)

    def new_event(self) -> int:
        """cudaEventCreateWithFlags, without timing."""
        return self._made("cudaEventCreateWithFlags", NO_TIMING)

    def record(self, event: int, stream: int) -> None:
        """cudaEventRecord."""
        self._call("cudaEventRecord", event, stream)

    def is_done(self, event: int) -> bool:
        """cudaEventQuery."""
        self._select()
        code = self._library.cudaEventQuery(event)
        if code == NOT_READY:
            return False
        self._check("cudaEventQuery", code)
        return True

    def wait(self, event: int) -> None:
        """cudaEventSynchronize."""
        self._call("cudaEventSynchronize", event)

    def stream_wait(self, stream: int, event: int) -> None:
        """cudaStreamWaitEvent."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def end_event(self, event: int) -> None:
        """cudaEventDestroy."""
        self._call("cudaEventDestroy", event)


def _loaded_runtime() -> Path:
    """The libcudart that this process has loaded. Raises `NotFound`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libcudart" in path:
            return Path(path)
    raise NotFound("no libcudart is loaded in this process: torch was built with its own copy; install cupy instead")


class TorchDevice(CudartDevice):
    """`Device` over the runtime that torch.cuda uses, on torch's present device; streams of torch are its streams
    (`torch.cuda.current_stream().cuda_stream`).
    """

    def __init__(self, index: int | None = None) -> None:
        """Raises `NotFound` where torch has no CUDA, or its runtime cannot be reached."""
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise NotFound("torch sees no CUDA device")
        torch.cuda.init()
        super().__init__(ctypes.CDLL(str(_loaded_runtime())), torch.cuda.current_device() if index is None else index)


class CupyDevice:
    """`Device` over cupy.cuda.runtime, which checks every return code itself."""

    def __init__(self, index: int | None = None) -> None:
        """Raises `NotFound` where cupy finds no device."""
        self._runtime = importlib.import_module("cupy.cuda.runtime")
        self._failure: type[Exception] = self._runtime.CUDARuntimeError
        self._selected = threading.local()
        try:
            count = self._runtime.getDeviceCount()
        except self._failure as error:
            raise NotFound(f"cupy finds no CUDA device: {error}") from error
        if not count:
            raise NotFound("cupy finds no CUDA device")
        self.index = int(self._runtime.getDevice()) if index is None else index

    def _call(self, name: str, *arguments: int) -> Any:
        function: Callable[..., Any] = getattr(self._runtime, name)
        try:
            if not getattr(self._selected, "done", False):
                self._runtime.setDevice(self.index)
                self._selected.done = True
            return function(*arguments)
        except self._failure as error:
            status = int(getattr(error, "status", -1))
            raise DeviceError(name, status, str(error).partition(":")[0]) from error

    def register(self, address: int, size: int) -> None:
        """As `CudartDevice`."""
        self._call("hostRegister", address, size, REGISTER_FLAGS)

    def unregister(self, address: int) -> None:
        """As `CudartDevice`."""
        self._call("hostUnregister", address)

    def device_pointer(self, address: int) -> int:
        """As `CudartDevice`, from the attributes of the pointer."""
        return int(self._call("pointerGetAttributes", address).devicePointer)

    def new_stream(self) -> int:
        """As `CudartDevice`."""
        return int(self._call("streamCreateWithFlags", NON_BLOCKING))

    def end_stream(self, stream: int) -> None:
        """As `CudartDevice`."""
        self._call("streamDestroy", stream)

    def drain(self, stream: int) -> None:
        """As `CudartDevice`."""
        self._call("streamSynchronize", stream)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """As `CudartDevice`."""
        self._call("memcpyAsync", target, source, size, DEFAULT, stream)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """As `CudartDevice`."""
        self._call("memcpy2DAsync", target, target_pitch, source, source_pitch, width, rows, DEFAULT, stream)

    def new_event(self) -> int:
        """As `CudartDevice`."""
        return int(self._call("eventCreateWithFlags", NO_TIMING))

    def record(self, event: int, stream: int) -> None:
        """As `CudartDevice`."""
        self._call("eventRecord", event, stream)

    def is_done(self, event: int) -> bool:
        """As `CudartDevice`: cupy returns the code of a query, or raises it."""
        try:
            code = int(self._call("eventQuery", event) or 0)
        except DeviceError as error:
            if error.device_code != NOT_READY:
                raise
            code = NOT_READY
        if code not in (0, NOT_READY):
            raise DeviceError("eventQuery", code, "unknown")
        return code == 0

    def wait(self, event: int) -> None:
        """As `CudartDevice`."""
        self._call("eventSynchronize", event)

    def stream_wait(self, stream: int, event: int) -> None:
        """As `CudartDevice`."""
        self._call("streamWaitEvent", stream, event)

    def end_event(self, event: int) -> None:
        """As `CudartDevice`."""
        self._call("eventDestroy", event)


def find_device(index: int | None = None) -> Device:
    """The device of torch if torch has CUDA, else that of cupy. Raises `NotFound`, which says why neither."""
    reasons = []
    for kind in (TorchDevice, CupyDevice):
        try:
            return kind(index)
        except ImportError as error:
            reasons.append(f"{error}")
        except NotFound as error:
            reasons.append(f"{error}")
    raise NotFound("; ".join(reasons))
