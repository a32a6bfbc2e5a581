"""Pre-training from a recipe and a corpus: puts the network, the data, the loop and the folders together.

out/run.json        the recipe and the corpus of this run
out/log.jsonl       a line every few steps          (out/tensorboard/ the same as curves)
out/checkpoints/    where a killed run goes on
out/model/          the result, once finished: loads in everybert and in `transformers`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from everybert.corpus.shards import Corpus, Layout
from everybert.errors import EverybertError
from everybert.files import MANIFEST, atomic_folder, is_complete, read_json, remove_stale, write_json
from everybert.model.config import EncoderConfig
from everybert.model.heads import HEADS, Network
from everybert.store.huggingface import save_network
from everybert.text.tokenizer import Tokenizer
from everybert.training import schedule
from everybert.training.boundary import add_boundary, boundary_loss
from everybert.training.convert import ROUND, start_from
from everybert.training.data import Feed, Step
from everybert.training.distributed import World
from everybert.training.evaluate import evaluate_packs, heldout_packs, pseudo_perplexity, sample_sentences
from everybert.training.logs import Logs
from everybert.training.loop import Job, train
from everybert.training.optim import Optimizer
from everybert.training.plan import flops_per_token, peak_flops
from everybert.training.recipe import Recipe
from everybert.training.state import Progress, latest, load_checkpoint, save_checkpoint, step_name, step_of
from everybert.training.step import Compute, LossFunction, pretrain_loss


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    finished: bool
    step: int
    figures: dict[str, float]
    """The last evaluation on held-out text."""

    @property
    def model(self) -> Path:
        """The model's folder, once finished."""
        return self.folder / "model"


@dataclass(frozen=True)
class Setting:
    """What a run stands on, before there is a network."""

    recipe: Recipe
    out: Path
    corpus: Corpus
    tokenizer: Tokenizer
    layout: Layout
    device: torch.device
    world: World

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in."""
        asked = self.recipe.run.dtype
        return (
            torch.bfloat16 if asked == "bfloat16" or (asked == "auto" and self.device.type == "cuda") else torch.float32
        )

    @property
    def sharded(self) -> bool:
        """Whether ranks share the weights as well; one alone has them all."""
        return self.recipe.run.parallel == "sharded" and self.world.size > 1

    @property
    def digest(self) -> str:
        """SHA-256 of the whole recipe, [run] included: ranks must save and evaluate at the same steps."""
        return hashlib.sha256(json.dumps(self.recipe.plain(), sort_keys=True).encode()).hexdigest()


def pretrain(
    recipe: Recipe | str | Path,
    corpus: str | Path,
    out: str | Path,
    *,
    device: str | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> Result:
    """Train as the recipe says, or go on where `out` stands. Overrides (`run__workers=2`) replace recipe lines."""
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe, **overrides)
    if recipe.distil is not None:
        raise EverybertError(
            "this recipe has a [distil] table: run it with `everybert distil`, which takes the teacher"
        )
    setting = prepare(recipe, corpus, out, device)
    network = build_network(setting)
    if recipe.boundary:
        add_boundary(network)
        return run(setting, network, boundary_loss, ("mlm", "nsp", "boundary"), quiet)
    names = ("mlm", "nsp") if "nsp" in network.heads else ("mlm",)
    return run(setting, network, pretrain_loss, names, quiet)


def prepare(
    recipe: Recipe, corpus: str | Path, out: str | Path, device: str | None, facts: dict[str, Any] | None = None
) -> Setting:
    """Open the corpus and its tokenizer, join the other ranks, and refuse a folder that holds another run."""
    world = World.join()
    opened = Corpus.open(corpus)
    tokenizer = Tokenizer.load(opened.tokenizer_path)
    opened.check_tokenizer(tokenizer.digest)
    setting = Setting(recipe, Path(out), opened, tokenizer, Layout.of(tokenizer), world.device(device), world)
    world.same("recipe", setting.digest)
    world.same("corpus", f"{opened.tokenizer_digest} {opened.token_count}")
    with world.together():
        if world.first:
            claim(setting, facts or {})
    world.see(setting.out / "run.json")
    return setting


def claim(setting: Setting, more: dict[str, Any]) -> None:
    """Write run.json, or compare with the one that is there."""
    facts = {
        **more,
        "recipe": setting.recipe.plain(),
        "corpus": {"tokenizer": setting.corpus.tokenizer_digest, "tokens": setting.corpus.token_count},
    }
    path = setting.out / "run.json"
    if path.exists():
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
    else:
        setting.out.mkdir(parents=True, exist_ok=True)
        write_json(path, facts)


def fit_config(config: EncoderConfig, tokenizer: Tokenizer) -> EncoderConfig:
    """The configuration with what the tokenizer decides: vocabulary, padding, and where positions begin."""
    pad = tokenizer.pad_id or 0
    return config.replace(
        vocab_size=-(-tokenizer.size // ROUND) * ROUND,
        pad_id=pad,
        # RoBERTa's kin count positions from the padding id, and `transformers` relies on it.
        position_offset=pad + 1 if config.position_offset else 0,
    )


def build_network(setting: Setting) -> Network:
    """A fresh network, or a trained one to go on from, with the heads that the objectives need."""
    recipe = setting.recipe
    heads: dict[str, int | None] = {"mlm": None, "nsp": None} if recipe.examples.paired else {"mlm": None}
    torch.manual_seed(recipe.seed)
    if recipe.model.init is not None:
        network = start_from(recipe.model, setting.tokenizer, heads)
    else:
        network = Network(fit_config(recipe.config, setting.tokenizer), heads)
    check_length(recipe, network.config, "model")
    network.encoder.checkpointing = recipe.run.checkpointing
    return network


def check_length(recipe: Recipe, config: EncoderConfig, who: str) -> None:
    """Refuse sequences that are longer than a model's table of positions."""
    longest = max(phase.length for phase in recipe.phases)
    if config.positions != "rotary" and longest > config.max_positions:
        remedy = "" if who == "teacher" else ", or raise [model] max_positions"
        raise EverybertError(
            f"length {longest} is more than the {who}'s {config.max_positions} positions: "
            f"lower [batch] or [[phase]] length (--set batch.length={config.max_positions}){remedy}"
        )


