"""Which token comes next, for many sequences at once: the tokens that generate() would choose for each alone."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from hfpaged.engine.logprobs import position_logprobs
from hfpaged.engine.outputs import PositionLogprobs
from hfpaged.engine.params import RequestParams
from hfpaged.engine.processors import SequenceProcessors, build_processors
from hfpaged.errors import CallbackError, HfpagedError, InvalidLogitsError

Tokens = Sequence[int]  # of an array("q"), or any other sequence


class Sampled(NamedTuple):
    """The token that was chosen, and its logprobs where the request asked for them."""

    token_id: int
    logprobs: PositionLogprobs | None = None


class SequenceSampler:
    """What the choice of one sequence's tokens keeps from step to step: processors, and a generator of its own.

    `seed` is what that generator starts from; None where nothing is drawn. Raises InvalidConfigError for settings
    that a logits processor refuses.
    """

    def __init__(self, model: PreTrainedModel, params: RequestParams, prompt_ids: Tokens, index: int = 0) -> None:
        self.params, self.index = params, index
        self.seed = None if params.seed is None else sequence_seed(params.seed, index)
        self.processors = SequenceProcessors(build_processors(model, params, prompt_ids))
        self._model, self._prompt_ids = model, prompt_ids
        self._generator: torch.Generator | None = None

    def fork(self, index: int) -> SequenceSampler:
        """The sampler of sample `index` of the same request, with a state of its own, as it was before any token."""
        return SequenceSampler(self._model, self.params, self._prompt_ids, index)

    def generator(self, device: torch.device) -> torch.Generator:
        """This sequence's own, on the device of its logits; on a CPU it draws what torch.manual_seed(seed) would."""
        if self._generator is None:
            assert self.seed is not None
            self._generator = torch.Generator(device).manual_seed(self.seed)
        return self._generator


class SampleRow(NamedTuple):
    """A sequence and all its tokens so far, those of the prompt included."""

    sequence: SequenceSampler
    token_ids: Tokens


