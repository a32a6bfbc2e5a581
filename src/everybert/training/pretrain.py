"""Pre-training from a recipe and a corpus: connects the network, the data, the loop and the folders.

out/run.json        the recipe and the corpus of this run
out/log.jsonl       a line every few steps (and out/tensorboard/, the same as curves)
out/checkpoints/    where a killed run resumes
out/model/          the result, once finished: loads in everybert and in `transformers`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from everybert.corpus.shards import Corpus, Layout
from everybert.errors import EverybertError
from everybert.files import atomic_folder, is_complete, read_json, write_json
from everybert.model.config import EncoderConfig
from everybert.model.heads import HEADS, Network
from everybert.model.losses import Boundary, boundary_loss, pretrain_loss
from everybert.model.ragged import Ragged
from everybert.store.convert import extend, padded_vocabulary, rebuild, to_longformer
from everybert.store.hub import resolve
from everybert.store.huggingface import load_network, save_network
from everybert.text.tokenizer import Tokenizer
from everybert.training import schedule
from everybert.training.checkpoint import Progress, find_checkpoint, load_checkpoint, save_checkpoint
from everybert.training.data import Feed
from everybert.training.distributed import Sharded, World
from everybert.training.evaluate import evaluate_packs, heldout_packs, pseudo_perplexity, sample_sentences
from everybert.training.logs import Logs
from everybert.training.loop import Figures, Job, train
from everybert.training.optim import Optimizer
from everybert.training.plan import flops_per_token, peak_flops
from everybert.training.recipe import Recipe
from everybert.training.step import Compute, LossFunction


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    finished: bool
    step: int
    figures: Figures
    """The last evaluation on held-out text."""

    @property
    def model(self) -> Path:
        """The folder of the model, once finished."""
        return self.folder / "model"


@dataclass(frozen=True)
class Setting:
    """The inputs of a run, before there is a network."""

    recipe: Recipe
    out: Path
    corpus: Corpus
    tokenizer: Tokenizer
    layout: Layout
    device: torch.device
    world: World

    @property
    def dtype(self) -> torch.dtype:
        """The compute precision."""
        asked, cuda = self.recipe.run.dtype, self.device.type == "cuda"
        return torch.bfloat16 if asked == "bfloat16" or (asked == "auto" and cuda) else torch.float32

    @property
    def compiled(self) -> bool:
        """Whether to use torch.compile."""
        asked, half = self.recipe.run.compile, self.dtype != torch.float32
        return asked if asked is not None else half and self.device.type == "cuda"

    @property
    def sharded(self) -> bool:
        """Whether ranks hold shares of the weights; a single rank has them all."""
        return self.recipe.run.parallel == "sharded" and self.world.size > 1


def pretrain(
    recipe: Recipe | str | Path,
    corpus: str | Path,
    out: str | Path,
    *,
    device: str | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> Result:
    """Train a recipe on a corpus, or resume the run in `out`. Overrides (`run__workers=2`) replace recipe lines."""
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe, **overrides)
    if recipe.distil is not None:
        raise EverybertError(
            "this recipe has a [distil] table: run it with `everybert distil`, which takes the teacher"
        )
    setting = prepare(recipe, corpus, out, device)
    network = build_network(setting)
    if recipe.boundary:
        network.heads["boundary"] = Boundary(network.config)
        return run(setting, network, boundary_loss, ("mlm", "nsp", "boundary"), quiet)
    names = ("mlm", "nsp") if "nsp" in network.heads else ("mlm",)
    return run(setting, network, pretrain_loss, names, quiet)


# ── before the run ───────────────────────────────────────────────────────────────────────────────────────────


def prepare(
    recipe: Recipe, corpus: str | Path, out: str | Path, device: str | None, facts: dict[str, Any] | None = None
) -> Setting:
    """Open the corpus and its tokenizer, connect the ranks, and refuse a folder that holds another run."""
    world = World.join()
    opened = Corpus.open(corpus)
    tokenizer = Tokenizer.load(opened.tokenizer_path)
    opened.check_tokenizer(tokenizer.digest)
    setting = Setting(recipe, Path(out), opened, tokenizer, Layout.of(tokenizer), world.device(device), world)
    # [run] included: ranks must save and evaluate at the same steps.
    world.same("recipe", hashlib.sha256(json.dumps(recipe.plain(), sort_keys=True).encode()).hexdigest())
    world.same("corpus", f"{opened.tokenizer_digest} {opened.token_count}")
    with world.together():
        if world.first:
            claim(setting, facts or {})
    world.see(setting.out / "run.json")
    return setting


def claim(setting: Setting, more: dict[str, Any]) -> None:
    """Write run.json, or compare with the one that is there."""
    corpus = {"tokenizer": setting.corpus.tokenizer_digest, "tokens": setting.corpus.token_count}
    facts = {**more, "recipe": setting.recipe.plain(), "corpus": corpus}
    path = setting.out / "run.json"
    if not path.exists():
        setting.out.mkdir(parents=True, exist_ok=True)
        write_json(path, facts)
        return
    there = read_json(path)
    keys = setting.recipe.differences(there.get("recipe", {}))
    if keys:
        raise EverybertError(
            f"{setting.out} holds a run of another recipe (differs in {', '.join(keys)}): "
            "use that recipe to resume it, or another --out"
        )
    for name in ("corpus", *more):
        if there.get(name) != facts[name]:
            raise EverybertError(f"{setting.out} holds a run with another {name}: use that one, or another --out")


def fit_config(config: EncoderConfig, tokenizer: Tokenizer) -> EncoderConfig:
    """The configuration with what the tokenizer decides: vocabulary, padding, and the offset of positions."""
    pad = tokenizer.pad_id or 0
    return config.replace(
        vocab_size=padded_vocabulary(tokenizer.size),
        pad_id=pad,
        # RoBERTa and its relatives count positions from the padding id, and `transformers` relies on it.
        position_offset=pad + 1 if config.position_offset else 0,
    )


def build_network(setting: Setting) -> Network:
    """A new network, or a trained one to continue, with the heads that the objectives need."""
    recipe = setting.recipe
    torch.manual_seed(recipe.seed)
    if recipe.model.init is not None:
        network = start_from(setting, recipe.model.init)
    else:
        network = Network(fit_config(recipe.config, setting.tokenizer), recipe.heads)
    check_length(recipe, network.config, "model")
    network.encoder.checkpointing = recipe.run.checkpointing
    return network


def start_from(setting: Setting, init: str) -> Network:
    """The network of [model] init, fitted to the corpus' tokenizer and the recipe's heads."""
    settings, tokenizer, folder = setting.recipe.model, setting.tokenizer, resolve(init)
    network = load_network(folder, heads=setting.recipe.heads, dtype=torch.float32).network
    size = network.config.vocab_size
    try:
        known = Tokenizer.load(folder)
    except EverybertError:  # a folder without a tokenizer: its ids are assumed to be those of the corpus
        if tokenizer.size > size:
            raise EverybertError(f"{folder} has {size} tokens, the corpus' tokenizer {tokenizer.size}") from None
    else:
        network = extend(network, known, tokenizer)
    if settings.longformer is not None:
        network = to_longformer(network, settings.longformer, settings.window)
    config = network.config.replace(**dict(settings.changes))
    return network if config == network.config else rebuild(network, config, {})


def check_length(recipe: Recipe, config: EncoderConfig, who: str) -> None:
    """Refuse sequences that are longer than the position table of a model."""
    if config.positions != "rotary" and recipe.longest > config.max_positions:
        remedy = "" if who == "teacher" else ", or raise [model] max_positions"
        raise EverybertError(
            f"length {recipe.longest} is more than the {who}'s {config.max_positions} positions: "
            f"lower [batch] or [[phase]] length (--set batch.length={config.max_positions}){remedy}"
        )


def untrained_positions(recipe: Recipe, config: EncoderConfig) -> int | None:
    """The first position of a new model that no example reaches; None if all are trained."""
    fresh = recipe.model.init is None and config.positions == "learned"
    return recipe.longest if fresh and recipe.longest < config.max_positions else None


# ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────


def run(setting: Setting, network: Network, loss: LossFunction, names: tuple[str, ...], quiet: bool) -> Result:
    """Train a network with a loss, from the start or the last checkpoint, and write the model."""
    recipe, out, world = setting.recipe, setting.out, setting.world
    common = (network, loss, setting.device, setting.dtype, setting.compiled)
    compute = Sharded(*common, world) if setting.sharded else Compute(*common)
    optimizer = Optimizer(compute.master, recipe.optimizer)
    progress = Progress(total=recipe.steps)
    found = find_checkpoint(out / "checkpoints", world)
    if found is not None:
        with world.together():
            progress = load_checkpoint(found, compute.master, optimizer, verify=world.first)
        compute.refresh()
    finished = bool(world.agree(float(progress.finished and is_complete(out / "model")))[0])
    silent = quiet or not world.first
    with Logs(None if finished or not world.first else out, progress.step, silent, recipe.run.tensorboard) as logs:
        if finished:
            logs.print(f"{out} is finished ({progress.step:,} steps): nothing to do. The model is in {out / 'model'}")
            return Result(out, True, progress.step, progress.figures)
        if found is not None:
            logs.print(f"resuming {out} from step {progress.step:,}")
        elif (unseen := untrained_positions(recipe, network.config)) is not None:
            logs.print(
                f"note: no example has more than {unseen} tokens, so the positions from {unseen} to "
                f"{network.config.max_positions} stay random: set [model] max_positions = {unseen}, or train longer"
            )
        done = train(make_job(setting, compute, optimizer, names, logs.print), progress, logs)
        if done:
            trained = compute.whole()
            with world.together():
                if world.first and trained is not None:
                    write_model(setting, trained)
            logs.print(f"finished: the model is in {out / 'model'}")
        else:
            logs.print(f"stopped at step {progress.step:,}; the run is saved: run the same command again to resume")
        world.barrier()
    return Result(out, done, progress.step, progress.figures)


def make_job(
    setting: Setting, compute: Compute, optimizer: Optimizer, names: tuple[str, ...], note: Callable[[str], None]
) -> Job:
    """A pre-training run as the loop sees it."""
    recipe, world, cuda = setting.recipe, setting.world, setting.device.type == "cuda"
    feed = Feed(
        recipe,
        setting.corpus,
        setting.layout,
        setting.device,
        world.rank,
        world.size,
        fill=setting.compiled,
        workers=recipe.run.workers if recipe.run.workers is not None else 4 if cuda else 0,
        even=setting.sharded,
    )
    peak = peak_flops(torch.cuda.get_device_name(setting.device)) if cuda else None

    def flops(progress: Progress) -> float:
        now = schedule.moment(recipe, progress.step - 1, progress.total)
        return flops_per_token(compute.master.config, now.length, now.mask_rate) / (peak or 1.0)

    checkpoints = setting.out / "checkpoints"
    return Job(
        compute=compute,
        optimizer=optimizer,
        steps=lambda at: feed.steps(at.step, at.total, at.place),
        lr=lambda at: schedule.learning_rate(recipe.schedule, at.step, at.total),
        save=lambda at: save_checkpoint(checkpoints, compute.master, optimizer, at, recipe.run.keep, world),
        names=names,
        run=recipe.run,
        evaluate=make_evaluation(setting, compute, note),
        evaluate_together=setting.sharded,
        plan=schedule.Planner(recipe) if recipe.budget else None,
        flops=flops if peak else None,
        seed=recipe.seed,
        memory_hint=f"lower [batch] pack (now {recipe.batch.pack:,} tokens; a step keeps its tokens), "
        "or set [run] checkpointing = true"
        + (' or, with AdamW, parallel = "sharded"' if world.size > 1 and not setting.sharded else ""),
        world=world,
    )


def make_evaluation(
    setting: Setting, compute: Compute, note: Callable[[str], None]
) -> Callable[[Progress], tuple[float, Figures]] | None:
    """The evaluation on the held-out split, or None if the corpus has none."""
    if not setting.corpus.meta["splits"].get("heldout"):
        return None
    heldout = Corpus.open(setting.corpus.path, "heldout")
    recipe, layout = setting.recipe, setting.layout
    packs: dict[int, list[Ragged]] = {}

    def evaluate(progress: Progress) -> tuple[float, Figures]:
        length = schedule.moment(recipe, progress.step - 1, progress.total).length
        if length not in packs:
            examples = replace(recipe.examples, length=length)
            packs[length] = heldout_packs(heldout, layout, examples, recipe.batch.pack, recipe.run.evaluate_packs, note)
        figures = compute.apply(lambda network: evaluate_packs(network, packs[length]))
        if progress.finished:
            sentences = sample_sentences(heldout, layout, longest=min(64, length))
            figures["pseudo_perplexity"] = compute.apply(
                lambda network: pseudo_perplexity(network, sentences, layout.mask_id)
            )
        return figures["heldout_loss"], figures

    return evaluate


def write_model(setting: Setting, network: Network) -> None:
    """Write out/model: weights, configuration and tokenizer, without the heads that only training needs."""
    extra = {name: network.heads.pop(name) for name in list(network.heads) if name not in HEADS}
    with atomic_folder(setting.out / "model") as draft:
        save_network(network, draft, tokenizer=setting.tokenizer)
    network.heads.update(extra)
