"""Transformer specs. The architectures dispatch what the models of the same name in Hugging Face transformers do."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from perfmodel.config.quantity import PositiveCount
from perfmodel.config.training import ADAMW, OptimizerField, TrainedSpec

Dropout = Annotated[float, Field(ge=0.0, lt=1.0)]
Activation = Literal["gelu", "gelu_new", "gelu_tanh", "relu", "silu"]
DEFAULT_ACTIVATION: dict[str, Activation] = {
    "gpt2": "gelu_new", "opt": "relu", "llama": "silu", "mixtral": "silu", "bert": "gelu",
}  # fmt: skip
# tie_embeddings where a file does not say: as the published models of each family.
TIED_BY_DEFAULT = {"gpt2": True, "opt": True, "llama": False, "mixtral": False, "bert": True}
WITHOUT_POSITION_TABLE = ("llama", "mixtral")  # these know rotary positions
ROTARY = WITHOUT_POSITION_TABLE


class TransformerSpec(TrainedSpec):
    """A transformer with a language-model head and cross-entropy loss.

    Attributes:
        architecture: `gpt2` (decoder, learned positions, LayerNorm, fused QKV), `opt` (decoder, learned positions,
            LayerNorm, separate QKV), `llama` (decoder, rotary positions, RMSNorm, gated MLP, grouped-query attention),
            `mixtral` (llama whose feed-forward layer is a mixture of experts), `bert` (encoder, post-norm, token types,
            masked-language-model head).
        heads, kv_heads: query heads; key-value heads (llama, mixtral; default: heads).
        head_dim: width of a head (llama, mixtral; default: hidden_size / heads).
        experts, experts_per_token: feed-forward layers of a block, and to how many of them the router sends a token
            (mixtral; 8 and 2).
        embedding_size: width of the token embedding where it differs from hidden_size (opt).
        sequence_length: tokens per sample; defaults to max_positions.
        tied_embeddings: the head shares the token embedding's weight; default by architecture.
        pre_norm: False puts LayerNorm after the residual (opt only).
        head: `lm`; for bert also `pretraining` (pooler, masked language model and next-sentence prediction) and
            `classification` (pooler and a classifier with two classes).
        transformers: whose operators are dispatched: those of transformers 4.57, or of 4.38, which adds no mask to
            GPT-2's scores and copies OPT's heads (bert is the same in both).
        attention: `eager` dispatches batched gemm, scale, mask, softmax, dropout, batched gemm; `sdpa` one fused call.
        gradient_checkpointing: recompute each block in backward.
        implementation: `huggingface`, or `megatron` (gpt2, llama): Megatron-LM's layer with its fused kernels; `vtrain`: the
            same layer (gpt2) in the model whose functions VIA-Research/vTrain profiles, head and loss as they are there.
        lora_rank: only adapters of this rank beside the attention's projections are trained (megatron's llama).
        products: `fp8`: the projections of a layer run their products in FP8, as TransformerEngine's do (megatron, `bf16`).
        predicted_tokens: tokens of a sample that bert's language-model head predicts, picked before it as NVIDIA's BERT does
            (its dense sequence output); by default the head runs on all of them.
        qkv: `joint` projects query, key and value at once, `separate` each on its own as Llama's own code does (megatron's
            llama). The value is a view of a joint projection and keeps it alive until backward.
    """

    kind: Literal["transformer"] = "transformer"
    architecture: Literal["gpt2", "opt", "llama", "mixtral", "bert"] = Field(
        description="gpt2, opt, llama, mixtral or bert"
    )
    optimizer: OptimizerField = ADAMW
    vocab_size: PositiveCount = Field(description="a whole number")
    hidden_size: PositiveCount = Field(description="a whole number")
    layers: PositiveCount = Field(description="the number of blocks, a whole number")
    heads: PositiveCount = Field(description="a whole number")
    kv_heads: PositiveCount | None = None
    head_dim: PositiveCount | None = None
    ffn_size: PositiveCount | None = None
    experts: PositiveCount = 8
    experts_per_token: PositiveCount = 2
    embedding_size: PositiveCount | None = None
    max_positions: PositiveCount = Field(description="a whole number")
    sequence_length: PositiveCount | None = None
    token_types: PositiveCount = 2
    activation: Activation | None = None
    norm_epsilon: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    rope_theta: Annotated[float, Field(gt=0.0)] = 10000.0
    tied_embeddings: bool | None = None
    pre_norm: bool = True
    hidden_dropout: Dropout = 0.0
    attention_dropout: Dropout = 0.0
    embedding_dropout: Dropout = 0.0
    attention: Literal["eager", "sdpa"] = "sdpa"
    head: Literal["lm", "pretraining", "classification"] = "lm"
    transformers: Literal["4.38", "4.57"] = "4.57"
    gradient_checkpointing: bool = False
    implementation: Literal["huggingface", "megatron", "vtrain"] = "huggingface"
    lora_rank: PositiveCount | None = None
    qkv: Literal["joint", "separate"] = "joint"
    products: Literal["own", "fp8"] = "own"
    predicted_tokens: PositiveCount | None = None

    @property
    def tokens(self) -> int:
        """Tokens per sample."""
        return self.sequence_length or self.max_positions

    @property
    def width_of_head(self) -> int:
        """Elements of one head."""
        return self.head_dim or self.hidden_size // self.heads

    @property
    def groups(self) -> int:
        """Key-value heads."""
        return self.kv_heads or self.heads

    @property
    def ffn(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn_size or 4 * self.hidden_size

    @property
    def act(self) -> Activation:
        """The activation, with the architecture's default."""
        return self.activation or DEFAULT_ACTIVATION[self.architecture]

    @property
    def tied(self) -> bool:
        """Whether the head shares the embedding's weight, with the architecture's default."""
        return TIED_BY_DEFAULT[self.architecture] if self.tied_embeddings is None else self.tied_embeddings

    def has_bias(self, part: Literal["attention", "mlp"]) -> bool:
        """Whether the linear layers of a part have a bias, with the architecture's default."""
        given = self.attention_bias if part == "attention" else self.mlp_bias
        return self.architecture not in ROTARY if given is None else given

    @model_validator(mode="after")
    def _consistent(self) -> TransformerSpec:
        problems = []
        if self.head_dim is None and self.hidden_size % self.heads:
            problems.append(f"heads: found {self.heads}, allowed a divisor of hidden_size {self.hidden_size}")
        if self.heads % self.groups:
            problems.append(f"kv_heads: found {self.groups}, allowed a divisor of heads {self.heads}")
        if self.tokens > self.max_positions and self.architecture not in WITHOUT_POSITION_TABLE:
            problems.append(f"sequence_length: found {self.tokens}, allowed at most max_positions {self.max_positions}")
        if self.head != "lm" and self.architecture != "bert":
            problems.append(f"head: found {self.head} with architecture {self.architecture}, allowed lm")
        if self.transformers == "4.38" and self.attention == "sdpa":
            problems.append("attention: found sdpa with transformers 4.38, allowed eager")
        if self.implementation != "huggingface":
            problems += self._not_of_megatron()
        if self.lora_rank is not None and (self.architecture, self.implementation) != ("llama", "megatron"):
            problems.append(
                f"lora_rank: found with architecture {self.architecture} and implementation {self.implementation}, allowed "
                "with llama and megatron"
            )
        if self.qkv == "separate" and (self.implementation != "megatron" or self.lora_rank is not None):
            problems.append(
                f"qkv: found separate with implementation {self.implementation} and lora_rank {self.lora_rank}, allowed with "
                "megatron and without lora_rank: the others are built one way"
            )
        problems += (
            self._not_predicted()
            + self._not_in_fp8()
            + self._misplaced()
            + (self._experts() if self.architecture == "mixtral" else [])
        )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _not_predicted(self) -> list[str]:
        n = self.predicted_tokens
        if n is None or (self.head != "classification" and n <= self.tokens):
            return []
        return [
            f"predicted_tokens: found {n}, allowed at most the {self.tokens} tokens of a sample, with a language-model head"
        ]

    def _not_in_fp8(self) -> list[str]:
        if self.products == "own" or (self.implementation == "megatron" and self.precision == "bf16"):
            return []
        return [
            f"products: found fp8 with implementation {self.implementation} and precision {self.precision}, allowed with "
            "megatron and bf16"
        ]

    def _experts(self) -> list[str]:
        problems = []
        if self.experts_per_token > self.experts:
            problems.append(
                f"experts_per_token: found {self.experts_per_token}, allowed at most experts {self.experts}"
            )
        if self.precision not in ("bf16", "amp_bf16"):
            problems.append(
                f"precision: found {self.precision} with architecture mixtral, allowed bf16 or amp_bf16: grouped products "
                "of experts (torch.nn.functional.grouped_mm) take bfloat16 on a GPU"
            )
        return problems

    def _not_of_megatron(self) -> list[str]:
        if self.implementation == "vtrain":
            if self.architecture == "gpt2" and not self.tied and self.attention == "eager" and self.act == "gelu_new":
                return []
            allowed = "architecture gpt2, tied_embeddings false, attention eager and activation gelu_new"
        elif self.architecture == "llama":
            dropouts = (self.hidden_dropout, self.attention_dropout)
            if not self.tied and self.attention == "sdpa" and self.act == "silu" and not any(dropouts):
                return []
            allowed = "tied_embeddings false, attention sdpa, activation silu and no dropout"
        elif self.tied and self.attention == "eager" and self.act == "gelu_new":
            return []
        else:
            allowed = "tied_embeddings, attention eager and activation gelu_new"
        return [f"implementation: found {self.implementation}, allowed with {allowed}"]

    def _misplaced(self) -> list[str]:
        only = {
            "kv_heads": ROTARY,
            "head_dim": ROTARY,
            "rope_theta": ROTARY,
            "embedding_size": ("opt",),
            "pre_norm": ("opt",),
            "token_types": ("bert",),
            "transformers": ("gpt2", "opt", "bert"),
            "embedding_dropout": ("gpt2",),
            "implementation": ("gpt2", "llama"),
            "qkv": ("llama",),
            "predicted_tokens": ("bert",),
            "attention_bias": ("opt", *ROTARY),
            "mlp_bias": ("opt", "llama"),
            "experts": ("mixtral",),
            "experts_per_token": ("mixtral",),
        }
        wrong = [key for key, homes in only.items() if key in self.model_fields_set and self.architecture not in homes]
        return [
            f"{key}: found with architecture {self.architecture}, allowed with {' or '.join(only[key])}"
            for key in wrong
        ]
