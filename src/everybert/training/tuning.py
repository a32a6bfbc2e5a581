"""One fine-tuning run: a task on a pre-trained encoder, trained in full, in part, by adapters, or as features.

Shuffling is keyed by (seed, epoch) and dropout by (seed, step), so a run is a pure function of its settings. The step
is one function of tensors, `loss(network, batch)`; batches are `batch_size` examples, ragged, without padding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everybert.corpus.masking import make_key, permutation
from everybert.corpus.packs import Position
from everybert.errors import EverybertError
from everybert.model.adapters import AdapterSet, LoraConfig
from everybert.model.config import EncoderConfig
from everybert.model.encoder import initialise
from everybert.model.features import SEQUENCE_HEADS, FeatureConfig, FeatureHead, add_feature_head, read_features
from everybert.model.heads import Network
from everybert.model.ragged import Ragged
from everybert.store.adapters import load_adapter, read_adapter
from everybert.tasks.features import Features, batch, run
from everybert.tasks.records import Examples
from everybert.tasks.task import Task
from everybert.training.checkpoint import Progress
from everybert.training.data import Item, Place, Step
from everybert.training.distributed import World
from everybert.training.keeper import History, Keeper
from everybert.training.loop import Job, train
from everybert.training.optim import Optimizer, OptimizerConfig
from everybert.training.recipe import RunSettings
from everybert.training.step import Compute

ADAPTER = "default"
"""What a freshly trained adapter is called until it is given a name."""
ALONE = World()
Kept = dict[tuple[str, str, str | None], tuple[Features, Features]]
"""Frozen features of the training and the dev set, by the layers, the pooling and the teacher that they are of."""
USUAL_SIZE = 0.07
"""Published encoders' weights (W₁, root mean square) are no larger; those of a long run with Muon may be."""
FILL = 256
"""On CUDA the tokens of a batch are rounded up to a multiple of this."""


