"""Hugging Face `config.json` fields -> TransformerSpec fields, without importing transformers.

A field that is absent takes the default that transformers 4.57 gives it. Fields that change nothing in a training
iteration (token ids, initialiser, generation settings) are ignored; those that change the model in a way we cannot
build are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perfmodel.errors import ConfigError, suggest

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}
# What transformers can be told to compute attention with -> our word; the flash packages' kernels are those that PyTorch's
# fused call takes where it can.
_ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "sdpa", "flash_attention_3": "sdpa"}
_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation")
# Heads of BERT other than a language model's, by the class in `architectures`.
_BERT_HEADS = {"BertForPreTraining": "pretraining", "BertForSequenceClassification": "classification"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How one `model_type` maps: spec field -> (config field, default); and what must have its usual value.

    `assumed` are spec fields that a config does not decide.
    """

    architecture: str
    fields: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, tuple[Any, ...]]
    assumed: Mapping[str, Any] = field(default_factory=dict)


_GPT2 = _Family(
    architecture="gpt2",
    fields={
        "vocab_size": ("vocab_size", 50257),
        "hidden_size": ("n_embd", 768),
        "layers": ("n_layer", 12),
        "heads": ("n_head", 12),
        "ffn_size": ("n_inner", None),
        "max_positions": ("n_positions", 1024),
        "activation": ("activation_function", "gelu_new"),
        "norm_epsilon": ("layer_norm_epsilon", 1e-5),
        "hidden_dropout": ("resid_pdrop", 0.1),
        "embedding_dropout": ("embd_pdrop", 0.1),
        "attention_dropout": ("attn_pdrop", 0.1),
        "tied_embeddings": ("tie_word_embeddings", True),
    },
    fixed={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
)
_OPT = _Family(
    architecture="opt",
    fields={
        "vocab_size": ("vocab_size", 50272),
        "hidden_size": ("hidden_size", 768),
        "layers": ("num_hidden_layers", 12),
        "heads": ("num_attention_heads", 12),
        "ffn_size": ("ffn_dim", 3072),
        "embedding_size": ("word_embed_proj_dim", None),
        "max_positions": ("max_position_embeddings", 2048),
        "activation": ("activation_function", "relu"),
        "pre_norm": ("do_layer_norm_before", True),
        "hidden_dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.0),
        "tied_embeddings": ("tie_word_embeddings", True),
        "attention_bias": ("enable_bias", True),
        "mlp_bias": ("enable_bias", True),
    },
    fixed={"layerdrop": (0.0,), "layer_norm_elementwise_affine": (True,), "_remove_final_layer_norm": (False,)},
)
_LLAMA = _Family(
    architecture="llama",
    fields={
        "vocab_size": ("vocab_size", 32000),
        "hidden_size": ("hidden_size", 4096),
        "layers": ("num_hidden_layers", 32),
        "heads": ("num_attention_heads", 32),
        "kv_heads": ("num_key_value_heads", None),
        "head_dim": ("head_dim", None),
        "ffn_size": ("intermediate_size", 11008),
        "max_positions": ("max_position_embeddings", 2048),
        "activation": ("hidden_act", "silu"),
        "norm_epsilon": ("rms_norm_eps", 1e-6),
        "attention_dropout": ("attention_dropout", 0.0),
        "attention_bias": ("attention_bias", False),
        "mlp_bias": ("mlp_bias", False),
        "rope_theta": ("rope_theta", 10000.0),
        "tied_embeddings": ("tie_word_embeddings", False),
    },
    fixed={},
)
_MIXTRAL = _Family(
    architecture="mixtral",
    fields={
        "vocab_size": ("vocab_size", 32000),
        "hidden_size": ("hidden_size", 4096),
        "layers": ("num_hidden_layers", 32),
        "heads": ("num_attention_heads", 32),
        "kv_heads": ("num_key_value_heads", 8),
        "head_dim": ("head_dim", None),
        "ffn_size": ("intermediate_size", 14336),
        "experts": ("num_local_experts", 8),
        "experts_per_token": ("num_experts_per_tok", 2),
        "max_positions": ("max_position_embeddings", 131072),
        "activation": ("hidden_act", "silu"),
        "norm_epsilon": ("rms_norm_eps", 1e-5),
        "attention_dropout": ("attention_dropout", 0.0),
        "rope_theta": ("rope_theta", 1e6),
        "tied_embeddings": ("tie_word_embeddings", False),
    },
    fixed={"sliding_window": (None,), "router_jitter_noise": (0.0,), "output_router_logits": (False,)},
    assumed={"precision": "bf16"},  # its experts' products run in nothing else
)
_BERT = _Family(
    architecture="bert",
    fields={
        "vocab_size": ("vocab_size", 30522),
        "hidden_size": ("hidden_size", 768),
        "layers": ("num_hidden_layers", 12),
        "heads": ("num_attention_heads", 12),
        "ffn_size": ("intermediate_size", 3072),
        "max_positions": ("max_position_embeddings", 512),
        "token_types": ("type_vocab_size", 2),
        "activation": ("hidden_act", "gelu"),
        "norm_epsilon": ("layer_norm_eps", 1e-12),
        "hidden_dropout": ("hidden_dropout_prob", 0.1),
        "attention_dropout": ("attention_probs_dropout_prob", 0.1),
        "tied_embeddings": ("tie_word_embeddings", True),
    },
    fixed={"position_embedding_type": ("absolute",), "is_decoder": (False,), "add_cross_attention": (False,)},
)
FAMILIES: Mapping[str, _Family] = {"gpt2": _GPT2, "opt": _OPT, "llama": _LLAMA, "mixtral": _MIXTRAL, "bert": _BERT}
# Names that older configs give to the same field.
_SYNONYMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gpt2": {
        "n_embd": ("hidden_size",),
        "n_layer": ("num_hidden_layers",),
        "n_head": ("num_attention_heads",),
        "n_positions": ("max_position_embeddings", "n_ctx"),
    }
}


