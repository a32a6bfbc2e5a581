"""Weights at a byte a parameter: `model.int8.safetensors`, matrices and tables as int8 with an fp32 scale a row.

A tensor NAME of int8 has its scales beside it as NAME.scale; its values are scale · byte. Vectors and matrices of a few
rows stay as they are. everybert.json says that the folder is quantised and how. The file has a name of its own so that
a library that knows nothing of the scales finds no weights, rather than wrong ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from everybert.errors import EverybertError
from everybert.files import read_json
from everybert.model.int8 import dequantise_rows, quantise_rows
from everybert.store.weights import INT8, Weights, open_safetensors

SCALE = ".scale"
KEY = "quantisation"
HOW = {"kind": "int8", "scales": "row", "symmetric": True}
"""What everybert.json says under "quantisation"."""
FEW_ROWS = 8
"""Matrices of fewer rows (segments, the labels of a head) cost nothing as they are."""


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


def open_quantised(path: Path) -> Weights:
    """The file's tensors, matrices in fp32 as they are asked for."""
    _check_described(path.parent)
    file = open_safetensors(path)
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    kinds = {name: (tuple(x.get_shape()), x.get_dtype()) for name, x in slices.items()}
    scaled = {name for name, (_, dtype) in kinds.items() if dtype == "I8"}
    for name in sorted(scaled):
        _check_scales(path, name, kinds)
    left = {name for name in kinds if name.endswith(SCALE) and name.removesuffix(SCALE) not in scaled}
    if left:
        raise EverybertError(f"{path}: {min(left)} belongs to no int8 matrix; download or quantise it again")
    scales = {name: _scales(path, name, file.get_tensor(name + SCALE)) for name in scaled}

    def get(name: str) -> Tensor:
        value = file.get_tensor(name)
        return dequantise_rows(value, scales[name]) if name in scaled else value

    return Weights({name: shape for name, (shape, _) in kinds.items() if not name.endswith(SCALE)}, get)


def is_quantised(folder: str | Path) -> bool:
    """Whether a folder's weights are stored as int8."""
    return (Path(folder) / INT8).is_file()


def _check_described(folder: Path) -> None:
    found = read_json(folder / "everybert.json")
    how = found.get(KEY) if isinstance(found, dict) else None
    if how != HOW:
        said = "does not say how" if how is None else "says in a way that this version does not know how"
        raise EverybertError(f"{folder}: everybert.json {said} {INT8} is quantised; restore it, or upgrade everybert")


def _check_scales(path: Path, name: str, kinds: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """By the header alone: a matrix, and one fp32 scale for each of its rows."""
    shape, _ = kinds[name]
    found = kinds.get(name + SCALE)
    if len(shape) != 2:
        raise EverybertError(f"{path}: {name} is int8 of shape {shape}, not a matrix; do not use this file")
    if found is None:
        raise EverybertError(f"{path}: {name} is int8 without its scales; download or quantise it again")
    if found != ((shape[0],), "F32"):
        raise EverybertError(
            f"{path}: {name + SCALE} is {found[1]} of shape {found[0]}, not F32 of ({shape[0]},); do not use this file"
        )


def _scales(path: Path, name: str, scale_O: Tensor) -> Tensor:
    if not bool((torch.isfinite(scale_O) & (scale_O > 0)).all()):
        raise EverybertError(f"{path}: {name + SCALE} has scales that are not positive numbers; do not use this file")
    return scale_O
