"""The door to the C core: one `Core` per mode, each with its `ffi`, `lib` and error translation.

Nothing else in the package calls C functions that can fail except through `Core.check`. What needs no pool (keys,
sizes) uses that of mode coherent, which is `ffi`, `lib` and `check` here.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvpool.bindings._coherent import ffi, lib
from kvpool.bindings.errors import InvalidArgument, error_for

__all__ = ["MODES", "Core", "check", "core", "ffi", "lib", "loaded"]

MODES = ("coherent", "noncoherent", "sim")


class Core:
    """The C core compiled for one mode. Made by `core`; one per process and mode."""

    def __init__(self, mode: str) -> None:
        module = importlib.import_module(f"kvpool.bindings._{mode}")
        self.mode = mode
        self.ffi: Any = module.ffi
        self.lib: Any = module.lib

    def check(self, status: int) -> int:
        """Return a non-negative status unchanged; raise the matching `Error` for a negative one.

        Must be called on the thread that made the failing call: the detail is that thread's.
        """
        if status >= 0:
            return status
        text = self.ffi.string(self.lib.kvp_strerror(status)).decode()
        detail = self.ffi.string(self.lib.kvp_error_detail()).decode(errors="replace")
        raise error_for(status, f"{text}: {detail}" if detail else text)


_cores: dict[str, Core] = {}


def core(mode: str) -> Core:
    """The core of a mode, loaded at first use. Raises `InvalidArgument` for a mode that does not exist."""
    if mode not in MODES:
        raise InvalidArgument(f"no mode {mode!r}: {', '.join(MODES)} exist")
    if mode not in _cores:
        _cores[mode] = Core(mode)
    return _cores[mode]


def loaded() -> list[Core]:
    """The cores that this process has used."""
    return list(_cores.values())


check = core("coherent").check
