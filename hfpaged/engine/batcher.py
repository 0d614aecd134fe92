"""ContinuousBatcher: iteration-level scheduling around the user's own model."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from hfpaged import compat
from hfpaged.config import DEFAULT_BLOCK_SIZE, DEFAULT_STORE_SIZE
from hfpaged.engine import registry
from hfpaged.engine.all_to_end import all_to_end
from hfpaged.engine.assembly import assemble
from hfpaged.engine.batcher_facts import BatcherFacts
from hfpaged.engine.delivery import Listener, Mailbox, Stream
from hfpaged.engine.events import Hook
from hfpaged.engine.intake import Config, Intake
from hfpaged.engine.loop import EngineLoop
from hfpaged.engine.outputs import RequestOutput
from hfpaged.engine.pacing import DEFAULT_STRETCH
from hfpaged.engine.preemption import PreemptionPolicy
from hfpaged.engine.rank_group import group_of
from hfpaged.engine.rank_support import check_ranks
from hfpaged.engine.running import RunningEngine
from hfpaged.engine.shadow_support import attach_shadow
from hfpaged.engine.spec import EngineSpec
from hfpaged.engine.tally import Tally
from hfpaged.engine.warm_up import forwards
from hfpaged.kv_format import Spec
from hfpaged.kv_pool import KVPool
from hfpaged.kv_scales import KVScales
from hfpaged.tensor_parallel import ranks_of
from hfpaged.tiers_spec import TiersSpec


class ContinuousBatcher(BatcherFacts):
    """An engine of any causal model object: requests come and go, and each step computes all that are there.

        batcher = ContinuousBatcher(model, tokenizer)
        outputs = batcher.generate(["one prompt", "another one"], max_new_tokens=64)

    Args:
        model: a causal language model of transformers, in eval mode. Its attention is switched to our kernels.
        tokenizer: for prompts that are text, for stop strings, and to give text back.
        pool: the pool of a PagedCache or of another batcher of this model, to share its blocks.
        memory: what the pool may take: a share of the device (0.85), bytes, or a text such as "2GiB".
        num_blocks, block_size: instead, blocks and the tokens in each.
        kv_dtype, kv_scales: how keys and values are stored, see PagedCache.
        max_num_seqs, max_num_queued_requests: the most sequences at once, and requests beyond those (None: any number).
        max_num_batched_tokens: the most tokens in one step.
        max_model_len: the longest prompt with what is generated; default: what the model's config says.
        policy: "fcfs", or "priority": a smaller `priority` of a request goes first.
        preemption: whose blocks are taken back when they run out: "least_computed", "last_come" or a function.
        watermark: the share of the pool that admission leaves free for those who run.
        max_step_stretch: while others stream, a step with prompt tokens takes at most about so many times one without.
        prefix_sharing: find known prefixes, and let others find what is computed.
        prepack: reorder weights of linear layers for the CPU; default: where it can be done and gains.
        cuda_graphs: decode steps as CUDA graphs. None: where it can be done, each kind of step from its first one on;
            True: all are recorded now, or it is an error. Off by default: it has not been tried on a card yet.
        debug, swap_space: see KVPool; evicted prefixes and preempted requests go to "4GiB" of host memory, say.
        prefix_store, prefix_store_size: a directory with prefixes for all services on this machine, see PagedCache.
        shadow: the share of requests that are computed once more with the native cache in spare time, see metrics.
        hooks: functions that are told of each event (hfpaged.engine.events).

    Under torchrun, of a model that several ranks compute together (hfpaged.tensor_parallel), each rank makes one, and
    rank 0 has the requests: every rank makes the same calls of generate(), or the others call follow(). Sizes are those
    of each rank.

    Raises:
        InvalidConfigError: sizes that cannot work, a model in training mode, graphs that cannot be.
        UnsupportedModelError: models that cannot be computed from plain tokens with what a cache keeps of a sequence.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        pool: KVPool | None = None,
        *,
        memory: float | int | str | None = None,
        num_blocks: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        kv_dtype: Spec = "auto",
        kv_scales: KVScales | str | os.PathLike[str] | None = None,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 4096,
        max_model_len: int | None = None,
        policy: str = "fcfs",
        preemption: str | PreemptionPolicy = "least_computed",
        watermark: float = 0.01,
        max_step_stretch: float | None = DEFAULT_STRETCH,
        prefix_sharing: bool = True,
        prepack: bool | None = None,
        cuda_graphs: bool | None = False,
        max_num_queued_requests: int | None = None,
        debug: bool | None = None,
        swap_space: int | str = 0,
        prefix_store: str | os.PathLike[str] | None = None,
        prefix_store_size: int | str = DEFAULT_STORE_SIZE,
        shadow: float = 0.0,
        hooks: tuple[Hook, ...] = (),
    ) -> None:
        self.tokenizer = tokenizer
        spec = EngineSpec(
            memory, num_blocks, block_size, kv_dtype, kv_scales, max_num_seqs, max_num_batched_tokens, max_model_len,
            policy, preemption, watermark, max_step_stretch, prefix_sharing, prepack, cuda_graphs,
            max_num_queued_requests, shadow, debug, TiersSpec(swap_space, prefix_store, prefix_store_size))  # fmt: skip
        ranks = ranks_of(model)
        check_ranks(ranks, model, pool, spec)
        self._group = group_of(ranks)
        with self._group.starting():
            self._parts = assemble(model, tokenizer, pool, spec, ranks)
        self._group.join(self._parts.runner)
        self.loop = EngineLoop(self._parts.engine)
        self.tally = Tally(compat.model_name(self.model), self.loop.requests)
        self.hooks.extend((self.tally, *attach_shadow(self._parts, self.loop, self.tally), *hooks))
        self._finalizer = weakref.finalize(self, self.pool.abandon, self._parts.scheduler.give_back)
        inner = compat.transformers_model(model)
        self._intake = Intake(inner, tokenizer, self._parts, self.loop, self.tally, self._group)
        registry.register(self)

    def check_queue(self, refused: str | None = None) -> None:
        """Whether one more request may wait. Raises QueueFullError; one of tenant `refused` is told of as refused."""
        self._intake.check_queue(refused)

    def warm_up(self) -> None:
        """Compute forwards as steps will, so that what is compiled at the first of each kind is compiled now. From any
        thread, between steps; nothing is counted or told. With too few free blocks it does nothing. Of ranks
        each calls it.
        """

        def all_kinds() -> None:
            for forward in forwards(self._parts.runner, self.limits):
                with self.loop.between_steps():
                    forward()

        self._group.together(self._parts.runner, all_kinds)

    def add_request(
        self, prompt: Any, generation_config: Config = None, *, request_id: str | None = None, priority: int = 0,
        tenant: str = "", salt: str | None = None, adapter: str | None = None, listener: Listener | None = None,
        **settings: Any,
    ) -> str:  # fmt: skip
        """Let a request wait for the next step, from any thread; returns its id, by which `abort` knows it.

        Args:
            prompt: a text, token ids, a tensor of them, or what a tokenizer or a chat template gives back.
            generation_config: what generate() takes; `settings` stand above it: max_new_tokens, temperature, stop,
                seed, n, logprobs, logits_processor and all else that generate() or OpenAI's API knows.
            request_id: a name that no other request has, until this one has ended.
            priority: the smaller, the sooner, with policy="priority".
            tenant: whose it is; waiting tenants get equal shares.
            salt: its prefixes are shared only with requests of the same salt.
            adapter: of the PEFT adapters that are loaded the one that acts; "__base__": none; None: those active then.
            listener: is given each of its outputs, in the thread that makes the step.

        Raises InvalidConfigError, RequestTooLongError for one that can never fit, BatcherClosedError.
        """
        names = dict[str, Any](request_id=request_id, priority=priority, tenant=tenant, salt=salt, adapter=adapter)
        return self._intake.add(listener, prompt, generation_config, **names, **settings)

    def abort(self, request_id: str) -> bool:
        """Give a request up, from any thread; whether it was still there. Its blocks go back now, or at the end of the
        step that is under way; its record comes with the next step, with finish_reason "abort".
        """
        return self.loop.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """One step; the records of the requests that got tokens or came to their end since the last one."""
        return self.loop.step()

    def generate(
        self, prompts: Any, generation_config: Config | list[Config] = None, *, progress: bool = False, **settings: Any
    ) -> list[RequestOutput]:
        """Run prompts to their end; outputs in the order of the prompts.

        Args:
            prompts: texts, lists of token ids, or what a tokenizer gives back; one alone is as good as a list of one.
            generation_config: for all, or a list with one for each.
            progress: show a progress bar.
            settings: see `add_request`.

        A request that fails has finish_reason "error" and its error; one that is refused raises before any begins. Of
        ranks each calls it, and gets what rank 0 gets for its prompts, errors too; and RankLostError.
        """
        return self._group.together(
            self._parts.runner,
            lambda: all_to_end(self._intake, self.loop, prompts, generation_config, progress, settings),
        )

    def follow(self) -> None:
        """On all ranks but 0: take part in whatever rank 0 computes, until it closes its batcher. Raises RankLostError,
        and NotLeaderError on rank 0."""
        self._group.follow(self._parts.runner)
        self.close()

    def stream(self, prompt: Any, generation_config: Config = None, **settings: Any) -> Stream:
        """Run one prompt beside all others and give what is new as soon as it is. Dropping the iterator aborts the
        request. Arguments and errors are those of `add_request`.
        """
        mailbox = Mailbox()
        request_id = self.add_request(prompt, generation_config, listener=mailbox.put, **settings)
        return Stream(request_id, mailbox, self.loop.next_output, self.loop.abort)

    def running(self, *, step_timeout: float | None = None) -> RunningEngine:
        """`async with batcher.running() as engine:` (or `with`): a thread of its own makes the steps. One that takes
        longer than `step_timeout` seconds is told of in the log and as an event."""
        return RunningEngine(self, step_timeout)

    def when_lost(self, told: Callable[[str], None]) -> None:
        """Let `told` know, in a thread of its own, when the ranks that compute the model together cannot go on."""
        self._group.when_lost(told)

    def close(self, *, drain: bool = False) -> None:
        """Give everything back: requests that are there are aborted, or with `drain` come to their end first. Of ranks
        each calls it, and all others follow until rank 0 does.
        """
        if self.is_closed:
            return
        self.loop.check_not_inside()
        self._intake.is_closed = True
        try:
            if not self.is_leader:
                self._group.follow(self._parts.runner)
            while drain and self.has_work:
                self.step()
        finally:  # Ctrl-C too
            self.loop.end_all()
            self._parts.close()
            self._group.close()

    def __enter__(self) -> ContinuousBatcher:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.is_leader and error[0] is not None:  # rank 0 may never close
            self._group.leave()
        self.close()
