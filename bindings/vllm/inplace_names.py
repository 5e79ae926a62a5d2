"""Everything of vLLM that in-place mode uses and that is not its documented interface, and a check that it is there.

The check is run before anything is changed. Where it finds a difference the engine copies instead.
"""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["TESTED", "needs_layers", "why_not"]

TESTED = ("0.32.0",)
"""Releases on which tests/engines has passed in this mode."""

NAMES = {
    "vllm.v1.core.block_pool:BlockPool": (
        "get_cached_block",
        "get_new_blocks",
        "touch",
        "free_blocks",
        "get_num_free_blocks",
        "get_usage",
        "reset_prefix_cache",
        "_insert_block_hash",
        "_remove_cached_block_hashes",
        "_maybe_evict_cached_block",
    ),
    "vllm.v1.core.block_pool:BlockHashToBlockMap": ("get_one_block",),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": ("popleft_n", "append", "append_n", "prepend_n", "remove"),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": ("reset_hash",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": ("allocate_slots",),
    "vllm.v1.worker.utils:allocate_kv_cache": (),
    "vllm.v1.kv_cache_interface:create_kv_cache_views": (),
}
SIGNATURES = {
    "vllm.v1.core.block_pool:BlockPool._insert_block_hash": ["self", "block_hash_with_group_id", "block", "num_tokens"],
    "vllm.v1.core.block_pool:BlockPool.get_cached_block": ["self", "block_hash", "kv_cache_group_ids"],
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.__init__": ["self", "blocks"],
}


def needs_layers(vllm_config: Any) -> bool:
    """Do this engine's kernels want the rows of a layer in one piece? Those of MLA on a CPU do."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu() and vllm_config.model_config.use_mla)


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    found = __import__(module, fromlist=["*"])
    for part in path.split("."):
        found = getattr(found, part)
    return found


class _Recorder:
    def __init__(self) -> None:
        self.freed: list[Any] = []

    def free_blocks(self, blocks: Any) -> None:
        self.freed += blocks


def _delegates() -> bool:
    """Does vLLM's pool hand a block that belongs to another pool to that one?"""
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=16)
    (block,) = pool.get_new_blocks(1)
    other = _Recorder()
    block.pool = other
    free = pool.get_num_free_blocks()
    pool.free_blocks([block])
    return other.freed == [block] and pool.get_num_free_blocks() == free and block.ref_cnt == 1


def _missing() -> list[str]:
    missing = []
    for name, attributes in NAMES.items():
        try:
            found = _find(name)
        except (ImportError, AttributeError):
            missing.append(name)
            continue
        missing += [f"{name}.{each}" for each in attributes if not hasattr(found, each)]
    for name, wanted in SIGNATURES.items():
        try:
            names = list(inspect.signature(_find(name)).parameters)
        except (ImportError, AttributeError, ValueError):
            names = []
        if names != wanted:
            missing.append(f"{name}({', '.join(wanted)})")
    return missing


def why_not(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why this engine cannot attend in place, or None."""
    import vllm

    parallel = vllm_config.parallel_config
    if vllm.__version__.split("+")[0] not in TESTED:
        return f"it was tested with vLLM {', '.join(TESTED)} only, this is {vllm.__version__}"
    if parallel.world_size != 1 or parallel.distributed_executor_backend not in ("uni", None):
        return (
            "it needs one rank, with the worker in the scheduler's process: distributed_executor_backend='uni', and "
            "on a CPU with VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )
    if vllm_config.speculative_config is not None:
        return "speculative decoding is not supported in place"
    if any(not group.kv_cache_spec.prefix_cacheable for group in kv_cache_config.kv_cache_groups):
        return "a cache group of this model is not for prefix caches"
    missing = _missing()
    if missing:
        return f"this vLLM has no {', '.join(missing)}"
    if not _delegates():
        return "this vLLM's block pool does not give blocks of another pool back to that one"
    return None
