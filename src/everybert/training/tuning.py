"""One fine-tuning run: a task on a pre-trained encoder, in one of five modes.

| mode   | trained                                         | saved                          |
|--------|-------------------------------------------------|--------------------------------|
| full   | all weights                                     | a model folder                 |
| top:K  | the last K layers, the pooler and the head      | a model folder                 |
| lora   | an adapter and the head                         | the adapter's folder (PEFT)    |
| frozen | the head, on features that are computed once    | a model folder                 |
| fewshot | the encoder, on pairs of texts; then as frozen | a model folder                 |

Shuffling is keyed by (seed, epoch) and dropout by (seed, step), so a run is a pure function of its settings.

Legend: T tokens in the batch, B sequences, E examples.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everybert.corpus.masking import make_key, permutation
from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.encoder import initialise
from everybert.model.engine import run_head
from everybert.model.heads import SEQUENCE_HEADS, FeatureConfig, FeatureHead, Network, add_feature_head
from everybert.model.lora import AdapterSet, LoraConfig
from everybert.model.ragged import Ragged
from everybert.store.adapters import load_adapter, read_adapter, save_adapter, save_feature_head
from everybert.store.huggingface import read_config, save_network
from everybert.store.sentence_transformers import Pooling, write_pooling
from everybert.tasks.dataset import Examples
from everybert.tasks.embed import Embed
from everybert.tasks.features import Features, TaskTargets, make_batch
from everybert.tasks.task import Task
from everybert.text.tokenizer import Tokenizer
from everybert.training.checkpoint import Progress
from everybert.training.data import Item, Place, Step
from everybert.training.distributed import World
from everybert.training.logs import Logs
from everybert.training.loop import TrainingJob, train
from everybert.training.optim import Optimizer, OptimizerConfig
from everybert.training.recipe import RunSettings
from everybert.training.step import Compute

ADAPTER = "default"
"""The name of a freshly trained adapter."""
USUAL_SIZE = 0.07
"""Published encoders' weights (W₁, root mean square) are no larger; those of a long run with Muon may be."""
HEAD_ALONE = ("frozen", "fewshot")
"""Modes whose examples train the head alone."""
PAIRS = 20
"""fewshot: partners of each text that have its label, and as many that have another."""
FILL = 256
"""On CUDA the tokens of a batch are rounded up to a multiple of this, so that recordings see few shapes."""
FILL_PADDED = 128
"""The same where attention has a bias; there the longest length is rounded up to it as well."""
DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float32": torch.float32, "fp32": torch.float32}


