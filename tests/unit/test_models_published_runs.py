"""What published runs did otherwise than Hugging Face's models: a head on picked tokens, 16-bit Transformer-XL."""

import pytest
import torch

from perfmodel.api import extract_graph
from perfmodel.config import load_model
from perfmodel.errors import ConfigError
from perfmodel.models import build, materialize
from perfmodel.models.transformer_xl import transformer_xl

BERT = {
    "kind": "transformer", "name": "b", "architecture": "bert", "batch_size": 3, "vocab_size": 99, "hidden_size": 32,
    "layers": 1, "heads": 2, "max_positions": 16, "head": "pretraining",
}  # fmt: skip


def head_rows(graph):
    """Rows of the product with the vocabulary in the forward pass."""
    (product,) = [
        op for op in graph.ops if op.phase == "forward" and op.name == "aten.addmm" and op.outputs[0].shape[1] == 99
    ]
    return product.outputs[0].shape[0]


def test_the_head_runs_on_the_tokens_it_predicts():
    assert head_rows(extract_graph({**BERT, "predicted_tokens": 5})) == 3 * 5
    assert head_rows(extract_graph(BERT)) == 3 * 16


def test_logits_of_picked_tokens_are_those_of_all_tokens_at_these_places():
    built = materialize(build(load_model({**BERT, "predicted_tokens": 5})), 0)
    module = built.module.eval()
    tokens, types, mask, places = built.args
    with torch.no_grad():
        picked, sentence = module(tokens, types, mask, places)
        whole, same = module(tokens, types, mask)
    torch.testing.assert_close(picked, whole.view(-1, 99)[places])
    torch.testing.assert_close(sentence, same)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"predicted_tokens": 17}, "predicted_tokens: found 17, allowed at most the 16 tokens"),
        ({"predicted_tokens": 2, "head": "classification"}, "with a language-model head"),
    ],
)
def test_tokens_that_cannot_be_predicted(changes, words):
    with pytest.raises(ConfigError, match=words):
        load_model({**BERT, **changes})


def test_transformer_xl_in_16_bits_has_the_loss_of_32_bits():
    torch.manual_seed(0)
    model, (segment, targets, memories), _ = transformer_xl(size="tiny", batch=2, tokens=8, memory=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
        wide = model(segment, targets, memories)
        half = model.to(torch.bfloat16)(segment, targets, [memory.bfloat16() for memory in memories])
    assert half.dtype == torch.float32  # the softmax is wide in both
    assert half.item() == pytest.approx(wide.item(), rel=0.02)
