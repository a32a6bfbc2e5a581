"""Hostile model folders, opened one after the other in one process. Called by test_hostile.py: hostile.py GOOD SCRATCH

Prints a JSON line for each: what was said, how much the peak of memory rose (kB) and the seconds it took.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from everybert.errors import EverybertError
from everybert.inference.model import load

DEEP = "[" * 300_000


def header(**tensors: dict) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def edited(name: str, edit: Callable[[dict], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        raw = json.loads((folder / name).read_text("utf-8"))
        edit(raw)
        (folder / name).write_text(json.dumps(raw), encoding="utf-8")

    return change


def setting(name: str, **changes: object) -> Callable[[Path], None]:
    return edited(name, lambda raw: raw.update(changes))


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def link(name: str, target: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return change


def pipe(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def shards(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        index = {"weight_map": {f"tensor.{i}": name for i, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    return change


def vocabulary(**words: int) -> Callable[[Path], None]:
    return edited("tokenizer.json", lambda raw: raw["model"]["vocab"].update(words))


def added(number: int) -> Callable[[Path], None]:
    more = {"id": number, "content": "[BOMB]"}
    return edited("tokenizer.json", lambda raw: raw["added_tokens"].append(raw["added_tokens"][0] | more))


def many_tensors(folder: Path) -> None:
    """A header of 30 MB that describes no data."""
    entry = '"%d": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    body = ("{" + ", ".join(entry % i for i in range(500_000)) + "}").encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(body)) + body)


def no_numbers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.embeddings.LayerNorm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")


EXTRAS = (
    '"encoder": []',
    '"encoder": {"dropout": "x"}',
    '"encoder": {"dropout": NaN}',
    '"encoder": {"classifier_form": 7}',
    '"encoder": {"layers": 99}',
    '"feature_head": {}',
    '"feature_head": {"name": "x", "outputs": 2, "layers": "last", "pool": "mean"}',
    '"feature_head": 7',
    '"task": "classify"',
    '"task": {"task": ["classify"]}',
    '"head": {}',
    '"adapters": {"x": 7}',
)
HUGE = {"dtype": "F32", "shape": [2**30, 2**30], "data_offsets": [0, 2**62]}
CASES: dict[str, Callable[[Path], None]] = {
    "vocabulary of 2^60": setting("config.json", vocab_size=2**60),
    "hidden size of 2^60": setting("config.json", hidden_size=2**60, num_attention_heads=1),
    "positions of 2^60": setting("config.json", max_position_embeddings=2**60),
    "layers of 2^60": setting("config.json", num_hidden_layers=2**60),
    "a label of number 2^60": setting("config.json", id2label={str(2**60): "a"}, architectures=["BertForX"]),
    "labels without end": setting("config.json", id2label={str(i): "x" for i in range(300_000)}),
    "sizes that are infinite": text("config.json", '{"model_type": "bert", "hidden_size": 1e999}'),
    "a deep config": text("config.json", DEEP),
    "a config of 80 MB": text("config.json", '{"a": "' + "x" * (80 << 20) + '"}'),
    "a header of 2^60 bytes": text("model.safetensors", struct.pack("<Q", 2**60) + b"{}"),
    "a tensor of 2^60 numbers": text("model.safetensors", header(a=HUGE) + b"\0" * 64),
    "a deep header": text("model.safetensors", struct.pack("<Q", 300_000) + DEEP.encode()),
    "half a million tensors": many_tensors,
    "a shard above the folder": shards("../outside.safetensors"),
    "a shard by its full path": shards("/etc/passwd"),
    "a shard in a folder above": shards("part.safetensors/../../outside.safetensors"),
    "a deep index": lambda f: (shards("x")(f), text("model.safetensors.index.json", DEEP)(f)),
    "weights that are a link": link("model.safetensors", "/etc/passwd"),
    "weights that are a pipe": pipe("model.safetensors"),
    "a config that is a link": link("config.json", "/etc/passwd"),
    "a tokenizer that is a link": link("tokenizer.json", "/etc/passwd"),
    "a tokenizer that is a pipe": pipe("tokenizer.json"),
    "tokenizer settings that are a link": link("tokenizer_config.json", "/etc/passwd"),
    "tokenizer settings that are a pipe": pipe("tokenizer_config.json"),
    "a deep tokenizer": text("tokenizer.json", DEEP),
    "deep tokenizer settings": text("tokenizer_config.json", DEEP),
    "a tokenizer that is no object": text("tokenizer.json", "[]"),
    "a word of number 2^31": vocabulary(bomb=2**31 - 8),
    "an added word of number 2^32": added(2**32 - 8),
    "extras that are deep": text("everybert.json", DEEP),
    "extras that are a pipe": pipe("everybert.json"),
    **{f"extras with {more}": text("everybert.json", f'{{"version": 1, {more}}}') for more in EXTRAS},
    "weights that are no numbers": no_numbers,
    "extras that are a link": link("everybert.json", "/etc/passwd"),
    "a list that is deep": text("manifest.json", DEEP),
    "a list that leads out": text("manifest.json", '{"everybert": 1, "files": {"../x": {"size": 1, "sha256": ""}}}'),
    "modules that are deep": text("modules.json", DEEP),
    "a module above the folder": text(
        "modules.json", '[{"path": "", "type": "a.Transformer"}, {"path": "../..", "type": "a.Pooling"}]'
    ),
    "a pooling that is a pipe": lambda f: (
        text("modules.json", '[{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}]')(f),
        pipe("1_Pooling/config.json")(f),
    ),
}


def peak() -> int:
    """Kilobytes at most so far; getrusage would count the process that this one was forked from too."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+)", status.read_text("utf-8"))[1])  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def use(folder: Path) -> str:
    """What a user does first."""
    model = load(folder, device="cpu")
    model.embed(["the dog bomb"])
    model.tokenizer.continues_word()
    return "loaded"


def main(good: Path, scratch: Path) -> None:
    use(good)
    for name, spoil in CASES.items():
        folder = scratch / "model"
        shutil.copytree(good, folder)
        (folder / "manifest.json").unlink(missing_ok=True)
        spoil(folder)
        before, began = peak(), time.monotonic()
        try:
            said, kind = use(folder), "loaded"
        except EverybertError as error:
            said, kind = str(error), "refused"
        except Exception as error:
            said, kind = repr(error)[:300], "raised"
        line = {"case": name, "kind": kind, "said": said, "rose": peak() - before, "took": time.monotonic() - began}
        print(json.dumps(line), flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
