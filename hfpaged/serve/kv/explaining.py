"""/v1/kv/explain: why a prompt would hit or miss, as far as its caller may know."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hfpaged.engine.prompts import read_prompt
from hfpaged.explain import explain_prompt
from hfpaged.prefix_report import PrefixReport
from hfpaged.serve.body_prompt import prompt_of_messages
from hfpaged.serve.callers import Caller
from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.schemas.kv import ExplainRequest
from hfpaged.serve.service import Service
from hfpaged.serve.tool_choice import tool_choice_of

DECLINED = "this server shares no prefixes (--no-prefix-caching)"


def explanation(service: Service, caller: Caller, body: ExplainRequest) -> dict[str, Any]:
    """What the prompt would find now under the caller's own salt; nothing of what others have. It reads the prompt and
    compares tokens, which takes milliseconds: call it in a thread.

    Raises ApiError and InvalidConfigError for what would be refused as a request.
    """
    adapter = service.adapter(body.model)
    model, pool = service.batcher.model, service.batcher.pool
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids, _ = read_prompt(_prompt(service, body), service.batcher.tokenizer, vocab_size)
    if not service.batcher.describe()["prefix_sharing"]:
        return _record(PrefixReport(len(ids), 0, 0, "declined", pool.block_size, declined=DECLINED))
    with pool.changing():
        salt = service.keys.salt(caller, body.cache_salt)
        facts = explain_prompt(pool.prefixes.index, ids, salt, adapter, is_private=True)
    return _record(facts.with_texts(service.batcher.tokenizer))


def _prompt(service: Service, body: ExplainRequest) -> Any:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "say which prompt: either prompt or messages", code="invalid_value", param="prompt")
    if body.messages is None:
        tool_choice_of(body.tools, body.tool_choice)  # which have no place in a text, and are read all the same
        return body.prompt
    return prompt_of_messages(body.messages, body, service.tokenizer).token_ids


def _record(report: PrefixReport) -> dict[str, Any]:
    difference = report.difference
    return {
        "object": "kv.explanation",
        "prompt_tokens": report.query_tokens,
        "known_tokens": report.known_tokens,
        "block_size": report.block_size,
        "reason": report.reason,
        "explanation": str(report),
        "evicted_at": report.evicted_at,
        "lost_tokens": report.lost_tokens,
        "difference": None if difference is None else asdict(difference),
    }
