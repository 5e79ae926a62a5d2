"""What callers hand in, checked where it comes in: the error names the argument, what it was, and what would do."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from kvpool.bindings.errors import InvalidArgument

__all__ = ["numbers", "seconds", "text", "whole"]


def whole(what: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """An integer of any kind, but no bool and no float, from `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least or (most is not None and number > most):
        end = "on" if most is None else f"to {most}"
        raise InvalidArgument(f"{what}={value!r} is not a whole number from {least} {end}")
    return number


def seconds(what: str, value: Any, least: float = 0.0, most: float = math.inf) -> float:
    """A time: a number, not NaN, from `least` on. What is less than nothing is nothing where 0 is allowed."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if not is_number or value > most or (value < least and least > 0):
        raise InvalidArgument(f"{what}={value!r} is not a number of seconds from {least} to {most}")
    return max(float(value), least)


def text(what: str, value: Any) -> str:
    """A string that has a UTF-8 form."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{what}={value!r} is not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what}={value!r} has no UTF-8 form: {error}") from error
    return value


def numbers(what: str, values: Any) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """One row of integers of 64 bits. Floats are not rounded: a number that is nearly right names another block."""
    try:
        if not isinstance(values, np.ndarray):
            values = [operator.index(value) for value in values]
        elif values.size and values.dtype.kind != "u" and (values.dtype.kind != "i" or values.min() < 0):
            raise TypeError(f"an array of {values.dtype}")
        return np.ascontiguousarray(values, dtype=np.uint64)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{what} are numbers of 64 bits, none negative: {error}") from error
