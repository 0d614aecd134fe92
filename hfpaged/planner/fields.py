"""The fields of one part of a config, under whatever names its family gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hfpaged.errors import InvalidConfigError

# Our word for a field, and what families call it. The first that a config has is taken.
NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "emb_dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
    "inner": ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"),
    "vocab": ("vocab_size", "n_vocab"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length", "model_max_length"),
    "dtype": ("dtype", "torch_dtype"),
}


class Fields:
    """`values` as in config.json, `model_type` as its family is called. Null counts as absent."""

    def __init__(self, values: Mapping[str, Any], model_type: str) -> None:
        self.values, self.model_type = values, model_type

    def get(self, name: str, default: Any = None) -> Any:
        """The field that we call `name`; `default` where there is none."""
        return next((self.values[each] for each in _names(name) if self.values.get(each) is not None), default)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1. Raises InvalidConfigError."""
        value = self.get(name, default)
        if value is None:
            raise missing(self.model_type, [name])
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidConfigError(
                f"{_found(self.values, name)}={value!r} in the config of model type {self.model_type!r} is no whole "
                "number of at least 1; plan needs the config.json that belongs to the weights"
            )
        return value


def missing(model_type: str, names: Iterable[str]) -> InvalidConfigError:
    """The error for fields of which none is there."""
    sought = "; ".join(", ".join(_names(name)) for name in names)
    return InvalidConfigError(
        f"the config of model type {model_type!r} has none of the fields that plan looked for: {sought}. Give the "
        "config.json of a model that generates text, or add the field to a copy of it"
    )


def _names(name: str) -> tuple[str, ...]:
    return NAMES.get(name, (name,))


def _found(values: Mapping[str, Any], name: str) -> str:
    return next((each for each in _names(name) if values.get(each) is not None), name)
