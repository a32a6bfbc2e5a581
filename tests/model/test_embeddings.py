import pytest
import torch

from everybert.model.config import EncoderConfig, preset
from everybert.model.embeddings import Embeddings, cos_sin_once, rotary_table, sinusoids
from everybert.model.encoder import initialise
from everybert.model.ragged import Ragged

SHAPE = {"vocab_size": 20, "hidden_size": 8, "heads": 2, "layers": 1, "max_positions": 6}
BATCH = Ragged.of([[3, 4, 5], [6, 3]], [[0, 0, 1], [0, 1]])


def made(**changes):
    torch.manual_seed(0)
    config = EncoderConfig(**{**SHAPE, **changes})
    module = Embeddings(config)
    initialise(module, config)
    return module.eval()


@pytest.mark.parametrize(
    "changes",
    [{}, {"position_offset": 2, "segments": 1}, {"segments": 0}, {"positions": "rotary", "segments": 0}],
)
def test_the_sum_is_that_of_the_tables_of_each_token(changes):
    module, seen = made(**changes), {}
    module(BATCH, watch=seen.__setitem__)
    for t, (token, segment, position) in enumerate(zip([3, 4, 5, 6, 3], [0, 0, 1, 0, 1], [0, 1, 2, 0, 1])):
        wanted = module.token.weight[token].clone()
        if module.segment is not None:
            wanted += module.segment.weight[segment if module.segment.num_embeddings > 1 else 0]
        if module.position is not None:
            wanted += module.position.weight[position + module.offset]
        torch.testing.assert_close(seen["embeddings.sum"][t], wanted)


def test_norm_projection_and_given_vectors():
    module = made(embedding_size=4)
    assert module.projection.weight.shape == (8, 4) and module(BATCH).shape == (5, 8)
    assert made(embedding_norm=False).norm is None
    given = torch.randn(5, 4)
    own = Ragged.of([[0, 0, 0], [0, 0]], [[0, 0, 1], [0, 1]])
    replaced = Ragged(**{**vars(own), "token_TE": given})
    total = given + module.segment.weight[[0, 0, 1, 0, 1]] + module.position.weight[[0, 1, 2, 0, 1]]
    torch.testing.assert_close(module(replaced), module.projection(module.norm(total)))


def test_fixed_tables_are_the_formulas():
    table = sinusoids(6, 8)
    assert table[0].tolist() == [0, 1] * 4
    assert table[3, 4].item() == pytest.approx(torch.tensor(3 / 10000 ** (4 / 8)).sin().item())
    module = made(positions="sinusoidal")
    assert torch.equal(module.position.weight, table) and not module.position.weight.requires_grad
    cos, sin = rotary_table(torch.tensor([0, 2]), EncoderConfig(hidden_size=8, heads=2), 100.0)
    assert cos[0].tolist() == [1] * 4 and sin[1].tolist() == pytest.approx(
        torch.tensor([2, 0.2, 2, 0.2]).sin().tolist()
    )


def test_compiled_code_has_the_rotary_table_as_one_operator():
    """Else the compiler computes the cosines anew in every layer."""
    config, positions_T = preset("modernbert-base"), torch.tensor([0, 1, 2, 0, 1, 511])
    called = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    table = torch.compile(lambda positions_T: rotary_table(positions_T, config, 10_000.0), backend=backend)
    for compiled, eager in zip(table(positions_T), rotary_table(positions_T, config, 10_000.0), strict=True):
        assert torch.equal(compiled, eager)
    assert sum("cos_sin" in name for name in called) == 1 and not any(name.endswith("cos") for name in called)
    torch.library.opcheck(cos_sin_once, (positions_T, torch.rand(32)))
