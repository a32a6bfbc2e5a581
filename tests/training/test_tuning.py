"""One fine-tuning run: what each mode trains, the learning rates, and which epoch is kept."""

import signal

import numpy as np
import pytest
import tiny_bert as tiny
import torch
from sentiment import FAST, parts, sentiment

import everybert
from everybert.errors import EverybertError
from everybert.model.config import EncoderConfig
from everybert.model.heads import Network
from everybert.model.lora import LoraConfig
from everybert.model.ragged import Ragged
from everybert.store.huggingface import load_network
from everybert.tasks import Classify, load_task
from everybert.text.tokenizer import Tokenizer
from everybert.training.finetune import finetune, prepare_data
from everybert.training.tuning import BestWeights, FinetuneSettings, FrozenMode, FullMode, LoraMode, steps, tune


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("base"), hidden_dropout_prob=0.1)


def test_top_layers_alone_move(base, tmp_path):
    tuned = finetune(base, "classify", sentiment(0, 32), sentiment(1, 16), mode="top:1", **FAST)
    before = load_network(base).network.state_dict()
    after = tuned.runs[0].network.state_dict()
    moved = {name for name in before if name in after and not torch.equal(before[name], after[name])}
    assert moved and all(name.startswith(("encoder.layers.1.", "pooler.", "heads.")) for name in moved)


def test_frozen_means_frozen(base):
    tuned = finetune(base, "classify", sentiment(0, 32), sentiment(1, 16), mode="frozen", **FAST)
    before, after = load_network(base).network.encoder.state_dict(), tuned.runs[0].network.encoder.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert tuned.runs[0].trained == 2 * 32 + 2


def test_frozen_features_are_computed_once_for_all_seeds(base, monkeypatch):
    computed, real = [], FrozenMode.features
    monkeypatch.setattr(FrozenMode, "features", lambda *given: computed.append(given) or real(*given))
    data = (sentiment(0, 32), sentiment(1, 16))
    tuned = finetune(base, "classify", *data, mode="frozen", seeds=3, **FAST)
    assert len(computed) == 2 and len(tuned.runs) == 3
    best = tuned.runs[0]
    alone = finetune(base, "classify", *data, mode="frozen", seed=best.seed, **FAST)
    head, own = (run.network.heads["classify"].state_dict() for run in (best, alone.runs[0]))
    assert all(torch.equal(head[name], own[name]) for name in own)


def test_reinitialised_layers_differ(base):
    data_rows = sentiment(0, 16)
    tuned = finetune(base, "classify", data_rows, data_rows, reinit=1, **(FAST | {"lr": 1e-9, "epochs": 1}))
    before, after = load_network(base).network, tuned.runs[0].network
    first, second = ((before.encoder.layers[i].attention.qkv.weight - after.encoder.layers[i].attention.qkv.weight)
                     for i in (0, 1))  # fmt: skip
    assert first.abs().max() < 1e-6 and second.abs().max() > 0.01


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_a_new_pooler(base, tmp_path, mode):
    data_rows, still = sentiment(0, 16), FAST | {"lr": 1e-9, "epochs": 1}
    tuned = finetune(base, "classify", data_rows, data_rows, tmp_path / "a", mode=mode, new_pooler=True, **still)
    before, after = load_network(base).network.pooler.dense.weight, tuned.runs[0].network.pooler.dense.weight
    assert (before - after).abs().max() > 0.01
    model = everybert.load(base if mode == "lora" else tmp_path / "a")
    if mode == "lora":
        model.use(model.add_adapter(tmp_path / "a"))
    assert torch.equal(model.network.pooler.dense.weight, after.cpu())
    if mode == "lora":
        model.use(None)
        assert torch.equal(model.network.pooler.dense.weight, before)  # the encoder keeps its own


def test_an_adapter_holds_no_layers():
    with pytest.raises(EverybertError, match="no encoder layers"):
        FinetuneSettings(mode="lora", reinit=1)
    with pytest.raises(EverybertError, match="without a new pooler"):
        FinetuneSettings(mode="lora", start="a", new_pooler=True)


def test_layer_rates():
    config = load_config()
    rate = FullMode(FinetuneSettings(layer_decay=0.5)).rates(config)
    names = ["heads.classify.output.weight", "pooler.dense.bias", "encoder.layers.1.attention.qkv.weight",
             "encoder.layers.0.attention_norm.bias", "encoder.embeddings.token.weight"]  # fmt: skip
    assert [rate(n) for n in names] == [1.0, 1.0, 0.5, 0.25, 0.125]
    assert [FullMode(FinetuneSettings(mode="top:1")).rates(config)(n) for n in names] == [1.0, 1.0, 1.0, 0.0, 0.0]
    with pytest.raises(EverybertError, match="more than the model's 2 layers"):
        FullMode(FinetuneSettings(mode="top:3")).rates(config)


