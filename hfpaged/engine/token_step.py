"""From logits to tokens: what a step computed is sampled, drafts are verified, one prompt becomes many sequences."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Many

from torch import Tensor

from hfpaged.engine.logprobs import prompt_logprobs
from hfpaged.engine.request import Request, SequenceGroup, SequenceState
from hfpaged.engine.sampler import Sampled, SampleRow, sample
from hfpaged.engine.samples import fork_samples
from hfpaged.engine.schedule import Scheduled
from hfpaged.engine.scheduler import Scheduler
from hfpaged.engine.sequence_end import end_beams, take_token
from hfpaged.engine.sequence_maker import SequenceMaker
from hfpaged.kv_pool import KVPool


class Choice:
    """A sequence whose next tokens are chosen: row `first` + `depth` of the logits is the next one to look at."""

    __slots__ = ("depth", "first", "seq")

    def __init__(self, seq: SequenceState, first: int) -> None:
        self.seq, self.first, self.depth = seq, first, 0


def wanted_logits(work: Scheduled) -> int:
    """Of how many of its last tokens the logits are wanted."""
    if work.start < work.group.request.num_prompt_tokens and work.group.request.wants_prompt_logits:
        return work.count
    return 1 + len(work.seq.draft) if work.samples else 0


class TokenStep:
    """The work of one step with its logits. Afterwards `moved` are the requests with new tokens, and `failed` those
    that could not be sampled, with the error. `seconds`: in sampling. It `is_done` unless Ctrl-C came between.
    """

    def __init__(self, pool: KVPool, scheduler: Scheduler, maker: SequenceMaker) -> None:
        self._pool, self._scheduler, self._maker = pool, scheduler, maker
        self.moved: dict[Request, None] = {}
        self.failed: dict[Request, BaseException] = {}
        self.ended: dict[Request, None] = {}  # those with a sequence that came to its end
        self.seconds = 0.0
        self.num_sampled = 0
        self.is_done = False

    def take(self, works: Many[Scheduled], logits: Tensor, counts: Many[int]) -> None:
        """`logits` [sum of counts, vocab]: counts[i] rows for works[i], those of its last tokens."""
        firsts = [end - count for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
        verified = [work for work in works if work.seq.draft]
        self._store([work for work in works if not work.seq.draft] if verified else works)
        choices: list[Choice] = []
        beams: dict[SequenceGroup, dict[int, int]] = {}  # row of the logits by beam; the work is in another order
        for work, first, count in zip(works, firsts, counts, strict=True):
            if count and work.group.request.wants_prompt_logits:
                _score_prompt(work, logits[first : first + count])
            if work.samples and work.group.beams is not None:
                beams.setdefault(work.group, {})[work.seq.index] = first + count - 1
            elif work.samples:
                last = first + count - 1 - len(work.seq.draft)
                choices += [Choice(seq, last) for seq in self._samples(work.group)]
        self._choose(choices, logits)
        self._store(verified)
        for group, rows in beams.items():
            self._advance(group, logits[[rows[seq.index] for seq in group.sequences]])
        self.is_done = True

    def _store(self, works: Many[Scheduled]) -> None:
        """What was stored is known now; rejected drafts go."""
        with self._pool.changing() as manager:
            for work in works:
                seq = work.seq
                assert seq.blocks is not None
                count = work.count
                if seq.draft:
                    length = min(len(seq.tokens) - 1, work.start + count)
                    manager.trim(seq.blocks, length)
                    seq.request.draft_tokens += len(seq.draft)
                    if seq.lookup is not None:
                        seq.lookup.told(len(seq.draft), length - work.start - 1)
                    count, seq.draft = length - work.start, []
                self._scheduler.computed(work, count)

    def _samples(self, group: SequenceGroup) -> list[SequenceState]:
        """The sequences that go on from here: of a prompt with several samples so many, on the same blocks."""
        if group.seats == len(group.sequences):
            return group.sequences
        with self._pool.changing() as manager:
            return fork_samples(group, manager, self._scheduler, self._maker.equip)

    def _choose(self, choices: list[Choice], logits: Tensor) -> None:
        """Token by token, as long as drafts turn out right."""
        while choices:
            rows = [each.first + each.depth for each in choices]
            picked = logits if rows == list(range(len(logits))) else logits[rows]
            for row, each in enumerate(choices):
                if each.seq.capture is not None:
                    each.seq.capture.see(len(each.seq.tokens), picked[row])
            asked = [SampleRow(each.seq.sampler, each.seq.tokens) for each in choices if each.seq.sampler]
            began = time.perf_counter()
            answers = sample(asked, picked)
            self.seconds += time.perf_counter() - began
            choices = [each for each, got in zip(choices, answers, strict=True) if self._goes_on(each, got)]

    def _goes_on(self, choice: Choice, got: Sampled | BaseException) -> bool:
        """Whether the next token of this sequence can be looked at too: its draft was right so far."""
        seq = choice.seq
        if isinstance(got, BaseException):
            self.failed[seq.request] = got
            return False
        self.moved[seq.request] = None
        self.num_sampled += 1
        error = take_token(seq, got)
        if seq.finish_reason is not None:
            self.ended[seq.request] = None
        if error is not None:
            self.failed[seq.request] = error
        if seq.finish_reason is not None or error is not None or choice.depth == len(seq.draft):
            return False
        if seq.draft[choice.depth] != got.token_id:
            return False
        choice.depth += 1
        seq.request.accepted_tokens += 1
        return True

    def _advance(self, group: SequenceGroup, logits: Tensor) -> None:
        """Beams move: tables are forked, nothing is copied."""
        assert group.beams is not None
        try:
            move = group.beams.advance(logits)
        except Exception as error:
            self.failed[group.request] = error
            return
        self.moved[group.request] = None
        self.num_sampled += len(move.tokens)
        with self._pool.changing() as manager:
            old = group.sequences
            group.sequences = [old[parent].fork(index) for index, parent in enumerate(move.parents)]
            for seq, parent, token in zip(group.sequences, move.parents, move.tokens, strict=True):
                blocks = old[parent].blocks
                assert blocks is not None
                seq.blocks = manager.fork(blocks)
                seq.tokens.append(token)
            for seq in old:
                assert seq.blocks is not None
                manager.free(seq.blocks)
                seq.blocks = None
        if group.beams.is_done:
            self.ended[group.request] = None
            params = group.request.params
            end_beams(group, [self._maker.detokenizer(params) for _ in range(params.n)])


def _score_prompt(work: Scheduled, logits: Tensor) -> None:
    """The logprobs of the prompt tokens that follow those of this chunk."""
    request = work.group.request
    assert request.prompt_logprobs is not None
    first = work.start + 1
    following = request.prompt_token_ids[first : first + len(logits)]
    if following:
        count = request.params.prompt_logprobs or 0
        request.prompt_logprobs[first : first + len(following)] = prompt_logprobs(
            logits[: len(following)], following, count
        )
