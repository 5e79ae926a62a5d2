"""SGLang's HiCache storage in a pool: a backend that its `dynamic` loader takes.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvpool", "module_path": "kvpool.bindings.sglang", "class_name": "PoolStorage", "interface_v1": 1,
      "uri": "shm:kv", "revision": "..."}'

One page of the host cache is one block: its pieces, wherever they lie in the host cache, one behind the other. With
`interface_v1` they are copied straight between host cache and pool; without it SGLang makes a flat copy in between.

SGLang's keys are chained hashes of the tokens. What they do not cover is in the identity: the model and `revision`, the
dtype, layout and page size of the host cache, the ranks and their numbers, the layers of this rank, SGLang's version.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

import kvpool
from kvpool.bindings.door import Door, class_for

__all__ = ["PoolStorage"]

T = TypeVar("T")
logger = logging.getLogger("kvpool")
BATCH = 16  # pages that are stored all or none

Piece = tuple[int, int]  # address, bytes


class PoolStorage(HiCacheStorage):
    """See the module. Thread-safe, as SGLang's threads for prefetch and backup need it.

    `door.misses` counts what went wrong with the pool by the name of the error; each is a miss, or a page not stored.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        """Raises `InvalidArgument` if the configuration has no uri, revision or model; what `kvpool.open` raises."""
        self.config = storage_config
        extra = dict(storage_config.extra_config or {})
        for name in ("uri", "revision"):
            if not isinstance(extra.get(name), str) or not extra[name]:
                raise kvpool.InvalidArgument(f"the extra config needs {name!r}: a string")
        self.extra = extra
        if not (storage_config.model_name or extra.get("model")):
            raise kvpool.InvalidArgument("SGLang names no model: put 'model' into the extra config")
        self._host: Any = None
        self._clearing = ""
        self._namespaces: dict[str, kvpool.Namespace] = {}
        self.door = Door(extra["uri"], host=extra.get("host"), opened=self._opened)

    # ---- the host cache, and what is shared with it ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """From here on the pages are known. Raises `InvalidArgument` if the pool's blocks are all smaller."""
        super().register_mem_pool_host(mem_pool_host)
        self._host = mem_pool_host
        self._namespaces.clear()
        pool = self.door.enter()
        if pool is not None:
            self._opened(pool)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refused: models with more than one kind of state in their host cache need the second interface."""
        raise kvpool.InvalidArgument(
            f"the host pool {host_pool_name} belongs to a hybrid model: this backend has pages of keys and values only"
        )

    def _opened(self, pool: kvpool.Pool) -> None:
        """Each time that a pool is opened, and when the host cache is known."""
        self._namespaces = {}
        if self._host is not None:
            self._namespaces = {form: self._namespace_of(pool, form) for form in ("pieces", "flat")}

    def _page_bytes(self) -> int:
        return int(self._host.size_per_token) * int(self._host.page_size)

    def _namespace_of(self, pool: kvpool.Pool, form: str) -> kvpool.Namespace:
        """`form`: pieces in the order of `get_page_buffer_meta`, or a flat copy; they differ in some layouts."""
        config, host, size = self.config, self._host, self._page_bytes()
        rank, ranks = (0, 1) if config.is_mla_model else (config.tp_rank, config.tp_size)
        told = {
            "engine": "sglang",
            "version": str(getattr(importlib.import_module("sglang"), "__version__", "")),
            "pp": f"{config.pp_rank}/{config.pp_size}",
            "cp": f"{config.attn_cp_rank}/{config.attn_cp_size}",
            "dcp": f"{getattr(config, 'dcp_rank', 0)}/{getattr(config, 'dcp_size', 1)}",
            "heads": f"{getattr(config, 'tp_lcm_size', None)}/{getattr(config, 'should_split_heads', False)}",
            "layers": f"{getattr(host, 'start_layer', '')}-{getattr(host, 'end_layer', '')}",
            "cleared": self._clearing,
        }
        identity = kvpool.Identity(
            model=str(config.model_name or self.extra["model"]),
            revision=self.extra["revision"],
            dtype=str(host.dtype).removeprefix("torch."),
            layout=f"{host.layout}/{form}/{size}",
            adapter=self.extra.get("adapter"),
            rank=(rank, ranks),
            block_tokens=int(host.page_size),
            extra=tuple(told.items()),
        )
        chosen = class_for(pool, size, f"a page of {host.page_size} tokens")
        return pool.namespace(identity, self.extra.get("tenant", ""), chosen)

    def _run(self, form: str, work: Callable[[kvpool.Namespace], T], otherwise: T) -> T:
        """`work(namespace)`; without a pool, without a host cache, or after an error `otherwise`."""

        def inside(pool: kvpool.Pool) -> T:
            namespace = self._namespaces.get(form)
            if namespace is None or namespace.pool is not pool:
                raise kvpool.NotReady("SGLang has not registered its host cache")
            return work(namespace)

        return self.door.run(inside, otherwise)

    # ---- pages straight from and to the host cache ----

    def _pages(self, count: int, host_indices: torch.Tensor) -> list[list[Piece]]:
        """The pieces of each page. Raises `InvalidArgument` if they are not of the size that the blocks are for."""
        addresses, sizes = self._host.get_page_buffer_meta(host_indices)
        each = len(addresses) // count if count else 0
        pages = [
            list(zip(addresses[i * each : (i + 1) * each], sizes[i * each : (i + 1) * each], strict=True))
            for i in range(count)
        ]
        if each * count != len(addresses) or any(sum(n for _, n in page) != self._page_bytes() for page in pages):
            raise kvpool.InvalidArgument(
                f"{len(addresses)} pieces for {count} pages do not make pages of {self._page_bytes()} bytes"
            )
        return pages

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the keys, from the first on, are there."""
        return self._run(self._form, partial(self._count, keys, _before(extra_info)), 0)

    @property
    def _form(self) -> str:
        return "pieces" if self.extra.get("interface_v1") else "flat"

    @staticmethod
    def _count(keys: list[str], before: list[str], namespace: kvpool.Namespace) -> int:
        """Also tells the policy that they are used, as one chain, so that it stays whole until it is got."""
        present = namespace.contains(namespace.named(keys))
        count = len(keys) if present.all() else int(present.argmin())
        if count:
            namespace.touch(namespace.named([*before, *keys[:count]]))
        return count

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Copy pages into the host cache: True for the first so many that were there."""
        return self._run("pieces", partial(self._get, keys, host_indices), [False] * len(keys))

    def _get(self, keys: list[str], host_indices: torch.Tensor, namespace: kvpool.Namespace) -> list[bool]:
        pages = self._pages(len(keys), host_indices)
        with namespace.match(namespace.named(keys)) as hit:
            for view, page in zip(hit.views, pages, strict=False):
                at = view.ctypes.data
                for address, size in page:
                    ctypes.memmove(address, at, size)
                    at += size
            namespace.pool.pin([]).release()  # raises if the pool was closed meanwhile: then the pins ended with it
            return [i < len(hit) for i in range(len(keys))]

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the host cache: True where the page is there now."""
        if not self.config.is_storage_writer:
            return [True] * len(keys)  # another rank stores the same pages
        return self._run("pieces", partial(self._set, keys, host_indices, extra_info), [False] * len(keys))

    def _set(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any, namespace: kvpool.Namespace
    ) -> list[bool]:
        pages = self._pages(len(keys), host_indices)

        def fill(view: Any, index: int) -> None:
            at = view.ctypes.data
            for address, size in pages[index]:
                ctypes.memmove(at, address, size)
                at += size

        return self._store(keys, fill, _before(extra_info), namespace)

    def _store(
        self,
        keys: list[str],
        fill: Callable[[Any, int], None],
        before: list[str],
        namespace: kvpool.Namespace,
    ) -> list[bool]:
        """Publish what is missing, in batches; if there is no room for one, those after it are not stored."""
        made = namespace.named(keys)
        present = namespace.contains(made)
        missing = [i for i in range(len(keys)) if not present[i]]
        for start in range(0, len(missing), BATCH):
            batch = missing[start : start + BATCH]
            try:
                with namespace.reserve([made[i] for i in batch]) as new:
                    for view, index in zip(new.views, batch, strict=True):
                        fill(view, index)
                    new.publish()
            except kvpool.PoolFull as error:
                self.door.miss(error)
                break
        # As one chain with what is before it, or its head would be older than its tail and go first.
        namespace.touch(namespace.named([*before, *keys]))
        return [bool(each) for each in namespace.contains(made)]

    # ---- flat copies ----

    def exists(self, key: str) -> bool:
        """Is the page there?"""
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Copy a page into a tensor of its size and return it, or None if it is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor | None] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """As `get`, of several."""
        targets = list(target_locations or [None] * len(keys))
        nothing: list[torch.Tensor | None] = [None] * len(keys)
        return self._run("flat", partial(self._get_flat, keys, targets), nothing)

    def _get_flat(
        self, keys: list[str], targets: list[torch.Tensor | None], namespace: kvpool.Namespace
    ) -> list[torch.Tensor | None]:
        size = self._page_bytes()
        rows = [None if target is None else _flat(target, size) for target in targets]
        wanted = [i for i, row in enumerate(rows) if row is not None]
        got = namespace.get_into(namespace.named([keys[i] for i in wanted]), [rows[i] for i in wanted])
        found = {i for i, there in zip(wanted, got, strict=True) if there}
        return [target if i in found else None for i, target in enumerate(targets)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page; True if it is there now."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[Any] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """As `set`, of several: True if all are there now."""
        if not self.config.is_storage_writer:
            return True
        return self._run("flat", partial(self._set_flat, keys, list(values or [])), False)

    def _set_flat(self, keys: list[str], values: list[Any], namespace: kvpool.Namespace) -> bool:
        size = self._page_bytes()
        rows = [_flat(value.contiguous(), size) for value in values]
        if len(rows) != len(keys) or any(row is None for row in rows):
            raise kvpool.InvalidArgument(f"{len(keys)} keys need as many pages of {size} bytes")

        def fill(view: Any, index: int) -> None:
            view[:size] = rows[index]

        return all(self._store(keys, fill, [], namespace))

    # ---- life ----

    def clear(self) -> None:
        """This backend finds nothing that was stored before, as after a change of the weights.

        The blocks go by eviction. It then shares with nobody: give a new `revision` and start again to share.
        """
        self._clearing = uuid.uuid4().hex
        logger.info("%s: cleared for this engine only; its blocks go by eviction", self.extra["uri"])
        pool = self.door.enter()
        if pool is not None:
            self._opened(pool)

    def close(self) -> None:
        """Leave the pool, and let go of its memory. Idempotent."""
        self.door.close()
        self._namespaces = {}


def _before(extra_info: Any) -> list[str]:
    """The keys of the chain before these, if SGLang gives them."""
    return list(getattr(extra_info, "prefix_keys", None) or [])


def _flat(tensor: torch.Tensor, size: int) -> Any:
    """The bytes of a contiguous tensor as an array over its memory; None if it is of another size."""
    if tensor.numel() * tensor.element_size() != size or not tensor.is_contiguous() or tensor.device.type != "cpu":
        return None
    return tensor.detach().flatten().view(torch.uint8).numpy()
