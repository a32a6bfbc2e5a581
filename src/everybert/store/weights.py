"""The weights of a folder: safetensors (whole, in shards, or int8) and, on request, pickles by the restricted loader.

Folders are not trusted: names and shapes are read first, tensors one at a time, and no code is executed.

`model.int8.safetensors` holds one byte per parameter. A matrix NAME is stored as int8 with one fp32 scale per row in
NAME.scale; its values are scale · byte. Vectors and matrices of few rows are stored unchanged, and everybert.json
records the format. The file has its own name so that a library without support for it finds no weights rather than
wrong ones.
"""

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from everybert.errors import EverybertError, one_line
from everybert.files import inside, read_json
from everybert.model.int8 import dequantise_rows, quantise_rows

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
INT8 = "model.int8.safetensors"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
OTHERS = ("tf_model.h5", "flax_model.msgpack", "model.onnx", "onnx/model.onnx")
HEADER_LIMIT = 2 << 20
"""Size in bytes of the largest safetensors header that is read: about 20,000 tensors; a large encoder has 400."""
QUANTISATION = {"quantisation": {"kind": "int8", "scales": "row", "symmetric": True}}
"""The entry of everybert.json for a folder with int8 weights."""
SCALE = ".scale"
FEW_ROWS = 8
"""Matrices with fewer rows (segments, the labels of a head) are not quantised."""


@dataclass(frozen=True)
class Weights:
    """The tensors of a folder, read on demand."""

    shapes: dict[str, tuple[int, ...]]
    """The shape of every tensor by name, known before any tensor is in memory."""
    get: Callable[[str], Tensor]
    """Read a tensor by name; memory-mapped where the format allows it."""


def open_weights(folder: Path, allow_pickle: bool = False) -> Weights:
    """Open the weights of a folder, in the first format found: safetensors, int8, pickles if allowed."""
    if _has(folder, SAFE):
        return _merge(folder, [SAFE], _open_safetensors)
    if _has(folder, SAFE_INDEX):
        return _merge(folder, _shards(folder, SAFE_INDEX, ".safetensors"), _open_safetensors)
    if _has(folder, INT8):
        return _merge(folder, [INT8], _open_int8)
    pickled = next((name for name in (PICKLE, PICKLE_INDEX) if _has(folder, name)), None)
    if pickled and not allow_pickle:
        raise EverybertError(
            f"{folder} has only {pickled}, a pickle, which can hide code; if you trust its source, give "
            "allow_pickle=True: torch's restricted reader (weights_only) then reads it"
        )
    if pickled:
        files = [PICKLE] if pickled == PICKLE else _shards(folder, PICKLE_INDEX, ".bin")
        return _merge(folder, files, _open_pickle)
    refuse_tensorflow(folder)
    if other := next((name for name in OTHERS if _has(folder, name)), None):
        raise EverybertError(f"{folder} has only {other}; convert it to {SAFE} with transformers' save_pretrained")
    remedy = "download the whole folder; of a hub model that has only .bin files, with allow_pickle=True"
    raise EverybertError(f"{folder} has no weights ({SAFE}); {remedy}")


def save_weights(folder: Path, tensors: Mapping[str, Tensor], int8: bool = False) -> dict[str, Any]:
    """Write the weights; returns the entries that everybert.json needs for them."""
    file = folder / (INT8 if int8 else SAFE)
    save_file(quantise_tensors(tensors) if int8 else dict(tensors), file, metadata={"format": "pt"})
    return QUANTISATION if int8 else {}


def refuse_tensorflow(folder: Path) -> None:
    """Refuse a folder that holds a TensorFlow checkpoint, such as Google's original BERT, with the command to run."""
    if any(folder.glob("*.ckpt*.index")):
        raise EverybertError(
            f"{folder} is a TensorFlow checkpoint; convert it with "
            f"`python contrib/tensorflow_checkpoint.py {folder} --out NEW_FOLDER` from the source of everybert"
        )


def _has(folder: Path, name: str) -> bool:
    try:
        return inside(folder, name).is_file()
    except FileNotFoundError:
        return False


def _merge(folder: Path, files: list[str], opener: Callable[[Path], Weights]) -> Weights:
    shards = []
    for name in files:
        try:
            shards.append(opener(inside(folder, name)))
        except FileNotFoundError:
            raise EverybertError(f"{folder} lacks {name}, a part of its weights; download the whole folder") from None
    owner = {name: shard for shard in shards for name in shard.shapes}
    return Weights({n: shard.shapes[n] for n, shard in owner.items()}, lambda name: owner[name].get(name))