def load_config():
    return EncoderConfig(layers=2, hidden_size=32, heads=2, intermediate_size=48)


def test_shared_layers_have_no_top(tmp_path):
    import tiny_models

    folder = tiny_models.saved(tmp_path / "albert", "albert", vocab_size=145)
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(tiny.VOCAB)) + "\n")
    with pytest.raises(EverybertError, match="share their weights"):
        finetune(folder, "classify", sentiment(0, 16), sentiment(1, 16), mode="top:1", **FAST)


def test_a_run_is_a_function_of_its_seed(base):
    def losses(seed):
        tuned = finetune(base, "classify", sentiment(0, 48), sentiment(1, 16), seed=seed, log_every=1, **FAST)
        return [row["loss"] for row in tuned.history if "loss" in row]

    assert losses(3) == losses(3)
    assert losses(3) != losses(4)


def script(monkeypatch, scores):
    """Each evaluation's accuracy, as given; returns the pooler's weights that it was of."""
    left, real, kept = iter(scores), Classify.score, []

    def fake(self, network, features, examples):
        kept.append(network.pooler.dense.weight.detach().clone())
        return real(self, network, features, examples) | {"accuracy": next(left)}

    monkeypatch.setattr(Classify, "score", fake)
    return kept


def test_patience_stops_and_keeps_the_best_epoch(base, monkeypatch):
    script(monkeypatch, [0.5, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])
    tuned = finetune(base, "classify", sentiment(0, 32), sentiment(1, 16), patience=2, **(FAST | {"epochs": 8}))
    assert tuned.runs[0].epoch == 2
    assert sum("f1" in row for row in tuned.history) == 4  # epochs 1 to 4, then patience was over


def test_an_epoch_may_be_scored_more_than_once(base, monkeypatch):
    kept = script(monkeypatch, [0.5, 0.9, 0.8, 0.7, 0.6, 0.6])
    few = FAST | {"epochs": 2, "batch_size": 8}
    tuned = finetune(base, "classify", sentiment(0, 40), sentiment(1, 16), evaluations=2, **few)
    steps = [row["step"] for row in tuned.history if "f1" in row]
    assert steps == [3, 6, 9, 10]  # five steps an epoch: about half an epoch apart, and the last
    assert tuned.runs[0].epoch == 2
    assert torch.equal(kept[-1], kept[1]) and not torch.equal(kept[-1], kept[3])
    with pytest.raises(EverybertError, match="evaluations must be at least 1"):
        FinetuneSettings(evaluations=0)


def test_patience_counts_whole_epochs_however_often_they_are_scored(base, monkeypatch):
    script(monkeypatch, [0.5, 0.9, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6])
    few = FAST | {"epochs": 4, "batch_size": 8, "patience": 1, "evaluations": 2}
    tuned = finetune(base, "classify", sentiment(0, 32), sentiment(1, 16), **few)
    assert [row["step"] for row in tuned.history if "f1" in row] == [2, 4, 6, 8]  # four steps an epoch, one more


def test_control_c_keeps_the_best_so_far(base, tmp_path, monkeypatch):
    real = BestWeights.evaluate

    def interrupt(self, progress):
        result = real(self, progress)
        if progress.step >= 2 * self.steps_per_epoch:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(BestWeights, "evaluate", interrupt)
    tuned = finetune(base, "classify", sentiment(0), sentiment(1), tmp_path / "out", seeds=3, **(FAST | {"epochs": 6}))
    assert len(tuned.runs) == 1 and not tuned.runs[0].finished
    assert any("interrupted" in note for note in tuned.notes)
    loaded, tokenizer = parts(tmp_path / "out")
    task = load_task("classify", loaded.network, loaded.labels, None, loaded.extras)
    texts, gold = zip(*sentiment(1))
    found = [p.label for p in task.predict(loaded.network, tokenizer, texts)]
    assert np.mean([a == b for a, b in zip(found, gold)]) == pytest.approx(tuned.metric.mean)


def interrupting(monkeypatch, number):
    """Ctrl-C in the run of that number, after its first epoch."""
    real, runs = BestWeights.evaluate, []

    def evaluate(self, progress):
        runs.append(self) if self not in runs else None
        if len(runs) == number:
            signal.raise_signal(signal.SIGINT)
        return real(self, progress)

    monkeypatch.setattr(BestWeights, "evaluate", evaluate)
    return runs