def sequence_seed(seed: int, index: int) -> int:
    """The seed of sample `index`: the request's own for the first, and for the others numbers that do not look like
    those of neighbouring seeds (the finalizer of SplitMix64, Steele et al. 2014).
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


@torch.no_grad()
def sample(rows: Sequence[SampleRow], logits: Tensor) -> list[Sampled | HfpagedError]:
    """The next token of each row; `logits` [rows, vocab], of any float dtype. They are not changed.

    A row that cannot be sampled has its error in place of a token: InvalidLogitsError for scores that are no numbers,
    CallbackError where a processor raised. Others are not touched by that. The same sequence may stand in several
    rows where nothing is drawn (tokens to be verified).
    """
    batch = _Batch(rows, logits)
    for group in batch.groups():
        batch.choose(group)
    return batch.results()


class _Batch:
    """One call of `sample`. What is chosen stays on the device until all of it is fetched at once."""

    def __init__(self, rows: Sequence[SampleRow], logits: Tensor) -> None:
        self._rows, self._logits = rows, logits
        self._errors: dict[int, HfpagedError] = {}
        self._chosen: list[tuple[list[int], Tensor, Tensor]] = []  # rows, their tokens, whether those are valid
        self._of_history = [row.sequence.processors.at(len(row.token_ids)) for row in rows]

    def groups(self) -> list[list[int]]:
        """The rows that can share passes over their scores."""
        groups: defaultdict[Hashable, list[int]] = defaultdict(list)
        for index, row in enumerate(self._rows):
            groups[row.sequence.params.do_sample, row.sequence.processors.key].append(index)
        return list(groups.values())

    def choose(self, group: list[int]) -> None:
        """Choose the tokens of one group."""
        first = self._rows[group[0]].sequence
        of_scores = first.processors.of_scores
        scores = self._logits if len(group) == len(self._rows) else self._logits[group]
        if first.params.do_sample or of_scores or any(self._of_history[index] for index in group):
            # A copy in float32, as generate() makes it: processors may write into it.
            scores = scores.to(torch.float32, copy=True)
            group, scores = self._after_history(group, scores)
            group, scores = self._after_scores(group, scores, of_scores)
        if group:
            self._chosen.append((group, *self._pick(group, scores, first.params.do_sample)))

    def _after_history(self, group: list[int], scores: Tensor) -> tuple[list[int], Tensor]:
        """The rows that got through the processors that look at their tokens, and their scores."""
        good = []
        for place, index in enumerate(group):
            processors = self._of_history[index]
            if processors:
                ids = _on_device(self._rows[index].token_ids, scores.device)
                done = self._apply(index, processors, ids, scores[place : place + 1])
                if done is None:
                    continue
                scores[place] = done[0]
            good.append(place)
        return _only(good, group, scores)

    def _after_scores(
        self, group: list[int], scores: Tensor, processors: LogitsProcessorList
    ) -> tuple[list[int], Tensor]:
        """The same for those that look at scores only: all rows at once, or if that fails, one by one."""
        if not (processors and group):
            return group, scores
        ids = torch.empty((len(group), 0), dtype=torch.int64, device=scores.device)
        try:
            return group, _through(processors, ids, scores)
        except Exception:
            done = [self._apply(index, processors, ids[:1], scores[i : i + 1]) for i, index in enumerate(group)]
        good = [place for place, row in enumerate(done) if row is not None]
        group = [group[place] for place in good]
        return group, torch.cat([row for row in done if row is not None]) if good else scores[:0]

    def _apply(self, index: int, processors: LogitsProcessorList, ids: Tensor, scores: Tensor) -> Tensor | None:
        """The scores of one row behind some processors; None, and its error kept, if one of them fails."""
        try:
            return _through(processors, ids, scores)
        except CallbackError as error:
            self._errors[index] = InvalidLogitsError(1, 1) if bool(scores.isnan().any()) else error
            return None

    def _pick(self, group: list[int], scores: Tensor, do_sample: bool) -> tuple[Tensor, Tensor]:
        """(tokens [rows] int64, whether each is a choice at all [rows] bool)."""
        # max() chooses as argmax() does, the first of equals, and is several times as fast on CPUs. NaN is the largest
        # to it, and compares false.
        if do_sample:
            probs = torch.softmax(scores, dim=-1)
            tokens = (probs / self._draw(group, probs)).max(dim=-1).indices
            return tokens, probs.gather(1, tokens[:, None])[:, 0] > 0
        best, tokens = scores.max(dim=-1)
        return tokens, best > -torch.inf

    def _draw(self, group: list[int], probs: Tensor) -> Tensor:
        """Exponential numbers, each row of its own generator: argmax(p / q) is the draw of torch.multinomial, which
        makes its q in the same way (Gumbel's trick with the logarithm taken away).
        """
        q = torch.empty_like(probs)
        for place, index in enumerate(group):
            q[place].exponential_(generator=self._rows[index].sequence.generator(q.device))
        return q

    def results(self) -> list[Sampled | HfpagedError]:
        tokens = self._tokens()
        asked = [
            (index, token_id, count)
            for index, token_id in tokens.items()
            if (count := self._rows[index].sequence.params.num_logprobs) is not None
        ]
        logprobs: dict[int, PositionLogprobs] = {}
        if asked:
            indices, token_ids, counts = zip(*asked, strict=True)
            found = position_logprobs(self._logits[list(indices)], token_ids, counts)
            logprobs = dict(zip(indices, found, strict=True))
        return [
            self._errors.get(index) or Sampled(tokens[index], logprobs.get(index)) for index in range(len(self._rows))
        ]

    def _tokens(self) -> dict[int, int]:
        """The chosen token of each row that has one, in one transfer."""
        if not self._chosen:
            return {}
        order = [index for group, _, _ in self._chosen for index in group]
        both = [torch.cat([tokens for _, tokens, _ in self._chosen]), torch.cat([ok for _, _, ok in self._chosen])]
        found = {}
        for index, token_id, ok in zip(order, *torch.stack(both).tolist(), strict=True):
            if ok:
                found[index] = token_id
            else:
                self._errors[index] = InvalidLogitsError(1, 1)
        return found


def _through(processors: LogitsProcessorList, ids: Tensor, scores: Tensor) -> Tensor:
    """Raises CallbackError, with its cause, for the first processor that raises or gives back something else."""
    for processor in processors:
        name, shape = type(processor).__name__, scores.shape
        try:
            scores = processor(ids, scores)
        except Exception as error:
            raise CallbackError(f"the logits processor {name} raised {type(error).__name__}: {error}") from error
        if not isinstance(scores, Tensor) or scores.shape != shape:
            raise CallbackError(
                f"the logits processor {name} gave back {getattr(scores, 'shape', type(scores).__name__)}, not scores "
                f"of shape {list(shape)}; return a tensor like the one that it is given"
            )
    return scores


def _only(good: list[int], group: list[int], scores: Tensor) -> tuple[list[int], Tensor]:
    if len(good) == len(group):
        return group, scores
    return [group[place] for place in good], scores[good]


def _on_device(token_ids: Tokens, device: torch.device) -> Tensor:
    """[1, length] int64, a copy: an array that lends its memory cannot grow."""
    if isinstance(token_ids, array) and token_ids.typecode == "q":
        ids = torch.frombuffer(token_ids, dtype=torch.int64).clone()
    else:
        ids = torch.tensor(list(token_ids), dtype=torch.int64)
    return ids[None].to(device)
