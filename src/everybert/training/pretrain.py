"""Pre-training from a recipe and a corpus: connects the network, the data, the loop and the folders.

out/run.json        the recipe and the corpus of this run
out/log.jsonl       a line every few steps (and out/tensorboard/, the same as curves)
out/checkpoints/    where a killed run resumes
out/model/          the result, once finished: loads in everybert and in `transformers`
out/generator/      with replaced-token detection: the generator, likewise
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from everybert.corpus.examples import ExampleConfig
from everybert.corpus.masking import MaskingConfig
from everybert.corpus.packs import PackStream
from everybert.corpus.shards import Corpus, ExampleLayout
from everybert.errors import EverybertError
from everybert.files import atomic_folder, is_complete, is_model, lock, read_json, write_json
from everybert.model.config import EncoderConfig, padded_vocabulary
from everybert.model.heads import HEADS, Network
from everybert.model.losses import Boundary, boundary_loss, pretrain_loss
from everybert.model.ragged import Ragged
from everybert.store import config_json
from everybert.store.hub import resolve
from everybert.store.huggingface import load_network, read_config, save_network
from everybert.text.tokenizer import Tokenizer
from everybert.training import schedule
from everybert.training.checkpoint import Progress, checkpoints, find_checkpoint, load_checkpoint, save_checkpoint
from everybert.training.data import RunContext
from everybert.training.distributed import World
from everybert.training.evaluate import PACK, evaluate_packs, heldout_packs, pseudo_perplexity, sample_sentences
from everybert.training.logs import Logs
from everybert.training.loop import Figures, TrainingJob, train
from everybert.training.optim import Optimizer
from everybert.training.plan import peak_flops, training_flops
from everybert.training.recipe import Recipe
from everybert.training.rtd import add_generator, generator_of, remove_generator, rtd_loss, score_detection
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


def pretrain(
    recipe: Recipe | str | Path,
    corpus: str | Path,
    out: str | Path,
    *,
    device: str | None = None,
    quiet: bool = False,
    allow_pickle: bool = False,
    **overrides: Any,
) -> Result:
    """Train a recipe on a corpus, or resume the run in `out`. Overrides (`run__workers=2`) replace recipe lines.

    `allow_pickle` reads .bin weights of [model] init (see `load`).
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe, **overrides)
    if recipe.distil is not None:
        raise EverybertError("the recipe has a [distil] table: `everybert distil` runs it, with the teacher")
    context = prepare(recipe, corpus, out, device)
    network = build_network(context, allow_pickle)
    if recipe.boundary:
        network.heads["boundary"] = Boundary(network.config)
        return run(context, network, boundary_loss, ("mlm", "nsp", "boundary"), quiet)
    if recipe.rtd is not None:
        return run(context, network, partial(rtd_loss, recipe.rtd), ("mlm", "rtd"), quiet)
    names = ("mlm", "nsp") if "nsp" in network.heads else ("mlm",)
    return run(context, network, pretrain_loss, names, quiet)


# ── before the run ───────────────────────────────────────────────────────────────────────────────────────────


def prepare(
    recipe: Recipe, corpus: str | Path, out: str | Path, device: str | None, teacher: str | None = None
) -> RunContext:
    """Open the corpus and its tokenizer, and connect the ranks."""
    if is_model(Path(out)):
        raise EverybertError(f"{out} holds a model, not a run; choose another folder")
    world = World.join()
    opened, tokenizer, layout = open_corpus(corpus)
    context = RunContext(recipe, Path(out), opened, tokenizer, layout, world.device(device), world, teacher)
    # [run] included: ranks must save and evaluate at the same steps.
    world.require_same("recipe", recipe.plain())
    world.require_same("corpus", (opened.tokenizer_digest, opened.token_count))
    return context


def open_corpus(path: str | Path) -> tuple[Corpus, Tokenizer, ExampleLayout]:
    """A corpus, its tokenizer, and the layout of the examples."""
    corpus = Corpus.open(path)
    tokenizer = Tokenizer.load(corpus.tokenizer_path)
    corpus.check_tokenizer(tokenizer.digest)
    return corpus, tokenizer, ExampleLayout.of(tokenizer)


def preview(recipe: Recipe, corpus: str | Path, length: int | None) -> tuple[PackStream, Tokenizer, float]:
    """The packs that a run begins with, their tokenizer and mask rate. `length` replaces that of the first phase."""
    opened, tokenizer, layout = open_corpus(corpus)
    if length is not None:
        recipe = replace(recipe, phases=(replace(recipe.phases[0], length=length),))
    init = recipe.model.init
    config = recipe.config if init is None else read_config(resolve(init))[0]
    check_config(recipe, config)
    context = RunContext(recipe, Path(), opened, tokenizer, layout, torch.device("cpu"), World(), causal=config.causal)
    return context.stream(0), tokenizer, schedule.moment(recipe, 0, recipe.steps).mask_rate


