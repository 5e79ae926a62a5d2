"""The check of everything that needs a GPU: run it where one is, keep what it prints.

    python -P tests/engines/gpu_check.py            JSON on stdout; exit code 0 if every check passed, 1 if not,
                                                    77 where there is no GPU (then it says why)

Takes about two minutes and 2 GiB of memory. Needs torch with CUDA; cupy and triton are used where they are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback

import numpy as np

import kvpool
from kvpool.bindings.cuda import CupyDevice, DeviceError, Pieces, Registration, TorchDevice, Transfers

NO_GPU = 77
BLOCK, BLOCKS = 2 << 20, 512
IDENTITY = kvpool.Identity(model="gpu-check", revision="1", dtype="uint8", layout="raw/16")
CHECKS = []


def check(body):
    """A check: a function of the device and the pool that returns what is to be recorded."""
    CHECKS.append(body)
    return body


def parts_of(tensor, count):
    """A tensor on the GPU as pages of a block each."""
    return [[Pieces(tensor.data_ptr() + i * BLOCK, BLOCK)] for i in range(count)]


def pattern(torch, count, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (count, BLOCK), dtype=torch.uint8, device="cuda", generator=generator)


def event_behind(torch):
    """An event of torch's on its present stream, and its handle."""
    event = torch.cuda.Event()
    event.record()
    return event, event.cuda_event


@check
def store_then_load(torch, device, pool):
    """Blocks go from the GPU to the pool and back, and the pool has the same bytes."""
    ns, count = pool.namespace(IDENTITY), 32
    there, back = pattern(torch, count), torch.zeros(count, BLOCK, dtype=torch.uint8, device="cuda")
    keys = ns.named([f"store/{i}" for i in range(count)])
    with Transfers(pool, device) as transfers:
        event, handle = event_behind(torch)
        assert transfers.store(ns, keys, parts_of(there, count), after=handle).finish() == count
        with ns.match(keys) as hit:
            assert len(hit) == count
            assert all(np.array_equal(view, there[i].cpu().numpy()) for i, view in enumerate(hit.views))
        transfer = transfers.load(ns.match(keys), parts_of(back, count))
        transfer.then(torch.cuda.current_stream().cuda_stream)
        equal = torch.equal(there, back)  # on torch's stream, which waits for the copies
        assert transfer.finish() == count
        del event
    assert equal
    assert pool.check().pins == 0
    return {"blocks": count}


@check
def scattered_layout(torch, device, pool):
    """A layout with the layers of a page far apart, gathered and scattered by copies with a pitch."""
    ns, layers, pages, piece = pool.namespace(IDENTITY), 32, 16, 32768
    there = torch.randint(0, 256, (2, layers, pages, piece), dtype=torch.uint8, device="cuda")
    back = torch.zeros_like(there)

    def page(tensor, i):
        half = layers * pages * piece
        return [Pieces(tensor.data_ptr() + kv * half + i * piece, piece, layers, pages * piece) for kv in (0, 1)]

    keys = ns.named([f"scattered/{i}" for i in range(pages)])
    torch.cuda.synchronize()
    with Transfers(pool, device) as transfers:
        assert transfers.store(ns, keys, [page(there, i) for i in range(pages)]).finish() == pages
        with ns.match(keys) as hit:
            seen = hit.views[3].reshape(2, layers, piece)
            assert np.array_equal(seen, there[:, :, 3].cpu().numpy())
        assert transfers.load(ns.match(keys), [page(back, i) for i in range(pages)]).finish() == pages
    assert torch.equal(there, back)
    return {"pages": pages, "pieces": 2 * layers}


@check
def chunks(torch, device, pool):
    """The pool registered in many chunks; copies across their boundaries."""
    ns, count = pool.namespace(IDENTITY), 64
    keys, there = ns.named([f"chunks/{i}" for i in range(count)]), pattern(torch, count, 1)
    torch.cuda.synchronize()
    with Transfers(pool, device, chunk=(3 << 20) + 4096) as transfers:
        assert transfers.store(ns, keys, parts_of(there, count)).finish() == count
        back = torch.zeros_like(there)
        torch.cuda.synchronize()
        assert transfers.load(ns.match(keys), parts_of(back, count)).finish() == count
    assert torch.equal(there, back)
    return {"chunk": (3 << 20) + 4096}


