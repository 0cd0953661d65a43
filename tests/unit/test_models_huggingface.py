"""Our transformers against the real ones: same weights give the same logits, loss and gradients; same operators in order."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perfmodel.config import load_model
from perfmodel.models import build, materialize

transformers = pytest.importorskip("transformers", reason="the optional oracle is not installed")

TOKENS, BATCH = 6, 2
# Bookkeeping that costs no kernel, and the preparation of masks and positions, which transformers does in its own way.
IGNORED = {"detach", "alias", "lift_fresh", "expand", "slice", "unsqueeze", "view", "_unsafe_view", "t", "transpose"}
IGNORED |= {"permute", "split", "select", "_local_scalar_dense"}


def config_of(family, **changes):
    sizes = {"vocab_size": 50, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    fields = {
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 12},
        "opt": {
            "hidden_size": 16,
            "word_embed_proj_dim": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 40,
            "max_position_embeddings": 12,
        },
        "llama": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 40,
            "max_position_embeddings": 12,
        },
        "bert": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 40,
            "max_position_embeddings": 12,
        },
    }[family]
    return {"model_type": family, **sizes, **fields, **changes}


def real_model(config, attention, head="lm"):
    family = config["model_type"]
    kind = {
        "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
        "opt": ("OPTConfig", "OPTForCausalLM"),
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "bert": ("BertConfig", {"lm": "BertForMaskedLM", "pretraining": "BertForPreTraining"}.get(head)),
    }[family]
    if head == "classification":
        kind = ("BertConfig", "BertForSequenceClassification")
    fields = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(0)
    real_config = getattr(transformers, kind[0])(**fields, attn_implementation=attention)
    return getattr(transformers, kind[1])(real_config)


def our_model(config, attention, **more):
    run = {"batch_size": BATCH, "sequence_length": TOKENS, "attention": attention, "name": "ours", **more}
    keys = {key: value for key, value in config.items() if value is not None}
    return materialize(build(load_model({**keys, **run})), seed=1)


def copy_weights(real, ours):
    theirs = dict(real.named_parameters())
    for name, parameter in ours.named_parameters():
        source = "cls.predictions.bias" if name == "cls.predictions.decoder.bias" else name
        assert theirs[source].shape == parameter.shape
        with torch.no_grad():
            parameter.copy_(theirs[source])


CASES = [
    ("gpt2", {}),
    ("opt", {}),
    ("opt", {"word_embed_proj_dim": 8, "do_layer_norm_before": False}),
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 8}),
    ("bert", {}),
]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_the_same_weights_give_the_same_logits_and_gradients(family, changes, attention):
    config = config_of(family, **changes)
    real, ours = real_model(config, attention), our_model(config, attention)
    assert sum(p.numel() for p in real.parameters()) == ours.n_parameters
    copy_weights(real, ours.module)
    real.eval()
    ours.module.eval()
    (labels,) = ours.targets
    tokens = ours.args[0]
    theirs = real(tokens, attention_mask=torch.ones_like(tokens), labels=labels)
    logits = ours.module(*ours.args)
    loss = ours.loss(logits)
    torch.testing.assert_close(logits, theirs.logits)
    torch.testing.assert_close(loss, theirs.loss)
    theirs.loss.backward()
    loss.backward()
    gradients = {name: p.grad for name, p in real.named_parameters()}
    for name, parameter in ours.module.named_parameters():
        source = "cls.predictions.bias" if name == "cls.predictions.decoder.bias" else name
        torch.testing.assert_close(parameter.grad, gradients[source], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("head", ["pretraining", "classification"])
def test_bert_heads_equal_the_real_ones(head):
    config = config_of("bert")
    real, ours = real_model(config, "eager", head), our_model(config, "eager", head=head)
    copy_weights(real, ours.module)
    assert sum(p.numel() for p in real.parameters()) == ours.n_parameters
    real.eval()
    ours.module.eval()
    tokens = ours.args[0]
    if head == "pretraining":
        labels = {"labels": ours.targets[0], "next_sentence_label": ours.targets[1]}
    else:
        labels = {"labels": ours.targets[0]}
    theirs = real(tokens, attention_mask=torch.ones_like(tokens), **labels)
    torch.testing.assert_close(ours.loss(ours.module(*ours.args)), theirs.loss)


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        shape = tuple(out.shape) if isinstance(out, torch.Tensor) else None
        self.calls.append((func.overloadpacket._qualified_op_name.removeprefix("aten::"), shape))
        return out


def recorded(step, after):
    """Kernels of a step from the first call of `after` on."""
    with Recorder() as recorder:
        step()
    calls = [call for call in recorder.calls if call[0] not in IGNORED]
    names = [name for name, _ in calls]
    return calls[names.index(after) :]


# OPT draws its layer drop on the host; BERT asks on the host whether its fused attention needs the mask at all.
HOST_ONLY = {"gpt2": set(), "opt": {"rand", "lt"}, "llama": set(), "bert": {"eq", "all"}}
# The first operator after masks and positions are ready.
FIRST = {"gpt2": "native_layer_norm", "opt": "native_layer_norm", "llama": "pow", "bert": "native_layer_norm"}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bert"])
def test_the_same_operators_in_the_same_order_with_dropout_on(family, attention):
    config = config_of(family)
    real, ours = real_model(config, attention).train(), our_model(config, attention)
    tokens, (labels,) = ours.args[0], ours.targets
    seen = torch.ones_like(tokens)

    arguments = {"attention_mask": seen, "labels": labels} | ({} if family == "bert" else {"use_cache": False})

    def real_step():
        real(tokens, **arguments).loss.backward()

    def our_step():
        ours.loss(ours.module(*ours.args)).backward()

    expected, found = recorded(real_step, FIRST[family]), recorded(our_step, FIRST[family])
    assert found == [call for call in expected if call[0] not in HOST_ONLY[family]]


def test_the_recorder_sees_a_difference():
    config = config_of("gpt2")
    ours = our_model(config, "eager")
    other = our_model({**config, "activation_function": "gelu"}, "eager")
    names = [
        Counter(name for name, _ in recorded(lambda m=m: m.module(*m.args), "native_layer_norm")) for m in (ours, other)
    ]
    assert names[0] != names[1]


def test_release_4_38_adds_no_mask_to_gpt2_scores_and_clamps_those_of_opt():
    """Operators per layer as in the torch.fx listing of transformers 4.38.1 that NeuSight published."""
    new, old = (our_model(config_of("gpt2"), "eager", transformers=version) for version in ("4.57", "4.38"))
    square = (BATCH, 4, TOKENS, TOKENS)
    counts = [
        Counter(recorded(lambda m=m: m.module(*m.args), "native_layer_norm"))[("add", square)] for m in (new, old)
    ]
    assert counts == [2, 0]
    opt = our_model(config_of("opt"), "eager", transformers="4.38")
    calls = Counter(name for name, _ in recorded(lambda: opt.module(*opt.args), "native_layer_norm"))
    per_layer = {"clone": 4, "bmm": 2, "maximum": 1, "_softmax": 1}
    assert {name: calls[name] for name in per_layer} == {name: 2 * count for name, count in per_layer.items()}


def test_both_releases_compute_the_same():
    for family in ("gpt2", "opt"):
        new, old = (our_model(config_of(family), "eager", transformers=version) for version in ("4.57", "4.38"))
        new.module.eval()
        old.module.eval()
        torch.testing.assert_close(new.module(*new.args), old.module(*old.args))