def claim(context: RunContext) -> None:
    """Write run.json; if the run has begun, compare with it: a run resumes with the same recipe and corpus."""
    corpus = {"tokenizer": context.corpus.tokenizer_digest, "tokens": context.corpus.token_count}
    facts: dict[str, Any] = {"recipe": context.recipe.plain(), "corpus": corpus}
    facts |= {"teacher": context.teacher} if context.teacher is not None else {}
    path = context.out / "run.json"
    if not path.exists() or not (checkpoints(path.with_name("checkpoints")) or path.with_name("model").exists()):
        write_json(path, facts)
        return
    recorded = read_json(path)
    other = context.recipe.differences(recorded.get("recipe", {}))
    other += [name for name in facts if name != "recipe" and recorded.get(name) != facts[name]]
    if other:
        raise EverybertError(f"{context.out} holds a run with another {', '.join(other)}: use that, or another folder")


def fit_config(config: EncoderConfig, tokenizer: Tokenizer) -> EncoderConfig:
    """The configuration with what the tokenizer decides: vocabulary, padding, mask, and the offset of positions."""
    pad = tokenizer.pad_id or 0
    fitted = config.replace(
        vocab_size=padded_vocabulary(tokenizer.size),
        pad_id=pad,
        # RoBERTa and its relatives count positions from the padding id, and `transformers` relies on it.
        position_offset=pad + 1 if config.position_offset else 0,
        mask_id=None if config.mask_id is None else tokenizer.mask_id,
    )
    config_json.write(fitted)  # what no folder could hold is refused before the run
    return fitted


def build_network(context: RunContext, allow_pickle: bool = False) -> Network:
    """A new network, or a trained one to continue, with the heads that the objectives need."""
    recipe = context.recipe
    torch.manual_seed(recipe.seed)
    if recipe.model.init is not None:
        network = start_from(context, recipe.model.init, allow_pickle)
    else:
        network = Network(fit_config(recipe.config, context.tokenizer), recipe.heads)
    check_config(recipe, network.config)
    if recipe.rtd is not None:
        add_generator(network, recipe.rtd)
    generator_of(network).encoder.checkpointing = network.encoder.checkpointing = recipe.run.checkpointing
    return network


def start_from(context: RunContext, init: str, allow_pickle: bool = False) -> Network:
    """The network of [model] init with the recipe's heads and dropouts; its tokenizer must be that of the corpus."""
    recipe, folder = context.recipe, resolve(init, allow_pickle=allow_pickle)
    network = load_network(folder, heads=recipe.heads, dtype=torch.float32, allow_pickle=allow_pickle).network
    size = network.config.vocab_size
    try:
        same = Tokenizer.load(folder).vocab() == context.tokenizer.vocab()
    except EverybertError:  # a folder without a tokenizer: its ids are assumed to be those of the corpus
        same = context.tokenizer.size <= size
    if not same or context.tokenizer.size > size:
        raise EverybertError(
            f"the corpus' tokenizer is not that of {folder}: build the corpus with the tokenizer of {folder}, whose "
            "vocabulary contrib/extend_vocabulary.py can extend"
        )
    if not recipe.model.changes:
        return network
    config = network.config.replace(**recipe.model.changes)
    changed = Network(config, recipe.heads, pooler=network.pooler is not None)
    changed.load_state_dict(network.state_dict())
    return changed


def check_config(recipe: Recipe, config: EncoderConfig, who: str = "model") -> None:
    """Refuse sequences longer than the position table of a model, and objectives that a causal model does not have.

    A causal model predicts every next token of unmasked text.
    """
    if config.positions != "rotary" and recipe.longest > config.max_positions:
        remedy = "" if who == "teacher" else ", or raise [model] max_positions"
        raise EverybertError(
            f"length {recipe.longest} is more than the {who}'s {config.max_positions} positions: "
            f"lower [batch] or [[phase]] length (batch.length={config.max_positions}){remedy}"
        )
    if config.causal and recipe.paired:
        table = recipe.paired.partition(".")[0]
        raise EverybertError(f'[{table}] kind: a causal model does not learn sentence pairs: set "full" or "document"')
    if config.causal and recipe.rtd is not None:
        raise EverybertError("[rtd] needs masked tokens, which a causal model has not: set [model] causal = false")
    masks = (recipe.mask, recipe.mask_rate, recipe.boundary, *(phase.rate for phase in recipe.phases))
    if config.causal and masks != (MaskingConfig(), (0.15, 0.15), False, *(None for _ in recipe.phases)):
        raise EverybertError("[mask] does not apply to a causal model, which predicts every next token: leave it out")


# ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────


