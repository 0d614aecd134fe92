"""In which form a server of somebody else takes a prompt: OpenAI's API leaves more open than one would like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from hfpaged.bench.endpoint import Endpoint, EndpointError
from hfpaged.bench.serve_client import Send, play

PATIENCE = 120.0  # seconds for a few tokens; a model may be loaded on its first request
PROBED = 8  # prompt tokens, and as many new ones: the first may have no text


@dataclass(frozen=True)
class Form:
    """`is_endless` where it knows ignore_eos: answers are as long as was asked for, on both sides or on none. `is_chat`
    where a prompt is what a user says.
    """

    name: str
    takes_ids: bool = False
    is_endless: bool = False
    tells_usage: bool = True
    is_chat: bool = False

    def that_may_end(self) -> Form:
        """The same for a server that takes ignore_eos and does not know it."""
        return replace(self, name=f"{self.name}, answers may end", is_endless=False)

    def url(self, endpoint: Endpoint) -> str:
        """Where to POST."""
        return f"{endpoint.url}/v1/chat/completions" if self.is_chat else endpoint.completions

    def body(self, model: str, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], new: int) -> dict[str, Any]:
        """A greedy completion of at most `new` tokens, streamed."""
        body: dict[str, Any] = {"model": model, "max_tokens": new, "temperature": 0, "stream": True}
        text = list(prompt) if self.takes_ids else tokenizer.decode(prompt)
        body |= {"messages": [{"role": "user", "content": text}]} if self.is_chat else {"prompt": text}
        if self.is_endless:
            body["ignore_eos"] = True
        if self.tells_usage:
            body["stream_options"] = {"include_usage": True}
        return body


FORMS = (
    Form("token ids", takes_ids=True, is_endless=True),
    Form("text", is_endless=True),
    Form("text, answers may end"),
    Form("text, answers may end, no usage", tells_usage=False),
    Form("chat", is_endless=True, is_chat=True),
    Form("chat, answers may end", is_chat=True),
    Form("chat, answers may end, no usage", tells_usage=False, is_chat=True),
)


def form_for(endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> Form:
    """The first form that is answered; chat, which tokens pass through a template in, only where there is nothing else.

    Raises EndpointError with the server's words where no form is, and at once where it was not the form that it did not
    like.
    """
    refusal: EndpointError | None = None
    missing: set[str] = set()
    for form in FORMS:
        url = form.url(endpoint)
        if url in missing or (form.is_chat and (not tokenizer.chat_template or (refusal and not missing))):
            continue
        body = form.body(endpoint.model, tokenizer, prompt[:PROBED], PROBED)
        try:
            play(url, [Send(0.0, body)], endpoint.headers, PATIENCE)
        except EndpointError as error:
            refusal = EndpointError(f"{url}: {error}", error.status)
            if error.status in (None, 401, 403):
                break
            missing |= {url} if error.status in (404, 405) else set()
        else:
            return form
    assert refusal is not None, "each form is tried or comes after one that was refused"
    raise refusal
