"""Distillation: a small student learns from a trained teacher.

DistilBERT (Sanh et al. 2019): 5 · KL(teacher ‖ student at temperature 2) · 4 + 2 · MLM + 1 · (1 − cos of the last
hidden states), with the student initialised from every other layer of the teacher. Narrower students learn hidden
states through a projection (TinyBERT) or the relations within Q, K and V (MiniLM v2).

Legend: T tokens in the batch, B sequences, n tokens of one sequence, H hidden, M masked positions, V vocabulary.
"""

import re
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.model.config import PRESETS, EncoderConfig
from everybert.model.encoder import initialise
from everybert.model.heads import Network
from everybert.model.losses import IGNORE, PretrainTargets, cross_entropy
from everybert.model.ragged import Ragged
from everybert.store.hub import resolve
from everybert.store.huggingface import load_network, read_config
from everybert.text.tokenizer import Tokenizer
from everybert.training.data import RunContext
from everybert.training.pretrain import Result, check_config, fit_config, prepare, run
from everybert.training.recipe import DistilSettings, ModelSettings, Recipe, located, parse_model, text

NAMES = ("ce", "mlm", "pair", "cosine", "hidden", "relation")


def distil(
    teacher: str | Path,
    corpus: str | Path,
    out: str | Path,
    *,
    student: str | Path | None = None,
    recipe: Recipe | str | Path = "distilbert",
    device: str | None = None,
    quiet: bool = False,
    allow_pickle: bool = False,
    **overrides: Any,
) -> Result:
    """Train a student on a corpus with a model as the teacher; run again on the same `out` to resume.

    `student` is a preset, a model folder whose configuration to take, or a TOML file with a [model] table; by default
    it is the recipe's [model]. `allow_pickle` reads .bin weights of the teacher (see `load`).
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe, **overrides)
    settings = recipe.distil
    if settings is None:
        raise EverybertError("the recipe has no [distil] table: say there what the student learns from the teacher")
    if recipe.boundary:
        raise EverybertError("distillation has no boundary objective: set [mask] boundary = false")
    if student is not None:
        recipe = replace(recipe, model=read_student(student))
    context = prepare(recipe, corpus, out, device, str(teacher))
    trained = load_teacher(teacher, context, allow_pickle)
    network = build_student(context, settings, trained)
    for who, config in (("teacher", trained.config), ("student", network.config)):
        check_config(recipe, config, who)
    if trained.config.causal != network.config.causal:
        raise EverybertError("teacher and student must read in the same direction: give both the same [model] causal")
    loss = partial(distil_loss, trained, settings)
    if settings.relation:  # relations are computed sequence by sequence, which cannot be compiled
        context = replace(context, recipe=replace(recipe, run=replace(recipe.run, compile=False)))
    return run(context, network, loss, NAMES, quiet)


def read_student(student: str | Path) -> ModelSettings:
    """The configuration of a student: the name of a preset, a model folder, or a TOML file with a [model] table."""
    path = Path(student)
    if path.suffix == ".toml":
        with located(str(path)):
            return parse_model(tomllib.loads(text(path)).get("model", {}))
    if (path / "config.json").is_file():
        config, base = read_config(path)[0], EncoderConfig()
        fixed = ("vocab_size", "pad_id", "mask_id", "position_offset")
        changes = {k: v for k, v in vars(config).items() if v != getattr(base, k) and k not in fixed}
        return ModelSettings(changes=dict(sorted(changes.items())))
    if str(student) not in PRESETS:
        raise EverybertError(f"student {student}: give a preset ({', '.join(PRESETS)}), a folder or a .toml file")
    return ModelSettings(preset=str(student))


def load_teacher(name: str | Path, context: RunContext, allow_pickle: bool = False) -> Network:
    """The teacher, frozen, in the compute precision; its tokenizer must be that of the corpus."""
    folder = resolve(name, allow_pickle=allow_pickle)
    context.corpus.check_tokenizer(Tokenizer.load(folder).digest)
    paired = context.recipe.paired
    heads, dtype = context.recipe.heads, context.dtype
    loaded = load_network(folder, heads=heads, dtype=dtype, device=context.device, allow_pickle=allow_pickle)
    missing = " ".join(loaded.report.missing)
    if "mlm" in missing:
        raise EverybertError(f"{folder} has no mlm head to learn from; give a pre-trained model")
    if paired and ("nsp" in missing or "pooler" in missing):
        raise EverybertError(f'{folder} judges no pairs: use [examples] kind = "full" or "document"')
    return loaded.network.requires_grad_(False).eval()


def build_student(context: RunContext, settings: DistilSettings, teacher: Network) -> Network:
    """A student with the teacher's vocabulary, initialised from its layers where the shapes agree."""
    recipe = context.recipe
    config = fit_config(recipe.config, context.tokenizer).replace(vocab_size=teacher.config.vocab_size)
    mine, theirs = config.hidden_size, teacher.config.hidden_size
    torch.manual_seed(recipe.seed)
    student = Network(config, recipe.heads)
    if settings.copy:
        copy_layers(teacher, student)
    if settings.hidden and mine != theirs:
        project = nn.Linear(mine, theirs, bias=False)
        initialise(project, config)
        student.heads["project"] = project
    if settings.cosine and mine != theirs:
        raise EverybertError(f"the widths {mine} and {theirs} differ: set [distil] cosine = 0 and use relation")
    for width in (mine, theirs):
        if settings.relation and width % settings.relation_heads:
            raise EverybertError(f"[distil] relation_heads: {settings.relation_heads} does not divide {width}")
    return student


