"""The text that is measured on, as tokens, and how it is cut into texts of one length."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hfpaged.errors import InvalidConfigError
from hfpaged.quality.contexts import Context

BUILT_IN = "built in"


@dataclass(frozen=True)
class Corpus:
    """`ids` [tokens] of all the data; `start` [0 or 1] is the token that the tokenizer puts before every text."""

    name: str
    ids: Tensor
    start: Tensor

    @property
    def available(self) -> int:
        """How many tokens one text can have."""
        return len(self.ids) + len(self.start)

    def texts(self, context: Context, count: int) -> Tensor:
        """At most `count` texts [texts, context.cached + 1]. Their ends, which are scored, lie evenly over the data and
        do not overlap, so that no token is scored twice; what comes before may. A text that begins before the data do
        begins at their end: in none of them does a token come twice.
        """
        length, size = context.cached + 1 - len(self.start), len(self.ids)
        count = max(1, min(count, size // context.fed))
        ends = [(number + 1) * size // count for number in range(count)]
        places = torch.tensor(ends)[:, None] + torch.arange(-length, 0)
        return torch.cat([self.start.expand(count, -1), self.ids[places % size]], dim=1)


def load_corpus(path: str | None, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """The data in `path`, or those that are built in. Raises InvalidConfigError."""
    text = built_in_text() if path is None else read_text(path)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return Corpus(BUILT_IN if path is None else path, torch.tensor(ids, dtype=torch.int64), _start(tokenizer))


def built_in_text() -> str:
    """Own English, code and tables, of several kinds in a fixed order."""
    folder = files("hfpaged.quality") / "texts"
    parts = sorted((part for part in folder.iterdir() if part.name.endswith(".txt")), key=lambda part: part.name)
    return "\n".join(part.read_text(encoding="utf-8") for part in parts)


def read_text(path: str) -> str:
    """Raises InvalidConfigError for what is no UTF-8 file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidConfigError(
            f"--data {path} is not UTF-8: byte {error.start} cannot be decoded; save the text as UTF-8"
        ) from error
    except OSError as error:
        raise InvalidConfigError(f"--data {path}: {error.strerror}; give a file with UTF-8 text") from error


def _start(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The token that stands before every text, where the tokenizer has one: models lose their way without it."""
    ids = tokenizer("a")["input_ids"]
    has_one = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
    return torch.tensor(ids[:1] if has_one else [], dtype=torch.int64)
