"""One vLLM engine over LMCache's server, or alone, for test_lmcache_server.py: prints what it generated as JSON.

python -P tests/engines/lmcache_engine.py MODEL_FOLDER [PORT of the server]
"""

from __future__ import annotations

import json
import os
import random
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
PROMPT = random.Random(5).choices(range(3, 1000), k=450)


def main():
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = None
    if len(sys.argv) > 2:
        server = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": int(sys.argv[2])}
        transfer = KVTransferConfig(
            kv_connector="LMCacheMPConnector", kv_role="kv_both", kv_connector_extra_config=server
        )
    engine = LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        num_gpu_blocks_override=64,
        enable_prefix_caching=True,
        seed=0,
        kv_transfer_config=transfer,
    )
    rules = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True, logprobs=1)
    answer = engine.generate([{"prompt_token_ids": PROMPT}], rules, use_tqdm=False)[0]
    told = {
        "tokens": list(answer.outputs[0].token_ids),
        "logprob": answer.outputs[0].cumulative_logprob,
        "cached": answer.num_cached_tokens,
    }
    print("ANSWER " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
