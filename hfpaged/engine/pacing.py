"""How many prompt tokens a step may bring while others stream: as many as keep their next token from being late.

Sarathi-Serve (Agrawal et al. 2024, arXiv 2403.02310) finds such a budget by profiling; here it follows what steps take.
"""

from __future__ import annotations

from collections import deque
from statistics import median

# A step with prompt tokens may take so many times a step without any.
DEFAULT_STRETCH = 2.0
SMALLEST, FIRST = 16, 32
# Steps after which what a decode takes is measured again, and how much larger a batch may be than the measured one.
FRESH, GROWTH = 64, 1.5
# Steps that are looked at: the median of so many, as a machine has other things to do at times.
SEEN = 7


class Pace:
    """`most` tokens, the token budget; `stretch` None: always all of it."""

    def __init__(self, most: int, stretch: float | None = DEFAULT_STRETCH) -> None:
        self._most, self._stretch = most, stretch
        self._decode_seconds: deque[float] = deque(maxlen=SEEN)  # of steps without prompt tokens
        self._token_seconds: deque[float] = deque(maxlen=SEEN)  # what a prompt token adds to a step
        self._num_decodes = 0  # sequences in the steps that were measured
        self._age = 0  # steps since

    def budget(self, num_decodes: int) -> int:
        """Prompt tokens for a step with so many decodes; 0 where it is time to see what they take alone."""
        if self._stretch is None or not num_decodes:
            return self._most
        if not self._decode_seconds or self._age >= FRESH or num_decodes > GROWTH * self._num_decodes + 1:
            return 0
        if not self._token_seconds:
            return min(FIRST, self._most)
        spare = (self._stretch - 1) * median(self._decode_seconds)
        return min(max(int(spare / median(self._token_seconds)), SMALLEST), self._most)

    def told(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """What a step has taken."""
        if not num_decodes:
            return
        if num_prefill_tokens:
            self._age += 1
            if self._decode_seconds:
                more = max(seconds - median(self._decode_seconds), 0.1 * seconds)
                self._token_seconds.append(more / num_prefill_tokens)
            return
        if num_decodes > GROWTH * self._num_decodes + 1 or num_decodes * GROWTH + 1 < self._num_decodes:
            self._decode_seconds.clear()  # of another size of batch
        self._decode_seconds.append(seconds)
        self._num_decodes, self._age = num_decodes, 0
