"""generate() of transformers with and without the pool: the same tokens, from blocks that another process wrote."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from conftest import eventually

import kvpool

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import DynamicCache  # noqa: E402

from kvpool.bindings.door import pool_block_bytes  # noqa: E402
from kvpool.bindings.transformers import ATTENTION, KVStore, layout_of  # noqa: E402

VOCABULARY = 1000
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # with small weights the tokens would hardly depend on keys and values
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def config_of(name):
    if name == "llama":
        return transformers.LlamaConfig(**SIZES)
    if name == "gemma3":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        return transformers.Gemma3TextConfig(**SIZES, sliding_window=24, layer_types=kinds)
    latent = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"num_key_value_heads": 4}
    return transformers.DeepseekV3Config(**sizes, **latent, first_k_dense_replace=3)


@pytest.fixture(scope="module")
def models():
    made = {}

    def model(name, attention="sdpa"):
        if name not in made:
            torch.manual_seed(7)
            made[name] = transformers.AutoModelForCausalLM.from_config(config_of(name)).eval()
        made[name].set_attn_implementation(attention)
        return made[name]

    return model


@pytest.fixture
def store_of(make_pool):
    def store(network, pool=None, blocks=64, **options):
        layout = layout_of(network.config, torch.float32, options.get("block_tokens", 16))
        if pool is None:
            pool = make_pool(block=pool_block_bytes(layout.block_bytes), blocks=blocks)
        return KVStore(pool, network.config, **{"model": "tiny", "revision": "1", "dtype": torch.float32, **options})

    return store


def prompt(tokens=100, rows=1, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(3, VOCABULARY, (rows, tokens)))


def generate(model, ids, cache, count=12, **options):
    options = {"max_new_tokens": count, "do_sample": False, **options}
    return model.generate(ids, past_key_values=cache, **options)


def plain(model, ids, **options):
    return generate(model, ids, DynamicCache(config=model.config), **options)


@pytest.mark.parametrize("attention", ["sdpa", "eager", ATTENTION])
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek"])
def test_generate_is_equal_with_and_without_the_pool(models, store_of, name, attention):
    ids = prompt()
    wanted = plain(models(name, "eager" if attention == "eager" else "sdpa"), ids)
    model = models(name, attention)
    store = store_of(model)
    with store.cache(ids) as cache:
        assert cache.hit_tokens == 0
        assert torch.equal(generate(model, ids, cache), wanted)
        assert cache.publish(wanted) == 0  # the blocks of the prompt are there already; 111 tokens fill no seventh
    with store.cache(ids) as cache:
        assert cache.hit_tokens == 96
        assert torch.equal(generate(model, ids, cache), wanted)
    with store.cache(wanted[:, :-1]) as cache:
        assert cache.hit_tokens == 96
    assert store.pool.check().pins == 0
    assert store.pool.check().blocks["reserved"] == 0
    assert not store.misses


def test_a_corrupted_pool_changes_the_tokens(models, store_of):
    """The negative control: what the tests above compare does depend on the blocks."""
    model, ids = models("llama", ATTENTION), prompt()
    wanted = plain(models("llama"), ids)
    store = store_of(models("llama", ATTENTION))
    with store.cache(ids) as cache:
        generate(model, ids, cache)
    store.paged.blocks.mul_(-1)
    for attention in (ATTENTION, "sdpa"):
        with store.cache(ids) as cache:
            assert cache.hit_tokens == 96
            assert not torch.equal(generate(models("llama", attention), ids, cache), wanted)


def test_generated_tokens_are_shared_too(models, store_of):
    model, ids = models("llama"), prompt()
    store = store_of(model)
    with store.cache(ids) as cache:
        out = generate(model, ids, cache, count=40)
        assert cache.publish(out) == 2  # 139 tokens have keys and values: 8 blocks
        assert cache.publish(out) == 0
    longer = torch.cat([out, prompt(7, seed=1)], 1)
    with store.cache(longer) as cache:
        assert cache.hit_tokens == 128
        assert torch.equal(generate(model, longer, cache), plain(model, longer))


def test_what_is_read_is_the_pool_itself(models, store_of):
    """In place: only new tokens are written, and nothing of a prefix that was found is copied."""
    model, ids = models("llama", ATTENTION), prompt()
    store = store_of(model)
    with store.cache(ids) as cache:
        generate(model, ids, cache, count=1)
    reserved = store.pool.check().blocks["reserved"]
    with store.cache(ids) as cache:
        numbers = [block.number for block in cache._tables[0]]
        generate(model, ids, cache, count=4)
        assert [block.number for block in cache._tables[0]][:6] == numbers
        assert store.pool.check().blocks["reserved"] == reserved + 1  # the tail
        for block in cache._tables[0]:
            assert block.row.data_ptr() == store.paged.blocks[block.number].data_ptr()


def test_another_process_finds_the_prefix(models, store_of, uri, tmp_path):
    model, ids = models("llama"), prompt()
    model.save_pretrained(tmp_path)
    wanted = plain(model, ids)
    store = store_of(model)
    with store.cache(ids) as cache:
        generate(model, ids, cache)
    program = """