def source_layers(student: int, teacher: int) -> list[int]:
    """The teacher layer that initialises each student layer: evenly spread, first and last included."""
    if student == 1:
        return [teacher - 1]
    return [round(i * (teacher - 1) / (student - 1)) for i in range(student)]


@torch.no_grad()
def copy_layers(teacher: Network, student: Network) -> None:
    """Copy the teacher's tables, heads and every k-th layer into the student, tensor by tensor where shapes agree."""
    theirs, mine = teacher.state_dict(), student.state_dict()
    layers = source_layers(len(student.encoder.layers), len(teacher.encoder.layers))
    for name, value in mine.items():
        source = re.sub(r"^(encoder\.layers\.)(\d+)", lambda match: f"{match[1]}{layers[int(match[2])]}", name)
        if source in theirs and theirs[source].shape == value.shape:
            value.copy_(theirs[source])
    # A student without segments adds the vector of the first segment, which every token had, to the positions.
    table = "encoder.embeddings.segment.weight"
    position = student.encoder.embeddings.position
    if table in theirs and table not in mine and position is not None:
        if theirs[table].shape[1] == position.weight.shape[1]:
            position.weight += theirs[table][0].to(position.weight)


def distil_loss(teacher: Network, settings: DistilSettings, network: Network, batch: Ragged) -> tuple[Tensor, Tensor]:
    """The weighted sum of the differences between student and teacher that the settings ask for.

    Sums over this pack are divided by the counts of the step; the figures are the weighted parts.
    """
    s, targets = settings, batch.targets_as(PretrainTargets)
    x_states: list[Tensor] = []
    y_states: list[Tensor] = []
    x_TH = network.encoder(batch, states=x_states)
    with torch.no_grad():
        y_TH = teacher.encoder(batch, states=y_states)
    ce = mlm = pair = cosine = hidden = relation = x_TH.new_zeros((), dtype=torch.float32)
    if s.ce or s.mlm:
        logits_MV = network.mlm_logits(x_TH, targets.mask_index_M).float()
        if s.mlm:
            mlm = s.mlm * cross_entropy(logits_MV, targets.mask_label_M) / targets.masked
        if s.ce:
            teacher_MV = teacher.mlm_logits(y_TH, targets.mask_index_M).float()
            ce = s.ce * divergence(logits_MV, teacher_MV, targets.mask_label_M, s.temperature) / targets.masked
    if "nsp" in network.heads and s.pair and targets.pair_label_B is not None:
        logits_B2 = network.sequence_logits(x_TH, batch, "nsp").float()
        teacher_B2 = teacher.sequence_logits(y_TH, batch, "nsp").float()
        pair = cross_entropy(logits_B2, targets.pair_label_B)
        pair = pair + divergence(logits_B2, teacher_B2, targets.pair_label_B, s.temperature)
        pair = s.pair * pair / targets.pairs
    real_T = torch.arange(len(x_TH), device=x_TH.device) < targets.real
    if s.cosine:
        apart_T = 1 - F.cosine_similarity(x_TH.float(), y_TH.float(), dim=-1)
        cosine = s.cosine * (apart_T * real_T).sum() / targets.tokens
    if s.hidden:
        hidden = s.hidden * hidden_error(network, x_states, y_states, real_T) / targets.tokens
    if s.relation:
        x_T3H, y_T3H = last_projections(network, x_states), last_projections(teacher, y_states)
        relation = s.relation * relation_divergence(x_T3H, y_T3H, batch, s.relation_heads) / targets.tokens
    parts = torch.stack((ce, mlm, pair, cosine, hidden, relation))
    return parts.sum(), parts.detach()


