"""The door to the C core: `ffi`, `lib`, one error translation.

Nothing else in the package calls C functions that can fail except through `check`.
"""

from kvpool.bindings._native import ffi, lib
from kvpool.bindings.errors import error_for

__all__ = ["check", "ffi", "lib"]


def check(status: int) -> int:
    """Return a non-negative status unchanged; raise the matching `Error` for a negative one.

    Must be called on the thread that made the failing call: the detail is that thread's.
    """
    if status >= 0:
        return status
    text = ffi.string(lib.kvp_strerror(status)).decode()
    detail = ffi.string(lib.kvp_error_detail()).decode(errors="replace")
    raise error_for(status, f"{text}: {detail}" if detail else text)
