"""What a key names: a total identity, and the chain of token blocks under it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final, overload

import numpy as np

from kvpool.arguments import text, whole
from kvpool.bindings import check, ffi, lib
from kvpool.bindings.errors import InvalidArgument
from kvpool.bindings.hashing import HASH

__all__ = ["Identity", "KeyMaker", "Keys", "KeysLike", "key_buffer"]

KEY_BYTES: int = lib.KVP_KEY_BYTES


def _rank(value: Any) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidArgument(f"Identity.rank is (rank, ranks), not {value!r}")
    ranks = whole("Identity.rank[1]", value[1], 1)
    return whole("Identity.rank[0]", value[0], 0, ranks - 1), ranks


def _pairs(value: Any) -> tuple[tuple[str, str], ...]:
    """Sorted. A number or None is not made a string here: it would equal the string that it looks like."""
    is_list = isinstance(value, tuple | list)
    if not is_list or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in value):
        raise InvalidArgument(f"Identity.extra is a sequence of (name, value) pairs, not {value!r}")
    return tuple(sorted((text("Identity.extra", name), text(f"Identity.extra {name}", each)) for name, each in value))


@dataclass(frozen=True)
class Identity:
    """Everything that decides whether two KV blocks of the same tokens hold the same numbers.

    Two identities that differ in any field never share a key; absent (None or "") equals absent, nothing else. `extra`
    takes what this list forgot, as (name, value) pairs of strings. Immutable, hashable, comparable across processes.
    """

    model: str
    """Which network; a name is not enough, see `revision`."""
    revision: str
    """Which weights: a digest of them, or a commit. Change it whenever the weights change."""
    dtype: str
    """Of the stored numbers, quantisation included: "float16", "fp8_e4m3+scale"."""
    layout: str
    """Order of axes and tokens per block, e.g. "LBHNC/16", and position encoding if it is baked in."""
    adapter: str | None = None
    """LoRA or other adapter, with its version."""
    isa: str | None = None
    """Where numerics differ by processor: the kernel family that wrote the block."""
    rank: tuple[int, int] = (0, 1)
    """(rank, ranks) of tensor parallelism: each rank holds its own heads."""
    block_tokens: int = 16
    """Tokens per block, 1 to 1024."""
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("model", "revision", "dtype", "layout"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InvalidArgument(
                    f"Identity.{name} must be a non-empty string, not {value!r}: it decides what is shared"
                )
        for name in ("adapter", "isa"):
            if getattr(self, name) is not None:
                text(f"Identity.{name}", getattr(self, name))
        # One form of each value, or identities that are equal would make keys that are not.
        object.__setattr__(self, "rank", _rank(self.rank))
        object.__setattr__(self, "block_tokens", whole("Identity.block_tokens", self.block_tokens, 1, 1024))
        object.__setattr__(self, "extra", _pairs(self.extra))

    def canonical(self) -> bytes:
        """The same bytes for equal identities in every process, machine and Python version."""
        fields = {name: value for name, value in asdict(self).items() if value not in (None, "", ())}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


@final
class Keys(Sequence[bytes]):
    """Keys of a chain of blocks: 16 bytes each, in one buffer. Immutable; slices share the buffer.

    `array` is uint8 [n, 16], C-contiguous, read-only. A Keys that ends where its chain ends can be extended:
    `namespace.keys(more_tokens, after=keys)`.
    """

    __slots__ = ("_chain", "array", "pointer")

    def __init__(self, array: np.ndarray[Any, Any], chain: tuple[int, int, int, int] | None = None) -> None:
        array.flags.writeable = False
        self.array = array
        self.pointer: tuple[Any, int] = (ffi.from_buffer(array), len(array))
        """For `kvpool.bindings`: the keys as cdata, which keeps them alive, and their number."""
        self._chain = chain

    @property
    def chain(self) -> tuple[int, int, int, int] | None:
        """State of the hash chain after the last key, or None if this is a part that ends earlier."""
        return self._chain

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Keys: ...
    def __getitem__(self, index: int | slice) -> bytes | Keys:
        """One key as bytes, or a part of the chain."""
        if isinstance(index, slice):
            _, stop, step = index.indices(len(self))
            ends = step == 1 and stop == len(self)
            return Keys(np.ascontiguousarray(self.array[index]), self._chain if ends else None)
        return bytes(self.array[index])

    def __iter__(self) -> Iterator[bytes]:
        data = self.array.tobytes()
        return (data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES))

    def __add__(self, other: Keys) -> Keys:
        """Keys of both, in order."""
        return Keys(np.concatenate([self.array, other.array]), other._chain)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __repr__(self) -> str:
        return f"<Keys {len(self)}>"


def _list_of(what: str, values: Any) -> list[Any]:
    """A string or a number where a list is wanted is refused, not taken letter by letter."""
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise InvalidArgument(f"{values!r} is no list of {what}")
    return list(values)


def _key_bytes(key: Any) -> bytes:
    try:
        return memoryview(key).tobytes()  # bytes(key) would make zeros of a number
    except TypeError as error:
        raise InvalidArgument(f"a key is {KEY_BYTES} bytes, not {key!r}: use Namespace.keys()") from error


KeysLike = Keys | bytes | bytearray | memoryview | Sequence[bytes]


def key_buffer(keys: KeysLike) -> tuple[Any, int]:
    """A pointer to the keys, as C functions take it, and their number; it keeps what it points to alive.

    Accepts Keys, one buffer of n x 16 bytes, or a sequence of 16-byte strings. Raises `InvalidArgument` for another
    length.
    """
    if type(keys) is Keys:
        return keys.pointer
    if type(keys) is bytes and not len(keys) % KEY_BYTES:
        return keys, len(keys) // KEY_BYTES  # cffi takes its address
    if not isinstance(keys, bytes | bytearray | memoryview):
        parts = [key if isinstance(key, bytes) else _key_bytes(key) for key in _list_of("keys", keys)]
        wrong = next((key for key in parts if len(key) != KEY_BYTES), None)
        if wrong is not None:
            raise InvalidArgument(f"a key has {KEY_BYTES} bytes, this one {len(wrong)}: use Namespace.keys()")
        keys = b"".join(parts)
    view = memoryview(keys)
    if view.nbytes % KEY_BYTES or not view.c_contiguous:
        raise InvalidArgument(
            f"keys are {KEY_BYTES} bytes each in one contiguous buffer; this one has {view.nbytes} bytes"
        )
    return ffi.from_buffer(view), view.nbytes // KEY_BYTES


def token_array(token_ids: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Token ids as uint32, from any buffer or sequence of integers from 0 to 2^32 - 1.

    A buffer (numpy, array.array, torch on the CPU) costs nothing or one pass; a list costs more than the hash.
    """
    array = np.asarray(token_ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument(f"token ids are one row of integers, not {array.dtype} of shape {array.shape}")
    if array.size and array.dtype != np.uint32 and (int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF):
        raise InvalidArgument("token ids are 0 to 2^32 - 1")
    return np.ascontiguousarray(array, dtype="<u4")


# Sets names apart from blocks of tokens, which are hashed as 16 bytes of chain state and four bytes a token.
_NAME_MARK = b"kvpool name 1\0"


def _name_bytes(name: Any) -> bytes:
    """Names that are missing are refused: all of them would be one."""
    try:
        data = text("name", name).encode() if isinstance(name, str) else memoryview(name).tobytes()
    except TypeError as error:
        raise InvalidArgument(f"a name is a string or bytes, not {name!r}") from error
    if not data:
        raise InvalidArgument("a name is not empty")
    return data


class KeyMaker:
    """Derives keys for one identity and tenant. Thread-safe; the same keys in every process and on every machine.

    The chain is XXH3-128 (Y. Collet, xxHash 0.8 specification) with a 192-byte secret that is SHAKE-256 of the identity
    and the tenant: without it nobody can make, or guess at, another tenant's keys.
    """

    def __init__(self, identity: Identity, tenant: str) -> None:
        if not isinstance(identity, Identity):
            raise InvalidArgument(f"{identity!r} is no Identity")
        material = identity.canonical() + b"\0" + text("tenant", tenant).encode()
        self.block_tokens = identity.block_tokens
        self._secret = hashlib.shake_256(b"kvpool keys 1\0" + material).digest(lib.KVP_SECRET_BYTES)
        start = hashlib.sha256(b"kvpool chain 1\0" + material).digest()
        self._start = (int.from_bytes(start[:8], "little"), int.from_bytes(start[8:16], "little"), 0, 0)

    def keys(self, token_ids: Any, after: Keys | None) -> Keys:
        """One key per full block of token_ids; a rest shorter than a block has none."""
        arguments, array = self.request(ffi, token_ids, after)
        check(lib.kvp_keys(HASH, *arguments))
        return self.made(arguments, array)

    def request(self, ffi: Any, token_ids: Any, after: Keys | None) -> tuple[tuple[Any, ...], np.ndarray[Any, Any]]:
        """What `kvp_keys` takes after the hash, and the array that it fills: what `made` makes Keys of."""
        tokens = token_array(token_ids)
        if after is not None and not isinstance(after, Keys):
            raise InvalidArgument(f"after={after!r} is not what Namespace.keys() gave")
        if after is not None and after.chain is None:
            raise InvalidArgument("these keys end before their chain does: only the whole of it can be extended")
        chain = ffi.new("struct kvp_chain *", self._start if after is None or after.chain is None else after.chain)
        count = len(tokens) // self.block_tokens
        array = np.empty((count, KEY_BYTES), np.uint8)
        source = ffi.from_buffer("uint32_t[]", tokens)
        return (self._secret, source, count, self.block_tokens, chain, ffi.from_buffer(array)), array

    @staticmethod
    def made(arguments: tuple[Any, ...], array: np.ndarray[Any, Any]) -> Keys:
        """The keys that C has filled in."""
        chain = arguments[4]
        return Keys(array, (chain.low, chain.high, chain.head, chain.blocks))

    def named(self, names: Sequence[bytes | str]) -> Keys:
        """One key per name: a digest of it under the secret. Names are no chain, so the keys cannot be extended."""
        if isinstance(names, bytes | bytearray | memoryview):
            raise InvalidArgument(f"{names!r} is one name: names are a list of them")
        listed = _list_of("names", names)
        out = np.empty((len(listed), KEY_BYTES), np.uint8)
        for row, name in zip(out, listed, strict=True):
            data = _NAME_MARK + _name_bytes(name)
            digest = HASH(data, len(data), self._secret, lib.KVP_SECRET_BYTES)
            row[:8] = np.frombuffer(digest.low.to_bytes(8, "little"), np.uint8)
            row[8:] = np.frombuffer(digest.high.to_bytes(8, "little"), np.uint8)
        return Keys(out)
