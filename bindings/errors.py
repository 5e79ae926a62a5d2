"""One family of exceptions, one class per condition that a caller handles differently."""

from __future__ import annotations

__all__ = [
    "Busy",
    "Closed",
    "Corrupt",
    "Error",
    "Exists",
    "Fenced",
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
    "Unqualified",
    "VersionMismatch",
    "WrongHost",
    "WrongMode",
    "WrongThread",
]


class Error(Exception):
    """Base of all errors of kvpool. `code` is the C status (`enum kvp_status`), negative."""

    code: int = 0

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class InvalidArgument(Error, ValueError):
    """An argument, a size, a key or a URI is not usable; the message says what would be."""

    code = -1


class NoSpace(Error):
    """The memory cannot be backed now; the message has the missing byte count."""

    code = -2


class Exists(Error):
    """A pool of this name exists."""

    code = -3


class NotFound(Error):
    """No pool of this name."""

    code = -4


class PermissionDenied(Error):
    """The operating system refused access; the message names the path."""

    code = -5


class SystemFailure(Error):
    """A system call failed for another reason; the message names it."""

    code = -6


class NotReady(Error):
    """The pool's creator has not finished, or died before it did."""

    code = -10


class Foreign(Error):
    """The memory holds something that is not a kvpool image."""

    code = -11


class VersionMismatch(Error):
    """The image has an older (-12) or a newer (-13) format."""

    code = -12


class LayoutMismatch(Error):
    """The image was made by a build with other sizes, for another machine or in another mode."""

    code = -14


class Corrupt(Error):
    """A checksum or an invariant of the image is broken."""

    code = -15


class Truncated(Error):
    """The memory is shorter than the image says."""

    code = -16


class Replaced(Error):
    """The pool was removed, or made anew under the same name: close this handle and open it again."""

    code = -17


class Busy(Error):
    """Live workers use the pool."""

    code = -18


class WrongMode(Error):
    """The pool was made for another mode (coherent, noncoherent, sim): open it in its own."""

    code = -19


class WrongHost(Error):
    """No such host in the pool, or its identity belongs to another machine."""

    code = -23


class Fenced(Error):
    """This host was declared lost and what it owned is another's: close the pool and open it again."""

    code = -24


class Unqualified(Error):
    """Nobody has shown that hosts may share this device without coherence: run `kvpool qualify` on it."""

    code = -25


class Closed(Error):
    """The handle is closed."""

    code = -20


class Forked(Error):
    """The handle belongs to the parent process: open the pool again in the child."""

    code = -21


class NoSlot(Error):
    """Every worker slot is taken by a live process."""

    code = -22


class PoolFull(Error):
    """No block is free and nothing may be evicted: all is pinned or reserved."""

    code = -30


class OutOfRange(Error, IndexError):
    """No such block class or block number."""

    code = -31


class Stale(Error):
    """The block was freed or reused since the reference was made."""

    code = -32


class NotOwned(Error):
    """The block is not reserved by this worker: double free, double publish, or another's."""

    code = -33


class NoPins(Error):
    """Every pin slot of this worker is in use: release hits."""

    code = -34


class WrongThread(Error):
    """A reservation was used from a thread that did not make it."""

    code = -40


_BY_CODE: dict[int, type[Error]] = {cls.code: cls for cls in Error.__subclasses__()} | {-13: VersionMismatch}


def error_for(code: int, message: str) -> Error:
    """The exception, not raised, for a C status."""
    return _BY_CODE.get(code, Error)(message, code)
