"""What the scheduler's side of the connector tells the workers' sides, and what they answer. Plain, small,
picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

__all__ = ["Load", "Orders", "Results", "Store"]


@dataclass
class Load:
    """Blocks that a request needs from the pool."""

    number: int
    """Of this job, within the engine."""
    request: str
    is_async: bool
    groups: dict[int, tuple[list[int], list[bytes]]] = field(default_factory=dict)
    """Per cache group: the engine's block numbers, and the hash of what each is to hold."""


@dataclass
class Store:
    """Blocks that are full after this step."""

    number: int
    request: str
    groups: dict[int, tuple[list[int], list[bytes]]] = field(default_factory=dict)


@dataclass
class Orders(KVConnectorMetadata):  # one step's
    """Of one step, to every worker."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    epoch: bytes = b""
    """Part of every key; changes when the engine's cache is reset."""


@dataclass
class Results(KVConnectorWorkerMetadata):
    """Of one step, from the workers. Numbers of jobs, with how many workers have done them."""

    loaded: dict[int, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    """Requests of which a load has failed on some worker."""
    stored: dict[int, int] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    """Stores that some worker left out."""
    published: list[int] = field(default_factory=list)
    """In place: the engine's blocks that are the pool's now."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Results:
        """Of several workers."""
        if not isinstance(other, Results):
            raise TypeError(f"{type(other)} is not of this connector")
        sums = []
        for mine, theirs in ((self.loaded, other.loaded), (self.stored, other.stored)):
            sums.append({key: mine.get(key, 0) + theirs.get(key, 0) for key in {**mine, **theirs}})
        return Results(
            sums[0], self.failed | other.failed, sums[1], self.skipped | other.skipped, self.published + other.published
        )

    def __bool__(self) -> bool:
        return bool(self.loaded or self.failed or self.stored or self.skipped)
