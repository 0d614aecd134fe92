"""What really happens when a model of a family generates with a PagedCache, against its own default cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from tiny_configs import HIDDEN, VOCAB
from transformers import PreTrainedModel, set_seed
from transformers.cache_utils import CacheLayerMixin

import hfpaged
from hfpaged import attention, compat, prefix_sharing
from hfpaged.errors import UnsupportedModelError
from hfpaged.handle import LazyKV
from hfpaged.verdict import CORRECT, FAST, NO_CACHE, REFUSED

CACHE = compat.cache_argument()
NEW = 6
# Longer than the windows and chunks of the tiny configs, which are of 6 positions.
MODES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "greedy": ({"do_sample": False}, [13, 13]),
    "padded": ({"do_sample": False}, [5, 13, 9]),
    "sampled": ({"do_sample": True, "top_k": 20}, [13, 6]),
    "beams": ({"do_sample": False, "num_beams": 3}, [9, 13]),
}


@dataclass
class Run:
    """`outcome` as in `hfpaged.verdict`; `faults`: what was not as with the default cache; `impossible`: modes in
    which transformers fails with its own cache.
    """

    outcome: str
    faults: list[str]
    impossible: list[str]
    reason: str = ""


class Watch:
    """Counts how often the kernels ran, and how often keys or values were gathered for somebody else."""

    def __init__(self) -> None:
        self.paged = self.gathered = 0

    def __enter__(self) -> Watch:
        paged, materialise = attention._paged, LazyKV.materialise

        def noted_paged(*args: Any) -> Any:
            self.paged += 1
            return paged(*args)

        def noted_gather(lazy: LazyKV) -> Any:
            self.gathered += 1
            return materialise(lazy)

        self._patches = [
            mock.patch.object(attention, "_paged", noted_paged),
            mock.patch.object(LazyKV, "materialise", noted_gather),
        ]
        for patch in self._patches:
            patch.start()
        attention.dense_calls.clear()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    @property
    def is_fast(self) -> bool:
        return self.paged > 0 and not self.gathered and not attention.dense_calls


def measure(model: PreTrainedModel) -> Run:
    """Generate in all modes with the default cache, with a PagedCache unpatched, and patched; patched ones also with
    prefixes that the pool knows, and with the common parts of a batch computed once.
    """
    wanted = {mode: _try(model, mode) for mode in MODES}
    possible = {mode: output for mode, output in wanted.items() if not isinstance(output, Exception)}
    run = Run(FAST, [], [f"{mode}: {error!r:.200}" for mode, error in wanted.items() if mode not in possible])
    try:
        hfpaged.PagedCache(config=model.config)
    except UnsupportedModelError as error:
        keeps_keys = any(_keeps_keys(output.get(CACHE)) for output in possible.values())
        run.outcome, run.reason = (REFUSED if keeps_keys else NO_CACHE), str(error)
        return run
    if not possible:
        run.faults.append("transformers generates nothing with its own cache, and PagedCache does not refuse")
    for is_patched in (False, True):
        _compare(model, is_patched, possible, run)
    return run


def _compare(model: PreTrainedModel, is_patched: bool, wanted: dict[str, Any], run: Run) -> None:
    watch = Watch()
    try:
        with watch, mock.patch.object(prefix_sharing, "FORWARD_COST", 0):
            for mode, output in wanted.items():
                fault = _fault(model, mode, output, is_patched)
                if fault:
                    run.faults.append(f"{mode}, {'patched' if is_patched else 'unpatched'}: {fault}")
    finally:
        hfpaged.unpatch(model)
    if not is_patched and watch.paged:
        run.faults.append("our kernels ran in a model that is not patched")
    if is_patched and not watch.is_fast:
        run.outcome = CORRECT


def _fault(model: PreTrainedModel, mode: str, wanted: Any, is_patched: bool) -> str:
    sizes: dict[str, Any] = {"block_size": 4, "num_blocks": 800}
    cache = hfpaged.PagedCache(model, **sizes) if is_patched else hfpaged.PagedCache(config=model.config, **sizes)
    output = _try(model, mode, cache)
    if isinstance(output, Exception):
        return f"{output!r:.300}"
    cache.pool.check_integrity()
    if cache.pool.num_free == cache.pool.num_blocks:
        return "the cache was not used"
    cache.free()
    if cache.pool.num_free != cache.pool.num_blocks:
        return "blocks did not come back"
    fault = _difference(output, wanted)
    if fault or not is_patched:
        return fault
    again = _try(model, mode, hfpaged.PagedCache(model, pool=cache.pool))
    fault = f"{again!r:.300}" if isinstance(again, Exception) else _difference(again, wanted)
    return fault and f"behind a known prefix: {fault}"


def _difference(output: Any, wanted: Any) -> str:
    if output.sequences.tolist() != wanted.sequences.tolist():
        return f"other tokens: {output.sequences.tolist()}, not {wanted.sequences.tolist()}"
    ours, theirs = torch.stack(output.logits), torch.stack(wanted.logits)
    if not torch.allclose(ours, theirs, atol=5e-4, rtol=1e-4):
        return f"logits differ by {(ours - theirs).abs().max():.2g}"
    return ""


def _try(model: PreTrainedModel, mode: str, cache: Any = None) -> Any:
    """The output, or the exception."""
    arguments, lengths = MODES[mode]
    given = arguments | prompts(model, lengths) | ({} if cache is None else {CACHE: cache})
    given |= {"max_new_tokens": NEW, "num_return_sequences": 1}
    set_seed(7)
    try:
        output = model.generate(**given, return_dict_in_generate=True, output_logits=True)
    except Exception as error:
        return error
    assert torch.stack(output.logits).isfinite().all(), "the tiny model computes no numbers that can be compared"
    return output


def prompts(model: PreTrainedModel, lengths: list[int]) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, left-padded to the longest."""
    generator = torch.Generator().manual_seed(3)
    if hasattr(model, "num_codebooks"):  # MusicGen begins with one token for each codebook
        first = torch.full((len(lengths) * model.num_codebooks, 1), VOCAB)
        return {"input_ids": first, "attention_mask": torch.ones(len(lengths), 1, dtype=torch.long)}
    ids = torch.randint(3, VOCAB - 10, (len(lengths), max(lengths)), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length], mask[row, : max(lengths) - length] = 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.model_type == "mllama_text_model":  # its cross-attention runs only with something to look at
        inputs["cross_attention_states"] = torch.randn(len(lengths), 5, HIDDEN, generator=generator)
    return inputs


def _keeps_keys(cache: Any) -> bool:
    layers = getattr(cache, "layers", ())
    return any(isinstance(layer, CacheLayerMixin) and layer.is_initialized for layer in layers)
