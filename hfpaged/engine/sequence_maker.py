"""What a request is made of when it begins: parameters, sequences, and what chooses, ends and reads their tokens."""

from __future__ import annotations

from array import array
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfpaged.engine.beam_search import BeamSearch, BeamSettings
from hfpaged.engine.detokenizer import Detokenizer
from hfpaged.engine.params import RequestParams
from hfpaged.engine.processors import build_processors
from hfpaged.engine.prompt_lookup import PromptLookup
from hfpaged.engine.request import Request, SequenceGroup, SequenceState
from hfpaged.engine.sampler import SequenceSampler
from hfpaged.engine.stopping import StopConditions


class SequenceMaker:
    """For one model and tokenizer. `speculates`: whether drafts can be taken back from the pool."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, speculates: bool) -> None:
        self._model, self._tokenizer, self._speculates = model, tokenizer, speculates

    def group(self, request: Request) -> SequenceGroup:
        """The first group of a request: one sequence, from which all samples or beams will come.

        Raises InvalidConfigError for settings that a logits processor refuses.
        """
        params = request.params
        request.stop = StopConditions(params, self._tokenizer)
        seq = SequenceState(request, 0, request.prompt[:])
        beams = params.num_beams
        group = SequenceGroup(request, [seq], seats=beams if beams > 1 else params.num_sequences)
        if beams > 1:
            group.beams = self._beam_search(request, request.stop)
        else:
            self.equip(seq)
        request.sequences, request.groups = [seq], [group]
        return group

    def equip(self, seq: SequenceState) -> SequenceState:
        """Give a sequence that samples what it needs for that."""
        params = seq.request.params
        seq.sampler = SequenceSampler(self._model, params, seq.request.prompt, seq.index)
        if params.prompt_lookup_num_tokens and self._speculates:
            seq.lookup = PromptLookup(params.prompt_lookup_num_tokens)
        seq.detokenizer = self.detokenizer(params)
        return seq

    def detokenizer(self, params: RequestParams) -> Detokenizer | None:
        """What reads the tokens of one sequence; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return Detokenizer(
            self._tokenizer, stop=params.stop_strings, include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )  # fmt: skip

    def _beam_search(self, request: Request, stop: StopConditions) -> BeamSearch:
        params = request.params
        settings: dict[str, Any] = {
            "num_beams": params.num_beams, "max_new_tokens": params.max_new_tokens,
            "eos_token_ids": tuple(sorted(params.stop_token_ids)), "do_sample": params.do_sample, "seed": params.seed,
        }  # fmt: skip
        for name in ("length_penalty", "early_stopping"):
            if (value := getattr(params.config, name)) is not None:
                settings[name] = value
        processors = build_processors(self._model, params, request.prompt)
        return BeamSearch(self._model, BeamSettings(**settings), request.prompt, processors, stop.for_beams)


def as_array(token_ids: Any) -> array[int]:
    """The ids as the engine keeps them."""
    return array("q", token_ids)
