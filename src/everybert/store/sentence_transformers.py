"""The module files of sentence-transformers: how a folder's token vectors become one vector per text.

modules.json lists the modules of a folder in the order in which they are applied:

- one vector per text: the encoder, Pooling, then Dense, LayerNorm and Normalize; a StaticEmbedding has the mean;
- sparse vectors: the masked language model and SpladePooling, or a SparseStaticEmbedding alone;
- one vector per token (ColBERT, PyLate): the encoder, Dense and Normalize, and MultiVectorMask;
- by a Router: several of these, each for a kind of texts (query, document).

What this library does not compute is refused when the folder is loaded. `read_pooling` and `write_pooling` are the only
code that reads and writes these files; those that were read are written as they were.

Legend: N texts (or tokens), H hidden, L layers.
"""

import json
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.files import inside, read_json, write_json
from everybert.model.pooling import MODES, check_mode
from everybert.store.weights import read_tensors

FLAGS = {mode: mode if "token" in mode else f"{mode}_tokens" for mode in MODES} | {"cls": "cls_token"}
"""pooling_mode_… : the names of the modes in older 1_Pooling/config.json files, which have a flag for each."""
PACKAGES = ("sentence_transformers.", "pylate.")
"""Whose modules are known. Any other is code that a folder brings along."""
MODULE = "sentence_transformers.models."
VECTOR, TOKENS = "sentence_embedding", "token_embeddings"
MULTI = ("MultiVectorEncoder", "ColBERT")
"""model_type in config_sentence_transformers.json: of sentence-transformers, and of PyLate."""
PYLATE = ["query_prefix", "document_prefix", "query_length", "document_length", "skiplist_words"]
PYLATE += ["do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens"]
"""Fields there that PyLate writes: such folders expand queries unless they say otherwise."""
ENCODER_MODULES = ("Transformer", "MLMTransformer", "StaticEmbedding", "SparseStaticEmbedding")
ENCODERS = [f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert")]
ENCODERS += ["sentence_xlm-roberta_config.json"]
"""The settings of the encoder, under the names of several versions."""
UNIT = partial(F.normalize, dim=-1)
"""The module Normalize: vectors of length 1."""


@dataclass(frozen=True)
class MultiVector:
    """One vector per token (ColBERT: Khattab & Zaharia 2020)."""

    skip: tuple[str, ...] = ()
    """Tokens that have no vector in documents."""
    skip_in: tuple[str, ...] = ("document",)
    """query, document, or both."""
    query_size: int | None = None
    document_size: int | None = None
    """The longest sequences; None: as long as the encoder's."""
    expansion: Mapping[str, Any] | None = None
    """Queries are filled up to a `length` with a `token` (None: the mask token), which tokens `attend` to or not; with
    the `strategy` fixed, longer ones are cut."""
    prefixes: Mapping[str, str] = field(default_factory=dict)
    """What is put before query and document: one token, if the vocabulary has it, else text."""
    per_token: bool = False
    """Whether scores are the mean, not the sum, over the tokens of a query."""


@dataclass(frozen=True)
class Pooling:
    """How texts become vectors. Without sentence-transformers files: the mean over all tokens."""

    modes: tuple[str, ...] = ("mean",)
    """Several modes are concatenated."""
    normalize: bool = False
    """Whether the last module makes vectors of length 1."""
    size: int | None = None
    """The longest sequence, special tokens included; None means the model's window."""
    lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts to put before every text, by name."""
    default_prompt: str | None = None
    include_prompt: bool = True
    """Whether the tokens of a prompt are part of the pooling."""
    layers: tuple[float, ...] = ()
    """The token vectors are the mean of the L + 1 hidden states with these weights; empty: the last state."""
    splade: str | None = None
    """relu or log1p_relu: pooled are the logits z of the masked language model, as log(1 + relu(z)), or that twice;
    tokens: a weight per token (SparseStaticEmbedding)."""
    multi: MultiVector | None = None
    """If there is no pooling, but a vector for each token."""
    modules: tuple[Callable[[Tensor], Tensor], ...] = field(default=(), repr=False, compare=False)
    """What follows the pooling, before the last Normalize; or what makes the vector of each token."""
    outer: int | None = None
    """The length of a vector after these modules; None if that of the pooling."""
    truncate: int | None = None
    """How many leading dimensions are kept, after the normalisation; of sparse vectors the largest. None keeps all."""
    similarity: str = "cosine"
    """By what vectors are compared, as sentence-transformers calls it."""
    activation: str | None = None
    """That of a CrossEncoder's scores; its files say nothing about vectors."""
    place: str = ""
    """Where the encoder is in the folder, if a Router has several."""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """The files that were read, by name; none in a folder without sentence-transformers files."""

    @property
    def published(self) -> bool:
        """Whether the folder has sentence-transformers files that say how vectors are made."""
        return bool(self.files) and self.activation is None

    @property
    def vectors(self) -> str:
        """What the folder makes of a text: a vector (embed), a sparse one (sparse), or one per token (multi)."""
        return "multi" if self.multi else "sparse" if self.splade else "embed"

    def prompt(self, name: str | None) -> str:
        """The text of a named prompt; None is the folder's default."""
        name = self.default_prompt if name is None else name
        if name is not None and name not in self.prompts:
            has = ", ".join(self.prompts) or "none"
            raise EverybertError(f"this model has no prompt {name!r} (it has {has}); or put it before your texts")
        return "" if name is None else self.prompts[name]

    def width(self, hidden_size: int) -> int:
        """The length of a vector."""
        whole = self.outer or len(self.modes) * hidden_size
        return min(whole, self.truncate or whole)

    def finish(self, x_NH: Tensor) -> Tensor:
        """(N, modes·H) → (N, width): the modules after the pooling, in their order."""
        for module in self.modules:
            x_NH = module(x_NH)
        x_NH = UNIT(x_NH) if self.normalize else x_NH
        return x_NH[..., : self.truncate]


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────


def _activation(about: dict[str, Any], modules: list[Any], folder: Path) -> str | None:
    """The activation of a reranker that CrossEncoder wrote as one module; None for any other folder."""
    if about.get("model_type") != "CrossEncoder":
        return None
    if len(modules) != 1 or about.get("default_prompt_name") is not None:
        raise EverybertError(f"{folder}: a CrossEncoder with further modules or a prompt; everybert reads neither")
    return str(about.get("activation_fn") or "torch.nn.Sigmoid")


def _settings(folder: Path, files: dict[str, bytes], name: str, kind: type = dict) -> Any:
    """A JSON file of a folder, whose bytes are kept in `files`; empty if the folder lacks it."""
    try:
        path = inside(folder, name)
    except FileNotFoundError:
        return kind()
    content = read_json(path, kind=kind)
    files[name] = path.read_bytes()
    return content


def routes_of(folder: Path, settings: Callable[..., Any] | None = None) -> dict[str, list[Any]]:
    """The modules of each route, its own in place of the Router; the default is first. Without a Router: one, ""."""
    settings = settings or partial(_settings, folder, {})
    modules = settings("modules.json", list)
    at = next((i for i, module in enumerate(modules) if _kind_and_path(module)[0] == "Router"), None)
    if at is None:
        return {"": modules}
    below = f"{_kind_and_path(modules[at])[1]}/".removeprefix("/")
    about = settings(f"{below}router_config.json")
    try:
        types, structure, how = (about[part] for part in ("types", "structure", "parameters"))
        entries = {name: {"type": kind, "path": below + name} for name, kind in types.items()}
        named = {route: [entries[name] for name in names] for route, names in structure.items()}
        first = "text" if "text" in named else how["default_route"]
        if how.get("route_mappings") or "" in named:
            raise KeyError
        return {route: [*modules[:at], *named[route], *modules[at + 1 :]] for route in (first, *named)}
    except (AttributeError, KeyError, TypeError):
        raise _unsupported(folder, "have a Router that chooses by more than the task, or without a default") from None


def encoder_folder(folder: Path, route: str | None = None) -> Path:
    """Where the encoder's files are: in the folder itself or below it, as in a Router or an older 0_Transformer."""
    if (folder / "config.json").is_file() or not (folder / "modules.json").is_file():
        return folder
    first, *others = (routes := routes_of(folder))
    kind, path = _kind_and_path((routes[route or first] or [None])[0])
    if others and route is None:
        raise EverybertError(f"{folder} is a Router of several encoders; give the folder of one, as {folder / path}")
    if kind not in ENCODER_MODULES:
        raise _unsupported(folder, f"begin with a {kind or 'nameless'} module, not with an encoder")
    return folder / path if folder.resolve() in (folder / path).resolve().parents else folder


def _kind_and_path(module: Any) -> tuple[str, str]:
    """The class and the folder of an entry of modules.json; no class if it is not sentence-transformers' own."""
    name, path = (str(module.get(key, "")) for key in ("type", "path")) if isinstance(module, dict) else ("", "")
    return (name.rpartition(".")[2] if name.startswith(PACKAGES) else ""), path


def _unsupported(folder: Path, why: str) -> EverybertError:
    return EverybertError(f"{folder}: its sentence-transformers files {why}, which everybert does not support")


def read_pooling(folder: Path, hidden_size: int, allow_pickle: bool = False, route: str | None = None) -> Pooling:
    """The settings in modules.json and the files it names, for a route of its Router; the defaults without them."""
    files: dict[str, bytes] = {}
    settings = partial(_settings, folder, files)
    routes = routes_of(folder, settings)
    modules, inner = routes[route or next(iter(routes))], encoder_folder(folder, route)
    more = settings("config_sentence_transformers.json")
    if (activation := _activation(more, modules, folder)) is not None:
        settings(ENCODERS[0])
        return Pooling(activation=activation, files=files)
    if not modules:
        return Pooling()
    level = TOKENS if more.get("model_type") in MULTI else VECTOR
    modes: tuple[str, ...] = ()
    layers: tuple[float, ...] = ()
    after: list[Any] = []
    include_prompt, width, splade, mask = True, hidden_size, None, None
    for number, module in enumerate(modules):
        kind, path = _kind_and_path(module)
        at = f"{path}/".removeprefix("/")
        about = settings(f"{at}config.json") if number else {}
        usual = VECTOR if kind == "Normalize" else level
        if number and {about.get(f"module_{end}put_name") or usual for end in ("in", "out")} != {level}:
            other = "tokens" if level == VECTOR else "texts"
            raise _unsupported(folder, f"have a {kind} that changes the vectors of {other}")
        ready = number and (modes or level == TOKENS)
        if not number and kind == "StaticEmbedding":
            modes = ("mean",)
            settings(f"{at}tokenizer.json")  # with its own truncation
        elif not number and kind == "SparseStaticEmbedding":
            settings(f"{at}config.json")
            if any((values < 0).any() for values in _tensors(folder, at, files, allow_pickle).values()):
                raise _unsupported(folder, "have weights of words below 0")
            modes, splade = ("max",), "tokens"
        elif number == 1 and kind == "WeightedLayerPooling":
            layers = _layers(about, _tensors(folder, at, files, allow_pickle), inner)
        elif number and not ready and kind == "Pooling":
            modes, include_prompt = _modes(about, folder), about.get("include_prompt") is not False
            width *= len(modes)
        elif number == 1 and len(modules) == 2 and kind == "SpladePooling" and not splade:
            strategy, splade = about.get("pooling_strategy", "max"), about.get("activation_function", "relu")
            if strategy not in ("max", "sum") or splade not in ("relu", "log1p_relu"):
                raise _unsupported(folder, f"have a SpladePooling by {strategy} of {splade}")
            modes = (strategy,)
        elif ready and kind in ("Dense", "LayerNorm"):
            tensors = _tensors(folder, at, files, allow_pickle)
            after.append(_dense(tensors, about, width) if kind == "Dense" else _layer_norm(tensors, width))
            if after[-1] is None:
                raise EverybertError(f"{folder}/{path} is a {kind} layer of an unknown form or size; restore the file")
            width = len(after[-1].keywords["weight"])
        elif ready and kind == "Normalize":
            after.append(UNIT)
        elif ready and kind == "MultiVectorMask" and not (modes or mask or about.get("keep_only_token_ids")):
            mask = about
        elif (number or kind not in ENCODER_MODULES) and not (modes and kind == "Dropout"):
            raise _unsupported(folder, f"have a {kind or 'foreign'} module in place {number}")
    if not modes and level == VECTOR:
        raise _unsupported(folder, "have no Pooling module")
    below = "" if inner == folder else f"{inner.relative_to(folder).as_posix()}/"
    encoder = _read_encoder(folder, below, settings)
    if below and "" in routes:  # a 0_Transformer is written into the folder itself, where the weights go
        files["modules.json"] = json.dumps([{**modules[0], "path": ""}, *modules[1:]], indent=2).encode()
        for old in [old for old in files if old.startswith(below)]:
            files[old.removeprefix(below)] = files.pop(old)
        below = ""
    if (encoder.get("transformer_task") == "fill-mask" or "MLM" in str(modules[0])) != (splade not in (None, "tokens")):
        raise _unsupported(folder, "pool logits by other than SpladePooling, or hidden states by it")
    multi = _multi_vector(after, mask, more, encoder, folder) if level == TOKENS else None
    normalize = multi is None and bool(after) and after[-1] is UNIT
    limit = "max_active_dims" if splade else "truncate_dim"
    prompts, default, truncate = (more.get(key) for key in ("prompts", "default_prompt_name", limit))
    if not isinstance(prompts or {}, dict) or not all(isinstance(text, str) for text in (prompts or {}).values()):
        raise _unsupported(folder, "have prompts that are not texts")
    if default is not None and default not in (prompts or {}):
        raise _unsupported(folder, "have a default prompt without a text")
    if truncate is not None and (not isinstance(truncate, int) or truncate < 1):
        raise _unsupported(folder, f"have a {limit} of {truncate!r}")
    size = encoder.get("max_seq_length")
    return Pooling(
        modes=modes,
        normalize=normalize,
        size=size if isinstance(size, int) and size > 0 else None,
        lowercase=bool(encoder.get("do_lower_case")),
        prompts={route: "" for route in routes if route} | (prompts or {}),
        default_prompt=default,
        include_prompt=include_prompt,
        layers=layers,
        splade=splade,
        multi=multi,
        modules=tuple(after[:-1] if normalize else after),
        outer=width,
        truncate=truncate,
        similarity=str(more.get("similarity_fn_name") or "cosine"),
        place=below,
        files=files,
    )


def _multi_vector(
    modules: list[Any], mask: dict[str, Any] | None, more: dict[str, Any], encoder: dict[str, Any], folder: Path
) -> MultiVector:
    """One vector per token. PyLate's files have lengths and prefixes in one, and neither mask nor normalisation."""
    about = {**more, **encoder}
    expansion, pylate = about.get("query_expansion"), any(key in more for key in PYLATE)
    if "query_expansion" not in about and pylate and more.get("do_query_expansion") is not False:
        attend = about.get("attend_to_expansion_tokens", about.get("attend_to_mask_tokens"))
        expansion = {"strategy": "fixed", "length": about.get("query_length") or 32, "attend": attend}
    if mask is None:
        modules.append(UNIT)
        words = more.get("skiplist_words")
        mask = {"skiplist_words": list(string.punctuation) if words is None else words}
    words, tasks = mask.get("skiplist_words") or [], mask.get("skiplist_tasks", "document")
    sizes = [about.get("query_length"), about.get("document_length")]
    right = isinstance(words, list) and isinstance(tasks, str | list) and all(isinstance(n, int | None) for n in sizes)
    if right and expansion is not None:
        right = isinstance(expansion, dict) and expansion.get("strategy") in ("fixed", "min")
        right = right and isinstance(expansion.get("length"), int) and isinstance(expansion.get("token"), str | None)
    if not right:
        raise _unsupported(folder, "have lengths, an expansion of queries or a skiplist of an unknown form")
    return MultiVector(
        skip=tuple(map(str, words)),
        skip_in=(tasks,) if isinstance(tasks, str) else tuple(tasks),
        query_size=sizes[0],
        document_size=sizes[1],
        expansion=expansion,
        prefixes={task: str(about.get(f"{task}_prefix") or "") for task in ("query", "document")},
        per_token=about.get("similarity_fn_name") == "meanmaxsim",
    )


def _read_encoder(folder: Path, below: str, settings: Callable[..., Any]) -> dict:
    """The encoder's settings."""
    encoder: dict[str, Any] = next(filter(None, (settings(below + name) for name in ENCODERS)), {})
    outputs = {TOKENS, encoder.get("module_output_name") or TOKENS}
    if len(outputs) > 1 or encoder.get("transformer_task") not in (None, "feature-extraction", "fill-mask"):
        raise _unsupported(folder, f"take {max(outputs)} of a {encoder.get('transformer_task')} model")
    if encoder.get("processing_kwargs"):
        raise _unsupported(folder, "change how texts become tokens (processing_kwargs)")
    return encoder


def _tensors(folder: Path, at: str, files: dict[str, bytes], allow_pickle: bool) -> dict[str, Tensor]:
    """The weights of a module. Those of a pickle are written again as safetensors."""
    name = f"{at}model.safetensors"
    tensors = read_tensors(folder, name, allow_pickle)
    files[name] = (folder / name).read_bytes() if (folder / name).is_file() else to_safetensors(tensors)
    return {key: value.float() for key, value in tensors.items()}


def _modes(settings: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """The modes in a 1_Pooling/config.json of the new form (pooling_mode) or the old one (a flag for each)."""
    named = settings.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or [])
    if not modes:
        known = {flag: mode for mode, flag in FLAGS.items()}
        flags = [key.removeprefix("pooling_mode_") for key, on in settings.items() if on is True]
        modes = [known.get(flag, flag) for flag in flags if f"pooling_mode_{flag}" in settings]
        modes.sort(key=lambda mode: MODES.index(mode) if mode in MODES else 0)
    for mode in modes:
        check_mode(mode, str(folder))
    return tuple(modes) or ("mean",)


def _layers(settings: dict[str, Any], tensors: dict[str, Tensor], inner: Path) -> tuple[float, ...]:
    """The weight of each hidden state. As in sentence-transformers, none if config.json does not ask for all states."""
    if not read_json(inner / "config.json").get("output_hidden_states"):
        return ()
    return (*[0.0] * int(settings.get("layer_start", 4)), *tensors.get("layer_weights", torch.empty(0)).tolist())


def _linear(x_NH: Tensor, weight: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """(N, H) → (N, out)."""
    return activation(F.linear(x_NH, weight, bias))


def _dense(tensors: dict[str, Tensor], settings: dict[str, Any], width: int) -> Callable[[Tensor], Tensor] | None:
    """A Dense module; None if its form or size is unknown."""
    name = str(settings.get("activation_function", "torch.nn.Tanh"))
    kind = getattr(nn.modules.activation, name.rpartition(".")[2], None) if name.startswith("torch.nn") else None
    kind = nn.Identity if name.endswith(".Identity") else kind
    weight, bias = tensors.get("linear.weight", torch.empty(0)), tensors.get("linear.bias")
    fits = weight.ndim == 2 and weight.shape[1] == width and (bias is None or bias.shape == weight.shape[:1])
    if not fits or settings.get("use_residual") or not isinstance(kind, type) or not issubclass(kind, nn.Module):
        return None
    rest = {key.removeprefix("activation_function."): value for key, value in tensors.items() if "linear." not in key}
    try:
        activation = kind().eval()
        activation.load_state_dict(rest)  # PReLU learns its slope
    except (TypeError, RuntimeError):  # attention, which is not a function of one tensor; further weights
        return None
    return partial(_linear, weight=weight, bias=bias, activation=activation)


def _layer_norm(tensors: dict[str, Tensor], width: int) -> Callable[[Tensor], Tensor] | None:
    """A LayerNorm module; None if its size is not that of the vectors."""
    weight, bias = (tensors.get(f"norm.{part}", torch.empty(0)) for part in ("weight", "bias"))
    if weight.shape != (width,) or bias.shape != (width,):
        return None
    return partial(F.layer_norm, normalized_shape=(width,), weight=weight, bias=bias)


def write_pooling(folder: Path, pooling: Pooling, hidden_size: int) -> None:
    """Write the files from which sentence-transformers and `read_pooling` make the same vectors.

    Files that were read are written as they were; new ones have a pooling and perhaps a Normalize module.
    """
    for name, content in pooling.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    if pooling.files:
        return
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")][: 2 + pooling.normalize]
    listed = [{"idx": i, "name": str(i), "path": p, "type": MODULE + kind} for i, (p, kind) in enumerate(modules)]
    write_json(folder / "modules.json", listed)
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{flag}": mode in pooling.modes for mode, flag in FLAGS.items()}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": hidden_size, **modes})
    write_json(folder / ENCODERS[0], {"max_seq_length": pooling.size, "do_lower_case": pooling.lowercase})
    more = {"prompts": dict(pooling.prompts), "default_prompt_name": pooling.default_prompt}
    write_json(folder / "config_sentence_transformers.json", more | {"similarity_fn_name": pooling.similarity})
