"""Moving blocks between a pool and GPUs: the pool's memory registered with CUDA, copies on streams, publish after them.

`find_device` gives the `Device` of what is installed (torch or cupy), `Transfers` does the rest. `RecordingDevice` is a
device of this machine's memory, for tests: it records every call, does copies only when they are waited for, and fails
where it is told to.
"""

if __name__ != "kvpool.bindings.cuda":
    raise ImportError("this is the source folder of kvpool.bindings.cuda: keep it out of sys.path")

from kvpool.bindings.cuda.device import Device, DeviceError
from kvpool.bindings.cuda.fake import RecordingDevice
from kvpool.bindings.cuda.registration import Registration
from kvpool.bindings.cuda.runtime import CudartDevice, CupyDevice, TorchDevice, find_device
from kvpool.bindings.cuda.transfers import Pieces, Transfer, Transfers

__all__ = [
    "CudartDevice",
    "CupyDevice",
    "Device",
    "DeviceError",
    "Pieces",
    "RecordingDevice",
    "Registration",
    "TorchDevice",
    "Transfer",
    "Transfers",
    "find_device",
]
