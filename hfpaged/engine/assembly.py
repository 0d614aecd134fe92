"""The engine put together: sizes are decided, and what was decided can be read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from hfpaged import compat
from hfpaged.config import format_bytes
from hfpaged.engine.adapter_routing import AdapterRouter
from hfpaged.engine.core import Engine
from hfpaged.engine.graph_support import make_graphs
from hfpaged.engine.limits import Limits
from hfpaged.engine.model_runner import ModelRunner
from hfpaged.engine.pacing import Pace
from hfpaged.engine.params import RequestParams
from hfpaged.engine.preemption import POLICIES
from hfpaged.engine.rank_support import check_runner, share_pool, shared_sizing
from hfpaged.engine.request_sequences import describe_requests
from hfpaged.engine.scheduler import Scheduler
from hfpaged.engine.sequence_maker import SequenceMaker
from hfpaged.engine.shadow_support import check_shadow
from hfpaged.engine.sizing import Sizing
from hfpaged.engine.spare import longest_of, pool_spec, size_by_trial, spare_runner
from hfpaged.engine.spec import EngineSpec
from hfpaged.engine.swap_support import check_swapping, read_ahead, settle_store, told_store
from hfpaged.engine.trial import try_out
from hfpaged.errors import InvalidConfigError, RequestTooLongError
from hfpaged.fingerprint import model_keys
from hfpaged.kv_pool import KVPool
from hfpaged.packed_cache import PackedCache
from hfpaged.prepack import is_prepacked, prepack, prepack_report, unprepack
from hfpaged.prepack_gain import BATCH_ROWS
from hfpaged.ranks import Ranks
from hfpaged.spread import in_runs, input_device

logger = logging.getLogger("hfpaged")


@dataclass(frozen=True)
class Assembly:
    """The parts of an engine."""

    engine: Engine
    runner: ModelRunner
    router: AdapterRouter
    scheduler: Scheduler
    maker: SequenceMaker
    spec: EngineSpec
    max_model_len: int | None
    vocab_size: int
    has_prepacked: bool
    sizing: Sizing | None  # of a pool that was promised a share of the device
    ranks: Ranks | None = None  # the processes that compute the model together

    def check_fits(self, num_prompt: int, params: RequestParams) -> None:
        """Raises RequestTooLongError for a request that can never run, InvalidConfigError for too many sequences."""
        total = num_prompt + params.max_new_tokens
        if self.max_model_len is not None and total > self.max_model_len:
            raise RequestTooLongError(
                f"{num_prompt} prompt tokens and {params.max_new_tokens} new ones are {total}, and the model's context "
                f"is {self.max_model_len}; shorten the prompt, lower max_new_tokens, or set max_model_len="
            )
        if (edge := self.runner.changes_between(num_prompt, total)) is not None:
            raise RequestTooLongError(
                f"{num_prompt} prompt tokens and {params.max_new_tokens} new ones go across {edge}, where this model "
                f"changes all its rotary positions and what is stored would have to be computed again; end at {edge} "
                "tokens, or begin behind them"
            )
        seats = max(params.num_beams, params.num_sequences)
        if seats > self.spec.max_num_seqs:
            raise InvalidConfigError(
                f"{seats} sequences of one request are more than max_num_seqs={self.spec.max_num_seqs}; use fewer, or "
                "raise max_num_seqs"
            )
        needed = self.scheduler.needs.at_most(
            num_prompt, params.max_new_tokens, params.num_beams, shared=self.engine.shares_prefixes
        )
        there = self.engine.pool.num_blocks
        if needed > there:
            raise RequestTooLongError(
                f"{num_prompt} prompt tokens and {params.max_new_tokens} new ones (in {params.num_beams} beams) take "
                f"{needed} blocks of {self.engine.pool.block_size} tokens, and the pool has {there}; give it more "
                "(memory= or num_blocks=), or ask for less"
            )

    def describe(self) -> dict[str, Any]:
        """Sizes and choices, for people and logs."""
        pool = self.engine.pool
        groups = max(len(pool.groups), 1)
        return {
            "model": type(compat.transformers_model(self.runner.model)).__name__,
            "devices": self._devices(),
            "kv_format": pool.kv_format.title,
            "block_size": pool.block_size,
            "num_blocks": pool.num_blocks,
            "pool_bytes": pool.num_blocks * pool.storage.block_bytes,
            "pool_tokens": pool.num_blocks // groups * pool.block_size,
            **self.scheduler.limits.sizes,
            "max_model_len": self.max_model_len,
            "forward": "packed" if self.runner.packs else f"one by one ({self.runner.why_separate})",
            "graphs": "off" if self.runner.graphs is None else self.runner.graphs.describe(),
            "adapters": self.router.describe(),
            "prefix_sharing": self.engine.shares_prefixes,
            "swap_bytes": pool.swapping.size if pool.swapping else 0,
            "prefix_store": told_store(pool),
            "prompts": "whole" if self.runner.whole_prompts else "in chunks",
            "shadow": self.spec.shadow,
            "requests_of_max_length": self._most_of_max_length(),
            "activation_bytes": None if self.sizing is None else self.sizing.activations,
            "sizing": "given" if self.sizing is None else str(self.sizing),
            "weights": str(prepack_report(self.runner.model)),
            "ranks": 1 if self.ranks is None else self.ranks.size,
        }

    def _devices(self) -> str:
        """Where the layers keep their blocks: one device, or "cuda:0 x 16, cuda:1 x 16"."""
        stores = self.engine.pool.layer_stores
        places = [str(stores[layer][-1].key.device) for layer in sorted(stores)]
        return in_runs(places) if len(set(places)) > 1 else "".join(places[:1]) or str(self.runner.device)

    def _most_of_max_length(self) -> int | None:
        """How many requests of one sequence, each as long as it may be, have room at the same time."""
        if self.max_model_len is None:
            return None
        return self.engine.pool.num_blocks // self.scheduler.needs.at_most(self.max_model_len - 1, 1)

    def close(self) -> None:
        """The weights lie again as they did, and what waits to be written is."""
        settle_store(self.engine.pool)
        if self.has_prepacked:
            unprepack(self.runner.model)


def assemble(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, pool: KVPool | None, spec: EngineSpec,
    ranks: Ranks | None = None,
) -> Assembly:  # fmt: skip
    """All `ranks` must call it. Raises InvalidConfigError, UnsupportedModelError; the weights lie as before then."""
    has_prepacked = ranks is None and _prepack(model, spec.prepack)
    try:
        return _assemble(model, tokenizer, pool, spec, has_prepacked, ranks)
    except BaseException:
        if has_prepacked:
            unprepack(model)
        raise


def _assemble(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, pool: KVPool | None, spec: EngineSpec,
    has_prepacked: bool, ranks: Ranks | None,
) -> Assembly:  # fmt: skip
    inner = compat.transformers_model(model)
    sizing = size_by_trial(model, spec) if pool is None and spec.num_blocks is None else None
    sizing = shared_sizing(ranks, sizing, inner.device.type)
    memory = spec.memory if sizing is None else sizing.pool
    assert not isinstance(memory, float)
    runner = ModelRunner(model, PackedCache(model, pool, pool_spec(spec, memory, spec.num_blocks, spec.below)))
    check_runner(ranks, runner)
    check_swapping(spec.below, runner)
    try_out(runner, spare_runner(model, spec))
    runner.expect_length(longest_of(model, spec))
    check_shadow(spec.shadow, runner)
    pool = runner.cache.pool
    share_pool(ranks, pool)
    pool.reserve_all()
    read_ahead(pool)
    model_keys(inner)  # all weights are read for it once: now, while no request waits
    runner.graphs = make_graphs(runner, spec.cuda_graphs, spec.max_num_seqs, longest_of(model, spec))
    policy = POLICIES[spec.preemption] if isinstance(spec.preemption, str) else spec.preemption
    limits = Limits(spec.max_num_seqs, spec.max_num_batched_tokens, spec.watermark, runner.whole_prompts)
    scheduler = Scheduler(
        pool.manager, pool.prefixes, tuple(group.window for group in pool.groups), limits,
        by_priority=spec.policy == "priority", policy=policy,
    )  # fmt: skip
    describe_requests(pool, scheduler)
    maker = SequenceMaker(inner, tokenizer, speculates=runner.can_speculate)
    router = AdapterRouter(runner, lambda: spare_runner(model, spec))
    engine = Engine(
        inner, runner, router, scheduler, maker, Pace(spec.max_num_batched_tokens, spec.max_step_stretch),
        shares_prefixes=spec.prefix_sharing and runner.can_share,
    )  # fmt: skip
    vocab_size = inner.config.get_text_config(decoder=True).vocab_size
    assembly = Assembly(
        engine, runner, router, scheduler, maker, spec, longest_of(model, spec), vocab_size, has_prepacked, sizing,
        ranks,
    )  # fmt: skip
    told = assembly.describe()
    logger.info(
        "%s on %s: %s blocks of %s tokens (%s, %s tokens), %s; up to %s sequences and %s tokens a step",
        told["model"], told["devices"], told["num_blocks"], told["block_size"], format_bytes(told["pool_bytes"]),
        told["pool_tokens"], told["forward"], told["max_num_seqs"], told["max_num_batched_tokens"],
    )  # fmt: skip
    return assembly


def _prepack(model: nn.Module, wanted: bool | None) -> bool:
    """Reorder weights where it was asked for, or by default on a CPU; whether that was done here."""
    is_on_cpu = input_device(compat.transformers_model(model)).type == "cpu"
    if (is_on_cpu if wanted is None else wanted) and not is_prepacked(model):
        return prepack(model, BATCH_ROWS).layers > 0
    return False
