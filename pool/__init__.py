"""kvpool: the memory that a rack of LLM servers shares.

One way in: `create` a pool or `open` it, take a `Namespace` of it for a total `Identity`, derive `keys` from token ids,
`match` them, `reserve` and publish what is missing. See README.md and CONTRACT.md.
"""

if __name__ != "kvpool":
    raise ImportError("this is the source folder of kvpool: install it (make), then `import kvpool`")

from kvpool.bindings import errors
from kvpool.bindings.errors import *  # noqa: F403 - the list of errors stands there, once
from kvpool.fencing import Fence, LostHost, Tender
from kvpool.handles import Hit, Reservation
from kvpool.keys import Identity, Keys
from kvpool.namespace import Namespace, Parts
from kvpool.pool import POLICIES, Pool, create, open, remove
from kvpool.reports import CheckReport, Event, EventStream
from kvpool.sizes import parse_size
from kvpool.stock import Stock

__version__ = "0.1.0"
__all__ = [
    "POLICIES",
    "CheckReport",
    "Event",
    "EventStream",
    "Fence",
    "Hit",
    "Identity",
    "Keys",
    "LostHost",
    "Namespace",
    "Parts",
    "Pool",
    "Reservation",
    "Stock",
    "Tender",
    "__version__",
    "create",
    "open",
    "parse_size",
    "remove",
]
__all__ += errors.__all__