@dataclass(frozen=True)
class FinetuneSettings:
    """How to fine-tune. None: the default depends on the mode and the size of the model."""

    mode: str = "full"
    """full, top:K (the last K layers and the head), frozen (the head alone), fewshot (pairs of texts first) or lora."""
    epochs: int | None = None
    """Passes over the training examples. None: 3, up to 30 if there are fewer than 10,000; 30 for a head alone."""
    lr: float | None = None
    """The highest learning rate."""
    batch_size: int = 32
    """Examples per step."""
    accumulate: int = 1
    """Number of parts in which the batch of a step is computed: less memory, the same result."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises linearly from 0; then it falls linearly to 0."""
    weight_decay: float = 0.01
    """Weight decay of matrices and embeddings; biases and norms are not decayed."""
    clip: float | None = 1.0
    """Largest gradient norm."""
    layer_decay: float = 1.0
    """Learning rate of each layer as a multiple of that of the layer above (0.8 – 0.95 is usual; 1: all the same)."""
    reinit: int = 0
    """Number of top layers to reinitialise, together with the pooler (Zhang et al. 2021)."""
    new_pooler: bool = False
    """Reinitialise only the pooler: one trained on next-sentence prediction may be saturated."""
    patience: int | None = None
    """Stop after this many epochs without a better score; None: never. The best epoch is kept either way."""
    evaluations: int = 1
    """Evaluations on the dev set per epoch; the weights with the best score are kept."""
    features: str = "last"
    """frozen: what the head reads: embeddings, second-to-last, last, weighted (all), sum or concat (last four)."""
    pool: str = "mean"
    """frozen: how a text becomes one vector: the mean over its tokens, or the first token (cls)."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """lora: the configuration of the adapter."""
    start: str | None = None
    """lora: the folder of an adapter to continue from, trained on the same base for the same labels."""
    device: str | None = None
    """None: CUDA if there is a GPU."""
    dtype: str | None = None
    """bfloat16 (bf16) or float32 (fp32); None: bfloat16 on CUDA, float32 elsewhere."""
    log_every: int = 10
    """Steps between the losses that the history keeps."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"full|frozen|fewshot|lora|top:[1-9]\d*", self.mode):
            raise EverybertError(f"mode is full, top:K, frozen, fewshot or lora, not {self.mode!r}")
        least = dict.fromkeys(("epochs", "batch_size", "accumulate", "evaluations", "log_every", "patience"), 1)
        for name, low in (least | {"reinit": 0, "weight_decay": 0}).items():
            if (value := getattr(self, name)) is not None and not value >= low:
                raise EverybertError(f"{name.replace('_', ' ')} must be at least {low}, not {value}")
        if self.lr is not None and not 0 < self.lr < 1:
            raise EverybertError(f"lr must lie between 0 and 1, not {self.lr}")
        if not 0 <= self.warmup < 1 or not 0 < self.layer_decay <= 1:
            raise EverybertError("warmup lies in [0, 1) and layer decay in (0, 1]")
        if self.dtype is not None and self.dtype not in DTYPES:  # float16 would need loss scaling
            raise EverybertError(f"fine-tuning has no dtype {self.dtype!r}; it has {', '.join(DTYPES)}")
        if self.start is not None and (self.mode != "lora" or self.new_pooler or self.lora != LoraConfig()):
            raise EverybertError("start is an adapter to continue from: use mode lora, without a new pooler or rank")
        if self.mode not in HEAD_ALONE and (self.features, self.pool) != ("last", "mean"):
            raise EverybertError("features and pool are what the head of a frozen encoder reads: use mode frozen")
        if self.mode == "frozen" and self.layer_decay != 1:
            raise EverybertError("layer decay is of layers that are trained; mode frozen trains the head alone")
        if self.mode == "lora" and self.reinit:
            raise EverybertError("an adapter has no encoder layers, so mode lora takes no reinit: use full or top:K")

    @property
    def rounds(self) -> int:
        """Number of epochs."""
        return self.epochs if self.epochs is not None else 30 if self.mode in HEAD_ALONE else 3

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of the computation."""
        return DTYPES[self.dtype or ("bfloat16" if device.type == "cuda" else "float32")]


# ── modes ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class FullMode:
    """Train all weights, or (top:K) the last K layers, the pooler and the head."""

    settings: FinetuneSettings
    seed: int = 0
    quiet: bool = False
    fresh_pooler: bool = False
    """Whether the pooler is new."""

    def peak(self, network: Network) -> float:
        """The default learning rate: smaller encoders take larger steps.

        AdamW moves a weight by about the rate, whatever its size: larger weights need a larger rate to move as far.
        """
        width = network.config.hidden_size
        rate = 1e-4 if width <= 512 else 5e-5 if width < 768 else 3e-5
        weights = [w for name, w in network.encoder.named_parameters() if name.endswith("feed_forward.input.weight")]
        size = float(torch.stack([w.detach().float().square().mean() for w in weights]).mean().sqrt())
        return rate * max(1.0, size / USUAL_SIZE)

    def rates(self, config: EncoderConfig) -> Callable[[str], float]:
        """The learning rate of a parameter as a multiple of the highest one: by its layer, 0 if it is frozen."""
        _, _, count = self.settings.mode.partition(":")
        top = int(count) if count else config.layers + 1  # the embeddings lie below the first layer
        if count and top > config.layers:
            raise EverybertError(f"{self.settings.mode} asks for more than the model's {config.layers} layers")

        def rate(name: str) -> float:
            layer = re.match(r"encoder\.layers\.(\d+)\.", name)
            if layer:
                below = config.layers - int(layer[1])
            else:
                below = config.layers + 1 if name.startswith("encoder.embeddings.") else 0
            return 0.0 if below > top else self.settings.layer_decay**below

        return rate

    def prepare(self, network: Network, data: "Data") -> None:
        """Freeze and add parts of the network."""
        rate = self.rates(network.config)
        for name, parameter in network.named_parameters():
            if rate(name) == 0.0:  # before the half-precision copy is made, so that it computes no gradient either
                parameter.requires_grad_(False)
        if network.pooler is not None and not reads_pooler(network, data.task):
            network.pooler.requires_grad_(False)  # nothing reads it

    def features(self, network: Network, task: Task, features: Features) -> Features:
        """The sequences of a data set, with what is computed from them once."""
        return features

    def save(self, network: Network, data: "Data", task: Task, folder: Path, **extras: Any) -> None:
        """Write what was trained: a model folder."""
        save_network(
            network,
            folder,
            tokenizer=data.tokenizer,
            labels=list(task.labels) if task.labels and str(task.head) in network.heads else None,
            problem_type=task.problem_type,
            extras={"task": task.state(), **extras},
            raw_config=read_config(data.folder)[1],
        )
        if "pooling" in (state := task.state()):  # a vector per text, for sentence-transformers
            how = {"modes": (state["pooling"],), "normalize": state["normalize"], "size": task.window.size}
            write_pooling(folder, replace(data.pooling, **how), network.config.hidden_size)


class FrozenMode(FullMode):
    """Train the head alone, on features of the frozen encoder that are computed once (Devlin et al. 2019, §5.3)."""

    def peak(self, network: Network) -> float:
        """The default learning rate."""
        return 2e-3

    def prepare(self, network: Network, data: "Data") -> None:
        """Freeze the network and put a feature-based head on it."""
        task = data.task
        if task.head is None or task.outputs is None:
            raise EverybertError(f"{task.name} trains the encoder, which cannot be frozen; use full, top:K or lora")
        network.requires_grad_(False)
        config = FeatureConfig(self.settings.features, self.settings.pool)  # type: ignore[arg-type]
        add_feature_head(network, task.head, task.outputs, config)

    def features(self, network: Network, task: Task, features: Features) -> Features:
        """The features that the head reads, in half precision."""
        read = [x.astype(np.float16) for x in run_head(network, features, str(task.head), features=True)]
        if task.head in SEQUENCE_HEADS:
            return features.with_targets(features_B=np.stack(read))
        return features.with_targets(features_T=read)

    def save(self, network: Network, data: "Data", task: Task, folder: Path, **extras: Any) -> None:
        """A model folder; a head that `transformers` does not have is written to a separate file."""
        name = str(task.head)
        head = network.heads[name]
        assert isinstance(head, FeatureHead)
        del network.heads[name]
        if head.features.layers == "last" and name not in SEQUENCE_HEADS and network.config.family != "modernbert":
            network.add_head(name, head.output.out_features)  # the family's own head after all
            network.heads[name].output.load_state_dict(head.output.state_dict())  # type: ignore[union-attr]
        else:
            extras["feature_head"] = {"name": name, **save_feature_head(head, folder)}
        super().save(network, data, task, folder, **extras)
        network.heads[name] = head


class FewShotMode(FrozenMode):
    """Train the encoder on pairs of texts, similar if of one label, then the head (SetFit; Tunstall et al. 2022)."""

    def prepare(self, network: Network, data: "Data") -> None:
        """Fine-tune the encoder in full, one epoch, then freeze it."""
        examples, task = data.train_examples, data.task
        single = all(isinstance(x, str) and isinstance(y, str) for x, y in zip(examples.inputs, examples.targets))
        if not single or task.head not in SEQUENCE_HEADS or self.settings.features != "last":
            raise EverybertError("fewshot is for single texts with one label each, and the last layer: use mode full")
        pairs = label_pairs(examples, self.seed)
        embed = Embed.from_examples(pairs, network.config, pooling=self.settings.pool, window=task.window)
        dev = pairs.take(range(min(len(pairs), 256)))
        train, held = (embed.features(data.tokenizer, network.config, part) for part in (pairs, dev))
        paired = replace(data, task=embed, train=train, dev=held, train_examples=pairs, dev_examples=dev, cache={})
        run = tune(paired, network, replace(self.settings, mode="full", epochs=1, lr=None), self.seed, quiet=self.quiet)
        if not run.finished:
            raise KeyboardInterrupt
        super().prepare(network, data)


def label_pairs(examples: Examples, seed: int) -> Examples:
    """Each text with PAIRS others of its label (score 1) and as many of other labels (0), drawn by the seed."""
    draw, texts, labels = np.random.default_rng(seed), examples.inputs, np.array(examples.targets)
    numbers: list[tuple[int, int]] = []
    for i, label in enumerate(labels):
        alike = np.flatnonzero(labels == label)
        for partners in (alike[alike != i], np.flatnonzero(labels != label)):
            numbers += [(i, j) for j in draw.choice(partners, PAIRS).tolist()] if len(partners) else []
    pairs, scores = [(texts[i], texts[j]) for i, j in numbers], [float(labels[i] == labels[j]) for i, j in numbers]
    return Examples(pairs, scores, examples.where)


class LoraMode(FullMode):
    """Train an adapter and the head."""

    adapters: AdapterSet

    def peak(self, network: Network) -> float:
        """The default learning rate; B·A begins at 0 on weights of any size."""
        return 1e-3 if network.config.hidden_size <= 512 else 5e-4

    def prepare(self, network: Network, data: "Data") -> None:
        """Freeze the network and put an adapter on it."""
        task = data.task
        network.requires_grad_(False)
        heads = {task.head: network.heads[task.head]} if task.head else {}
        self.adapters = AdapterSet(network)
        if self.settings.start is not None:
            self._continue(task, heads, self.settings.start)
        else:
            with_pooler = self.fresh_pooler or (self.settings.new_pooler and reads_pooler(network, task))
            self.adapters.add(ADAPTER, self.settings.lora, heads, network.pooler if with_pooler else None)
        self.adapters.use(ADAPTER)
        entry = self.adapters.entries[ADAPTER]
        for part in filter(None, (*entry.heads.values(), entry.pooler)):
            part.requires_grad_(True)

    def _continue(self, task: Task, heads: dict[str, nn.Module], start: str) -> None:
        """Load an adapter, which must have the task's head for the same labels."""
        file = read_adapter(start)
        if file.raw.get("use_dora"):
            raise EverybertError(f"{start} is a DoRA, which is not trained here; merge it into its base, or start anew")
        load_adapter(self.adapters, ADAPTER, file)
        known = (file.extras.get("task") or {}).get("labels")
        same = known is None or not task.labels or list(known) == list(task.labels)
        loaded = self.adapters.entries[ADAPTER].heads if same else {}
        shapes = [{k: v.shape for k, v in nn.ModuleDict(part).state_dict().items()} for part in (heads, loaded)]
        if shapes[0] != shapes[1]:
            raise EverybertError(f"{start} is an adapter for another task or other labels; start without it")

    def save(self, network: Network, data: "Data", task: Task, folder: Path, **extras: Any) -> None:
        """The adapter's folder."""
        save_adapter(self.adapters, ADAPTER, folder, base=str(data.folder), extras={"task": task.state()})


