"""kvpool.testing: what kvpool is tested with, for those who property-test concurrent systems of their own.

Record what many threads and processes do (`History`), state what each operation may answer if they came one after the
other (`Model`), and ask whether some order explains what was recorded (`linearizable`). `Turns` interleaves threads as
Hypothesis chooses. See docs/testing.md.
"""

from kvpool.testing.history import UNKNOWN, Call, History, Operation, read_history, write_history
from kvpool.testing.linear import Counterexample, SearchLimit, Verdict, linearizable
from kvpool.testing.models import CacheModel, Model, PoolModel, RegisterModel
from kvpool.testing.turns import Deadlock, Turns

__all__ = [
    "UNKNOWN",
    "CacheModel",
    "Call",
    "Counterexample",
    "Deadlock",
    "History",
    "Model",
    "Operation",
    "PoolModel",
    "RegisterModel",
    "SearchLimit",
    "Turns",
    "Verdict",
    "linearizable",
    "read_history",
    "write_history",
]
