"""The fields of one part of a config, under whatever names its family gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hfpaged.errors import InvalidConfigError
from hfpaged.planner.families import families

# What the decoder of an encoder-decoder calls its own: these come before the names that both halves share.
_OF_DECODERS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers"),
    "num_attention_heads": (
        "decoder_attention_heads", "num_decoder_attention_heads", "decoder_num_attention_heads",
    ),
    "num_key_value_heads": ("decoder_num_key_value_heads",),
    "intermediate_size": ("decoder_ffn_dim",),
    "max_position_embeddings": ("max_target_positions",),
}  # fmt: skip
# transformers' names for the fields of a decoder, and what else they are called.
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "hidden_size": ("n_embd", "n_embed", "d_model", "emb_dim", "model_dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads", "num_query_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "kv_n_heads", "n_kv_heads"),
    "head_dim": ("kv_channels", "attention_head_dim", "d_kv", "dim_head"),
    "intermediate_size": ("ffn_dim", "n_inner", "d_ff", "dim_ff", "ffn_hidden_size"),
    "vocab_size": ("n_vocab", "padded_vocab_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "n_ctx", "seq_length", "model_max_length"),
    "sliding_window": ("sliding_window_size",),
    "layer_types": ("layers_block_type",),
    "dtype": ("torch_dtype",),
}


class Fields:
    """`values` as in config.json, of a part of type `model_type`, with the defaults of its family."""

    def __init__(self, values: Mapping[str, Any], model_type: str) -> None:
        family = families().get(model_type, {})
        self.values, self.model_type = values, model_type
        self._names: dict[str, str] = family.get("names", {})
        self._defaults: dict[str, Any] = family.get("defaults", {})

    def names(self, name: str) -> tuple[str, ...]:
        """All that the field which transformers calls `name` may be called, the likeliest first."""
        own = (self._names[name],) if name in self._names else ()
        if name == "num_key_value_heads" and own == ("encoder_attention_heads",):  # Whisper's, whose decoder differs
            own = ()
        return (*_OF_DECODERS.get(name, ()), name, *own, *_OTHER_NAMES.get(name, ()))

    def get(self, name: str, default: Any = None) -> Any:
        """The field, else the default of its family, else `default`. A null in the file stands for `default`."""
        names = self.names(name)
        for each in names:
            if self.values.get(each) is not None:
                return self.values[each]
        if any(each in self.values for each in names if each not in _OF_DECODERS.get(name, ())):
            return default
        return next((self._defaults[each] for each in names if each in self._defaults), default)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1. Raises InvalidConfigError."""
        value = self.get(name, default)
        if value is None:
            raise missing(self, [name])
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidConfigError(
                f"{self._found(name)}={value!r} in the config of model type {self.model_type!r} is no whole number of "
                "at least 1; plan needs the config.json that belongs to the weights"
            )
        return value

    def of_layer(self, layer: int) -> Fields:
        """The fields of one layer, where a config has some of its own for it."""
        by_layer = self.values.get("per_layer_config") or {}
        own = by_layer.get(str(layer), by_layer.get(layer))
        return Fields({**self.values, **own}, self.model_type) if own else self

    def merged(self) -> dict[str, Any]:
        """The values, the family's defaults for what is left out, and transformers' names for what has others."""
        merged = {**self._defaults, **self.values}
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
        return merged | {name: value for name in names if (value := self.get(name)) is not None}

    def _found(self, name: str) -> str:
        return next((each for each in self.names(name) if self.values.get(each) is not None), name)


def missing(fields: Fields, names: Iterable[str]) -> InvalidConfigError:
    """The error for fields of which none is there."""
    sought = "; ".join(", ".join(fields.names(name)) for name in names)
    known = "" if families().get(fields.model_type) else ", which is not known to plan,"
    return InvalidConfigError(
        f"the config of model type {fields.model_type!r}{known} has none of the fields that plan looked for: {sought}. "
        "Give the config.json of a model that generates text, or add what is missing to a copy of it"
    )