MODES = {"full": FullMode, "top": FullMode, "frozen": FrozenMode, "fewshot": FewShotMode, "lora": LoraMode}


def reads_pooler(network: Network, task: Task) -> bool:
    """Whether the task's head reads the pooler."""
    return task.head is not None and network.reads_pooler(task.head)


def reinitialise(network: Network, task: Task, settings: FinetuneSettings) -> None:
    """Reinitialise what `reinit` and `new_pooler` name; refuse settings that do not fit the model."""
    config = network.config
    by_layer = settings.mode.startswith("top:") or settings.reinit or settings.layer_decay != 1.0
    if config.layer_groups is not None and by_layer:
        raise EverybertError("this model's layers share their weights: top:K, reinit and layer decay do not apply")
    if settings.reinit > config.layers:
        raise EverybertError(f"reinit {settings.reinit} is more than the model's {config.layers} layers")
    if config.causal is True and settings.mode not in HEAD_ALONE and task.head in SEQUENCE_HEADS:
        raise EverybertError("the first token of a left-to-right model sees only itself: use mode frozen")
    for layer in list(network.encoder.layers)[config.layers - settings.reinit :]:
        initialise(layer, config)
    pooler = settings.reinit or (settings.new_pooler and reads_pooler(network, task))
    if pooler and network.pooler is not None:
        initialise(network.pooler, config)


