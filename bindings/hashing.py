"""The hash behind the keys: XXH3-128 with a secret, as libxxhash has it, handed to the C core as a function pointer."""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import Any

import xxhash._xxhash as _compiled

from kvpool.bindings import Core, ffi

__all__ = ["HASH", "hash_of"]

_SYMBOL = "XXH3_128bits_withSecret"


def _address() -> int:
    """Of the function: in the wheel's own copy of libxxhash, or else in the system's."""
    for path in (_compiled.__file__, ctypes.util.find_library("xxhash")):
        if path is None:
            continue
        try:
            library = ctypes.CDLL(path)
            return ctypes.cast(getattr(library, _SYMBOL), ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    raise ImportError(f"no {_SYMBOL}: install the xxhash package, or libxxhash 0.8 or later")


_ADDRESS = _address()
HASH: Any = ffi.cast("kvp_hash", _ADDRESS)


def hash_of(core: Core) -> Any:
    """The same for the core of a mode, whose types are its own."""
    return core.ffi.cast("kvp_hash", _ADDRESS)
