"""Many prompts to their end, for one who waits for all of them."""

from __future__ import annotations

from typing import Any

from hfpaged.engine.delivery import Mailbox
from hfpaged.engine.intake import Config, Intake
from hfpaged.engine.loop import EngineLoop
from hfpaged.engine.outputs import RequestOutput
from hfpaged.engine.progress import progress_bar
from hfpaged.engine.prompts import listed, per_prompt


def all_to_end(
    intake: Intake, loop: EngineLoop, prompts: Any, generation_config: Config | list[Config], progress: bool,
    settings: dict[str, Any],
) -> list[RequestOutput]:  # fmt: skip
    """Add all prompts and make steps until each has ended; outputs in their order. Where one is refused, or on Ctrl-C,
    none goes on.
    """
    prompts, mailbox = listed(prompts), Mailbox()
    waiting: list[str] = []
    try:
        for prompt, config in zip(prompts, per_prompt(generation_config, len(prompts)), strict=True):
            waiting.append(intake.add(mailbox.put, prompt, config, only_end=True, **settings))
        found = _wait_for(len(waiting), loop, mailbox, progress)
    except BaseException:
        for request_id in waiting:
            loop.abort(request_id)
        raise
    return [found[request_id] for request_id in waiting]


def _wait_for(count: int, loop: EngineLoop, mailbox: Mailbox, progress: bool) -> dict[str, RequestOutput]:
    found: dict[str, RequestOutput] = {}
    with progress_bar(count, progress) as advance:
        while len(found) < count:
            output = loop.next_output(mailbox)
            if output.finished:
                found[output.request_id] = output
                advance(sum(len(seq.token_ids) for seq in output.sequences))
    return found
