"""What is known of a model from its config: its layers as a KV cache sees them, and the sizes around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# full       keys and values of all tokens
# sliding    those of the last `window` tokens
# chunked    those of the chunk of `window` tokens that the newest token is in; hfpaged stores such a layer as full
# state      no keys and values, but a state for each sequence, of any length
# borrowed   reads what another layer stores
# dense      keys and values that hfpaged leaves to transformers' own layer
Kind = Literal["full", "sliding", "chunked", "state", "borrowed", "dense"]


@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps of a sequence. `kv_heads` heads with `key_dim` and `value_dim` numbers for each token;
    `latent_dim` numbers instead where a model of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) would
    store its latent only; `state_bytes` for each sequence.
    """

    kind: Kind
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    latent_dim: int | None = None
    state_bytes: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """One model. `dtype` is the one of its weights, by its config; sizes of 0 or None are not in the config.
    `cross_layers` keep the keys and values of what an encoder read, which do not grow.
    """

    name: str
    model_type: str
    dtype: str
    layers: tuple[LayerKV, ...]
    cross_layers: tuple[LayerKV, ...] = ()
    attention_heads: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    vocab_size: int = 0
    max_positions: int | None = None
    config: dict[str, Any] = field(default_factory=dict, repr=False)  # of the part that generates, as in config.json
    whole: dict[str, Any] = field(default_factory=dict, repr=False)  # all of config.json: towers, quantization_config
    folder: str | None = None  # where config.json lies; weights may lie beside it
