"""A `Cache` of Hugging Face transformers whose keys and values lie in a pool's blocks.

    store = KVStore(pool, model.config, model="llama", revision="1", dtype=model.dtype)
    with store.cache(input_ids) as cache:
        out = model.generate(input_ids, past_key_values=cache)
        cache.publish(out)

A prefix that any process has published is found when the cache is made, pinned, and read where it lies; new tokens are
written into reserved blocks, and those of the prompt are published as soon as the prompt has been computed.

Where attention needs keys and values as one tensor ("sdpa", "eager") the blocks are gathered, a copy, at each step.
With `model.set_attn_implementation(kvpool.bindings.transformers.ATTENTION)` attention reads the blocks in place, on the
CPU.

Whatever goes wrong with the pool is a miss: blocks then come from private memory. Only a pool that is closed, or
inherited by a fork, under a cache that reads it raises: its blocks are protected no more, and the request must be
computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import kvpool
from kvpool.bindings.door import Misses
from kvpool.bindings.torch import KVLayout, PagedTensors
from kvpool.bindings.torch.attention import attend

__all__ = ["ATTENTION", "KVStore", "PoolCache", "layout_of"]

ATTENTION = "kvpool"

# Of a configuration: what does not change a key or a value.
_IRRELEVANT = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "use_cache",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "dtype",  # stands in the identity by itself
    "torch_dtype",
)
# Tokens that stand for something else: the same token for every image.
_PLACEHOLDER = re.compile(r"(image|video|audio|vision|speech)\w*_token_(id|index)")
_KINDS = ("full_attention", "sliding_attention")
# What a model may ask of keys that are not there.
_HARMLESS = ("shape", "dtype", "device", "ndim", "size", "dim", "is_cuda", "layout", "requires_grad")


def layout_of(config: Any, dtype: torch.dtype, block_tokens: int = 16) -> KVLayout:
    """The block layout for a model's configuration: full or sliding attention with keys of one shape in all layers.

    Raises `InvalidArgument` for what a block per so many tokens cannot hold: encoder-decoders, recurrent states, layers
    that share keys and values.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise kvpool.InvalidArgument("a model with an encoder has cross attention, which is not a prefix of tokens")
    text = config.get_text_config(decoder=True)
    kinds = sorted(set(getattr(text, "layer_types", None) or _KINDS) - set(_KINDS))
    is_shared = bool(getattr(text, "num_kv_shared_layers", None))
    if kinds or is_shared:
        raise kvpool.InvalidArgument(f"layers of this model are {kinds or 'shared'}: only {', '.join(_KINDS)} are held")
    heads = text.num_attention_heads
    if _is_latent(config):  # the latent vector stands for the keys, its rotated part for the values
        key_dim, value_dim, kv_heads = text.kv_lora_rank, text.qk_rope_head_dim, 1
    else:
        key_dim = value_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return KVLayout(text.num_hidden_layers, kv_heads, key_dim, value_dim, block_tokens, dtype)


def _is_latent(config: Any) -> bool:
    return bool(getattr(config.get_text_config(decoder=True), "kv_lora_rank", None))


