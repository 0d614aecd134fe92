"""By what a request is sent to a replica: the hashes of its prompt, made of its body, where there is no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from hfpaged.replicas.routing_hash import RoutingHash, keys_for
from hfpaged.serve.body_prompt import prompt_of_items, prompt_of_messages, prompt_of_text
from hfpaged.serve.callers import KeyRing
from hfpaged.serve.http_errors import ApiError
from hfpaged.serve.options import ServeOptions
from hfpaged.serve.schemas.chat import ChatBody
from hfpaged.serve.schemas.completion import CompletionBody
from hfpaged.serve.schemas.responses import ResponsesBody
from hfpaged.serve.tool_choice import tool_choice_of


class Prompt(NamedTuple):
    """Of a request: the token ids of its first prompt, and what else decides where it is known."""

    token_ids: list[int]
    model: str | None
    cache_salt: str | None


class PromptHashes:
    """Of the requests to replicas that serve with `options`, whose salt_secret is set. Raises ValueError where it is
    not, as each replica has salts of its own then.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, options: ServeOptions, block_size: int) -> None:
        self._tokenizer, self._options, self._block_size = tokenizer, options, block_size
        self._keys = KeyRing(options.api_keys, options.salt_secret)
        self._hash = RoutingHash(options.salt_secret or b"")

    def of(self, path: str, body: bytes, authorization: str | None = None) -> bytes:
        """The hashes of the first prompt of a request to `path`; none for a request without a prompt, and for one that
        replicas refuse. It takes milliseconds: call it in a thread.
        """
        read = _READERS.get(path)
        if read is None:
            return b""
        try:
            prompt = read(body, self._its_tokenizer)
            salt = self._keys.salt(self._keys.caller(authorization), prompt.cache_salt)
            keys = keys_for(salt, self._adapter(prompt.model))
            return self._hash.chain(keys, prompt.token_ids, self._block_size)
        except Exception:  # whatever a client has thought of: the replica tells it, in its own words
            return b""

    def _its_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise ApiError(422, "there is no tokenizer", code="no_tokenizer")
        return self._tokenizer

    def _adapter(self, model: str | None) -> str | None:
        return model if model in self._options.adapters else None


Tokenizer = Callable[[], PreTrainedTokenizerBase]


def _chat(body: bytes, tokenizer: Tokenizer) -> Prompt:
    read = ChatBody.model_validate_json(body)
    choice = tool_choice_of(read.tools, read.tool_choice, read.parallel_tool_calls)
    prompt = prompt_of_messages(read.messages, read, tokenizer(), choice)
    return Prompt(prompt.token_ids, read.model, read.cache_salt)


def _completion(body: bytes, tokenizer: Tokenizer) -> Prompt:
    read = CompletionBody.model_validate_json(body)
    return Prompt(prompt_of_text(read.prompt[0], read, tokenizer), read.model, read.cache_salt)


def _responses(body: bytes, tokenizer: Tokenizer) -> Prompt:
    read = ResponsesBody.model_validate_json(body)
    prompt = prompt_of_items(read, tokenizer(), tool_choice_of(read.tools, read.tool_choice))
    return Prompt(prompt.token_ids, read.model, read.cache_salt)


_READERS: Mapping[str, Callable[[bytes, Tokenizer], Prompt]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _responses,
}