@check
def errors_are_told(torch, device, pool):
    """What the driver refuses is an error with its name, and the context goes on."""
    told = {}
    with Registration(pool, device) as registration:
        try:
            Registration(pool, device)
        except DeviceError as error:
            told["twice"] = str(error)
        told["delta"] = registration.device_pointer() - registration.base
    try:
        device.unregister(registration.base)
    except DeviceError as error:
        told["not registered"] = str(error)
    assert "twice" in told
    assert "not registered" in told
    assert int(torch.ones(8, device="cuda").sum()) == 8
    return told


@check
def kernels_read_the_pool(torch, device, pool):
    """The pool's memory as a CUDA tensor: a kernel reads what the CPU wrote, and the CPU reads what a kernel wrote."""
    ns = pool.namespace(IDENTITY)
    with Registration(pool, device) as registration:
        blocks = torch.as_tensor(registration.device_array(), device="cuda")
        assert blocks.data_ptr() == registration.device_pointer()
        with ns.reserve(1) as new:
            new.views[0][:] = np.arange(BLOCK) % 256
            number = int(new.blocks[0])
            assert int(blocks[number].sum(dtype=torch.int64)) == int(new.views[0].sum(dtype=np.int64))
            blocks[number].fill_(7)
            torch.cuda.synchronize()
            assert (new.views[0] == 7).all()
        del blocks
    return {}


@check
def paged_attention(torch, device, pool):
    """The Triton kernel over blocks in the pool, and over a copy in GPU memory, against the reference."""
    try:
        from kvpool.bindings.torch.kernel import paged_attention as kernel
    except ImportError as error:
        return {"skipped": str(error)}
    from kvpool.bindings.torch import KVLayout, PagedTensors, paged_attention

    layout = KVLayout(2, 8, 128, 128, 16, torch.bfloat16)
    tokens, errors = 1000, {}
    with kvpool.create("memfd:", block=layout.block_bytes, blocks=128) as small, Registration(small, device) as mapped:
        paged = PagedTensors(small, layout)
        paged.blocks.copy_(torch.randn(paged.blocks.shape))
        tables = torch.randperm(128)[:126].reshape(2, 63).to(torch.int32)
        lengths = torch.tensor([tokens, tokens - 37], dtype=torch.int32)
        rows = torch.as_tensor(mapped.device_array(), device="cuda")[:, : layout.block_bytes].view(torch.bfloat16)
        keys, values = layout.split(rows.unflatten(1, layout.row_shape))
        for new in (1, 40):
            query = torch.randn(2, new, 32, 128).to(torch.bfloat16)
            wanted = paged_attention(query, paged.keys(1), paged.values(1), tables, lengths).float()
            for name, (k, v) in {"in place": (keys, values), "in GPU memory": (keys.clone(), values.clone())}.items():
                got = kernel(query.cuda(), k[:, 1], v[:, 1], tables.cuda(), lengths.cuda())
                errors[f"{name}, {new} tokens"] = float((got.float().cpu() - wanted).abs().max())
        torch.cuda.synchronize()
        del rows, keys, values, k, v
    assert max(errors.values()) < 0.02, errors
    return {"largest error": errors}


