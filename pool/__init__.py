"""kvpool: the memory that a rack of LLM servers shares.

One way in: `create` a pool or `open` it, take a `Namespace` of it for a total `Identity`, derive `keys` from token ids,
`match` them, `reserve` and publish what is missing. See README.md and CONTRACT.md.
"""

if __name__ != "kvpool":
    raise ImportError("this is the source folder of kvpool: install it (make), then `import kvpool`")

from kvpool.bindings import (
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
)
from kvpool.handles import Hit, Reservation
from kvpool.keys import Identity, Keys
from kvpool.namespace import Namespace
from kvpool.pool import POLICIES, Pool, create, open, remove
from kvpool.reports import CheckReport, Event, EventStream
from kvpool.sizes import parse_size

__version__ = "0.1.0"
__all__ = [
    "POLICIES",
    "Busy",
    "CheckReport",
    "Closed",
    "Corrupt",
    "Error",
    "Event",
    "EventStream",
    "Exists",
    "Foreign",
    "Forked",
    "Hit",
    "Identity",
    "InvalidArgument",
    "Keys",
    "LayoutMismatch",
    "Namespace",
    "NoPins",
    "NoSlot",
    "NoSpace",
    "NotFound",
    "NotOwned",
    "NotReady",
    "OutOfRange",
    "PermissionDenied",
    "Pool",
    "PoolFull",
    "Replaced",
    "Reservation",
    "Stale",
    "SystemFailure",
    "Truncated",
    "VersionMismatch",
    "WrongThread",
    "__version__",
    "create",
    "open",
    "parse_size",
    "remove",
]
