"""vLLM over a pool: a KV connector, a tier of vLLM's own offloading, and attention in place.

`kv_connector_module_path="kvpool.bindings.vllm"`, `kv_connector="KVPoolConnector"`. Importing this package imports
vLLM;
nothing else of kvpool does. See docs/engines/vllm.md.
"""

from kvpool.bindings.vllm.connector import KVPoolConnector

__all__ = ["KVPoolConnector"]