# ── a run ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Data:
    """What the runs share: the base model's folder, the task, and both data sets."""

    folder: Path
    tokenizer: Tokenizer
    task: Task
    train: Features
    dev: Features
    train_examples: Examples
    dev_examples: Examples
    notes: tuple[str, ...] = ()
    allow_pickle: bool = False
    pooling: Pooling = field(default_factory=Pooling)
    """Of an embedder that is trained further: the settings in its files."""
    cache: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """Mode frozen: what the head reads in both sets, computed by the first run."""


@dataclass
class Run:
    """The outcome of one run."""

    seed: int
    scores: dict[str, float]
    epoch: int
    """The epoch that was kept."""
    history: list[dict[str, Any]]
    """Losses by step, scores by epoch."""
    network: Network | None
    """With the weights of the best epoch; None if another seed's run was better."""
    task: Task
    mode: FullMode | None
    """None if the network is."""
    finished: bool = True
    """False if it was interrupted: the best epoch so far was kept."""
    seconds: float = 0.0
    lr: float = 0.0
    """The highest learning rate."""
    trained: int = 0
    """Number of trained parameters."""

    @property
    def metric(self) -> float:
        """The score by which runs are compared."""
        return self.scores[self.task.metric]


def tune(
    data: Data,
    network: Network,
    settings: FinetuneSettings,
    seed: int = 0,
    fresh_pooler: bool = False,
    quiet: bool = False,
) -> Run:
    """Train one network, which has the task's head."""
    task, device = data.task, World().device(settings.device)
    dtype, kind = settings.torch_dtype(device), MODES[settings.mode.partition(":")[0]]
    mode = kind(settings, seed, quiet, fresh_pooler)
    network.to(device)
    peak = settings.lr if settings.lr is not None else mode.peak(network)
    reinitialise(network, task, settings)
    mode.prepare(network, data)
    key = (settings.mode, settings.features, settings.pool)
    if key not in data.cache or settings.reinit or settings.mode == "fewshot":  # encoders differ from seed to seed
        sets = {"train": data.train, "dev": data.dev}
        data.cache[key] = {name: mode.features(network, task, features) for name, features in sets.items()}
    data = replace(data, **data.cache[key])

    graphs = device.type == "cuda" and dtype != torch.float32
    compute = Compute(network, _loss(task), device, dtype, graphs=graphs)
    config = OptimizerConfig(eps=1e-8, weight_decay=settings.weight_decay, clip=settings.clip)
    optimizer = Optimizer(compute.master, config, mode.rates(network.config))
    steps_per_epoch = math.ceil(len(data.train) / settings.batch_size)
    progress = Progress(total=steps_per_epoch * settings.rounds)
    best = BestWeights(data, compute, steps_per_epoch, settings.patience)
    job = TrainingJob(
        compute=compute,
        optimizer=optimizer,
        steps=lambda at: steps(data, settings, seed, device, network.config),
        lr=lambda at: peak * linear(at.step, settings.warmup, steps_per_epoch * settings.rounds),
        names=("loss",),
        run=RunSettings(
            evaluate_every=math.ceil(steps_per_epoch / settings.evaluations),
            log_every=settings.log_every,
            spike=0.0,
            tensorboard=False,
        ),
        evaluate=best.evaluate,
        seed=seed,
        memory_hint="lower batch_size, or raise accumulate",
        guard_hint="lower lr, or raise warmup",
    )
    with Logs(quiet=quiet) as logs:
        finished = train(job, progress, logs)
    best.restore()
    task = task.tuned(compute.network, data.dev, data.dev_examples)
    return Run(
        seed=seed,
        scores=task.score(compute.network, data.dev, data.dev_examples),
        epoch=best.epoch,
        history=logs.rows,
        network=compute.master.eval(),
        task=task,
        mode=mode,
        finished=finished,
        seconds=progress.seconds,
        lr=peak,
        trained=sum(p.numel() for p in optimizer.parameters),
    )


