"""How many weights a model has, counted from its config: no file of weights and no code of the model is needed."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from hfpaged.planner import layer_parameters as of_layer
from hfpaged.planner import state_parameters as of_state
from hfpaged.planner import tower_parameters, unlike_families
from hfpaged.planner.config_numbers import flag, number
from hfpaged.planner.model_facts import LayerKV, ModelFacts
from hfpaged.planner.parameter_families import LEARNED_POSITIONS, TIED


@dataclass(frozen=True)
class Parameters:
    """Numbers of weights. `linear`: attention's and dense MLPs' matrices; `experts`: those of routed experts;
    `other`: norms, biases, convolutions, which no quantization touches.
    """

    embedding: int = 0
    head: int = 0
    linear: int = 0
    experts: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.linear + self.experts + self.other

    def __add__(self, more: Parameters) -> Parameters:
        return Parameters(*map(sum, zip(astuple(self), astuple(more), strict=True)))


def count(facts: ModelFacts) -> Parameters:
    """Of the part that generates, of the encoder that it reads, and of towers for pictures and sound."""
    own = facts.cross_layers if of_layer.family_of(facts) != "mllama_text_model" else ()  # there they are among layers
    cross = [Parameters(linear=of_layer.attention(facts, layer)) for layer in own]
    beside = _around(facts) + _encoder(facts) + _by_token_and_layer(facts)
    return sum([*_layers(facts), *cross, Parameters(linear=tower_parameters.towers(facts))], beside)


def _layers(facts: ModelFacts) -> list[Parameters]:
    if of_layer.family_of(facts) in ("zamba", "zamba2"):
        matrices, other = unlike_families.zamba(facts)
        return [Parameters(linear=matrices, other=other)]
    if of_layer.family_of(facts) == "nemotron_h":
        kinds = enumerate(unlike_families.blocks(facts))
        counts = [unlike_families.nemotron_h(facts, kind, index) for index, kind in kinds]
        return [Parameters(linear=linear, experts=experts, other=other) for linear, experts, other in counts]
    if of_layer.family_of(facts) == "longcat_flash":
        pairs = [unlike_families.longcat(facts, index) for index in range(len(facts.layers))]
        return [Parameters(linear=linear, experts=experts) for linear, experts in pairs]
    layers = facts.layers[: unlike_families.distinct_layers(facts)]
    return [_layer(facts, layer, index) for index, layer in enumerate(layers)]


def _around(facts: ModelFacts) -> Parameters:
    """Embeddings, the head and the last norm."""
    config, hidden = facts.config, facts.hidden_size
    width = number(config, "embedding_size", "word_embed_proj_dim", "input_embedding_size", default=hidden)
    embedding = facts.vocab_size * width
    positions = (facts.max_positions or 0) * hidden if of_layer.family_of(facts) in LEARNED_POSITIONS else 0
    sides = 2 if flag(config, "is_encoder_decoder") else 1
    tied = flag(config, "tie_word_embeddings", default=of_layer.family_of(facts) in TIED)
    head = 0 if tied else facts.vocab_size * number(config, "output_embedding_size", default=width)
    return Parameters(embedding + sides * positions, head, other=hidden)


def _encoder(facts: ModelFacts) -> Parameters:
    """The layers that read what a decoder answers to."""
    config, hidden = facts.config, facts.hidden_size
    if not flag(config, "is_encoder_decoder"):
        return Parameters()
    inner = number(config, "encoder_ffn_dim", "d_ff", default=facts.intermediate_size)
    width = number(config, "d_kv") * facts.attention_heads or hidden
    one = 4 * hidden * width + of_layer.matrices(config, of_layer.family_of(facts)) * hidden * inner
    bands = number(config, "num_mel_bins")  # two convolutions over three frames each read the sound of Whisper
    count = number(config, "encoder_layers", "num_encoder_layers", "num_layers", default=len(facts.layers))
    return Parameters(linear=count * one, other=3 * hidden * (bands + hidden) if bands else 0)


def _by_token_and_layer(facts: ModelFacts) -> Parameters:
    """Gemma 3n and 4: an embedding of its own for each layer, and what mixes it in; Gemma 3n's four streams."""
    config, hidden, layers = facts.config, facts.hidden_size, len(facts.layers)
    width = number(config, "hidden_size_per_layer_input")
    rows = number(config, "vocab_size_per_layer_input", default=facts.vocab_size)
    streams = max(number(config, "altup_num_inputs") - 1, 0) * 2 * hidden**2
    low_rank = layers * 2 * hidden * number(config, "laurel_rank")
    return Parameters(rows * layers * width, linear=3 * layers * hidden * width + streams + low_rank)


def _layer(facts: ModelFacts, layer: LayerKV, index: int) -> Parameters:
    mixing = _mixing(facts, layer) + Parameters(other=2 * facts.hidden_size)
    if of_layer.is_sparse(facts.config, index):
        return mixing + Parameters(linear=of_layer.beside_experts(facts), experts=of_layer.experts(facts))
    return mixing + Parameters(linear=of_layer.dense_mlp(facts, index))


def _mixing(facts: ModelFacts, layer: LayerKV) -> Parameters:
    """What reads other tokens: attention, a state, or in Falcon-H1 both."""
    attention = 0 if layer.kind == "state" else of_layer.attention(facts, layer)
    matrices, other = of_state.state_layer(facts) if layer.state_bytes or layer.kind == "state" else (0, 0)
    return Parameters(linear=attention + matrices, other=other)