def transformer_fields(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields of a TransformerSpec from a Hugging Face config. Raises ConfigError for a model type that is not built."""
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        reason = "; of mixtures of experts mixtral alone is built" if "num_experts" in config else ""
        near = suggest(str(model_type), FAMILIES)
        raise ConfigError(f"{where}: model_type: found {model_type!r}, allowed {', '.join(FAMILIES)}{near}{reason}")
    problems = [
        f"{where}: {key}: found {config[key]!r}, allowed {' or '.join(map(repr, allowed))} (else the model differs)"
        for key, allowed in family.fixed.items()
        if key in config and config[key] not in allowed
    ]
    attention = next((config[key] for key in _ATTENTION_KEYS if config.get(key) is not None), None)
    if attention is not None and attention not in _ATTENTION:
        problems.append(f"{where}: attn_implementation: found {attention!r}, allowed {', '.join(_ATTENTION)}")
    if problems:
        raise ConfigError(problems)
    synonyms = _SYNONYMS.get(str(model_type), {})
    found = {
        field: _value(config, key, synonyms.get(key, ()), default) for field, (key, default) in family.fields.items()
    }
    if found.get("embedding_size") == found["hidden_size"]:
        found["embedding_size"] = None
    found |= {"attention": _ATTENTION.get(str(attention)), "head": _head(family, config.get("architectures"))}
    return {"architecture": family.architecture, **family.assumed} | {k: v for k, v in found.items() if v is not None}


def _head(family: _Family, architectures: Any) -> str | None:
    """The head that a config's `architectures` name, or None for the usual one."""
    if family is not _BERT or not isinstance(architectures, list | tuple):
        return None
    return next((_BERT_HEADS[name] for name in architectures if name in _BERT_HEADS), None)


def _value(config: Mapping[str, Any], key: str, synonyms: tuple[str, ...], default: Any) -> Any:
    given = next((config[name] for name in (key, *synonyms) if config.get(name) is not None), default)
    return _ACTIVATIONS.get(given, given) if isinstance(given, str) else given


def config_fields(model_type: str) -> list[str]:
    """Every config field that matters for a model type (used to tell a misspelt key from an ignored one)."""
    family = FAMILIES[model_type]
    renamed = [name for names in _SYNONYMS.get(model_type, {}).values() for name in names]
    return [*(key for key, _ in family.fields.values()), *family.fixed, *renamed, *_ATTENTION_KEYS]
