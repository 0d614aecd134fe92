"""Text of clients in tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from hfpaged.serve.http_errors import ApiError


def text_tokens(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool, param: str
) -> list[int]:  # fmt: skip
    """Token ids of `text`, which is of the field `param`. Raises ApiError 400 for half characters (JSON can spell them,
    as in "\\ud800"), which are no text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            400, f"{param} has half a character at {error.start}, which is no Unicode text; send whole characters",
            code="invalid_unicode", param=param,
        ) from error  # fmt: skip
    token_ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return token_ids
