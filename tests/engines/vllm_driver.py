"""A process that runs vLLM engines on command: JSON lines on stdin, JSON lines that start with @@ on stdout.

Several engines one after another in one process cost little each. It sets the environment that vLLM on a CPU needs.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

DEFAULTS = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "enable_prefix_caching": True,
    "seed": 0,
    "num_gpu_blocks_override": 128,
    "distributed_executor_backend": "uni",
    "disable_log_stats": True,
}


def prompt(seed, length):
    """Random tokens, the same for the same seed."""
    source = random.Random(seed)
    return [source.randrange(3, 1000) for _ in range(length)]


class Driver:
    def __init__(self):
        self.llm = None

    def engine(self, model, extra=None, connector=None, policy="recompute", **kwargs):
        """Start one; the one before it has been closed."""
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.close()
        transfer = None
        if extra is not None:
            transfer = KVTransferConfig(
                **{
                    "kv_connector": "KVPoolConnector",
                    "kv_connector_module_path": "kvpool.bindings.vllm",
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": policy,
                    **(connector or {}),
                    "kv_connector_extra_config": extra,
                }
            )
        start = time.perf_counter()
        self.llm = LLM(model, kv_transfer_config=transfer, **{**DEFAULTS, **kwargs})
        return {"seconds": time.perf_counter() - start}

    def close(self):
        if self.llm is not None:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            gc.collect()
            cleanup_dist_env_and_memory()
        return {}

    def generate(self, prompts, tokens=16, salt=None, logprobs=1, adapter=None):
        """prompts: token lists, or [seed, length]. All at once. adapter: name, number and folder of a LoRA adapter."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        parameters = SamplingParams(
            temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, logprobs=logprobs
        )
        asked = []
        for each in prompts:
            ids = prompt(*each) if len(each) == 2 else list(each)
            asked.append({"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})})
        start = time.perf_counter()
        lora = LoRARequest(*adapter) if adapter else None
        outputs = self.llm.generate(asked, parameters, use_tqdm=False, lora_request=lora)
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "outputs": [
                {
                    "tokens": list(each.outputs[0].token_ids),
                    "cached": each.num_cached_tokens,
                    "logprob": each.outputs[0].cumulative_logprob,
                }
                for each in outputs
            ],
        }

    def reset(self, connector=False):
        return {"reset": self.llm.reset_prefix_cache(reset_connector=connector)}

    @property
    def scheduler(self):
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def run(self, code, **values):
        """Python in this process: `driver` and the values are there; what `result` is at its end is the answer."""
        scope = {"driver": self, "result": None, **values}
        exec(code, scope)
        return {"result": scope["result"]}


def answer(value):
    print("@@" + json.dumps(value), flush=True)


def main():
    driver = Driver()
    answer({"ready": os.getpid()})
    for line in sys.stdin:
        order = json.loads(line)
        verb = order.pop("verb")
        if verb == "quit":
            break
        try:
            answer(getattr(driver, verb)(**order))
        except Exception as error:  # the test decides what it means
            answer({"error": f"{type(error).__name__}: {error}"})
            import traceback

            traceback.print_exc()
    driver.close()


if __name__ == "__main__":
    main()
