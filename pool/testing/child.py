"""What runs in a child process of a rack, with the arguments URI HOST BODY ARGUMENTS."""

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import Any

import kvpool

__all__ = ["Here", "is_function_path", "main"]


class Here:
    """What a child's function gets first: its pool and the line to the one that started it. For one thread."""

    def __init__(self, pool: kvpool.Pool) -> None:
        self.pool = pool

    def say(self, *words: object) -> None:
        """One line to the parent, which reads it with `Child.hears`."""
        print(*words, flush=True)

    def hear(self) -> str:
        """Wait for a line of the parent's `Child.say`. When the parent is gone the child ends here."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit(0)
        return line.removesuffix("\n")


def is_function_path(body: str) -> bool:
    """Is this "package.module:function" rather than source?"""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", body) is not None


def main() -> None:
    """Open the pool as that host, say "ready", run the body."""
    uri, host, body, arguments = sys.argv[1:]
    args: list[Any] = json.loads(arguments)
    with kvpool.open(uri, host=int(host)) as pool:
        here = Here(pool)
        here.say("ready")
        if is_function_path(body):
            module, _, function = body.partition(":")
            getattr(importlib.import_module(module), function)(here, *args)
        else:
            names = {"__name__": "child", "pool": pool, "say": here.say, "hear": here.hear, "args": args}
            exec(compile(body, "<child of a rack>", "exec"), names)
