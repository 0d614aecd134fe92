"""What is known of a model from its config: its layers as a KV cache sees them, and the sizes around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# full       keys and values of all tokens
# sliding    those of the last `window` tokens
# chunked    those of the chunk of `window` tokens that the newest token is in; stored as those of the last `window`
# state      no keys and values, but a state for each sequence, of any length
# borrowed   reads what another layer stores
# none       stores nothing, as it has no attention
# dense      keys and values that hfpaged leaves to transformers' own layer
Kind = Literal["full", "sliding", "chunked", "state", "borrowed", "none", "dense"]


@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps of a sequence. `kv_heads` heads with `key_dim` and `value_dim` numbers for each token; with
    multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) one head, whose key is the latent and whose value the
    rotary part, `latent_dim` numbers together, as transformers hands them to the cache.

    Beside blocks: `state_dim` numbers of the model's dtype and `state_bytes` bytes for each sequence; `side_dim`
    numbers and `side_bytes` bytes for each token (the keys of an indexer).
    """

    kind: Kind
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    latent_dim: int | None = None
    state_dim: int = 0
    state_bytes: int = 0
    side_dim: int = 0
    side_bytes: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """One model. `dtype` is the one of its weights, by its config; sizes of 0 or None are not in the config.
    `cross_layers` keep the keys and values of what an encoder read, which do not grow. `notes` are for people: what
    was taken for granted where the config says nothing.
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
    # Of the part that generates: what is in config.json, with the family's defaults for what is not.
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    whole: dict[str, Any] = field(default_factory=dict, repr=False)  # all of config.json: towers, quantization_config
    folder: str | None = None  # where config.json lies; weights may lie beside it
    notes: tuple[str, ...] = ()
