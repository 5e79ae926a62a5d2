"""The door to the C core: `ffi`, `lib`, one error translation, one hash.

Nothing else in the package talks to cffi directly without `check`.
"""

from kvpool.bindings._native import ffi, lib
from kvpool.bindings.errors import (
    Busy,
    Closed,
    Corrupt,
    Error,
    Exists,
    Foreign,
    Forked,
    InvalidArgument,
    LayoutMismatch,
    NoPins,
    NoSlot,
    NoSpace,
    NotFound,
    NotOwned,
    NotReady,
    OutOfRange,
    PermissionDenied,
    PoolFull,
    Replaced,
    Stale,
    SystemFailure,
    Truncated,
    VersionMismatch,
    WrongThread,
    error_for,
)

__all__ = [
    "Busy",
    "Closed",
    "Corrupt",
    "Error",
    "Exists",
    "Foreign",
    "Forked",
    "InvalidArgument",
    "LayoutMismatch",
    "NoPins",
    "NoSlot",
    "NoSpace",
    "NotFound",
    "NotOwned",
    "NotReady",
    "OutOfRange",
    "PermissionDenied",
    "PoolFull",
    "Replaced",
    "Stale",
    "SystemFailure",
    "Truncated",
    "VersionMismatch",
    "WrongThread",
    "check",
    "ffi",
    "lib",
]


def check(status: int) -> int:
    """Return a non-negative status unchanged; raise the matching `Error` for a negative one.

    Must be called on the thread that made the failing call: the detail is that thread's.
    """
    if status >= 0:
        return status
    text = ffi.string(lib.kvp_strerror(status)).decode()
    detail = ffi.string(lib.kvp_error_detail()).decode(errors="replace")
    raise error_for(status, f"{text}: {detail}" if detail else text)
