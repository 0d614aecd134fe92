"""What goes from rank 0 to the others: outputs and errors come back as they were, and nothing else is made of it."""

from __future__ import annotations

import os
import pickle
from array import array

import numpy as np
import pytest
import torch

from hfpaged.engine.outcome import from_numbers, to_numbers
from hfpaged.engine.outputs import (
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    SequenceOutput,
    TokenLogprob,
    Tokens,
)
from hfpaged.errors import HfpagedError, InvalidConfigError, OutOfBlocksError


def output(error=None):
    chosen = PositionLogprobs(2, -0.5, 1, (TokenLogprob(2, -0.5, 1),))
    sequence = SequenceOutput(0, Tokens(array("q", [1, 2, 3]), 1, 2), "text", "stop", 2, -0.5, (chosen,))
    metrics = RequestMetrics(1.0, waits={"blocks": 1.5})
    return RequestOutput("name", [1], (sequence,), True, metrics, 0, "prompt", (None, chosen), error)


def test_outputs_come_back_as_they_were():
    assert from_numbers(to_numbers([output()], None)) == [output()]
    assert from_numbers(to_numbers(None, None)) is None
    (failed,) = from_numbers(to_numbers([output(torch.OutOfMemoryError("no room"))], None))
    assert type(failed.error) is HfpagedError
    assert str(failed.error) == "OutOfMemoryError: no room"


class Unlike(ValueError):
    """One that the other ranks may not have."""


class Runs:
    """Runs a program where it is made."""

    def __reduce__(self):
        return os.system, ("true",)


def carrying(error, thing):
    error.thing = thing
    return error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (InvalidConfigError("so many"), InvalidConfigError, "so many"),
        (KeyError("name"), KeyError, "'name'"),
        (OutOfBlocksError(3, 2, 9), HfpagedError, "OutOfBlocksError: 3 more blocks"),
        (Unlike("said"), HfpagedError, "Unlike: said"),
        (carrying(ValueError("said"), Runs()), HfpagedError, "ValueError: said"),
    ],
)
def test_errors_come_back_as_themselves_or_as_what_they_say(error, kind, text):
    with pytest.raises(kind) as raised:
        from_numbers(to_numbers(None, error))
    assert type(raised.value) is kind
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize("thing", [Runs(), os.system, eval, Runs, HfpagedError.__init__])
def test_nothing_else_is_made_of_what_comes_over_the_network(thing):
    content = pickle.dumps((thing, None))
    numbers = np.frombuffer(content + bytes(-len(content) % 8), dtype=np.int64)
    with pytest.raises(pickle.UnpicklingError, match="no part of what a batcher gives back"):
        from_numbers(np.concatenate([[len(content)], numbers]))