def _shards(folder: Path, index: str, ending: str) -> list[str]:
    """The file names of an index; only files in the folder itself are accepted."""
    weight_map = read_json(inside(folder, index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise EverybertError(f"{folder / index} has no weight_map; restore it")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if "/" in name or "\\" in name or not name.endswith(ending):
            raise EverybertError(f"{folder / index} names {name!r}, no {ending} file beside it; do not use it")
    return names


# ── formats ─────────────────────────────────────────────────────────────────────────────────────────────────


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file after checking the size of its header; tensors stay on disk."""
    try:
        with path.open("rb") as raw:
            size = int.from_bytes(raw.read(8), "little")
        if size > HEADER_LIMIT:
            raise ValueError(f"its header would have {size:,} bytes")
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise EverybertError(f"{path} is truncated or damaged ({one_line(error)}); download or copy it again") from None


def read_tensors(folder: Path, name: str, allow_pickle: bool = False) -> dict[str, Tensor]:
    """All tensors of a small safetensors file or, if that is allowed, of the pytorch_model.bin in its place."""
    pickled = str(PurePosixPath(name).with_name("pytorch_model.bin"))
    if _has(folder, name):
        weights = _open_safetensors(inside(folder, name))
    elif not _has(folder, pickled):
        raise EverybertError(f"{folder} has no {name}; copy or download the whole folder")
    elif not allow_pickle:
        raise EverybertError(f"{folder} has no {name}, only {pickled}, a pickle; if you trust it, allow_pickle=True")
    else:
        weights = _open_pickle(inside(folder, pickled))
    return {key: check_finite(weights.get(key), f"{folder / name}: {key}") for key in weights.shapes}


def check_finite(tensor: Tensor, what: str) -> Tensor:
    """The tensor itself; numbers that are not finite are refused."""
    if tensor.is_floating_point() and not bool(tensor.sum(dtype=torch.float32).isfinite()):
        raise EverybertError(f"{what} holds numbers that are not finite; use another copy of the model")
    return tensor


def _open_safetensors(path: Path) -> Weights:
    file = open_safetensors(path)
    return Weights({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}, file.get_tensor)  # noqa: SIM118


def _open_pickle(path: Path) -> Weights:
    """Read a pickle with torch's restricted loader: tensors and plain containers, no code."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises many types of errors for a damaged or disallowed pickle
        raise EverybertError(f"{path} is damaged or has more than tensors ({one_line(error)}); do not use it") from None
    if not isinstance(content, dict):
        raise EverybertError(f"{path} holds no dictionary of tensors; convert it with transformers' save_pretrained")
    tensors = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
    for name, value in tensors.items():
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise EverybertError(f"{path}: {name} lacks data for its shape {tuple(value.shape)}; do not use it")
    return Weights({name: tuple(value.shape) for name, value in tensors.items()}, tensors.__getitem__)


# ── int8 ────────────────────────────────────────────────────────────────────────────────────────────────────


def quantise_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with every matrix as int8 and its scales."""
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if not bool(value.isfinite().all()):
            raise EverybertError(f"{name} holds numbers that are not finite; the model cannot be quantised")
        if value.ndim == 2 and len(value) >= FEW_ROWS:
            out[name], out[name + SCALE] = quantise_rows(value)
        else:
            out[name] = value
    return out


def _open_int8(path: Path) -> Weights:
    """Open an int8 file; matrices are converted to fp32 when they are read. Shapes are checked before data is read."""
    if not QUANTISATION.items() <= read_json(path.parent / "everybert.json").items():
        raise EverybertError(
            f"{path.parent}: everybert.json does not describe {INT8} as this version expects; restore it, or upgrade"
        )
    file = open_safetensors(path)
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    kinds = {name: (tuple(x.get_shape()), x.get_dtype()) for name, x in slices.items()}
    scales: dict[str, Tensor] = {}
    for name in [name for name, (_, dtype) in kinds.items() if dtype == "I8"]:
        shape = kinds[name][0]
        if len(shape) == 2 and kinds.get(name + SCALE) == ((shape[0],), "F32"):
            scales[name] = file.get_tensor(name + SCALE)
        if name not in scales or not bool((scales[name].isfinite() & (scales[name] > 0)).all()):
            raise EverybertError(f"{path}: {name} is no int8 matrix with one positive fp32 scale per row; requantise")

    def get(name: str) -> Tensor:
        value = file.get_tensor(name)
        return dequantise_rows(value, scales[name]) if name in scales else value

    scale_names = {name + SCALE for name in scales}
    return Weights({name: shape for name, (shape, _) in kinds.items() if name not in scale_names}, get)
