"""The files of sentence-transformers as settings: what is written is read again, what is not supported is refused.

The vectors themselves are compared with sentence-transformers in tests/inference/test_embedding.py.
"""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from everybert.errors import EverybertError
from everybert.model.pooling import MODES
from everybert.store.sentence_transformers import FLAGS, Pooling, encoder_folder, read_pooling, write_pooling

WIDTH = 4


def write(folder, *modules, **settings):
    """A folder with an encoder and these modules: (class, its config.json, its tensors)."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (kind, about, tensors) in enumerate(modules, 1):
        path = f"{number}_{kind}"
        name = kind if "." in kind else f"sentence_transformers.models.{kind}"
        listed.append({"idx": number, "name": str(number), "path": path, "type": name})
        (folder / path).mkdir(parents=True)
        (folder / path / "config.json").write_text(json.dumps(about))
        if tensors:
            save_file(tensors, folder / path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


MEAN = ("Pooling", {"pooling_mode_mean_tokens": True}, None)
DENSE = ("Dense", {"activation_function": "torch.nn.modules.linear.Identity"}, {"linear.weight": torch.ones(3, WIDTH)})


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("modes", [("mean",), ("cls",), ("cls", "max", "mean"), MODES])
def test_what_is_written_is_read_again(tmp_path, modes, normalize):
    write_pooling(tmp_path, Pooling(modes, normalize, 64, lowercase=True), WIDTH)
    found = read_pooling(tmp_path, WIDTH)
    assert (found.modes, found.normalize, found.size, found.lowercase) == (modes, normalize, 64, True)
    assert found.width(WIDTH) == WIDTH * len(modes) and found.published
    (tmp_path / "again").mkdir()
    write_pooling(tmp_path / "again", found, WIDTH)  # files that were read are written as they were
    for name, content in found.files.items():
        assert (tmp_path / "again" / name).read_bytes() == content == (tmp_path / name).read_bytes()


def test_a_folder_without_these_files_has_the_defaults(tmp_path):
    assert read_pooling(tmp_path, WIDTH) == Pooling() and not Pooling().published
    assert encoder_folder(tmp_path) == tmp_path


def test_modes_by_name_and_by_flag(tmp_path):
    for mode, flag in FLAGS.items():
        by_flag = write(tmp_path / f"flag-{mode}", ("Pooling", {f"pooling_mode_{flag}": True}, None))
        by_name = write(tmp_path / f"name-{mode}", ("Pooling", {"pooling_mode": mode}, None))
        assert read_pooling(by_flag, WIDTH).modes == read_pooling(by_name, WIDTH).modes == (mode,)


def test_modules_apply_in_their_order(tmp_path):
    prompts = {"query": "q: "}
    folder = write(tmp_path, MEAN, DENSE, ("Normalize", {}, None), prompts=prompts, default_prompt_name="query")
    found, x = read_pooling(folder, WIDTH), torch.randn(2, WIDTH)
    assert found.normalize and found.width(WIDTH) == 3
    assert torch.allclose(found.finish(x), F.normalize(x.sum(1, keepdim=True).expand(2, 3), dim=-1))
    assert (found.prompt(None), found.prompt("query")) == ("q: ", "q: ")
    with pytest.raises(EverybertError, match="no prompt 'document'"):
        found.prompt("document")


@pytest.mark.parametrize(
    ("modules", "settings", "message"),
    [
        ([], {}, "no Pooling module"),
        ([("other.module.Pooling", {}, None)], {}, "foreign module in place 1"),
        ([MEAN, ("CNN", {}, None)], {}, "CNN module in place 2"),
        ([("Pooling", {"pooling_mode": "best"}, None)], {}, "no pooling 'best'"),
        ([MEAN, ("Dense", {}, {"linear.weight": torch.ones(3, WIDTH + 1)})], {}, "unknown form or size"),
        ([MEAN, ("Dense", {"use_residual": True}, DENSE[2])], {}, "unknown form or size"),
        ([MEAN, ("Dense", {}, DENSE[2] | {"gate.weight": torch.ones(1)})], {}, "unknown form or size"),
        ([MEAN, ("LayerNorm", {}, {"norm.weight": torch.ones(2), "norm.bias": torch.ones(2)})], {}, "unknown form"),
        ([MEAN], {"prompts": {"a": 1}}, "prompts that are not texts"),
        ([MEAN], {"default_prompt_name": "a"}, "default prompt without a text"),
        ([MEAN], {"truncate_dim": 0}, "truncate_dim of 0"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, modules, settings, message):
    with pytest.raises(EverybertError, match=message):
        read_pooling(write(tmp_path, *modules, **settings), WIDTH)


def test_an_activation_has_the_weights_that_it_learnt(tmp_path):
    slope = {"activation_function.weight": torch.tensor([-2.0])}
    dense = ("Dense", {"activation_function": "torch.nn.modules.activation.PReLU"}, DENSE[2] | slope)
    found = read_pooling(write(tmp_path, MEAN, dense), WIDTH).finish(-torch.ones(1, WIDTH))
    assert torch.equal(found, torch.full((1, 3), 2.0 * WIDTH))


def test_another_way_to_tokens_is_refused(tmp_path):
    folder, kwargs = write(tmp_path, MEAN), {"text": {"add_special_tokens": False}}
    (folder / "sentence_bert_config.json").write_text(json.dumps({"processing_kwargs": {}}))
    assert read_pooling(folder, WIDTH).modes == ("mean",)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"processing_kwargs": kwargs}))
    with pytest.raises(EverybertError, match="processing_kwargs"):
        read_pooling(folder, WIDTH)


def test_an_older_encoder_is_in_a_folder_of_its_own(tmp_path):
    first = {"idx": 0, "name": "0", "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}
    (tmp_path / "modules.json").write_text(json.dumps([first]))
    assert encoder_folder(tmp_path) == tmp_path / "0_Transformer"
    (tmp_path / "modules.json").write_text(json.dumps([first | {"type": "sentence_transformers.models.CLIPModel"}]))
    with pytest.raises(EverybertError, match="begin with a CLIPModel module"):
        encoder_folder(tmp_path)
