"""A new token of a sequence, and whether it is its last."""

from __future__ import annotations

from hfpaged.engine.detokenizer import Detokenizer
from hfpaged.engine.request import SequenceGroup, SequenceState
from hfpaged.engine.sampler import Sampled
from hfpaged.engine.stopping import Stop
from hfpaged.errors import HfpagedError


def take_token(seq: SequenceState, got: Sampled) -> HfpagedError | None:
    """Append what was sampled, and end the sequence where it must end. Returns what a criterion of its own raised."""
    seq.tokens.append(got.token_id)
    if got.logprobs is not None:
        seq.logprobs.append(got.logprobs)
        seq.cumulative_logprob += got.logprobs.logprob
    assert seq.request.stop is not None
    try:
        stop = seq.request.stop.check(seq.tokens)
    except HfpagedError as error:
        return error
    if seq.detokenizer is not None:
        if stop is None or not isinstance(stop.by, int) or seq.request.params.include_stop_str_in_output:
            seq.detokenizer.add([got.token_id])
        if stop is None and seq.detokenizer.stopped_by is not None:  # no more text would come
            stop = Stop("stop", seq.detokenizer.stopped_by)
    if stop is not None:
        seq.finish_reason, seq.stop_reason = stop
        if seq.detokenizer is not None:
            seq.detokenizer.finish()
    return None


def end_beams(group: SequenceGroup, detokenizers: list[Detokenizer | None]) -> None:
    """The search is over: its best hypotheses are the sequences of the request."""
    request, beams = group.request, group.beams
    assert beams is not None
    sequences = []
    for index, (found, detokenizer) in enumerate(zip(beams.results(request.params.n), detokenizers, strict=True)):
        seq = SequenceState(request, index, request.prompt[:])
        seq.tokens.extend(found.token_ids)
        seq.finish_reason, seq.cumulative_logprob = found.finish_reason, found.score
        if detokenizer is not None:
            detokenizer.add(found.token_ids)
            detokenizer.finish()
        seq.detokenizer = detokenizer
        sequences.append(seq)
    request.sequences = sequences


def has_ended(group: SequenceGroup) -> bool:
    """Whether a group has nothing left to do."""
    if group.beams is not None:
        return group.beams.is_done
    return all(seq.finish_reason is not None for seq in group.sequences)


def is_half_done(group: SequenceGroup, starts: dict[SequenceState, int]) -> bool:
    """Whether a step that was to compute tokens from `starts` on stored some, and did not come to what follows."""
    return any(seq.num_left < 1 or seq.num_computed > starts.get(seq, seq.num_computed) for seq in group.sequences)
