"""What was found of the prompt of a request that was admitted, who had computed it, and why it was not more."""

from __future__ import annotations

from typing import NamedTuple

from hfpaged.engine.schedule import Admission
from hfpaged.explain import match_reason
from hfpaged.match_end import match_end
from hfpaged.prefix_block import Origin, origins
from hfpaged.prefix_index import PrefixIndex


class PrefixMatch(NamedTuple):
    """See hfpaged.engine.events.PrefixMatched."""

    hit: int
    queried: int
    reason: str
    computed_by: tuple[Origin, ...]


def prefix_match(index: PrefixIndex, admission: Admission) -> PrefixMatch | None:
    """None where nothing was looked up, or not for the first time."""
    request = admission.group.request
    root, match = request.root, admission.match
    if root is None or request.wants_prompt_logits or request.admitted_time is not None:
        return None
    end = match_end(index, root, request.prompt, request.num_prompt_tokens - 1, match)
    reason = match_reason(index, root, request.prompt, end)
    return PrefixMatch(admission.found, request.num_prompt_tokens, reason, origins(match.all_blocks))