def divergence(logits_MV: Tensor, teacher_MV: Tensor, label_M: Tensor, temperature: float) -> Tensor:
    """Σ KL(teacher ‖ student) · τ² over the masked tokens, or pairs, that count (Hinton et al. 2015, §2)."""
    each_MV = F.kl_div(
        F.log_softmax(logits_MV / temperature, dim=-1),
        F.log_softmax(teacher_MV / temperature, dim=-1),
        reduction="none",
        log_target=True,
    )
    return (each_MV.sum(-1) * (label_M != IGNORE)).sum() * temperature**2


def hidden_error(network: Network, mine: list[Tensor], theirs: list[Tensor], real_T: Tensor) -> Tensor:
    """Σ over tokens of the mean squared error to the teacher's states, averaged over layers (Jiao et al. 2020, eq. 8).

    The embeddings count as a layer. A student of another width has a head "project".
    """
    total = mine[0].new_zeros((), dtype=torch.float32)
    for x_TH, i in zip(mine, source_layers(len(mine), len(theirs))):
        x_TH = network.heads["project"](x_TH) if "project" in network.heads else x_TH
        total = total + ((x_TH.float() - theirs[i].float()).square().mean(-1) * real_T).sum()
    return total / len(mine)


def last_projections(network: Network, states: list[Tensor]) -> Tensor:
    """(T, 3, H): Q, K and V of the last layer, from the input of that layer."""
    layer = network.encoder.layers[network.config.layer_order[-1]]
    x_TH = states[-2]
    if network.config.norm == "pre" and layer.attention_norm is not None:
        x_TH = layer.attention_norm(x_TH)  # type: ignore[operator]
    return layer.attention.split(layer.attention.qkv(x_TH)).flatten(2)  # type: ignore[union-attr, operator]


def relation_divergence(x_T3H: Tensor, y_T3H: Tensor, batch: Ragged, heads: int) -> Tensor:
    """Σ over tokens of KL between the teacher's and the student's relations, averaged over Q, K, V and heads.

    A relation is softmax(A Aᵀ / √d) in a sequence, A being Q, K or V split into `heads` of width d (Wang et al. 2021).
    """
    total = x_T3H.new_zeros((), dtype=torch.float32)
    real_T = torch.arange(len(x_T3H), device=x_T3H.device) < batch.targets_as(PretrainTargets).real
    for mine, theirs, real_Bn in zip(*(batch.by_length(z) for z in (x_T3H, y_T3H, real_T))):
        pair = relations(mine, heads), relations(theirs, heads)
        each = F.kl_div(*pair, reduction="none", log_target=True).sum(-1).mean((1, 2))  # (sequences, n)
        total = total + (each * real_Bn).sum()
    return total


def relations(z_Bn3H: Tensor, heads: int) -> Tensor:
    """log softmax(A Aᵀ / √d): (B, 3, heads, n, n)."""
    z = z_Bn3H.float().unflatten(-1, (heads, -1)).permute(0, 2, 3, 1, 4)
    return F.log_softmax(z @ z.transpose(-1, -2) * z.shape[-1] ** -0.5, dim=-1)
