"""A small student from a trained teacher.

DistilBERT (Sanh et al. 2019):  5 · KL(teacher ‖ student at temperature 2) · 4  +  2 · MLM  +  1 · (1 − cos of the last
hidden states), the student starting as every other layer of the teacher. Narrower students learn hidden states through
a projection (TinyBERT, Jiao et al. 2020, eq. 8) or the relations within Q, K and V (MiniLM v2, Wang et al. 2021).
The words are compared at masked positions, where the two models have something to say.

Legend: T tokens in the batch, H hidden, M masked positions, V vocabulary, R relation heads, n tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.encoder import Encoder, initialise
from everybert.model.heads import Network
from everybert.model.presets import PRESETS
from everybert.model.ragged import Ragged
from everybert.store.huggingface import load_network, read_config
from everybert.text.tokenizer import Tokenizer
from everybert.training.pretrain import Result, Setting, check_length, fit_config, prepare, run
from everybert.training.recipe import DistilSettings, ModelSettings, Recipe, Source, parse_model

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
    **overrides: Any,
) -> Result:
    """Train a student on a corpus, taught by a model folder; run again on the same `out` to resume.

    `student` is a preset, a model folder whose configuration to take, or a TOML file with a [model] table; by default
    what the recipe says.
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe, **overrides)
    lesson = recipe.distil
    if lesson is None:
        raise EverybertError("the recipe has no [distil] table: say there what the student learns from the teacher")
    if recipe.boundary:
        raise EverybertError("distillation has no boundary objective: set [mask] boundary = false")
    if student is not None:
        recipe = replace(recipe, model=read_student(student))
    setting = prepare(recipe, corpus, out, device, {"teacher": str(teacher)})
    master = load_teacher(teacher, setting)
    network = build_student(setting, master)
    for who, config in (("teacher", master.config), ("student", network.config)):
        check_length(recipe, config, who)
    loss = Lesson(master, lesson)
    if lesson.relation:  # relations are made sequence by sequence, which a compiled graph cannot be
        setting = replace(setting, recipe=replace(recipe, run=replace(recipe.run, compile=False)))
    return run(setting, network, loss, NAMES, quiet)


def read_student(student: str | Path) -> ModelSettings:
    """The shape of a student: a preset's name, a model folder, or a TOML file with a [model] table."""
    path = Path(student)
    if path.suffix == ".toml":
        source = Source.read(path)
        return parse_model(source, source.table.get("model", {}))
    if (path / "config.json").is_file():
        config, base = read_config(path)[0], EncoderConfig()
        fixed = ("vocab_size", "pad_id", "position_offset")
        changes = {k: v for k, v in vars(config).items() if v != getattr(base, k) and k not in fixed}
        return ModelSettings(changes=tuple(sorted(changes.items())))
    if str(student) not in PRESETS:
        raise EverybertError(
            f"--student {student}: give a preset ({', '.join(PRESETS)}), a model folder or a .toml file"
        )
    return ModelSettings(preset=str(student))


def load_teacher(folder: str | Path, setting: Setting) -> Network:
    """The teacher, frozen, in the precision that computes; its tokenizer must be the corpus' own."""
    own = Tokenizer.load(folder)
    setting.corpus.check_tokenizer(own.digest)
    paired = setting.recipe.examples.paired
    network = load_network(folder, heads=_heads(paired), dtype=setting.dtype, device=setting.device)
    missing = " ".join(network.report.missing)
    if "mlm" in missing:
        raise EverybertError(f"{folder} has no masked-word head to learn from; give a pre-trained model")
    if paired and ("nsp" in missing or "pooler" in missing):
        raise EverybertError(f'{folder} judges no pairs: use [examples] kind = "full" or "document"')
    return network.network.requires_grad_(False).eval()


def _heads(paired: bool) -> dict[str, int | None]:
    return {"mlm": None, "nsp": None} if paired else {"mlm": None}


