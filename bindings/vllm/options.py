"""What a user may say in `kv_connector_extra_config`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvpool.bindings.errors import InvalidArgument
from kvpool.sizes import parse_size

__all__ = ["Options"]

LOADS = ("auto", "sync", "async")
MODES = ("copy", "in-place")


@dataclass(frozen=True)
class Options:
    """The options of one engine. `Options.of` makes them from what vLLM passes on; unknown names are refused."""

    uri: str
    """The pool."""
    size: str | int | None = None
    """Make the pool with this size if it does not exist, its blocks as large as this engine's. By default it must
    exist."""
    policy: str = "leaf"
    """Of a pool that is made here."""
    host: int | None = None
    """Which host of a pool of many hosts this is; default: the environment variable KVPOOL_HOST."""
    model: str | None = None
    """What names the network instead of vLLM's model name, so that copies under different paths share."""
    revision: str | None = None
    """What names the weights. Default: the commit of a Hugging Face snapshot, else a digest of the weight files."""
    tenant: str = ""
    """Blocks are shared only within a tenant. Within it vLLM's cache_salt separates users."""
    load: str = "auto"
    """sync: before the step that needs the blocks; async: between steps; auto: sync, but async for models with several
    kinds of cache, since vLLM can recompute failed loads of those only between steps."""
    mode: str = "copy"
    """copy, or in-place: the engine's KV cache is the pool."""
    quota: float = 1.0
    """In place: the part of the pool's blocks that this engine may hold at once, from 0 to 1."""
    load_threads: int = 1
    """Threads that copy asynchronous loads."""
    retry: float = 5.0
    """Seconds until a pool that has gone is looked for again."""

    def __post_init__(self) -> None:
        for name, values in (("load", LOADS), ("mode", MODES)):
            if getattr(self, name) not in values:
                raise InvalidArgument(f"{name}={getattr(self, name)!r}: one of {', '.join(values)}")
        if not isinstance(self.uri, str) or not self.uri:
            raise InvalidArgument('the pool is missing: kv_connector_extra_config={"uri": "shm:NAME"}')
        if self.size is not None:
            parse_size(self.size)
        for name, least, most in (("quota", 0.0, 1.0), ("retry", 0.0, 1e6), ("load_threads", 1, 64)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise InvalidArgument(f"{name}={value!r} is not a number from {least} to {most}")

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Options:
        """From kv_connector_extra_config. Raises `InvalidArgument` for a name or a value that is none."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(extra) - known)
        if unknown:
            raise InvalidArgument(f"no option {', '.join(map(repr, unknown))}: there are {', '.join(sorted(known))}")
        if "uri" not in extra:
            raise InvalidArgument('the pool is missing: kv_connector_extra_config={"uri": "shm:NAME"}')
        return cls(**extra)
