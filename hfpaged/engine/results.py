"""What a request gives back at the end of a step."""

from __future__ import annotations

from hfpaged.engine.outputs import RequestOutput, SequenceOutput, Tokens
from hfpaged.engine.request import Request, SequenceState


def output_of(request: Request) -> RequestOutput:
    """A request as it stands."""
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sequences=tuple(_sequence(seq) for seq in _shown(request)),
        finished=request.is_finished,
        metrics=request.metrics,
        num_cached_tokens=request.num_cached_tokens,
        prompt=request.text,
        prompt_logprobs=None if request.prompt_logprobs is None else tuple(request.prompt_logprobs),
        error=request.error,
    )


def _shown(request: Request) -> list[SequenceState]:
    """All sequences; once all have come to their end, the best ones of best_of, best first."""
    wanted = request.params.n
    has_come_to_its_end = all(seq.finish_reason in ("stop", "length") for seq in request.sequences)
    if len(request.sequences) <= wanted or not has_come_to_its_end:
        return request.sequences
    return sorted(request.sequences, key=_mean_logprob, reverse=True)[:wanted]


def _mean_logprob(seq: SequenceState) -> float:
    return seq.cumulative_logprob / max(seq.num_new, 1)


def _sequence(seq: SequenceState) -> SequenceOutput:
    asked = seq.request.params
    return SequenceOutput(
        seq.index,
        Tokens(seq.tokens, seq.request.num_prompt_tokens, len(seq.tokens)),
        None if seq.detokenizer is None else seq.detokenizer.text,
        seq.finish_reason,
        seq.stop_reason,
        seq.cumulative_logprob if asked.num_logprobs is not None or asked.num_beams > 1 else None,
        None if asked.logprobs is None else tuple(seq.logprobs),
    )
