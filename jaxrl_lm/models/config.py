"""What a model is: one frozen, hashable record for the whole Llama-shaped family."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's frequency scaling: long wavelengths are divided by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class LinearRope:
    """Positions divided by `factor`."""

    factor: float


PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
"""The linear layers of a block, by the short names that LoRA's targets use."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Which linear layers get a low-rank adapter, of which rank and scale (Hu et al., 2021).

    `targets` are names of PROJECTIONS or "all"; they are stored in that order, each once. `rslora` divides alpha by
    the rank's square root (Kalajdzievski, 2023), so that the output's size does not depend on the rank. Raises
    ValueError for a rank below 1, an alpha that is not above 0, and unknown or no targets.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("all",)
    rslora: bool = False

    def __post_init__(self):
        unknown = sorted(set(self.targets) - {*PROJECTIONS, "all"})
        if unknown or not self.targets:
            raise ValueError(f"lora targets={self.targets}: give some of {', '.join(PROJECTIONS)}, or all")
        if self.rank < 1:
            raise ValueError(f"lora rank={self.rank}: must be at least 1")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora alpha={self.alpha}: must be above 0 and finite")
        chosen = tuple(name for name in PROJECTIONS if name in self.targets or "all" in self.targets)
        object.__setattr__(self, "targets", chosen)

    @property
    def scale(self) -> float:
        """What the product of the two factors is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder: RMS norm, rotary positions, grouped-query attention, gated SiLU feed-forward.

    `family` is the Hugging Face model_type it reads and writes: llama, qwen2, qwen3, mistral.
    """

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Rope | LinearRope | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # a token sees this many tokens, itself included
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    dtype: str = "float32"  # of the computation; norms, softmax and log-probs are float32 in any case
    remat: str = "none"  # none, full, dots, offload: what the backward pass recomputes
    attention_implementation: str = "xla"  # reference, xla, splash, cudnn: of whole rows, see attention.py

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.remat not in ("none", "full", "dots", "offload"):
            raise ValueError(f"remat={self.remat!r} is unknown: use none, full, dots or offload")
        if self.attention_implementation not in ("reference", "xla", "splash", "cudnn"):
            raise ValueError(
                f"attention_implementation={self.attention_implementation!r} is unknown: use reference, xla, splash or cudnn"
            )
