"""Tiny models with real random weights: what an engine computes with them depends on every byte of its KV cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

RANGE = 0.25  # of the weights: with small ones outputs hardly depend on the cache, and wrong bytes would pass


def llama(seed=0, **changes):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "initializer_range": RANGE,
    }
    config = LlamaConfig(vocab_size=1024, bos_token_id=1, eos_token_id=2, **{**sizes, **changes})
    return LlamaForCausalLM(config)


def gemma3(seed=0):
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        sliding_window=128,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=False,  # else the last token says itself, whatever the cache holds
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=RANGE,
    )
    return Gemma3ForCausalLM(config)


def deepseek(seed=0):
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(seed)
    config = DeepseekV2Config(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        head_dim=64,
        first_k_dense_replace=2,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=RANGE,
    )
    return DeepseekV2ForCausalLM(config)


def qwen3next(seed=0):
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(seed)
    config = Qwen3NextConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        decoder_sparse_step=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"],
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=RANGE,
    )
    return Qwen3NextForCausalLM(config)


MAKERS = {"llama": llama, "gemma3": gemma3, "deepseek": deepseek, "qwen3next": qwen3next}


def save(kind, folder, seed=0, **changes):
    """The model in a folder, made if it is not there; safe against others that do the same."""
    import torch

    folder = Path(folder)
    if not (folder / "config.json").exists():
        fresh = folder.with_name(f"{folder.name}.{os.getpid()}")
        MAKERS[kind](seed, **changes).to(torch.bfloat16).save_pretrained(fresh)
        try:
            fresh.rename(folder)
        except OSError:
            assert (folder / "config.json").exists()
    return str(folder)


def save_adapter(folder, seed):
    """A LoRA adapter to the Llama-like model, of random weights that change keys and values a lot."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    folder, rank, weights = Path(folder), 8, {}
    for layer in range(2):
        for name, outputs in (("k_proj", 64), ("v_proj", 64)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, 128) * RANGE
            weights[f"{at}.lora_B.weight"] = torch.randn(outputs, rank) * RANGE
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["k_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return str(folder)


if __name__ == "__main__":
    import sys

    for name in sys.argv[2:] or MAKERS:
        print(save(name, Path(sys.argv[1]) / name))
