"""KV blocks of a pool as torch tensors, and attention that reads them in place through a block table.

`pool_tensor` and `PagedTensors` are views: no copy. `paged_attention` is the reference, in plain torch, for any device;
`kvpool.bindings.torch.kernel` has the same as a Triton kernel (for GPUs; on a CPU under TRITON_INTERPRET=1).
"""

if __name__ != "kvpool.bindings.torch":
    raise ImportError("this is the source folder of kvpool.bindings.torch, not torch: keep it out of sys.path")

from kvpool.bindings.torch.attention import paged_attention
from kvpool.bindings.torch.layout import KVLayout, PagedTensors, pool_tensor

__all__ = ["KVLayout", "PagedTensors", "paged_attention", "pool_tensor"]