@dataclass(frozen=True)
class Settings:
    """How to fine-tune. None means: what suits the mode and the model's size."""

    mode: str = "full"
    """full; top:K (the last K layers and the head); frozen (features computed once, head alone); lora."""
    epochs: int | None = None
    """Times that the training examples are seen: 3 by default, 30 for frozen, whose epochs cost little."""
    lr: float | None = None
    """The highest learning rate."""
    batch_size: int = 32
    """Examples a step."""
    accumulate: int = 1
    """Parts that a step's batch is computed in: less memory, the same step."""
    warmup: float = 0.1
    """The share of the steps in which the learning rate rises from 0; then it falls linearly to 0."""
    weight_decay: float = 0.01
    """Of matrices and tables; biases and norms are not decayed."""
    clip: float | None = 1.0
    """Largest gradient norm."""
    layer_decay: float = 1.0
    """Each layer's learning rate is this times that of the layer above it (0.8 – 0.95 is usual; 1: all the same)."""
    reinit: int = 0
    """Top layers that start from fresh weights, and the pooler with them (Zhang et al. 2021)."""
    new_pooler: bool = False
    """The pooler alone starts anew: one trained for next sentences may be saturated. An adapter then brings its own."""
    patience: int | None = None
    """Stop after so many epochs without a better score; None: train them all. The best is kept either way."""
    evaluations: int = 1
    """How often an epoch is scored on the dev set; the weights with the best score are kept."""
    features: str = "last"
    """frozen: the last layer, the sum or the concat of the last four."""
    pool: str = "mean"
    """frozen, whole texts: the mean over tokens, or cls."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """lora: size and place of the adapter."""
    teacher: str | None = None
    """A model fine-tuned for the same labels, whose answers are learnt beside them (classify, regress)."""
    start: str | None = None
    """lora: an adapter's folder to go on from, trained on the same base for the same labels."""
    device: str | None = None
    """None: CUDA where there is one."""
    dtype: str | None = None
    """None: bfloat16 on CUDA, float32 elsewhere."""
    compile: bool = False
    """torch.compile the step."""
    log_every: int = 10
    """Steps between the losses that the history keeps."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"full|frozen|lora|top:[1-9]\d*", self.mode):
            raise EverybertError(f"mode is full, top:K, frozen or lora, not {self.mode!r}")
        for name in ("rounds", "batch_size", "accumulate", "evaluations", "log_every"):
            if getattr(self, name) < 1:
                name, value = "epochs" if name == "rounds" else name, getattr(self, name)
                raise EverybertError(f"{name} must be at least 1, not {value}")
        if self.lr is not None and not 0 < self.lr < 1:
            raise EverybertError(f"lr must lie between 0 and 1, not {self.lr}")
        if not 0 <= self.warmup < 1 or not 0 < self.layer_decay <= 1:
            raise EverybertError("warmup lies in [0, 1) and layer_decay in (0, 1]")
        if self.start is not None and self.mode != "lora":
            raise EverybertError("start is an adapter to go on from, which mode lora alone does")
        if self.mode == "lora" and (self.reinit or (self.start and self.new_pooler)):
            wrong = (
                "new_pooler: the adapter to go on from has its pooler" if self.start else "reinit: use full or top:K"
            )
            raise EverybertError(f"an adapter holds no layers of the trunk, so mode lora takes no {wrong}")

    @property
    def rounds(self) -> int:
        """How many epochs are trained."""
        return (30 if self.mode == "frozen" else 3) if self.epochs is None else self.epochs

    def rate(self, network: Network) -> float:
        """The highest learning rate: the one given, else by mode; smaller encoders take larger steps.

        AdamW moves a weight by about the rate, whatever its size: larger weights need a larger rate to move as far.
        """
        if self.lr is not None:
            return self.lr
        if self.mode == "frozen":
            return 2e-3
        width = network.config.hidden_size
        if self.mode == "lora":  # B·A begins at 0 on weights of any size
            return 1e-3 if width <= 512 else 5e-4
        rate = 1e-4 if width <= 512 else 5e-5 if width < 768 else 3e-5
        return rate * max(1.0, weight_size(network) / USUAL_SIZE)


@dataclass
class Run:
    """One run's outcome. `network` has the best epoch's weights."""

    seed: int
    scores: dict[str, float]
    epoch: int
    """The epoch that was kept."""
    history: list[dict[str, Any]]
    """What was logged: losses by step, scores by epoch."""
    network: Network
    task: Task
    adapters: AdapterSet | None = None
    finished: bool = True
    """False where it was interrupted: the best so far was kept."""
    seconds: float = 0.0
    lr: float = 0.0
    """The highest learning rate."""
    trained: int = 0
    """How many parameters were trained."""

    @property
    def metric(self) -> float:
        """The score that chooses."""
        return self.scores[self.task.metric]


def tune(
    network: Network,
    task: Task,
    train_features: Features,
    dev_features: Features,
    dev: Examples,
    settings: Settings,
    seed: int = 0,
    fresh_pooler: bool = False,
    quiet: bool = False,
    kept: Kept | None = None,
) -> Run:
    """Train one network on one task; the network must have the task's head, freshly initialised where it is new.

    `kept` holds what frozen features were computed by runs before this one, on the same data and base.
    Under `torchrun` the ranks share each step's examples, and all end with the first rank's best weights.
    """
    world = World.join()
    if world.size > 1 and task.name == "embed":
        raise EverybertError("embed compares all texts of a batch, which ranks would cut up: run it in one process")
    device = world.device(settings.device)
    dtype = getattr(torch, settings.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    network.to(device)
    peak = settings.rate(network)
    adapters = prepare(network, task, settings, fresh_pooler)
    if settings.mode == "frozen":
        of = (settings.features, settings.pool, settings.teacher)
        kept = {} if kept is None or settings.reinit else kept  # renewed layers differ from seed to seed
        if of not in kept:
            kept[of] = (_cached(network, task, train_features), _cached(network, task, dev_features))
        train_features, dev_features = kept[of]
    graphs = device.type == "cuda" and dtype != torch.float32 and not settings.compile
    compute = Compute(network, _loss(task), device, dtype, settings.compile, graphs)
    config = OptimizerConfig(eps=1e-8, weight_decay=settings.weight_decay, clip=settings.clip)
    optimizer = Optimizer(compute.master, config, layer_rates(network.config, settings))
    each = math.ceil(len(train_features) / settings.batch_size)
    progress = Progress(total=each * settings.rounds)
    keeper = Keeper(task, compute, dev_features, dev, each, settings.patience)
    job = Job(
        compute=compute,
        optimizer=optimizer,
        steps=lambda at: steps(task, train_features, settings, seed, device, network.config.pad_id, at.step, world),
        lr=lambda at: peak * linear(at.step, settings.warmup, each * settings.rounds),
        save=lambda at: None,
        names=("loss",),
        run=RunSettings(
            evaluate_every=math.ceil(each / settings.evaluations),
            save_every=10**9,
            log_every=settings.log_every,
            spike=0.0,
            tensorboard=False,
        ),
        evaluate=keeper.evaluate,
        seed=seed,
        memory_hint="lower batch_size, or raise accumulate",
        world=world,
    )
    history = History(quiet or not world.first)
    with history:
        finished = train(job, progress, history)
    keeper.restore(world)
    task = task.tuned(compute.network, dev_features, dev)
    scores = task.evaluate(compute.network, dev_features, dev)
    scores = dict(zip(scores, world.agree(*scores.values())))
    return Run(
        seed=seed,
        scores=scores,
        epoch=keeper.epoch,
        history=history.rows,
        network=compute.master.eval(),
        task=task,
        adapters=adapters,
        finished=finished,
        seconds=progress.seconds,
        lr=peak,
        trained=sum(p.numel() for p in optimizer.parameters),
    )


# ── the parts that are trained ───────────────────────────────────────────────────────────────────────────────


def weight_size(network: Network) -> float:
    """Root mean square of the layers' W₁."""
    weights = [w for name, w in network.encoder.named_parameters() if name.endswith("feed_forward.input.weight")]
    return float(torch.stack([w.detach().float().square().mean() for w in weights]).mean().sqrt())


