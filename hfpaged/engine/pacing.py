"""How many prompt tokens a step may bring while others stream: as many as keep their next token from being late.

Sarathi-Serve (Agrawal et al. 2024, arXiv 2403.02310) finds such a budget by profiling; here it follows what steps take.
"""

from __future__ import annotations

# A step with prompt tokens may take so many times a step without any.
DEFAULT_STRETCH = 2.0
SMALLEST, FIRST = 16, 64
# Steps after which what a decode takes is measured again.
FRESH = 64


class Pace:
    """`most` tokens, the token budget; `stretch` None: always all of it."""

    def __init__(self, most: int, stretch: float | None = DEFAULT_STRETCH) -> None:
        self._most, self._stretch = most, stretch
        self._chunk: float = min(FIRST, most)
        self._decode_seconds: float | None = None
        self._age = 0

    def budget(self, num_decodes: int) -> int:
        """Prompt tokens for a step with so many decodes; 0 where it is time to see what they take alone."""
        if self._stretch is None or not num_decodes:
            return self._most
        if self._decode_seconds is None or self._age >= FRESH:
            return 0
        return int(self._chunk)

    def told(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """What a step has taken."""
        if self._stretch is None or not num_decodes:
            return
        if not num_prefill_tokens:
            old = self._decode_seconds or seconds
            self._decode_seconds, self._age = old + 0.3 * (seconds - old), 0
            return
        self._age += 1
        if self._decode_seconds is None:
            return
        ratio = self._stretch * self._decode_seconds / max(seconds, 1e-9)
        if ratio < 1 or num_prefill_tokens >= int(self._chunk):
            self._chunk = min(max(self._chunk * min(max(ratio, 0.5), 2.0), SMALLEST), self._most)
