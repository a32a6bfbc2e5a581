"""Convert an original Google BERT checkpoint (`bert_model.ckpt.*`) to a folder of safetensors, without TensorFlow.

    python contrib/tensorflow_checkpoint.py uncased_L-12_H-768_A-12 --out bert-base-uncased

Reads bert_config.json, the checkpoint and vocab.txt; writes config.json, model.safetensors and vocab.txt, which
everybert and transformers load.

A checkpoint is a "tensor bundle". `.index` is a sorted string table in LevelDB's format: blocks of prefix-compressed
keys, and a footer with the position of the index block. Its values are protocol buffers with dtype, shape, shard,
offset and size. `.data-0000i-of-0000n` holds the bytes of the tensors.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from everybert.errors import EverybertError
from everybert.files import JSON_LIMIT, atomic_folder, inside, read_json, write_json

MAGIC = 0xDB4775248B80FB57
FOOTER = 48
DTYPES: dict[int, np.dtype] = {1: np.dtype("<f4"), 2: np.dtype("<f8"), 19: np.dtype("<f2")}
"""TensorFlow's numbers of the float types."""


@dataclass(frozen=True)
class Entry:
    """The position of one tensor."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    sliced: bool


def convert(folder: Path, out: Path) -> None:
    """Write the checkpoint of a folder as safetensors with config.json and vocabulary."""
    found = sorted(folder.glob("*.ckpt*.index"))
    if len(found) != 1:
        raise EverybertError(f"{folder} has {len(found)} TensorFlow checkpoints; it must have the files of one")
    config = read_json(inside(folder, "bert_config.json"))
    tensors = read_checkpoint(inside(folder, found[0].name))
    with atomic_folder(out) as draft:
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        write_json(draft / "config.json", config | {"model_type": "bert", "architectures": ["BertForPreTraining"]})
        if (folder / "vocab.txt").is_file():
            shutil.copyfile(inside(folder, "vocab.txt"), draft / "vocab.txt")


def read_checkpoint(index: Path) -> dict[str, np.ndarray]:
    """The BERT weights of a checkpoint, under the names of `transformers`."""
    try:
        entries, shards = _entries(index)
    except (IndexError, ValueError) as error:
        if isinstance(error, EverybertError):
            raise
        raise _damaged(index, "its table does not parse") from None
    data = []
    for i in range(shards):
        name = f"{index.name.removesuffix('.index')}.data-{i:05d}-of-{shards:05d}"
        try:
            data.append(np.memmap(inside(index.parent, name), mode="c", dtype=np.uint8))
        except (OSError, ValueError):
            raise EverybertError(f"{index.parent} has no {name}, which belongs to its checkpoint") from None
    tensors = {}
    for name, entry in entries.items():
        theirs = renamed(name)
        if theirs is None or entry.dtype not in DTYPES:
            continue
        whole = entry.size == math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        if entry.sliced or entry.shard >= shards or not whole or entry.offset + entry.size > len(data[entry.shard]):
            raise _damaged(index, f"{name} is not where it should be")
        raw = data[entry.shard][entry.offset : entry.offset + entry.size]
        array = np.frombuffer(raw, DTYPES[entry.dtype]).reshape(entry.shape)
        # TensorFlow multiplies by W, torch by its transpose.
        tensors[theirs] = np.ascontiguousarray(array.T if name.endswith("/kernel") else array)
    return tensors


def renamed(name: str) -> str | None:
    """`bert/encoder/layer_0/…/kernel` → `bert.encoder.layer.0.….weight`; None for the optimizer's variables."""
    if name.endswith(("/adam_m", "/adam_v")) or not name.startswith(("bert/", "cls/")):
        return None
    name = re.sub(r"layer_(\d+)", r"layer.\1", name).replace("/", ".")
    name = re.sub(r"\.(kernel|gamma|output_weights)$", ".weight", name)
    name = re.sub(r"\.(beta|output_bias)$", ".bias", name)
    return name + ".weight" if name.endswith("_embeddings") else name


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────


