"""In which form a server of somebody else takes a prompt: OpenAI's API leaves more open than one would like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hfpaged.bench.endpoint import Endpoint, EndpointError
from hfpaged.bench.serve_client import Send, play

PATIENCE = 120.0  # seconds for a few tokens; a model may be loaded on its first request
PROBED = 8  # prompt tokens, and as many new ones: the first may have no text


@dataclass(frozen=True)
class Form:
    """`is_endless` where it knows ignore_eos: an answer is as long as was asked for, on both sides or on none."""

    name: str
    takes_ids: bool
    is_endless: bool
    tells_usage: bool

    def body(self, model: str, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], new: int) -> dict[str, Any]:
        """A greedy completion of at most `new` tokens, streamed."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(prompt) if self.takes_ids else tokenizer.decode(prompt),
            "max_tokens": new,
            "temperature": 0,
            "stream": True,
        }
        if self.is_endless:
            body["ignore_eos"] = True
        if self.tells_usage:
            body["stream_options"] = {"include_usage": True}
        return body


FORMS = (
    Form("token ids", takes_ids=True, is_endless=True, tells_usage=True),
    Form("text", takes_ids=False, is_endless=True, tells_usage=True),
    Form("text, answers may end", takes_ids=False, is_endless=False, tells_usage=True),
    Form("text, answers may end, no usage", takes_ids=False, is_endless=False, tells_usage=False),
)


def form_for(endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> Form:
    """The first form that is answered. Raises EndpointError with the server's words for the last one where none is, and
    at once where it was not the form that it did not like.
    """
    for form in FORMS:
        body = form.body(endpoint.model, tokenizer, prompt[:PROBED], PROBED)
        try:
            play(endpoint.completions, [Send(0.0, body)], endpoint.headers, PATIENCE)
        except EndpointError as error:
            refusal = error
            if error.status in (None, 401, 403, 404):
                break
        else:
            return form
    raise EndpointError(f"{endpoint.completions}: {refusal}") from refusal