def run(context: RunContext, network: Network, loss: LossFunction, names: tuple[str, ...], quiet: bool) -> Result:
    """Train a network with a loss, from the start or the last checkpoint, and write the model.

    This is the first function that writes to the run folder: the inputs have been checked before.
    """
    context = replace(context, causal=network.config.causal)
    for phase in range(len(context.recipe.phases)):
        context.stream(phase)  # examples that the corpus cannot give are refused before the first step
    recipe, out, world, most = context.recipe, context.out, context.world, network.config.max_positions
    with contextlib.ExitStack() as stack:
        with world.together():
            if world.first:
                stack.enter_context(lock(out))
                claim(context)
        compute = Compute(network, loss, context.device, context.dtype, context.compiled)
        optimizer = Optimizer(compute.master, recipe.optimizer)
        progress = Progress(total=recipe.steps)
        checkpoint = find_checkpoint(out / "checkpoints", world)
        if checkpoint is not None:
            with world.together():
                progress = load_checkpoint(checkpoint, compute.master, optimizer)
            compute.refresh()
        finished = world.gather(progress.finished and is_complete(out / "model"))[0]
        folder, silent = None if finished or not world.first else out, quiet or not world.first
        logs = stack.enter_context(Logs(folder, progress.step, silent, recipe.run.tensorboard))
        if finished:
            logs.print(f"{out} is finished ({progress.step:,} steps): nothing to do. The model is in {out / 'model'}")
            return Result(out, True, progress.step, progress.figures)
        if checkpoint is not None:
            logs.print(f"resuming {out} from step {progress.step:,}")
        elif recipe.model.init is None and network.config.positions == "learned" and recipe.longest < most:
            far = f"no example has more than {recipe.longest} tokens, so the positions up to {most} stay random"
            logs.print(f"note: {far}: set [model] max_positions = {recipe.longest}, or train longer")
        done = train(make_job(context, compute, optimizer, names, logs), progress, logs)
        if done:
            with world.together():
                if world.first:
                    write_model(context, compute.master)
            logs.print(f"finished: the model is in {out / 'model'}")
        else:
            logs.print(f"stopped at step {progress.step:,}; the run is saved: run the same command again to resume")
        world.gather(None)  # waits for all ranks
        return Result(out, done, progress.step, progress.figures)


def make_job(
    context: RunContext, compute: Compute, optimizer: Optimizer, names: tuple[str, ...], logs: Logs
) -> TrainingJob:
    """A pre-training run as the loop sees it."""
    recipe = context.recipe
    peak = peak_flops(torch.cuda.get_device_name(context.device)) if context.device.type == "cuda" else None

    def flops(progress: Progress) -> float:
        now = schedule.moment(recipe, progress.step - 1, progress.total)
        return training_flops(compute.master, now.length, 1.0 if context.causal else now.mask_rate) / (peak or 1.0)

    checkpoints = context.out / "checkpoints"
    return TrainingJob(
        compute=compute,
        optimizer=optimizer,
        steps=lambda at: context.steps(at.step, at.total, at.place),
        lr=lambda at: schedule.learning_rate(recipe.schedule, at.step, at.total),
        save=lambda at: save_checkpoint(checkpoints, compute.master, optimizer, at, recipe.run.keep, context.world),
        names=names,
        run=recipe.run,
        evaluate=make_evaluation(context, compute, logs),
        plan=schedule.Planner(recipe) if recipe.budget else None,
        flops=flops if peak else None,
        seed=recipe.seed,
        memory_hint=f"lower [batch] pack (now {recipe.batch.pack:,} tokens; a step keeps its tokens), "
        "or set [run] checkpointing = true",
        world=context.world,
    )


def make_evaluation(context: RunContext, compute: Compute, logs: Logs) -> Callable[[Progress], Figures] | None:
    """The evaluation on the held-out split, or None if the corpus has none."""
    if not context.corpus.meta["splits"].get("heldout"):
        return None
    heldout = Corpus.open(context.corpus.path, "heldout")
    recipe, layout = context.recipe, context.layout

    @cache
    def packs(examples: ExampleConfig) -> list[Ragged]:
        tokens = recipe.run.evaluate_packs * PACK
        return heldout_packs(heldout, layout, examples, tokens, logs.print, causal=context.causal)

    def evaluate(progress: Progress) -> Figures:
        examples = recipe.examples_of(schedule.moment(recipe, progress.step - 1, progress.total).phase)
        figures = evaluate_packs(predictor := generator_of(compute.network), packs(examples))
        if recipe.rtd is not None:
            figures |= score_detection(compute.network, packs(examples))
        if progress.finished:
            sentences = sample_sentences(heldout, layout, longest=min(64, examples.length))
            figures["pseudo_perplexity"] = pseudo_perplexity(predictor, sentences, layout.mask_id)
        return figures

    return evaluate


def write_model(context: RunContext, network: Network) -> None:
    """Write out/model: weights, configuration and tokenizer, without the heads that only training needs.

    The generator of replaced-token detection becomes a model folder too, out/generator.
    """
    if context.recipe.rtd is not None:
        generator = remove_generator(network)
        with atomic_folder(context.out / "generator") as draft:
            save_network(generator, draft, tokenizer=context.tokenizer)
    for name in set(network.heads) - set(HEADS):
        del network.heads[name]
    with atomic_folder(context.out / "model") as draft:
        save_network(network, draft, tokenizer=context.tokenizer)
