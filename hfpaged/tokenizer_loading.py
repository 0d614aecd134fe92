"""Tokenizers, for those too who have no model: nothing here loads the code of models, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hfpaged.load_errors import told
from hfpaged.model_folder import REMEDY, check_folder

_TOKENIZER_REMEDY = "a tokenizer is needed besides the model: tokenizer.save_pretrained(FOLDER) puts it there"


def load_tokenizer(name: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The left-padding tokenizer alone. Raises DemoModelError."""
    check_folder(name)
    with told(name, _TOKENIZER_REMEDY if Path(name).is_dir() else REMEDY):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, padding_side="left", trust_remote_code=trust_remote_code
        )
    return tokenizer