def untrained_positions(recipe: Recipe, config: EncoderConfig) -> int | None:
    """The first position that a fresh model has and no example reaches; None where all are trained."""
    longest = max(phase.length for phase in recipe.phases)
    fresh = recipe.model.init is None and config.positions == "learned"
    return longest if fresh and longest < config.max_positions else None


def run(setting: Setting, network: Network, loss: LossFunction, names: tuple[str, ...], quiet: bool) -> Result:
    """Train a network with a loss, from the start or the last checkpoint, and write the model."""
    recipe, out, world = setting.recipe, setting.out, setting.world
    fit = setting.device.type == "cuda" and setting.dtype != torch.float32
    compiled = recipe.run.compile if recipe.run.compile is not None else fit
    compute = make_compute(setting, network, loss, compiled)
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
        job = make_job(setting, compute, optimizer, names, compiled)
        done = train(job, progress, logs)
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


def make_compute(setting: Setting, network: Network, loss: LossFunction, compiled: bool) -> Compute:
    """What runs the loss: on whole weights, or on this rank's share of them."""
    if setting.sharded:
        from everybert.training.sharded import Sharded

        return Sharded(network, loss, setting.device, setting.dtype, compiled, setting.world)
    return Compute(network, loss, setting.device, setting.dtype, compiled)


def find_checkpoint(folder: Path, world: World) -> Path | None:
    """The checkpoint to go on from, which the first rank chooses and every rank must see."""
    if world.first and folder.exists():
        remove_stale(folder)
    found = latest(folder) if world.first else None
    step = int(world.agree(-1.0 if found is None else float(step_of(found)))[0])
    if step < 0:
        return None
    path = folder / step_name(step)
    world.see(path / MANIFEST)
    return path


def make_job(setting: Setting, compute: Compute, optimizer: Optimizer, names: tuple[str, ...], compiled: bool) -> Job:
    """The loop's view of a pre-training run."""
    recipe, world = setting.recipe, setting.world
    workers = recipe.run.workers if recipe.run.workers is not None else 4 if setting.device.type == "cuda" else 0
    feed = Feed(
        recipe,
        setting.corpus,
        setting.layout,
        setting.device,
        world.rank,
        world.size,
        fill=compiled,
        workers=workers,
        even=setting.sharded,
    )

    def steps(progress: Progress) -> Iterator[Step]:
        return feed.steps(progress.step, progress.total, progress.place)

    def lr(progress: Progress) -> float:
        return schedule.learning_rate(recipe.schedule, progress.step, progress.total)

    def save(progress: Progress) -> None:
        save_checkpoint(setting.out / "checkpoints", compute.master, optimizer, progress, recipe.run.keep, world)

    def flops(progress: Progress) -> float:
        now = schedule.moment(recipe, progress.step - 1, progress.total)
        return flops_per_token(compute.master.config, now.length, now.mask_rate) / (peak or 1.0)

    peak = peak_flops(torch.cuda.get_device_name(setting.device)) if setting.device.type == "cuda" else None
    return Job(
        compute=compute,
        optimizer=optimizer,
        steps=steps,
        lr=lr,
        save=save,
        names=names,
        run=recipe.run,
        evaluate=make_evaluation(setting, compute),
        evaluate_together=setting.sharded,
        plan=schedule.Planner(recipe) if recipe.budget else None,
        flops=flops if peak else None,
        seed=recipe.seed,
        memory_hint=f"lower [batch] pack (now {recipe.batch.pack:,} tokens; a step keeps its tokens), "
        "or set [run] checkpointing = true"
        + (' or, with AdamW, parallel = "sharded"' if world.size > 1 and not setting.sharded else ""),
        world=world,
    )


def make_evaluation(setting: Setting, compute: Compute) -> Any:
    """The evaluation on the held-out split, or None where the corpus has none."""
    if not setting.corpus.meta["splits"].get("heldout"):
        return None
    heldout = Corpus.open(setting.corpus.path, "heldout")
    recipe, layout = setting.recipe, setting.layout
    packs: dict[int, Any] = {}

    def evaluate(progress: Progress) -> tuple[float, dict[str, float]]:
        length = schedule.moment(recipe, progress.step - 1, progress.total).length
        if length not in packs:
            examples = replace(recipe.examples, length=length)
            packs[length] = heldout_packs(heldout, layout, examples, recipe.batch.pack, recipe.run.evaluate_packs)
        figures = compute.apply(lambda network: evaluate_packs(network, packs[length]))
        if progress.finished:
            sentences = sample_sentences(heldout, layout, longest=min(64, length))
            figures["pseudo_perplexity"] = compute.apply(
                lambda network: pseudo_perplexity(network, sentences, layout.mask_id)
            )
        return figures["heldout_loss"], figures

    return evaluate


def write_model(setting: Setting, network: Network) -> None:
    """out/model: weights, configuration and tokenizer; heads that only training needs are left out."""
    extra = {name: network.heads.pop(name) for name in list(network.heads) if name not in HEADS}
    with atomic_folder(setting.out / "model") as draft:
        save_network(network, draft, tokenizer=setting.tokenizer)
    network.heads.update(extra)