def build_student(setting: Setting, teacher: Network) -> Network:
    """A student that shares the teacher's vocabulary, begun from its layers where the shapes agree."""
    recipe, theirs = setting.recipe, teacher.config
    assert recipe.distil is not None
    config = fit_config(recipe.config, setting.tokenizer).replace(vocab_size=theirs.vocab_size)
    torch.manual_seed(recipe.seed)
    student = Network(config, _heads(recipe.examples.paired))
    if recipe.distil.copy:
        copy_layers(teacher, student)
    if recipe.distil.hidden and config.hidden_size != theirs.hidden_size:
        project = nn.Linear(config.hidden_size, theirs.hidden_size, bias=False)
        initialise(project, config)
        student.heads["project"] = project
    if recipe.distil.cosine and config.hidden_size != theirs.hidden_size:
        raise EverybertError(
            f"cosine compares hidden states of equal width ({config.hidden_size} and {theirs.hidden_size}): "
            "set [distil] cosine = 0 and use hidden or relation"
        )
    for width in (config.hidden_size, theirs.hidden_size):
        if recipe.distil.relation and width % recipe.distil.relation_heads:
            raise EverybertError(f"[distil] relation_heads: {recipe.distil.relation_heads} does not divide {width}")
    return student


def taught_by(student: int, teacher: int) -> list[int]:
    """Which teacher layer each student layer begins as: evenly spread, first and last included (0, 2, 4, 7, 9, 11)."""
    if student == 1:
        return [teacher - 1]
    return [round(i * (teacher - 1) / (student - 1)) for i in range(student)]


@torch.no_grad()
def copy_layers(teacher: Network, student: Network) -> None:
    """Copy the teacher's tables, heads and every k-th layer into the student, tensor by tensor where shapes agree."""
    theirs, mine = teacher.state_dict(), student.state_dict()
    layers = taught_by(len(student.encoder.layers), len(teacher.encoder.layers))
    for name, value in mine.items():
        source = name
        if name.startswith("encoder.layers."):
            number, rest = name.removeprefix("encoder.layers.").split(".", 1)
            source = f"encoder.layers.{layers[int(number)]}.{rest}"
        if source in theirs and theirs[source].shape == value.shape:
            value.copy_(theirs[source])
    # Without token types the first type's vector, which every token had, goes into the positions: the sum stays.
    table = "encoder.embeddings.segment.weight"
    place = student.encoder.embeddings.position
    if table in theirs and table not in mine and place is not None and theirs[table].shape[1] == place.weight.shape[1]:
        place.weight += theirs[table][0].to(place.weight)


@dataclass
class Lesson:
    """The loss: what the student (network) misses of what the teacher says."""

    teacher: Network
    settings: DistilSettings

    def __call__(self, network: Network, batch: Ragged) -> tuple[Tensor, Tensor]:
        """Sums over this pack divided by the step's counts; figures are the weighted parts."""
        s, extra = self.settings, batch.extra
        x_states: list[Tensor] = []
        y_states: list[Tensor] = []
        x_TH = network.encoder(batch, states=x_states)
        with torch.no_grad():
            y_TH = self.teacher.encoder(batch, states=y_states)
        zero = x_TH.new_zeros((), dtype=torch.float32)
        ce = mlm = pair = cosine = hidden = relation = zero
        if s.ce or s.mlm:
            logits_MV = network.mlm_logits(x_TH, extra["mask_index"]).float()
            if s.mlm:
                mlm = F.cross_entropy(logits_MV, extra["mask_label"], ignore_index=-100, reduction="sum")
                mlm = s.mlm * mlm / extra["masked"]
            if s.ce:
                with torch.no_grad():
                    wanted_MV = self.teacher.mlm_logits(y_TH, extra["mask_index"]).float()
                ce = s.ce * divergence(logits_MV, wanted_MV, extra["mask_label"], s.temperature) / extra["masked"]
        if "nsp" in network.heads and s.pair:
            logits_B2 = network.sequence_logits(x_TH, batch, "nsp").float()
            with torch.no_grad():
                wanted_B2 = self.teacher.sequence_logits(y_TH, batch, "nsp").float()
            pair = F.cross_entropy(logits_B2, extra["pair_label"], ignore_index=-100, reduction="sum")
            pair = pair + divergence(logits_B2, wanted_B2, extra["pair_label"], s.temperature)
            pair = s.pair * pair / extra["pairs"]
        real_T = torch.arange(len(x_TH), device=x_TH.device) < extra["real"]
        if s.cosine:
            apart_T = 1 - F.cosine_similarity(x_TH.float(), y_TH.float(), dim=-1)
            cosine = s.cosine * (apart_T * real_T).sum() / extra["tokens"]
        if s.hidden:
            hidden = s.hidden * hidden_error(network, x_states, y_states, real_T) / extra["tokens"]
        if s.relation:
            q_x, q_y = last_projections(network.encoder, x_states), last_projections(self.teacher.encoder, y_states)
            relation = s.relation * relation_divergence(q_x, q_y, batch, s.relation_heads) / extra["tokens"]
        parts = torch.stack((ce, mlm, pair, cosine, hidden, relation))
        return parts.sum(), parts.detach()


