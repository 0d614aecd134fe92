"""How a request comes in: its prompt and settings are read and checked, and it begins to wait, or is refused."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hfpaged.engine.assembly import Assembly
from hfpaged.engine.delivery import Listener
from hfpaged.engine.loop import EngineLoop
from hfpaged.engine.params import resolve_params
from hfpaged.engine.prompts import read_prompt
from hfpaged.engine.rank_group import OneProcess, RankGroup
from hfpaged.engine.request import Request
from hfpaged.engine.tally import Tally
from hfpaged.errors import BatcherClosedError, InvalidConfigError, QueueFullError

Config: TypeAlias = GenerationConfig | dict[str, Any] | None


class Intake:
    """Of one batcher."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        parts: Assembly,
        loop: EngineLoop,
        tally: Tally,
        group: RankGroup | OneProcess,
    ) -> None:
        self.is_closed = False
        self._model, self._tokenizer, self._parts, self._loop = model, tokenizer, parts, loop
        self._tally, self._group = tally, group
        self._numbers = itertools.count()

    def add(
        self, listener: Listener | None, prompt: Any, generation_config: Config, *, only_end: bool = False,
        **settings: Any,
    ) -> str:  # fmt: skip
        """Let a request wait, see EngineLoop.add; returns its id. Who is refused is told of."""
        try:
            request = self._request(prompt, generation_config, **settings)
            self._loop.add(request, listener, only_end=only_end)
            self._tally.added()
        except Exception as error:
            self._parts.engine.tells.rejected(settings.get("request_id"), settings.get("tenant"), error)
            raise
        return request.request_id

    def _request(
        self, prompt: Any, generation_config: Config, request_id: str | None = None, priority: int = 0,
        tenant: str = "", salt: str | None = None, adapter: str | None = None, **settings: Any,
    ) -> Request:  # fmt: skip
        if self.is_closed:
            raise BatcherClosedError("this batcher is closed; make another one")
        self._group.check_leads()
        self.check_queue()
        self._check_adapter(adapter)
        ids, text = read_prompt(prompt, self._tokenizer, self._parts.vocab_size)
        params = resolve_params(self._model, self._tokenizer, len(ids), generation_config, **settings)
        self._parts.check_fits(len(ids), params)
        number = next(self._numbers)
        name = f"request-{number}" if request_id is None else request_id
        while request_id is None and self._loop.is_there(name):  # somebody has chosen it
            name += "+"
        request = Request(
            name, number, ids, params, text=text, priority=priority, tenant=tenant, salt=salt, adapter=adapter
        )
        self._parts.maker.group(request)
        return request

    def _check_adapter(self, adapter: str | None) -> None:
        if adapter is not None and self._parts.ranks is not None:
            raise InvalidConfigError(
                f"adapter={adapter!r} of a model that several ranks compute together: which one acts would be chosen "
                "on rank 0 alone; leave it out"
            )
        self._parts.router.check(adapter)

    def check_queue(self, refused: str | None = None) -> None:
        """Raises QueueFullError for one more; where it has a tenant, it is told of as refused. Before anything else, as
        those who are refused shall cost nothing.
        """
        spec, in_flight = self._parts.spec, len(self._loop.requests)
        most = spec.max_num_queued_requests
        if most is not None and in_flight >= spec.max_num_seqs + most:
            error = QueueFullError(in_flight, spec.max_num_seqs, most)
            if refused is not None:
                self._parts.engine.tells.rejected(None, refused, error)
            raise error
