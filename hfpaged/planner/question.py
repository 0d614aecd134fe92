"""From the flags of `hfpaged plan` to what is asked."""

from __future__ import annotations

import argparse
from dataclasses import replace

from hfpaged.config import DEFAULT_STORE_SIZE, parse_bytes
from hfpaged.errors import InvalidConfigError
from hfpaged.planner.case import Case, Choices, Machine, Workload
from hfpaged.planner.devices import machine_of
from hfpaged.planner.model_facts import ModelFacts
from hfpaged.planner.model_reading import read_model
from hfpaged.planner.sizes import Sizes

# Of a context, where nothing is said: few requests are longer, and many models take a hundred times as much.
USUAL_CONTEXT = 8192
# As hfpaged.engine.sizing has them, which needs torch.
SHARE_ON_GPU, SHARE_ON_CPU = 0.85, 0.5


def case_of(args: argparse.Namespace) -> Case:
    """Raises InvalidConfigError for a model that cannot be read, and numbers that cannot be."""
    facts = read_model(args.model)
    machine = replace(machine_of(args.device), overhead=args.overhead)
    return Case(
        Sizes(facts, args.weights, args.activations),
        workload_of(args, facts),
        machine,
        choices_of(args, machine),
        args.prefix_store,
    )


def workload_of(args: argparse.Namespace, facts: ModelFacts) -> Workload:
    """The requests. Of text that an encoder reads the prompt is that text, and what grows is the answer. Raises
    InvalidConfigError.
    """
    encoder, prompt = args.encoder_tokens, args.prompt
    if encoder is None and facts.cross_layers:
        read = prompt or facts.config.get("max_source_positions")
        encoder = _heard_or_seen(facts) or read or min(facts.max_positions or USUAL_CONTEXT, USUAL_CONTEXT)
    if facts.config.get("is_encoder_decoder") and not (prompt and _heard_or_seen(facts)):
        prompt = None if args.output is None else 0
    prompt, output, context = _lengths(prompt, args.output, args.context, facts)
    return Workload(
        prompt=prompt, output=output, context=context, concurrency=args.concurrency, shared_prefix=args.shared_prefix,
        encoder=encoder or 0,
    )  # fmt: skip


def _heard_or_seen(facts: ModelFacts) -> int | None:
    """Tokens that are no part of a prompt: Whisper's encoder always reads 30 seconds, and Mllama's pictures are cut
    into so many tiles of patches, of which each has a token, and the tile one more. None of any other model.
    """
    if facts.model_type == "whisper":
        return int(facts.config.get("max_source_positions", 1500))
    if facts.model_type != "mllama":
        return None
    eyes = facts.whole.get("vision_config") or {}
    patches = int(eyes.get("image_size", 448)) // int(eyes.get("patch_size", 14))
    return int(eyes.get("max_num_tiles", 4)) * (patches**2 + 1)


def choices_of(args: argparse.Namespace, machine: Machine) -> Choices:
    """What was chosen, and the defaults of `hfpaged serve` for the rest. Raises
    InvalidConfigError for ranks with tiers.
    """
    store_size = _store_size(args)
    if args.tp > 1 and (args.swap_space or store_size):
        tier = "--swap-space" if args.swap_space else "--prefix-store"
        raise InvalidConfigError(
            f"{tier} with --tp {args.tp}: each rank would decide by its own measurements what comes back, and all must "
            "compute the same tokens; leave one of the two out"
        )
    share = SHARE_ON_CPU if machine.is_cpu else SHARE_ON_GPU
    return Choices(
        kv_format=args.kv_dtype, block_size=args.block_size, window=args.window, tp=args.tp,
        dtype=None if args.dtype == "auto" else args.dtype, weights_dtype=args.weights_dtype,
        token_budget=args.token_budget, replicas=args.replicas, swap_space=args.swap_space,
        store_size=store_size, utilization=args.utilization or share, pool=args.kv_cache_memory,
    )  # fmt: skip


def _store_size(args: argparse.Namespace) -> int:
    """Bytes, 0 where no store was asked for."""
    if args.prefix_store is None and args.prefix_store_size is None:
        return 0
    return int(args.prefix_store_size or parse_bytes(DEFAULT_STORE_SIZE))


def _lengths(prompt: int | None, output: int | None, context: int | None, facts: ModelFacts) -> tuple[int, int, int]:
    """Of prompt, output and context: two of them tell the third."""
    if prompt is None and output is None:
        context = context or min(facts.max_positions or USUAL_CONTEXT, USUAL_CONTEXT)
        return context, 0, context
    if context is None and (prompt is None or output is None):
        given, missing = ("prompt", "output") if output is None else ("output", "prompt")
        raise InvalidConfigError(f"--{given} alone leaves the length of a request open; add --{missing} or --context")
    context = context or max(1, (prompt or 0) + (output or 0))
    if prompt is None:
        prompt = max(0, context - (output or 0))
    if output is None:
        output = max(0, context - prompt)
    return prompt, output, context
