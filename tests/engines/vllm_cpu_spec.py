"""vLLM's tiering on a CPU, which it refuses: its own manager and host memory, with a worker that copies by hand."""

from __future__ import annotations

import time

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    def __init__(self, caches, region):
        self.caches, self.done = caches, []
        self.region = region
        self.views = [region.create_next_worker_view(each.page_size_bytes) for each in caches.tensors]

    def _copy(self, job, blocks, chunks, store):
        start, at = time.monotonic(), 0
        for group, count in enumerate(blocks.group_sizes):
            for _ in range(count):
                number, chunk = int(blocks.block_ids[at]), int(chunks.block_ids[at])
                at += 1
                for ref in self.caches.group_data_refs[group]:
                    page = self.caches.tensors[ref.tensor_idx].tensor[number]
                    row = self.views[ref.tensor_idx][chunk][: page.numel()]
                    row.copy_(page) if store else page.copy_(row)
        self.done.append(TransferResult(job, True, at, time.monotonic() - start))
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec, False)

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self.views.clear()
        self.region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region)
        return self._worker