def steps(
    data: Data, settings: FinetuneSettings, seed: int, device: torch.device, config: EncoderConfig
) -> Iterator[Step]:
    """The batches of every step: `batch_size` examples in the epoch's order, in `accumulate` parts."""
    task, features = data.task, data.train
    padded = config.relative != "none"
    fill = min(FILL_PADDED if padded else FILL, features.size) if device.type == "cuda" else None
    longest = None if padded else features.size
    for epoch in range(settings.rounds):
        order = permutation(make_key(seed, epoch), len(features))
        for first in range(0, len(features), settings.batch_size):
            example_E = order[first : first + settings.batch_size]
            total = task.share(features, example_E)
            items = []
            for number, part in enumerate(np.array_split(example_E, min(settings.accumulate, len(example_E)))):
                share = task.share(features, part) / total if total else 0.0
                ragged = make_batch(features, part, fill=fill, longest=longest, pad_id=config.pad_id, share=share)
                real = len(ragged.tokens_T) - (ragged.lengths[-1] if fill else 0)
                items.append(Item(ragged, Place(number=number), (1.0, 0.0, real)))  # copied when it is used
            yield Step(items, Place())


def _loss(task: Task) -> Callable[[Network, Ragged], tuple[Tensor, Tensor]]:
    def loss(network: Network, ragged: Ragged) -> tuple[Tensor, Tensor]:
        share = ragged.targets_as(TaskTargets).share
        assert share is not None
        value = task.loss(network, ragged) * share
        return value, value.detach()[None]

    return loss