def config_digest(config: Any) -> str:
    """A digest of everything in a configuration that may change keys and values: rotary settings, window, sizes."""
    text = json.dumps(_relevant(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _relevant(value: Any) -> Any:
    """A configuration, and those inside it, without what is irrelevant."""
    if not isinstance(value, dict):
        return value
    return {str(name): _relevant(part) for name, part in value.items() if name not in _IRRELEVANT}


class KVStore:
    """The keys and values of one model in a pool. Thread-safe; each cache belongs to the thread that generates.

    `misses` counts what went wrong with the pool, by the name of the error. `hit_tokens` and `asked_tokens` count
    prompt tokens found and looked for.
    """

    def __init__(
        self,
        pool: kvpool.Pool,
        config: Any,
        *,
        model: str,
        revision: str,
        dtype: torch.dtype,
        block_tokens: int = 16,
        tenant: str = "",
        adapter: str | None = None,
    ) -> None:
        """`revision`: a digest of the weights, or a commit; change it whenever they change. The configuration is part
        of the identity by itself. Raises `InvalidArgument`: no class of the pool fits, or `layout_of` refuses the
        model.
        """
        self.pool, self.config, self.is_latent = pool, config, _is_latent(config)
        layout = layout_of(config, dtype, block_tokens)
        self.paged = PagedTensors(pool, layout)
        identity = kvpool.Identity(
            model=model,
            revision=revision,
            dtype=layout.dtype_name,
            layout=layout.name,
            adapter=adapter,
            block_tokens=block_tokens,
            extra=(("engine", "transformers"), ("config", config_digest(config))),
        )
        self.namespace = pool.namespace(identity, tenant, self.paged.block_class)
        self.misses = Misses()
        self.hit_tokens = self.asked_tokens = 0

    def count(self, error: kvpool.Error) -> None:
        """An error has become a miss."""
        self.misses.note(self.pool.uri, error)

    def match(self, keys: kvpool.Keys) -> kvpool.Hit | None:
        """The longest prefix, or None where the pool has trouble."""
        try:
            return self.namespace.match(keys)
        except kvpool.Error as error:
            self.count(error)
            return None

    def reserve(self) -> kvpool.Reservation | None:
        """One block, evicting but not waiting, or None."""
        try:
            return self.namespace.reserve(1, timeout=0)
        except kvpool.Error as error:
            self.count(error)
            return None

    def assure(self) -> None:
        """Raise if blocks that we read are protected no more: `Closed`, `Forked`, `Fenced`.

        A pool that was removed is harmless: nobody can reserve in it, so its memory stays as it is.
        """
        with contextlib.suppress(kvpool.Replaced):
            self.namespace.lookup(b"")

    def cache(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, look_up: bool = True
    ) -> PoolCache:
        """A cache for `generate(input_ids, ..)`, which holds what is there of the prompts already, but their last
        token.

        `input_ids` [sequences, tokens]. With several sequences the shortest of their hits counts. If `attention_mask`
        hides tokens (padding), nothing is shared: their positions are not those of the same text without padding. Nor
        is a prompt with tokens that stand for images or sounds, which are the same for every image. `look_up=False`:
        begin empty, and still publish. Assisted generation of transformers needs that.
        """
        return PoolCache(self, input_ids, attention_mask, look_up=look_up)


def _is_only_text(config: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> bool:
    """Do the tokens say all? Not if `generate` hides some (without a mask it makes one from padding tokens), nor if
    some stand for an image or a sound.
    """
    if attention_mask is not None and not bool(attention_mask.bool().all()):
        return False
    others = [value for name, value in config.to_dict().items() if _PLACEHOLDER.fullmatch(name)]
    if attention_mask is None:
        others.append(getattr(config.get_text_config(decoder=True), "pad_token_id", None))
    unsaid = [token for token in others if isinstance(token, int)]
    return not bool(torch.isin(input_ids, torch.tensor(unsaid, dtype=input_ids.dtype, device=input_ids.device)).any())


@dataclass(eq=False)
class _Block:
    """One block of a sequence: a row of the pool's tensor, or private memory where the pool had none."""

    row: torch.Tensor  # [layers, items]
    number: int = -1  # in the pool; -1: private
    reservation: kvpool.Reservation | None = None
    pin: kvpool.Hit | None = None
    users: int = 1  # rows of the batch that have it
    is_ours: bool = True  # written by us and not published: may be written again
    keys: torch.Tensor = field(init=False)  # [layers, kv_heads, block_tokens, dim]
    values: torch.Tensor = field(init=False)


class PoolCache(Cache):
    """See `KVStore.cache`. A context manager; `close` gives back pins and reserved blocks, and it holds nothing then.

    Not thread-safe: made, used and closed by one thread. Supports beams, crop and candidates (blocks are copied on
    write).
    """

    def __init__(
        self,
        store: KVStore,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        look_up: bool = True,
    ) -> None:
        if input_ids.ndim != 2 or not input_ids.shape[0]:
            raise kvpool.InvalidArgument(f"input_ids are [sequences, tokens], not {tuple(input_ids.shape)}")
        layout = store.paged.layout
        super().__init__(layers=[_PoolLayer(self, index) for index in range(layout.layers)])
        self.store, self.layout = store, layout
        self.is_shareable = _is_only_text(store.config, input_ids, attention_mask)
        self.lengths = [0] * layout.layers
        self._keys = [store.namespace.keys(row) for row in input_ids.cpu().numpy().astype(np.int64)]
        self._hits: list[kvpool.Hit] = []
        self._tables: list[list[_Block]] = [[] for _ in range(len(input_ids))]
        self._is_short_of_blocks = False
        self._prompt_tokens = input_ids.shape[1]
        self.hit_tokens = self._adopt(self._prompt_tokens) if self.is_shareable and look_up else 0
        """Tokens of each prompt that were there."""

    def _adopt(self, tokens: int) -> int:
        """Pin what is there. At least one token must be computed, so the block of the last one does not count."""
        limit = max(tokens - 1, 0) // self.layout.block_tokens
        hits = [self.store.match(keys[:limit]) for keys in self._keys]
        count = min(len(hit) if hit else 0 for hit in hits)
        self._hits = [hit for hit in hits if hit]
        for table, hit in zip(self._tables, hits, strict=True):
            for number in hit.blocks[:count].tolist() if hit else ():
                table.append(self._block(self.store.paged.blocks[number], number=number, is_ours=False))
        found = count * self.layout.block_tokens
        self.lengths = [found] * self.layout.layers
        self.store.hit_tokens += found * len(hits)
        self.store.asked_tokens += tokens * len(hits)
        return found

    def _block(self, row: torch.Tensor, **what: Any) -> _Block:
        block = _Block(row, **what)
        block.keys, block.values = self.layout.split(row)
        return block

    # ---- writing ----

    def _new_block(self) -> _Block:
        """A reserved block, or a private one: after a first failure the pool is not asked again by this cache."""
        new = None if self._is_short_of_blocks else self.store.reserve()
        if new is None:
            self._is_short_of_blocks = True
            return self._block(torch.empty(self.layout.row_shape, dtype=self.layout.dtype))
        number = int(new.blocks[0])
        return self._block(self.store.paged.blocks[number], number=number, reservation=new)

    def _writable(self, row: int, index: int) -> _Block:
        """Block `index` of a sequence, new or a copy of its own if others have it too."""
        table = self._tables[row]
        if index == len(table):
            table.append(self._new_block())
        block = table[index]
        if not block.is_ours or block.users > 1:
            block.users -= 1
            copy = self._new_block()
            copy.row.copy_(block.row)
            if not block.users:
                self._drop(block)
            table[index] = block = copy
        return block

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the new tokens of a layer: [sequences, kv_heads, tokens, dim] each."""
        rows = len(self._tables)
        if keys.shape[0] > rows and keys.shape[0] % rows == 0:  # generate repeats rows for beams and for samples
            self.batch_repeat_interleave(keys.shape[0] // rows)
        self._check(keys, values)
        if layer == 0:
            self.store.assure()
            self._assure_rest(keys.shape[2])
        start, tokens, size = self.lengths[layer], keys.shape[2], self.layout.block_tokens
        for row in range(keys.shape[0]):
            done = 0
            while done < tokens:
                at = (start + done) % size
                count = min(size - at, tokens - done)
                block = self._writable(row, (start + done) // size)
                block.keys[layer, :, at : at + count].copy_(keys[row, :, done : done + count])
                block.values[layer, :, at : at + count].copy_(values[row, :, done : done + count])
                done += count
        self.lengths[layer] = start + tokens
        if layer == self.layout.layers - 1:
            self._publish(self._keys)

    def _assure_rest(self, tokens: int) -> None:
        """What comes first after a hit is the rest of the prompt: other tokens must not be stored as if they were."""
        if self.hit_tokens == self.lengths[0] > 0 and tokens >= self._prompt_tokens:
            raise kvpool.InvalidArgument(
                f"{self.hit_tokens} tokens of the prompt are in the cache, and generate() computes all of it again (as "
                "assisted generation does): make the cache with look_up=False"
            )

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        layout, rows = self.layout, len(self._tables)
        wanted = (rows, layout.kv_heads, layout.key_dim), (rows, layout.kv_heads, layout.value_dim)
        got = tuple((each.shape[0], each.shape[1], each.shape[3]) for each in (keys, values))
        if got != wanted or keys.dtype != layout.dtype or values.dtype != layout.dtype:
            raise kvpool.InvalidArgument(
                f"the model gives keys {tuple(keys.shape)} and values {tuple(values.shape)} of {keys.dtype}; this "
                f"cache was made for {rows} sequences of {layout.name} in {layout.dtype}"
            )

    # ---- reading ----

    def gather(self, layer: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as one tensor each, [sequences, kv_heads, length, dim]: a copy."""
        length, paged = self.lengths[layer], self.store.paged
        count = -(-length // self.layout.block_tokens)
        numbers = [[block.number for block in table[:count]] for table in self._tables]
        if all(number >= 0 for row in numbers for number in row):
            index = torch.tensor(numbers)
            both = paged.keys(layer)[index], paged.values(layer)[index]  # [sequences, blocks, kv_heads, tokens, dim]
        else:
            tables = [table[:count] for table in self._tables]
            both = (
                torch.stack([torch.stack([block.keys[layer] for block in table]) for table in tables]),
                torch.stack([torch.stack([block.values[layer] for block in table]) for table in tables]),
            )
        keys, values = (each.transpose(1, 2).flatten(2, 3)[:, :, :length].to(device) for each in both)
        return keys, values

    def attend(self, layer: int, query: torch.Tensor, **rules: Any) -> torch.Tensor:
        """Attention of new tokens [sequences, heads, tokens, dim] in place: [sequences, tokens, heads, value_dim]."""
        length = self.lengths[layer]
        count = -(-length // self.layout.block_tokens)
        out = []
        for row, table in enumerate(self._tables):
            keys, values = ([getattr(block, name)[layer] for block in table[:count]] for name in ("keys", "values"))
            out.append(attend(query[row].transpose(0, 1), keys, values, range(count), length, **rules))
        return torch.stack(out)

    # ---- sharing ----

    def publish(self, token_ids: torch.Tensor) -> int:
        """Publish the full blocks of what was generated: `token_ids` [sequences, tokens], prompt included, as
        `generate` returns them. Returns how many blocks are new in the pool. A sequence that was padded, or is another
        than the one that this cache holds, must not be given.
        """
        rows = token_ids.cpu().numpy().astype(np.int64)
        if len(rows) != len(self._tables):
            raise kvpool.InvalidArgument(f"{len(rows)} sequences of tokens for a cache of {len(self._tables)}")
        chains = [self.store.namespace.keys(row) for row in rows]
        for old, new in zip(self._keys, chains, strict=True):
            common = min(len(old), len(new))
            if old[:common] != new[:common]:
                raise kvpool.InvalidArgument("these tokens do not begin as the prompt that this cache was made for")
        self._keys = chains
        return self._publish(chains)

    def _publish(self, keys: Sequence[kvpool.Keys]) -> int:
        """Publish full blocks of ours that have keys; the last of a chain first, so that a prefix is found whole."""
        if not self.is_shareable:
            return 0
        full = min(self.lengths) // self.layout.block_tokens
        done = 0
        try:
            for table, chain in zip(self._tables, keys, strict=True):
                for index in range(min(full, len(chain), len(table)) - 1, -1, -1):
                    done += self._publish_block(table[index], chain[index : index + 1])
        except kvpool.Error as error:
            self.store.count(error)
        return done

    def _publish_block(self, block: _Block, key: kvpool.Keys) -> int:
        """From here on the block is pinned, or, if another of this key is there, it stays reserved: ours either way."""
        if not block.is_ours or block.reservation is None:
            return 0
        hit = block.reservation.publish_pinned(key)
        block.is_ours = False
        if not hit.refs[0]:
            hit.release()
            return 0
        block.pin, block.reservation = hit, None
        return 1

    # ---- life ----

    @staticmethod
    def _drop(block: _Block) -> None:
        """Nobody reads it any more. The reservation ends with its object, in whatever thread that is."""
        if block.pin is not None:
            block.pin.release()
        block.pin = block.reservation = None

    def _retable(self, order: Sequence[int]) -> None:
        """The batch is now these rows of what it was; rows that come twice share their blocks."""
        old = self._tables
        self._tables = [list(old[row]) for row in order]
        self._keys = [self._keys[row] for row in order]
        uses = Counter(id(block) for table in self._tables for block in table)
        for block in {id(block): block for table in old for block in table}.values():
            block.users = uses[id(block)]
            if not block.users:
                self._drop(block)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on, of all layers."""
        length = max(0, length)
        self.lengths = [min(length, each) for each in self.lengths]
        keep = -(-max(self.lengths) // self.layout.block_tokens)
        for table in self._tables:
            for block in table[keep:]:
                block.users -= 1
                if not block.users:
                    self._drop(block)
            del table[keep:]
        # What was known of the text from there on is known no more.
        self._keys = [keys[: length // self.layout.block_tokens] for keys in self._keys]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beams: row i continues what was row beam_idx[i]."""
        self._retable(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times."""
        self._retable([row for row in range(len(self._tables)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these rows."""
        self._retable(torch.arange(len(self._tables))[indices.cpu()].tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a negative number of them (or, as it once was, a positive length that stays)."""
        length = max(self.lengths)
        self.truncate(tokens_to_remove if tokens_to_remove > 0 else length + tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens."""
        self.truncate(0)

    def close(self) -> None:
        """Give back pins and blocks that were not published. Idempotent; the cache is empty then."""
        self.truncate(0)
        for hit in self._hits:
            hit.release()
        self._hits.clear()

    def __enter__(self) -> PoolCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _PoolLayer(CacheLayerMixin):
    """One layer of a PoolCache, as transformers wants to see it."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: PoolCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index

    @property
    def batch_size(self) -> int:
        return len(self.cache._tables)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens; return all keys and values, or in place what stands for them."""
        self.cache.append(self.index, key_states, value_states)
        if self._is_in_place(key_states):
            return _InPlace.of(key_states, self), value_states
        return self.cache.gather(self.index, key_states.device)

    def _is_in_place(self, keys: torch.Tensor) -> bool:
        store = self.cache.store
        chosen = store.config.get_text_config(decoder=True)._attn_implementation == ATTENTION
        # A latent is expanded between cache and attention, so it must be there.
        return chosen and self.cache.is_shareable and keys.device.type == "cpu" and not store.is_latent

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.lengths[self.index]

    def get_max_length(self) -> int:
        return -1


class _InPlace(torch.Tensor):
    """Stands for the keys of a layer on their way from the cache to the attention function. A model that computes with
    them in between would see the new tokens only: that is refused.
    """

    layer: _PoolLayer

    @staticmethod
    def of(keys: torch.Tensor, layer: _PoolLayer) -> _InPlace:
        made = torch.Tensor._make_subclass(_InPlace, keys)
        made.layer = layer
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", "")
        if name not in _HARMLESS:
            raise kvpool.InvalidArgument(
                f"this model computes {name} with keys between cache and attention: use 'sdpa' or 'eager' instead of "
                f"{ATTENTION!r}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over pool blocks in place where `key` stands for a layer; else torch's own.

    The mask is then causal, within the window: a cache that must hide padding does not work in place.
    """
    if not isinstance(key, _InPlace):
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if kwargs.get("s_aux") is not None or dropout:
        raise kvpool.InvalidArgument(f"attention {ATTENTION!r} has neither sinks nor dropout: use 'sdpa' or 'eager'")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = key.layer
    return layer.cache.attend(layer.index, query, scale=scale, window=sliding_window, softcap=softcap), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