import sys, torch, transformers, kvpool
from kvpool.bindings.transformers import ATTENTION, KVStore
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32).eval()
ids = torch.tensor(eval(sys.argv[3]))
for attention in ("sdpa", ATTENTION):
    model.set_attn_implementation(attention)
    with kvpool.open(sys.argv[1]) as pool:
        store = KVStore(pool, model.config, model="tiny", revision="1", dtype=torch.float32)
        with store.cache(ids) as cache:
            out = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
            print(cache.hit_tokens, out.tolist())
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, uri, str(tmp_path), str(ids.tolist())],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line] == [f"96 {wanted.tolist()}"] * 2


@pytest.mark.racks("sim-2")
def test_another_handle_finds_the_prefix(models, store_of, rack, uri):
    """Also on another host, whose cache sees nothing that was not written back and refreshed."""
    ids = prompt()
    wanted = plain(models("llama"), ids)
    model = models("llama", ATTENTION)
    store = store_of(model)
    with store.cache(ids) as cache:
        generate(model, ids, cache)
    with rack.open(uri) as pool:
        other = store_of(model, pool)
        with other.cache(ids) as cache:
            assert cache.hit_tokens == 96
            assert torch.equal(generate(model, ids, cache), wanted)


def test_a_process_that_is_killed_as_it_generates(models, store_of, uri, tmp_path):
    """Its prefix is found or computed again, its blocks and pins come back."""
    model, ids = models("llama", ATTENTION), prompt()
    model.save_pretrained(tmp_path)
    wanted = plain(models("llama"), ids)
    model = models("llama", ATTENTION)
    store = store_of(model, blocks=32)
    program = """
import sys, torch, transformers, kvpool
from kvpool.bindings.transformers import ATTENTION, KVStore
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32).eval()
model.set_attn_implementation(ATTENTION)
store = KVStore(kvpool.open(sys.argv[1]), model.config, model="tiny", revision="1", dtype=torch.float32)
print(flush=True)
while True:
    for ids in (torch.tensor(eval(sys.argv[3])), torch.randint(3, 900, (1, 150))):
        with store.cache(ids) as cache:
            cache.publish(model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False))
"""
    command = [sys.executable, "-P", "-c", program, uri, str(tmp_path), str(ids.tolist())]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        child.stdout.readline()
        for turn in range(6):
            with store.cache(ids) as cache:
                assert torch.equal(generate(model, ids, cache), wanted)
            if turn == 3:
                child.kill()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert eventually(lambda: pool_is_quiet(store.pool), 20), store.pool.check()
    with store.cache(ids) as cache:
        assert torch.equal(generate(model, ids, cache), wanted)


def pool_is_quiet(pool):
    report = pool.check()
    return report.clean and report.pins == 0 and report.blocks["reserved"] == 0


def test_a_batch_has_the_shortest_of_its_hits(models, store_of):
    model, ids = models("llama", ATTENTION), prompt(rows=2)
    store = store_of(model)
    with store.cache(ids[:1]) as cache:
        generate(model, ids[:1], cache, count=1)
    half = torch.cat([prompt(rows=2)[1:, :40], prompt(60, seed=5)], 1)
    with store.cache(half) as cache:
        generate(model, half, cache, count=1)
    with store.cache(ids) as cache:
        assert cache.hit_tokens == 32
        assert torch.equal(generate(model, ids, cache), plain(models("llama"), ids))
    models("llama", ATTENTION)
    with store.cache(ids) as cache:
        assert cache.hit_tokens == 96


