"""How many weights a model has, counted from its config: no file of weights and no code of the model is needed."""

from __future__ import annotations

from dataclasses import dataclass

from hfpaged.planner import layer_parameters as of_layer
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
        return Parameters(
            self.embedding + more.embedding,
            self.head + more.head,
            self.linear + more.linear,
            self.experts + more.experts,
            self.other + more.other,
        )


def count(facts: ModelFacts) -> Parameters:
    """Of the part that generates."""
    layers = [_layer(facts, layer, index) for index, layer in enumerate(facts.layers)]
    return sum(layers, _around(facts))


def _around(facts: ModelFacts) -> Parameters:
    """Embeddings, the head and the last norm."""
    config, hidden = facts.config, facts.hidden_size
    width = number(config, "embedding_size", "word_embed_proj_dim", default=hidden)
    embedding = facts.vocab_size * width
    positions = (facts.max_positions or 0) * hidden if facts.model_type in LEARNED_POSITIONS else 0
    tied = flag(config, "tie_word_embeddings", default=facts.model_type in TIED)
    return Parameters(embedding + positions, 0 if tied else embedding, other=hidden)


def _layer(facts: ModelFacts, layer: LayerKV, index: int) -> Parameters:
    config = facts.config
    attention = of_layer.attention(facts, layer)
    norms = 2 * facts.hidden_size
    if of_layer.is_sparse(config, index):
        return Parameters(
            linear=attention + of_layer.beside_experts(facts), experts=of_layer.experts(facts), other=norms
        )
    return Parameters(linear=attention + of_layer.dense_mlp(facts, index), other=norms)
