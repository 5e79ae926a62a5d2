"""One vLLM engine as a child of `kvpool bench engines`: JSON lines in, JSON lines that start with @@ out.

Scheduler and worker are in one process, and this one asks it, as `vllm serve` does when the variable below says so.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

__all__ = ["main", "prompt", "save_model"]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or CPUs get a worker in a process of its own, which has no in place
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # engines that wait for each other's threads would measure that
}
VOCABULARY = 1024


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens, the same for the same seed."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(length)]


def save_model(folder: str) -> None:
    """A model of 8 layers with 16 KiB of cache a token, and random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _engine(model: str, blocks: int, transfer: dict[str, Any] | None) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=4608,
        max_num_seqs=1,
        max_num_batched_tokens=8192,
        enable_prefix_caching=True,
        seed=0,
        num_gpu_blocks_override=blocks,
        distributed_executor_backend="uni",
        disable_log_stats=True,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
    )
    return LLMEngine.from_engine_args(arguments, enable_multiprocessing=True)


def _first_token(engine: Any, seed: int, length: int) -> dict[str, Any]:
    from vllm import SamplingParams

    ask = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
    request = {"prompt_token_ids": prompt(seed, length)}
    start = time.perf_counter()
    engine.add_request(str(seed), request, ask)
    outputs: list[Any] = []
    while not outputs:
        outputs = engine.step()
    seconds = time.perf_counter() - start
    (output,) = outputs
    return {
        "seconds": seconds,
        "token": int(output.outputs[0].token_ids[0]),
        "cached": int(output.num_cached_tokens or 0),
    }


def main() -> None:
    """Serve orders until stdin ends."""
    os.environ.update(ENVIRONMENT)
    engine: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        if order["verb"] == "model":
            save_model(order["folder"])
        elif order["verb"] == "engine":
            engine = _engine(order["model"], order["blocks"], order["transfer"])
        elif order["verb"] == "ask":
            answer = _first_token(engine, order["seed"], order["length"])
        elif order["verb"] == "reset":
            answer = {"reset": bool(engine.reset_prefix_cache())}
        print("@@" + json.dumps(answer), flush=True)
    if engine is not None:
        engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