@pytest.mark.parametrize("attention", ["sdpa", ATTENTION])
def test_padding_is_computed_and_not_shared(models, store_of, attention):
    ids = prompt(40, rows=2)
    ids[0, :9] = 0
    mask = (ids != 0).long()
    wanted = plain(models("llama"), ids, attention_mask=mask)
    model = models("llama", attention)
    store = store_of(model)
    for given in (mask, None):  # without a mask generate() makes one from the padding
        with store.cache(ids, given) as cache:
            assert torch.equal(generate(model, ids, cache, attention_mask=mask), wanted)
            assert cache.publish(wanted) == 0
    assert store.pool.check().blocks["live"] == 0


def test_tokens_that_stand_for_images_are_not_shared(models, store_of):
    """Two images have the same tokens."""
    model, ids = models("llama"), prompt(40)
    store = store_of(model)
    store.config = config_of("llama")
    store.config.image_token_id = int(ids[0, 20])
    with store.cache(ids) as cache:
        generate(model, ids, cache)
    assert store.pool.check().blocks["live"] == 0
    assert not store.cache(ids).is_shareable
    assert store.cache(ids[:, :20]).is_shareable


@pytest.mark.parametrize("attention", ["sdpa", ATTENTION])
@pytest.mark.parametrize("how", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_beams(models, store_of, how, attention):
    ids = prompt(40, rows=2)
    wanted = plain(models("llama"), ids, **how)
    model = models("llama", attention)
    store = store_of(model, blocks=128)
    for hit in (0, 32):
        with store.cache(ids) as cache:
            assert cache.hit_tokens == hit
            assert torch.equal(generate(model, ids, cache, **how), wanted)
    assert store.pool.check().pins == 0
    assert store.pool.check().blocks["reserved"] == 0


@pytest.mark.parametrize("attention", ["sdpa", ATTENTION])
def test_candidates_are_cropped(models, store_of, attention):
    ids = prompt(20).repeat(1, 3)  # repeats itself, so that there are candidates
    how = {"prompt_lookup_num_tokens": 6}
    wanted = plain(models("llama"), ids, count=30, **how)
    model = models("llama", attention)
    store = store_of(model)
    for look_up in (True, False):
        with store.cache(ids, look_up=look_up) as cache:
            assert cache.hit_tokens == 0
            assert torch.equal(generate(model, ids, cache, count=30, **how), wanted)
    # From a cache that is not empty transformers computes all tokens again, behind those that are there.
    with store.cache(ids) as cache:
        assert cache.hit_tokens == 48
        with pytest.raises(kvpool.InvalidArgument, match="look_up=False"):
            generate(model, ids, cache, count=30, **how)


def test_a_crop_into_what_is_shared_copies_on_write(models, store_of):
    model, ids = models("llama"), prompt(64)
    store = store_of(model)
    with store.cache(ids) as cache:
        model(ids, past_key_values=cache)
        before = store.paged.blocks.clone()
        cache.crop(-24)  # into a block that is published
        assert cache.get_seq_length() == 40
        other = torch.cat([ids[:, :40], prompt(10, seed=9)], 1)
        got = model(other[:, 40:], past_key_values=cache).logits[0, -1]
        live = [int(n) for n in store.namespace.match(store.namespace.keys(ids[0].numpy())).blocks]
        assert torch.equal(store.paged.blocks[live], before[live])
        torch.testing.assert_close(got, model(other).logits[0, -1], atol=1e-4, rtol=1e-4)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(generate(model, ids, cache), plain(model, ids))


@pytest.mark.parametrize("attention", ["sdpa", ATTENTION])
def test_a_full_pool_is_private_memory(models, store_of, attention):
    ids = prompt()
    wanted = plain(models("llama"), ids)
    model = models("llama", attention)
    store = store_of(model, blocks=8)
    store.pool.evict(8)
    others = store.namespace.reserve(store.pool.info["classes"][0]["blocks"] - 3)
    with store.cache(ids) as cache:
        assert torch.equal(generate(model, ids, cache), wanted)
    assert store.misses == {"PoolFull": 1}
    others.withdraw()
    with store.cache(ids) as cache:
        assert cache.hit_tokens == 48
        assert torch.equal(generate(model, ids, cache), wanted)


def test_a_pool_that_is_removed_is_missed(models, store_of, uri):
    model, ids = models("llama"), prompt()
    wanted = plain(model, ids)
    store = store_of(model)
    with store.cache(ids) as cache:
        kvpool.remove(uri, force=True)
        assert torch.equal(generate(model, ids, cache), wanted)
    with store.cache(ids) as cache:
        assert cache.hit_tokens == 0
        assert torch.equal(generate(model, ids, cache), wanted)
    assert store.misses["Replaced"] >= 2


def test_a_pool_that_is_closed_under_a_reader_raises(models, store_of):
    model, ids = models("llama"), prompt()
    store = store_of(model)
    with store.cache(ids) as cache:
        generate(model, ids, cache, count=1)
    with store.cache(ids) as cache:
        assert cache.hit_tokens == 96
        store.pool.close()
        with pytest.raises(kvpool.Closed):
            generate(model, ids, cache)


@pytest.mark.parametrize(
    "other",
    [
        {"revision": "2"},
        {"model": "other"},
        {"block_tokens": 32},
        {"tenant": "b"},
        {"adapter": "lora-1"},
        "rope",
        "dtype",
    ],
    ids=str,
)
def test_another_identity_is_a_miss(models, store_of, make_pool, other):
    model, ids = models("llama"), prompt()
    pool = make_pool(block="64KiB", blocks=32)
    store = store_of(model, pool)
    with store.cache(ids) as cache:
        generate(model, ids, cache, count=1)
    if other == "rope":
        config = config_of("llama")
        config.rope_parameters = {"rope_type": "default", "rope_theta": 5000.0}
        stranger = KVStore(pool, config, model="tiny", revision="1", dtype=torch.float32)
    elif other == "dtype":
        stranger = KVStore(pool, model.config, model="tiny", revision="1", dtype=torch.bfloat16)
    else:
        stranger = store_of(model, pool, **other)
    assert stranger.cache(ids).hit_tokens == 0
    assert store.cache(ids).hit_tokens == 96


def test_what_cannot_be_held_is_refused(models, store_of, make_pool):
    model = models("llama")
    with pytest.raises(kvpool.InvalidArgument, match="--block"):
        KVStore(make_pool(), model.config, model="m", revision="1", dtype=torch.float32)
    with pytest.raises(kvpool.InvalidArgument, match="cross attention"):
        layout_of(transformers.T5Config(), torch.float32)
    hybrid = transformers.Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(kvpool.InvalidArgument, match="linear_attention"):
        layout_of(hybrid, torch.float32)
    store = store_of(model, make_pool(uri="memfd:", block="64KiB", blocks=32))
    with pytest.raises(kvpool.InvalidArgument, match="sequences"):
        store.cache(torch.tensor([1, 2]))
    with store.cache(prompt()) as cache, pytest.raises(kvpool.InvalidArgument, match="was made for"):
        model.to(torch.bfloat16)(prompt(), past_key_values=cache)
    model.to(torch.float32)
    with store.cache(prompt()) as cache:
        model(prompt(), past_key_values=cache)
        with pytest.raises(kvpool.InvalidArgument, match="do not begin"):
            cache.publish(prompt(seed=2))
        with pytest.raises(kvpool.InvalidArgument, match="sequences"):
            cache.publish(prompt(rows=2))


def test_a_model_that_touches_the_keys_is_refused(store_of, models):
    model, ids = models("llama", ATTENTION), prompt(20)
    with store_of(model).cache(ids) as cache:
        keys, _ = cache.update(torch.zeros(1, 2, 20, 16), torch.zeros(1, 2, 20, 16), 0)
        assert keys.shape == (1, 2, 20, 16)
        with pytest.raises(kvpool.InvalidArgument, match="computes"):
            keys.transpose(1, 2)