def linear(step: int, warmup: float, total: int) -> float:
    """The learning rate as a share of its peak: up from 0 in the warm-up, then down to 0, as in `transformers`."""
    warm = round(warmup * total)
    if step < warm:
        return step / warm
    return max(0.0, (total - step) / max(1, total - warm))


class BestWeights:
    """Scores the dev set every epoch, or more often, and keeps the best weights: of equal scores, the lower loss."""

    def __init__(self, data: Data, compute: Compute, steps_per_epoch: int, patience: int | None) -> None:
        self.data, self.compute, self.steps_per_epoch, self.patience = data, compute, steps_per_epoch, patience
        self.best = (-math.inf, -math.inf)
        self.epoch = self.last_rise = 0
        self.weights: dict[str, Tensor] = {}

    def evaluate(self, progress: Progress) -> dict[str, float]:
        """The scores. Ends the run after `patience` epochs without a better one."""
        data = self.data
        scores = data.task.score(self.compute.network, data.dev, data.dev_examples)
        score = scores[data.task.metric]
        rose = score > self.best[0]
        if score >= self.best[0] and (candidate := (score, -self.loss())) > self.best:
            self.best, self.epoch = candidate, math.ceil(progress.step / self.steps_per_epoch)
            trained = self.compute.master.named_parameters()
            self.weights = {name: p.detach().clone() for name, p in trained if p.requires_grad}
        if rose:
            self.last_rise = progress.step
        elif self.patience is not None and progress.step - self.last_rise >= self.patience * self.steps_per_epoch:
            progress.total = progress.step
        return scores

    @torch.no_grad()
    def loss(self) -> float:
        """The mean loss on the dev set."""
        dev, total = self.data.dev, 0.0
        for example_E in np.array_split(np.arange(len(dev)), max(1, len(dev) // 32)):
            ragged = make_batch(dev, example_E, share=len(example_E) / len(dev)).to(self.compute.device)
            total += float(_loss(self.data.task)(self.compute.network, ragged)[0])
        return total

    def restore(self) -> None:
        """Load the best weights; the last ones stay if no epoch was finished."""
        self.compute.master.load_state_dict(self.weights, strict=False)
        self.compute.refresh()