def prepare(network: Network, task: Task, settings: Settings, fresh_pooler: bool) -> AdapterSet | None:
    """Freeze what the mode freezes, renew the layers to renew, put on what the mode needs."""
    config = network.config
    shared = config.layer_groups is not None
    if shared and (settings.mode.startswith("top:") or settings.reinit or settings.layer_decay != 1.0):
        raise EverybertError("this model's layers share their weights: top:K, reinit and layer_decay do not apply")
    if settings.reinit > config.layers:
        raise EverybertError(f"reinit {settings.reinit} is more than the model's {config.layers} layers")
    for layer in list(network.encoder.layers)[config.layers - settings.reinit :] if settings.reinit else []:
        initialise(layer, config)
    renew = settings.new_pooler and task.head is not None and network.reads_pooler(task.head)
    if (settings.reinit or renew) and network.pooler is not None:
        initialise(network.pooler, config)
    if settings.mode == "frozen":
        if task.head is None:
            raise EverybertError("embed trains the encoder itself, so it cannot be frozen; use full, top:K or lora")
        network.requires_grad_(False)
        outputs = task.outputs or {"answer": 2, "choose": 1}[task.head]
        features = FeatureConfig(settings.features, settings.pool)  # type: ignore[arg-type]
        add_feature_head(network, task.head, outputs, features)
        return None
    if settings.mode == "lora":
        network.requires_grad_(False)
        heads = {task.head: network.heads[task.head]} if task.head else {}
        adapters = AdapterSet(network)
        if settings.start is not None:
            file = read_adapter(settings.start)
            load_adapter(adapters, ADAPTER, file)
            said, labels = (file.extras.get("task") or {}).get("labels"), getattr(task, "labels", None)
            same = said is None or labels is None or list(said) == list(labels)
            _check_heads(heads, adapters.entries[ADAPTER].heads if same else {}, settings.start)
        else:
            adapters.add(ADAPTER, settings.lora, heads, network.pooler if fresh_pooler or renew else None)
        adapters.use(ADAPTER)
        entry = adapters.entries[ADAPTER]
        for part in [*entry.heads.values(), *([entry.pooler] if entry.pooler is not None else [])]:
            part.requires_grad_(True)
        return adapters
    rate = layer_rates(config, settings)
    for name, parameter in network.named_parameters():
        if rate(name) == 0.0:  # before the copy that computes is made, so that no gradient goes below
            parameter.requires_grad_(False)
    if network.pooler is not None and (task.head is None or not network.reads_pooler(task.head)):
        network.pooler.requires_grad_(False)  # nothing reads it
    return None


