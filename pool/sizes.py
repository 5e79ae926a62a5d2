"""Sizes as people write them."""

from __future__ import annotations

import re

from kvpool.bindings.errors import InvalidArgument

__all__ = ["format_size", "parse_size"]

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_UNITS |= {f"{unit}iB": factor for unit, factor in list(_UNITS.items()) if unit not in ("", "B")}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str) -> int:
    """Bytes: an int as it is, or "4GiB", "360 KiB", "1.5G" (K, M, G, T and KiB… are binary, KB… decimal).

    Raises `InvalidArgument` for anything that is not a positive whole number of bytes.
    """
    if isinstance(size, str):
        match = _FORM.fullmatch(size)
        factor = _UNITS.get(match[2]) if match else None
        if match is None or factor is None:
            raise InvalidArgument(f"{size!r} is not a size: write bytes, or a number with KiB, MiB, GiB or TiB")
        value = float(match[1]) * factor if "." in match[1] else int(match[1]) * factor
        if value != int(value):
            raise InvalidArgument(f"{size!r} is not a whole number of bytes")
        size = int(value)
    if isinstance(size, bool) or not isinstance(size, int):
        raise InvalidArgument(f"{size!r} is not a size: write an int, or a string such as '4GiB'")
    if size <= 0 or size >= 1 << 63:
        raise InvalidArgument(f"{size} bytes is not a size: it must be positive and below 2^63")
    return size


def format_size(size: int) -> str:
    """The shortest binary form with at most one decimal: 368640 -> '360 KiB'."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.0f} TiB" if value == int(value) else f"{value:.1f} TiB"
