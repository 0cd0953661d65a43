"""Models of transformers itself, from a config, on any device; their inputs and a loss on their logits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.overrides import TorchFunctionMode

from perfmodel.config.foreign import HuggingFaceSpec
from perfmodel.errors import ConfigError
from perfmodel.models.blocks import masked_token_loss, next_token_loss
from perfmodel.models.built import CONVERTED, PARAMETER_DTYPE

MAX_DEFAULT_TOKENS = 2048
_MASK = "_prepare_4d_attention_mask_for_sdpa"  # of transformers 4.57, in the modules of its encoders
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")
# Heads that transformers registers, the first that a config has is taken; what is predicted at each position.
_HEADS = (
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "next"),
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "pair"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "same"),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "class"),
)


def build_parts(spec: HuggingFaceSpec, device: str, seed: int) -> dict[str, Any]:
    """BuiltModel fields of a model of transformers. Raises ConfigError where the config is not one, or takes other inputs."""
    config = _config(spec)
    head, predicts = _head(config, spec.config.get("architectures"))
    attention = {} if spec.attention is None else {"attn_implementation": spec.attention}
    try:
        with torch.device(device):
            module: nn.Module = head._from_config(config, **attention)
    except (TypeError, ValueError, AttributeError, RuntimeError, KeyError, ImportError) as error:
        raise ConfigError(f"{spec.name}: transformers cannot build it: {_line(error)}") from error
    config.pad_token_id = None  # built in by now; only a warning would read it, and the tokens, at every step
    if spec.gradient_checkpointing:
        module.gradient_checkpointing_enable()  # type: ignore[operator]  # of transformers' modules
    dtype = PARAMETER_DTYPE[spec.precision]
    if spec.precision in CONVERTED:
        module = module.to(dtype)
    draw = _Draw(device, seed)
    text = partial(_text, paired=predicts == "pair")
    args, target = _images(spec, config, draw, dtype) if predicts == "class" else text(spec, config, draw)
    return {
        "module": _Logits(module),
        "args": (args,),
        "loss": partial(_LOSSES[predicts], target),
        "targets": (target,),
        "checkpointing": spec.gradient_checkpointing,
    }


class _Logits(nn.Module):
    """The logits of a model of transformers, called with a dict of inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """(batch, tokens, vocabulary) or (batch, classes)."""
        with _without_padding(self.model), _WithoutLayerDrop(self.model):
            logits: Tensor = self.model(**inputs).logits
        return logits


@contextmanager
def _without_padding(model: nn.Module) -> Iterator[None]:
    """Encoders and decoders read their mask and drop it if nothing is padded. No batch here is, and values may be absent."""
    from transformers.modeling_attn_mask_utils import AttentionMaskConverter

    names = vars(sys.modules[type(model).__module__])
    kept, reads = names.get(_MASK), AttentionMaskConverter._ignore_causal_mask_sdpa
    if kept is not None:
        names[_MASK] = lambda *_args, **_kwargs: None
    unread = staticmethod(lambda attention_mask, **given: reads(None, **given))
    AttentionMaskConverter._ignore_causal_mask_sdpa = unread  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        AttentionMaskConverter._ignore_causal_mask_sdpa = staticmethod(reads)  # type: ignore[method-assign]
        if kept is not None:
            names[_MASK] = kept


class _WithoutLayerDrop(TorchFunctionMode):
    """Draws of one number, with which encoders and decoders skip layers in training, where a config skips none of them.

    The number is compared with a probability of 0 on the host: whatever it is, no layer is skipped, and no value is read.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._skips = any(getattr(module, "layerdrop", 0.0) > 0.0 for module in model.modules())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.rand and args == ([],) and not kwargs and not self._skips:
            return 1.0
        return func(*args, **(kwargs or {}))


class _Draw:
    """Tensors of a device: values from a seed where it holds some."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def integers(self, below: int, *shape: int) -> Tensor:
        if self.device == "meta":
            return torch.empty(shape, dtype=torch.int64, device=self.device)
        return torch.randint(0, below, shape, generator=self.generator)

    def floats(self, *shape: int) -> Tensor:
        if self.device == "meta":
            return torch.empty(shape, device=self.device)
        return torch.rand(shape, generator=self.generator)


def _config(spec: HuggingFaceSpec) -> Any:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        raise ConfigError(f"{spec.name}: this family needs transformers: pip install transformers") from error
    fields = {key: _plain(value) for key, value in spec.config.items()}
    model_type = str(fields.pop("model_type"))
    for stored in ("torch_dtype", "dtype"):  # of a checkpoint; a step runs in the precision that is asked for
        fields.pop(stored, None)
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"{spec.name}: model_type: found {model_type!r}, which the installed transformers does not have"
        )
    try:
        config = AutoConfig.for_model(model_type, **fields)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(f"{spec.name}: transformers refuses the config: {_line(error)}") from error
    config.use_cache = False
    config.return_dict = True
    return config


def _head(config: Any, architectures: Any) -> tuple[Any, str]:
    """The class with a head that can be trained, and what it predicts. The config's own architecture comes first."""
    from transformers.models.auto import modeling_auto

    asked = set(architectures or ())
    found = []
    for name, predicts in _HEADS:
        mapping = getattr(modeling_auto, name)
        if type(config) in mapping:
            classes = mapping[type(config)]
            found += [(cls, predicts) for cls in (classes if isinstance(classes, tuple) else (classes,))]
    for cls, predicts in found:
        if cls.__name__ in asked:
            return cls, predicts
    if not found:
        kinds = "a language model or an image classifier"
        raise ConfigError(f"model_type {config.model_type}: transformers has no head for it that is {kinds}")
    usual = "pair" if config.is_encoder_decoder else "next" if getattr(config, "is_decoder", False) else "same"
    heads = [pair for pair in found if pair[1] == usual and (usual != "same" or pair[0].__name__.endswith("MaskedLM"))]
    return (heads or found)[0]


def _text(spec: HuggingFaceSpec, config: Any, draw: _Draw, *, paired: bool) -> tuple[dict[str, Tensor], Tensor]:
    text = config.get_text_config()
    positions = next(
        (value for key in _POSITIONS if isinstance(value := getattr(text, key, None), int) and value > 0), None
    )
    n_tokens = spec.sequence_length or min(positions or MAX_DEFAULT_TOKENS, MAX_DEFAULT_TOKENS)
    inputs = {"input_ids": draw.integers(text.vocab_size, spec.batch_size, n_tokens)}
    if paired:
        inputs["decoder_input_ids"] = draw.integers(text.vocab_size, spec.batch_size, n_tokens)
    return inputs, draw.integers(text.vocab_size, spec.batch_size, n_tokens)


def _images(spec: HuggingFaceSpec, config: Any, draw: _Draw, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    images = draw.floats(spec.batch_size, int(getattr(config, "num_channels", None) or 3), int(height), int(width))
    return {"pixel_values": images.to(dtype)}, draw.integers(config.num_labels, spec.batch_size)


def _class_loss(labels: Tensor, logits: Tensor) -> Tensor:
    return fn.cross_entropy(logits.float(), labels)


_LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "next": next_token_loss,
    "same": masked_token_loss,
    "pair": masked_token_loss,
    "class": _class_loss,
}


def _plain(value: Any) -> Any:
    """Lists for the tuples that a config file is read as; transformers looks at types."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
