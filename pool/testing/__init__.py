"""kvpool.testing: what kvpool is tested with, for those who property-test concurrent systems of their own.

Record what many threads and processes do (`History`), state what each operation may answer if they came one after the
other (`Model`), and ask whether some order explains what was recorded (`linearizable`). `Turns` interleaves threads as
Hypothesis chooses. `Rack` has simulated hosts that share a pool and can be lost; `kvpool.testing.strategies` draws what
they do, `kvpool.testing.pytest_plugin` has a fixture. See docs/testing.md.
"""

from kvpool.testing.actor import payload_of
from kvpool.testing.child import Here
from kvpool.testing.history import UNKNOWN, Call, History, Operation, read_history, write_history
from kvpool.testing.linear import Counterexample, SearchLimit, Verdict, linearizable
from kvpool.testing.models import CacheModel, Model, PoolModel, RegisterModel
from kvpool.testing.rack import Child, ChildEnded, Rack
from kvpool.testing.turns import Deadlock, Turns

__all__ = [
    "UNKNOWN",
    "CacheModel",
    "Call",
    "Child",
    "ChildEnded",
    "Counterexample",
    "Deadlock",
    "Here",
    "History",
    "Model",
    "Operation",
    "PoolModel",
    "Rack",
    "RegisterModel",
    "SearchLimit",
    "Turns",
    "Verdict",
    "linearizable",
    "payload_of",
    "read_history",
    "write_history",
]