def _check_heads(wanted: dict[str, torch.nn.Module], found: dict[str, torch.nn.Module], folder: str) -> None:
    """An adapter that training goes on from must have the task's head, for as many labels."""
    shapes = [
        {(n, k): v.shape for n, m in heads.items() for k, v in m.state_dict().items()} for heads in (wanted, found)
    ]
    if shapes[0] != shapes[1]:
        raise EverybertError(f"{folder} is an adapter for another task or other labels; start without it")


def layer_rates(config: EncoderConfig, settings: Settings) -> Callable[[str], float]:
    """A parameter's learning rate as a multiple of the highest one: by its layer, 0 where the mode freezes it."""
    top = int(settings.mode[4:]) if settings.mode.startswith("top:") else None
    if top is not None and top > config.layers:
        raise EverybertError(f"{settings.mode} asks for more than the model's {config.layers} layers")

    def rate(name: str) -> float:
        if settings.mode in ("frozen", "lora"):
            return 1.0  # what is frozen there asks for no gradient
        found = re.match(r"encoder\.layers\.(\d+)\.", name)
        if found:
            below = config.layers - int(found[1])
        elif name.startswith("encoder.embeddings."):
            below = config.layers + 1
        else:
            below = 0
        if top is not None and below > top:
            return 0.0
        return settings.layer_decay**below

    return rate


def _cached(network: Network, task: Task, features: Features) -> Features:
    """The features with what the head reads computed once, in half precision."""
    assert task.head is not None
    name = task.head
    out = run(network, features, lambda ragged: read_features(network, ragged, name))
    pooled = name in SEQUENCE_HEADS
    values = (np.stack(out) if pooled else np.concatenate(out)).astype(np.float16)
    return replace(features, labels={**features.labels, f"features_{'B' if pooled else 'T'}": values})


def plain_head(network: Network, name: str) -> bool:
    """Turn a feature-based head that is one of the family's own after all into that; whether it is one now."""
    head = network.heads[name]
    if not isinstance(head, FeatureHead):
        return True
    if head.features.layers != "last" or name in SEQUENCE_HEADS or network.config.family == "modernbert":
        return False
    network.add_head(name, head.output.out_features)
    output = network.heads[name].output
    assert isinstance(output, torch.nn.Linear)
    output.load_state_dict(head.output.state_dict())
    return True


# ── batches, rates, and the best epoch ───────────────────────────────────────────────────────────────────────


def steps(
    task: Task,
    features: Features,
    settings: Settings,
    seed: int,
    device: torch.device,
    pad_id: int,
    start: int = 0,
    world: World = ALONE,
) -> Iterator[Step]:
    """The batches of every step from `start`: `batch_size` examples in the epoch's own order, in `accumulate` parts
    on each rank.
    """
    size = settings.batch_size
    each = math.ceil(len(features) / size)
    fill = min(FILL, features.size) if device.type == "cuda" else None
    for epoch in range(start // each, settings.rounds):
        order = permutation(make_key(seed, epoch), len(features))
        for first in range((start - epoch * each if epoch == start // each else 0) * size, len(features), size):
            which = order[first : first + size]
            total = task.share(features, which)
            items = []
            parts = np.array_split(which, min(settings.accumulate * world.size, len(which)))
            for number, part in list(enumerate(parts))[world.rank :: world.size]:
                ragged = batch(features, part, fill=fill, pad_id=pad_id)
                share = torch.tensor(task.share(features, part) / total if total else 0.0)
                ragged = replace(ragged, extra=ragged.extra | {"share": share})
                items.append(
                    Item(
                        ragged.to(device),
                        number,
                        Position(epoch, 0, 0),
                        len(ragged.tokens_T),
                        (1.0, 0.0),
                    )
                )
            yield Step(items, Place())


def _loss(task: Task) -> Callable[[Network, Ragged], tuple[Tensor, Tensor]]:
    def loss(network: Network, ragged: Ragged) -> tuple[Tensor, Tensor]:
        value = task.loss(network, ragged) * ragged.extra["share"]
        return value, value.detach()[None]

    return loss


def linear(step: int, warmup: float, total: int) -> float:
    """The learning rate as a share of its peak: up from 0 in the warm-up, then down to 0, as `transformers` has it."""
    warm = round(warmup * total)
    if step < warm:
        return step / warm
    return max(0.0, (total - step) / max(1, total - warm))
