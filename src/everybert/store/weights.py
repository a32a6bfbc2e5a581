"""A folder's weights, opened without trust: names and shapes first, tensors one at a time, nothing unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from everybert.errors import EverybertError
from everybert.files import inside, read_json

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
INT8 = "model.int8.safetensors"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
HEADER_LIMIT = 2 << 20
"""Bytes of the largest list of tensors that is read: some 20,000 tensors, where a large encoder has 400."""
OTHERS = ("tf_model.h5", "flax_model.msgpack", "model.onnx")


@dataclass(frozen=True)
class Weights:
    """The tensors of a folder, read when asked for."""

    shapes: dict[str, tuple[int, ...]]
    """Every tensor's name and shape, known before any of it is in memory."""
    get: Callable[[str], Tensor]
    """A tensor by name: mapped from the file where the format allows it."""


def open_weights(folder: Path, allow_pickle: bool = False) -> Weights:
    """The folder's weights: safetensors, whole, in shards or int8; pickles by the restricted loader, if allowed."""
    if _has(folder, SAFE):
        return _merged(folder, [SAFE], _open_safetensors)
    if _has(folder, SAFE_INDEX):
        return _merged(folder, _shards(folder, SAFE_INDEX, ".safetensors"), _open_safetensors)
    if _has(folder, INT8):
        from everybert.store.quantized import open_quantised

        return _merged(folder, [INT8], open_quantised)
    pickled = next((name for name in (PICKLE, PICKLE_INDEX) if _has(folder, name)), None)
    if pickled and not allow_pickle:
        raise EverybertError(
            f"{folder} has only {pickled}, a pickle, which can hide code; convert it to safetensors, or pass "
            "allow_pickle=True to read it with torch.load(weights_only=True)"
        )
    if pickled:
        files = [PICKLE] if pickled == PICKLE else _shards(folder, PICKLE_INDEX, ".bin")
        return _merged(folder, files, _open_pickle)
    refuse_tensorflow(folder)
    if other := next((name for name in OTHERS if _has(folder, name)), None):
        raise EverybertError(f"{folder} has only {other}; convert it to {SAFE} with transformers' save_pretrained")
    raise EverybertError(f"{folder} has no weights ({SAFE}); download the folder again, whole")


def save_weights(folder: Path, tensors: Mapping[str, Tensor], int8: bool = False) -> dict[str, Any]:
    """Write the weights; returns what everybert.json must say of them."""
    file, said = folder / SAFE, {}
    if int8:
        from everybert.store import quantized

        file, tensors, said = folder / INT8, quantized.quantise_tensors(tensors), {quantized.KEY: quantized.HOW}
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise EverybertError(f"{file} could not be written ({error})") from None
    return said


def refuse_tensorflow(folder: Path) -> None:
    """Refuse a folder that holds a TensorFlow checkpoint, such as Google's original BERT, with the command to run."""
    if any(folder.glob("*.ckpt*.index")):
        raise EverybertError(
            f"{folder} is a TensorFlow checkpoint; convert it with "
            f"`python contrib/tensorflow_checkpoint.py {folder} --out NEW_FOLDER` from the source of everybert"
        )


def _has(folder: Path, name: str) -> bool:
    """Whether the folder has that file; a link that leads out of it is refused."""
    try:
        return inside(folder, name).is_file()
    except FileNotFoundError:
        return False


def _merged(folder: Path, files: list[str], opener: Callable[[Path], Weights]) -> Weights:
    shards = []
    for name in files:
        try:
            shards.append(opener(inside(folder, name)))
        except FileNotFoundError:
            raise EverybertError(f"{folder} lacks the shard {name} of its weights; download it again") from None
    owner = {name: shard for shard in shards for name in shard.shapes}
    shapes = {name: shard.shapes[name] for name, shard in owner.items()}
    return Weights(shapes, lambda name: owner[name].get(name))


def _shards(folder: Path, index: str, ending: str) -> list[str]:
    """The file names of an index: plain names in the folder itself, nothing else."""
    found = read_json(inside(folder, index))
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise EverybertError(f"{folder / index} has no weight_map; download it again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if "/" in name or "\\" in name or not name.endswith(ending):
            raise EverybertError(
                f"{folder / index} names a shard {name!r} that is no {ending} file beside it; do not use it"
            )
    return names


def open_safetensors(path: Path) -> Any:
    """A safetensors file, once its header is known to be of a reasonable size; its tensors are still on disk."""
    try:
        with path.open("rb") as raw:
            size = int.from_bytes(raw.read(8), "little")
        if size > HEADER_LIMIT:
            raise ValueError(f"its header would have {size:,} bytes")
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise EverybertError(f"{path} is truncated or damaged ({_brief(error)}); download or copy it again") from None


def _open_safetensors(path: Path) -> Weights:
    file = open_safetensors(path)
    return Weights({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}, file.get_tensor)  # noqa: SIM118


def _open_pickle(path: Path) -> Weights:
    """torch's restricted loader: tensors and plain containers, no code."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises many kinds for a damaged or disallowed pickle
        raise EverybertError(f"{path} is damaged or holds more than tensors ({_brief(error)}); do not use it") from None
    if not isinstance(found, dict):
        raise EverybertError(f"{path} holds no dictionary of tensors; convert it with transformers' save_pretrained")
    tensors = {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, Tensor)}
    for name, value in tensors.items():
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise EverybertError(
                f"{path}: {name} claims the shape {tuple(value.shape)} without the data; do not use it"
            )
    return Weights({name: tuple(value.shape) for name, value in tensors.items()}, tensors.__getitem__)


def _brief(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
