"""What the blocks of a vLLM engine depend on, and the keys that follow from it.

vLLM's block hash covers the tokens, `cache_salt`, the LoRA name and multi-modal content. It does not cover the model,
the weights, the layout of a page or the rank: those are bound to it here. Engines that differ in any of them have other
keys, so a block of one is a miss for the other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

import kvpool
from kvpool.bindings.errors import InvalidArgument

__all__ = ["KeyRing", "engine_identity", "total_identity", "weights_revision"]

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})(/|$)")
_STEP = 64 << 20


def weights_digest(folder: Path) -> str:
    """XXH3-128 over the names and contents of the weight files in a folder. They are in the page cache: just loaded."""
    digest = xxhash.xxh3_128()
    files = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)})
    if not files:
        raise InvalidArgument(
            f"{folder} has no weight files ({', '.join(WEIGHTS)}): name the weights with revision=..."
        )
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_STEP):
                digest.update(chunk)
    return f"xxh3:{digest.hexdigest()}"


def weights_revision(config: Any, load_format: str, seed: int) -> str:
    """Which weights a vLLM ModelConfig means. Raises `InvalidArgument` if that cannot be known."""
    if str(load_format) == "dummy":
        return f"dummy:{seed}"
    path = Path(config.model)
    snapshot = SNAPSHOT.search(f"{path}/")
    if snapshot:
        return f"commit:{snapshot[1]}"
    if path.is_dir():
        return weights_digest(path)
    commit = getattr(config.hf_config, "_commit_hash", None)
    if commit:
        return f"commit:{commit}"
    raise InvalidArgument(
        f"which weights {config.model} stands for cannot be known: name them with "
        'kv_connector_extra_config={"revision": "..."}, and change it whenever they change'
    )


def instruction_set() -> str:
    """The kernels that write the pages: on a CPU their bytes are in an order of the instruction set's own."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        names = ("_is_amx_tile_supported", "_is_avx512_supported", "_is_avx512_bf16_supported", "_is_avx2_supported")
        probes = [(name, getattr(torch.cpu, name, None)) for name in names]
        found = [name[4:].removesuffix("_supported") for name, probe in probes if probe is not None and probe()]
        return f"{current_platform.get_cpu_architecture().name}:{'+'.join(found) or 'plain'}"
    return f"{current_platform.device_name}:{current_platform.get_device_capability()}"


def _plain(value: Any) -> Any:
    """A configuration as JSON would have it, without what does not bear on the numbers."""
    if isinstance(value, dict):
        skip = ("_name_or_path", "transformers_version", "_commit_hash")
        return {str(key): _plain(each) for key, each in value.items() if key not in skip}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _digest(value: Any) -> str:
    text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def describe_groups(kv_cache_config: Any) -> list[Any]:
    """What decides the layout of a page: the kind of each group, its sizes, and the names of its layers in order."""
    described = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        named = (
            dataclasses.asdict(spec) if dataclasses.is_dataclass(spec) and not isinstance(spec, type) else repr(spec)
        )
        described.append([type(spec).__name__, named, list(group.layer_names), spec.page_size_bytes])
    return described


def demand_portable_hashes(algorithm: str) -> None:
    """Raise `InvalidArgument` where vLLM's block hashes begin with a seed of this process: nobody else finds them."""
    if "xxhash" in algorithm and os.environ.get("PYTHONHASHSEED") in (None, "random"):
        raise InvalidArgument(
            f"prefix_caching_hash_algo={algorithm!r} makes other hashes in each process: set PYTHONHASHSEED to the "
            'same number for all engines, or use "sha256"'
        )


def total_identity(
    vllm_config: Any, options: Any, layout: str, rank: int, ranks: int, told: Mapping[str, str]
) -> kvpool.Identity:
    """What one rank of an engine writes: the network, the weights, the kernels, and what is `told` of the blocks.

    Raises `InvalidArgument` for a model whose weights have no name.
    """
    import vllm

    model, cache, quantization = vllm_config.model_config, vllm_config.cache_config, vllm_config.quant_config
    demand_portable_hashes(cache.prefix_caching_hash_algo)
    extra = {
        "engine": f"vllm {vllm.__version__}",
        "kvpool": kvpool.__version__,
        "config": _digest(model.hf_config.to_dict()),
        "quantization": str(quantization.get_name() if quantization else model.quantization),
        "attention": str(getattr(vllm_config.attention_config, "backend", None)),
        **told,
    }
    return kvpool.Identity(
        model=options.model or (model.architectures[0] if os.path.isdir(model.model) else str(model.model)),
        revision=options.revision or weights_revision(model, vllm_config.load_config.load_format, model.seed),
        dtype=f"{model.dtype}/{cache.cache_dtype}",
        layout=layout,
        isa=instruction_set(),
        rank=(rank, ranks),
        extra=tuple(extra.items()),
    )


def engine_identity(
    vllm_config: Any, kv_cache_config: Any, options: Any, rank: int, ranks: int, layouts: Sequence[Any]
) -> kvpool.Identity:
    """The identity of the blocks of the connector. Raises what `total_identity` raises."""
    cache = vllm_config.cache_config
    layout = kv_cache_config.kv_cache_layout or cache.kv_cache_layout or "default"
    told = {
        "groups": _digest(describe_groups(kv_cache_config)),
        "pages": _digest([None if each is None else [each.starts, each.sizes] for each in layouts]),
        "block_tokens": str(cache.block_size),
        "hash": f"{cache.prefix_caching_hash_algo}:{kv_cache_config.hash_block_size}",
    }
    return total_identity(vllm_config, options, str(getattr(layout, "name", layout)), rank, ranks, told)


class KeyRing:
    """Keys of the pool for the block hashes of one identity, tenant and rank. Immutable.

    A key is BLAKE2b of the engine's hash, keyed with a digest of the identity, the tenant and the cache group.
    """

    def __init__(self, identity: kvpool.Identity, tenant: str, groups: int, epoch: bytes = b"") -> None:
        material = identity.canonical() + b"\0" + tenant.encode() + b"\0" + epoch
        self._starts = [
            hashlib.blake2b(digest_size=16, key=hashlib.sha256(b"kvpool vllm 1\0%d\0" % group + material).digest())
            for group in range(groups)
        ]

    def key(self, group: int, block_hash: bytes) -> bytes:
        """The 16-byte key of a block of a group."""
        one = self._starts[group].copy()
        one.update(block_hash)
        return one.digest()

    def keys(self, group: int, block_hashes: Iterable[bytes]) -> bytes:
        """The keys of many, in one buffer."""
        return b"".join(self.key(group, each) for each in block_hashes)