def divergence(logits_MV: Tensor, wanted_MV: Tensor, label_M: Tensor, temperature: float) -> Tensor:
    """Σ KL(teacher ‖ student) · τ² over the masked words, or pairs, that count (Hinton et al. 2015, §2)."""
    each_MV = F.kl_div(
        F.log_softmax(logits_MV / temperature, dim=-1),
        F.log_softmax(wanted_MV / temperature, dim=-1),
        reduction="none",
        log_target=True,
    )
    return (each_MV.sum(-1) * (label_M != -100)).sum() * temperature**2


def hidden_error(network: Network, mine: list[Tensor], theirs: list[Tensor], real_T: Tensor) -> Tensor:
    """Σ over tokens of the mean squared error to the teacher's states, averaged over layers, embeddings included."""
    total = mine[0].new_zeros((), dtype=torch.float32)
    for i, x_TH in enumerate(mine):
        y_TH = theirs[round(i * (len(theirs) - 1) / (len(mine) - 1))]
        x_TH = network.heads["project"](x_TH) if "project" in network.heads else x_TH
        total = total + ((x_TH.float() - y_TH.float()).square().mean(-1) * real_T).sum()
    return total / len(mine)


def last_projections(encoder: Encoder, states: list[Tensor]) -> Tensor:
    """(T, 3, H): Q, K and V of the last layer, from what that layer read."""
    layer = encoder.layers[encoder.config.layer_order[-1]]
    x_TH = states[-2]
    if encoder.config.norm == "pre" and layer.attention_norm is not None:
        x_TH = layer.attention_norm(x_TH)  # type: ignore[operator]
    return layer.attention.qkv(x_TH).unflatten(-1, (3, -1))  # type: ignore[union-attr, operator]


def relation_divergence(x_T3H: Tensor, y_T3H: Tensor, batch: Ragged, heads: int) -> Tensor:
    """Σ over tokens of KL between the teacher's and the student's relations, averaged over Q, K, V and heads.

    A relation is softmax(A Aᵀ / √d) within a sequence, A being Q, K or V cut into `heads` pieces of width d.
    """
    total = x_T3H.new_zeros((), dtype=torch.float32)
    real = int(batch.extra["real"])
    for n, rows in batch.groups:
        mine, theirs = (relations(z[rows].unflatten(0, (-1, n)), heads) for z in (x_T3H, y_T3H))
        each = F.kl_div(mine, theirs, reduction="none", log_target=True).sum(-1).mean((1, 2))  # (sequences, n)
        places = torch.arange(len(x_T3H), device=x_T3H.device)[rows].view(-1, n)
        total = total + (each * (places < real)).sum()
    return total


def relations(z_Bn3H: Tensor, heads: int) -> Tensor:
    """log softmax(A Aᵀ / √d): (B, 3, R, n, n)."""
    z = z_Bn3H.float().unflatten(-1, (heads, -1)).permute(0, 2, 3, 1, 4)
    return F.log_softmax(z @ z.transpose(-1, -2) * z.shape[-1] ** -0.5, dim=-1)