@check
def another_process(torch, device, pool):
    """What the GPU wrote is found by another process, and what that wrote is loaded."""
    ns, count = pool.namespace(IDENTITY), 8
    there = pattern(torch, count, 5)
    torch.cuda.synchronize()
    program = (
        "import sys, kvpool; pool = kvpool.open(sys.argv[1])\n"
        "ns = pool.namespace(kvpool.Identity(model='gpu-check', revision='1', dtype='uint8', layout='raw/16'))\n"
        "hit = ns.match(ns.named([f'process/{i}' for i in range(8)]))\n"
        "print(*[int(view.sum(dtype='int64')) for view in hit.views])\n"
        "ns.put(ns.named([f'reply/{i}' for i in range(8)]), [bytes(255 - view) for view in hit.views])\n"
    )
    with Transfers(pool, device) as transfers:
        transfers.store(ns, ns.named([f"process/{i}" for i in range(count)]), parts_of(there, count)).finish()
        done = subprocess.run(
            [sys.executable, "-P", "-c", program, pool.uri], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert [int(each) for each in done.stdout.split()] == there.sum(1, dtype=torch.int64).tolist()
        back = torch.zeros_like(there)
        torch.cuda.synchronize()
        replies = ns.match(ns.named([f"reply/{i}" for i in range(count)]))
        assert transfers.load(replies, parts_of(back, count)).finish() == count
    assert torch.equal(back, 255 - there)
    return {}


@check
def throughput(torch, device, pool):
    """GB/s of batches of 128 blocks of 2 MiB, each way, beside one copy of the same size from pinned memory."""
    ns, count = pool.namespace(IDENTITY), 128
    there = pattern(torch, count, 6)
    pinned = torch.empty(count * BLOCK, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    figures = {}
    with Transfers(pool, device) as transfers:
        for turn in range(4):
            keys = ns.named([f"speed/{turn}/{i}" for i in range(count)])
            for name, begin in (
                ("store", lambda keys=keys: transfers.store(ns, keys, parts_of(there, count))),
                ("load", lambda keys=keys: transfers.load(ns.match(keys), parts_of(there, count))),
            ):
                start = time.perf_counter()
                assert begin().finish() == count
                figures.setdefault(name, []).append(count * BLOCK / (time.perf_counter() - start) / 1e9)
            for name, copy in (
                ("bare to host", lambda: pinned.copy_(there.view(-1), non_blocking=True)),
                ("bare to GPU", lambda: there.view(-1).copy_(pinned, non_blocking=True)),
            ):
                start = time.perf_counter()
                copy()
                torch.cuda.synchronize()
                figures.setdefault(name, []).append(count * BLOCK / (time.perf_counter() - start) / 1e9)
    return {name: round(float(np.median(values[1:])), 2) for name, values in figures.items()}


def run(kind, torch, only):
    """All checks with one device, each by itself: {name: result}."""
    results = {}
    for body in CHECKS:
        if only and body.__name__ not in only:
            continue
        start = time.perf_counter()
        try:
            with kvpool.create("memfd:", block=BLOCK, blocks=BLOCKS) as pool:
                told = body(torch, kind(), pool)
                report = pool.check()
                assert report.clean
                assert report.pins == report.blocks["reserved"] == 0
            results[body.__name__] = {"ok": True, **told}
        except Exception:
            results[body.__name__] = {"ok": False, "error": traceback.format_exc(limit=-4)}
        results[body.__name__]["seconds"] = round(time.perf_counter() - start, 2)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="names of checks; all by default")
    only = parser.parse_args().only
    try:
        import torch
    except ImportError:
        torch = None
    if torch is None or not torch.cuda.is_available():
        print(json.dumps({"skipped": "torch is not installed" if torch is None else "torch sees no CUDA device"}))
        return NO_GPU
    answer = {
        "machine": {
            "gpu": torch.cuda.get_device_name(),
            "capability": torch.cuda.get_device_capability(),
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "kvpool": kvpool.__version__,
            "linux": platform.release(),
            "cpus": os.cpu_count(),
        }
    }
    for name, kind in {"torch": TorchDevice, "cupy": CupyDevice}.items():
        try:
            kind()
        except (ImportError, kvpool.NotFound) as error:
            answer[name] = {"skipped": str(error)}
            continue
        answer[name] = run(kind, torch, only)
    results = [each for name in ("torch", "cupy") for each in answer[name].values() if isinstance(each, dict)]
    answer["ok"] = bool(results) and all(each["ok"] for each in results)
    print(json.dumps(answer, indent=1))
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