@pytest.mark.parametrize(
    "number, seeds, grid", [(2, 3, False), (2, 1, {"lr": [1e-3, 1e-4, 1e-5]}), (3, 2, {"lr": [1e-3, 1e-4]})]
)
def test_control_c_ends_a_search_and_keeps_what_is_finished(base, tmp_path, monkeypatch, caplog, number, seeds, grid):
    runs = interrupting(monkeypatch, number)
    few = {name: value for name, value in (FAST | {"epochs": 2}).items() if name not in (grid or {})}
    tuned = finetune(base, "classify", sentiment(0), sentiment(1), tmp_path / "out", seeds=seeds, grid=grid, **few)
    assert len(runs) == number, "no further run was started"
    assert not tuned.finished and [run.finished for run in tuned.runs] == [True]
    assert len(tuned.grid) == (min(number - 1, len(grid["lr"])) if grid else 0)
    assert tuned.metric.runs == 1 and (tmp_path / "out" / "config.json").exists()
    total = len(grid["lr"]) + seeds - 1 if grid else seeds
    assert f"interrupted after {number - 1} of {total} runs" in caplog.text and tuned.notes[-1] in caplog.text


def test_control_c_between_two_runs_keeps_the_first(base, monkeypatch):
    real, seeds = tune, []

    def run(data, network, settings, seed, *args, **more):
        seeds.append(seed)
        if seed == 1:
            raise KeyboardInterrupt
        return real(data, network, settings, seed, *args, **more)

    monkeypatch.setattr("everybert.training.finetune.tune", run)
    tuned = finetune(base, "classify", sentiment(0), sentiment(1), seeds=3, **FAST)
    assert seeds == [0, 1] and len(tuned.runs) == 1 and not tuned.finished


def test_settings_are_frozen():
    with pytest.raises(AttributeError):
        FinetuneSettings().mode = "lora"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": "sum"}, "use mode frozen"),
        ({"mode": "lora", "pool": "cls"}, "use mode frozen"),
        ({"mode": "frozen", "layer_decay": 0.9}, "layers that are trained"),
        ({"mode": "lora", "start": "adapter", "lora": LoraConfig(rank=8)}, "without a new pooler or rank"),
        ({"patience": 0}, "patience must be at least 1, not 0"),
        ({"reinit": -1}, "reinit must be at least 0"),
        ({"weight_decay": float("nan")}, "weight decay must be at least 0"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(changes, message):
    with pytest.raises(EverybertError, match=message):
        FinetuneSettings(**changes)


def test_larger_weights_take_larger_steps():
    network = Network(load_config())
    usual, lora = FullMode(FinetuneSettings()).peak(network), LoraMode(FinetuneSettings(mode="lora")).peak(network)
    assert lora > usual
    with torch.no_grad():
        for layer in network.encoder.layers:
            layer.feed_forward.input.weight.normal_(std=0.14)
    assert FullMode(FinetuneSettings()).peak(network) == pytest.approx(2 * usual, rel=0.1)
    assert LoraMode(FinetuneSettings(mode="lora")).peak(network) == lora


def test_half_precision_is_bfloat16_by_any_name_and_float16_is_refused():
    for name, dtype in [("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp32", torch.float32)]:
        assert FinetuneSettings(dtype=name).torch_dtype(torch.device("cpu")) == dtype
    for name in ("float16", "fp16", "int8"):
        with pytest.raises(EverybertError, match=f"no dtype '{name}'; it has bfloat16, bf16, float32, fp32"):
            FinetuneSettings(dtype=name)


def test_training_computes_in_bf16(base):
    tuned = finetune(base, "classify", sentiment(0, 32), sentiment(1, 16), **(FAST | {"epochs": 1, "dtype": "bf16"}))
    assert tuned.runs[0].network.pooler.dense.weight.dtype == torch.float32  # the master weights


def test_the_guard_names_the_settings_of_fine_tuning(base):
    how = FAST | {"lr": 0.999, "clip": None, "weight_decay": 1e30, "epochs": 30, "warmup": 0.0, "log_every": 1}
    with pytest.raises(EverybertError, match="lower lr, or raise warmup"):
        finetune(base, "classify", sentiment(0, 32), sentiment(1, 16), **how)


def test_speed_counts_real_tokens(base, monkeypatch):
    data = prepare_data("classify", base, Tokenizer.load(base), sentiment(0, 8), sentiment(1, 8))
    monkeypatch.setattr(Ragged, "to", lambda self, device: self)
    made = next(steps(data, FinetuneSettings(batch_size=8), 0, torch.device("cuda"), EncoderConfig()))
    (item,) = made.items
    assert item.counts[2] == data.train.lengths_S.sum() < len(item.batch.tokens_T)


def test_of_equal_scores_the_lower_loss_is_kept(base, monkeypatch):
    losses = iter([0.5, 0.3, 0.4])
    monkeypatch.setattr("everybert.training.tuning.BestWeights.loss", lambda self: next(losses))
    real = Classify.score
    monkeypatch.setattr(Classify, "score", lambda *args: real(*args) | {"accuracy": 0.5})
    tuned = finetune(base, "classify", sentiment(0, 16), sentiment(1, 8), **(FAST | {"epochs": 3}))
    assert tuned.runs[0].epoch == 2