def _entries(path: Path) -> tuple[dict[str, Entry], int]:
    """Every tensor's entry, and the number of data files."""
    if not FOOTER <= path.stat().st_size <= JSON_LIMIT:
        raise _damaged(path, "its size is not an index's")
    table = path.read_bytes()
    footer = table[-FOOTER:]
    if int.from_bytes(footer[-8:], "little") != MAGIC:
        raise _damaged(path, "it does not end as an index does")
    at, handle = 0, [0] * 4
    for i in range(4):  # offset and size of the metaindex block, then of the index block
        handle[i], at = _varint(footer, at)
    entries: dict[str, Entry] = {}
    shards = 0
    for _, where in _block(path, table, handle[2], handle[3]):
        offset, after = _varint(where, 0)
        size, _ = _varint(where, after)
        for key, value in _block(path, table, offset, size):
            if not key:  # the header
                fields = dict(_fields(value))
                shards = _number(fields.get(1, 1))
                if fields.get(2, 0) != 0 or not 1 <= shards <= 1000:
                    raise _damaged(path, "it is big-endian or has too many data files")
            else:
                entries[key.decode("utf-8")] = _entry(value)
    return entries, shards


def _block(path: Path, table: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of one block: each key shares its first `shared` bytes with the one before."""
    block, trailer = table[offset : offset + size], table[offset + size : offset + size + 5]
    if len(block) != size or len(trailer) != 5 or trailer[0] != 0:
        raise _damaged(path, "a block is cut or compressed")
    if _masked_crc(block + trailer[:1]) != int.from_bytes(trailer[1:], "little"):
        raise _damaged(path, "a checksum differs")
    restarts = int.from_bytes(block[-4:], "little")
    end, at, key = size - 4 * (restarts + 1), 0, b""
    while at < end:
        shared, at = _varint(block, at)
        fresh, at = _varint(block, at)
        length, at = _varint(block, at)
        if shared > len(key) or at + fresh + length > end:
            raise _damaged(path, "an entry is cut")
        key = key[:shared] + block[at : at + fresh]
        at += fresh + length
        yield key, block[at - length : at]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a number of seven bits per byte, low bits first; returns the number and the position after it."""
    value = 0
    for shift in range(0, 64, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is too long")


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """A protocol buffer's (field number, value) pairs."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
        else:
            length = {1: 8, 5: 4}.get(kind)
            if length is None:
                length, at = _varint(message, at)
            if at + length > len(message) or kind not in (1, 2, 5):
                raise ValueError("a field is cut")
            yield tag >> 3, message[at : at + length]
            at += length


def _entry(message: bytes) -> Entry:
    """A BundleEntryProto."""
    only = dict(_fields(message))
    dims = [value for number, value in _fields(_bytes(only.get(2, b""))) if number == 2]
    shape = tuple(_number(dict(_fields(_bytes(dim))).get(1, 0)) for dim in dims)
    dtype, shard, offset, size = (_number(only.get(number, 0)) for number in (1, 3, 4, 5))
    return Entry(dtype, shape, shard, offset, size, sliced=7 in only)


def _number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a number was expected")
    return value


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("bytes were expected")
    return value


def _crc_table() -> list[int]:
    table = []
    for n in range(256):
        for _ in range(8):
            n = (n >> 1) ^ 0x82F63B78 if n & 1 else n >> 1
        table.append(n)
    return table


CRC = _crc_table()


def _masked_crc(data: bytes) -> int:
    """CRC-32C (Castagnoli), rotated and shifted as LevelDB stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _damaged(path: Path, why: str) -> EverybertError:
    return EverybertError(f"{path} is not a readable TensorFlow checkpoint ({why}); download it again")


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder with bert_config.json and bert_model.ckpt.*")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    given = parser.parse_args()
    try:
        convert(given.folder, given.out)
    except (EverybertError, OSError) as error:
        raise SystemExit(str(error)) from None
    print(f"{given.out} written")


if __name__ == "__main__":
    main()
