"""`hfpaged demo`: one batch of prompts through plain transformers and through PagedCache, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import hfpaged
from hfpaged import demo_model
from hfpaged.bench.result import Measured
from hfpaged.bench.turns import in_pairs
from hfpaged.compat import cache_argument
from hfpaged.errors import InvalidConfigError
from hfpaged.kv_format import FORMATS, KVFormat, resolve_format
from hfpaged.measure import KVBytes, alternate, dynamic_kv_bytes
from hfpaged.model_arguments import add_trust

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Name three fruits.",
    "A train leaves at nine in the morning and needs four hours to the coast. When does it arrive?",
)
DTYPES = ("float32", "bfloat16", "float16")
TURNS = 4  # each of the two is first in half of them
PLAIN, PAGED = "transformers", "hfpaged"


@dataclass(frozen=True)
class Outcome:
    """What one run of generate() gave, and the KV memory that it held at its end."""

    rows: list[list[int]]
    kv_bytes: KVBytes
    blocks: str


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its options."""
    line = "chat with a small model, with and without paged KV memory, and compare"
    parser = subparsers.add_parser("demo", help=line, description=line)
    parser.add_argument("--model", help="folder or hub id (default: SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument(
        "--kv-dtype", default="auto", metavar="FORMAT",
        help="what PagedCache stores: int8, fp8_e4m3, fp8_e5m2, k8v4, int4, or auto, what the model computes (default)",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="where torch runs the model (default: cpu)")
    add_trust(parser)
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, metavar="TEXT", help="questions, one batch")


def run(args: argparse.Namespace) -> int:
    """Print answers and comparison; 1 if the two did not generate the same tokens and nothing was quantized."""
    kv_format = resolve_format(args.kv_dtype)
    if args.max_new_tokens < 1:
        raise InvalidConfigError(f"--max-new-tokens {args.max_new_tokens} generates nothing; use 1 or more")
    model, tokenizer = demo_model.load(args.model, args.dtype, args.device, trust_remote_code=args.trust_remote_code)
    inputs = chat_inputs(tokenizer, args.prompts).to(args.device)
    runs: dict[str, Callable[[], Outcome]] = {
        PLAIN: partial(generate_plain, model, inputs, args.max_new_tokens),
        PAGED: partial(generate_paged, model, inputs, args.max_new_tokens, kv_format),
    }
    outcomes = {name: once() for name, once in runs.items()}  # also the warm-up: kernels compile here
    console = Console()
    print_answers(console, tokenizer, args.prompts, outcomes[PAGED])
    measured = speed(outcomes, alternate(runs, TURNS, warmup=0))
    setting = f"{args.dtype} on {args.device}, batch of {len(args.prompts)}, median of {TURNS}"
    console.print(comparison(outcomes, measured, setting))
    if kv_format.is_quantized:
        console.print(quantized_verdict(outcomes, kv_format.title), highlight=False)
        return 0
    console.print(verdict(outcomes, measured), highlight=False)
    return 0 if measured.same_tokens else 1


def chat_inputs(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> Any:
    """One left-padded batch, in the model's own chat format where it has one."""
    if tokenizer.chat_template is None:
        return tokenizer(list(prompts), padding=True, return_tensors="pt")
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )


def generate_plain(model: PreTrainedModel, inputs: Any, max_new_tokens: int) -> Outcome:
    """Greedy generation with the cache and the attention that transformers brings."""
    cache = DynamicCache(config=model.config)
    rows = _generate(model, inputs, max_new_tokens, cache)
    padding = (inputs["attention_mask"] == 0).sum(dim=1).tolist()
    return Outcome(rows, dynamic_kv_bytes(cache, padding), "none")


def generate_paged(
    model: PreTrainedModel, inputs: Any, max_new_tokens: int, kv_format: KVFormat = FORMATS["auto"]
) -> Outcome:
    """The same with PagedCache; the model's own attention is back afterwards."""
    cache = hfpaged.PagedCache(model, kv_dtype=kv_format)
    try:
        rows = _generate(model, inputs, max_new_tokens, cache)
        stats = cache.stats()
    finally:
        cache.free()
        hfpaged.unpatch(model)
    blocks = f"{stats.blocks_used} of {stats.blocks_total}"
    return Outcome(rows, KVBytes(stats.bytes_live, stats.bytes_reserved), blocks)


def _generate(model: PreTrainedModel, inputs: Any, max_new_tokens: int, cache: Any) -> list[list[int]]:
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **{cache_argument(): cache})
    # tolist() waits for the device, which timing relies on.
    rows: list[list[int]] = output[:, inputs["input_ids"].shape[1] :].tolist()
    return rows


def print_answers(
    console: Console, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], outcome: Outcome
) -> None:
    """Questions and answers, once: both runs are expected to say the same."""
    for prompt, row in zip(prompts, outcome.rows, strict=True):
        answer = tokenizer.decode(row, skip_special_tokens=True).strip()
        console.print(f"> {prompt}", style="bold", markup=False, highlight=False)
        console.print(answer, "\n", markup=False, highlight=False)


def speed(outcomes: Mapping[str, Outcome], seconds: Mapping[str, Sequence[float]]) -> Measured:
    """Tokens per second by turn, of both; tokens count as generate() makes them: rows times steps."""
    tokens = {name: sum(map(len, outcome.rows)) for name, outcome in outcomes.items()}
    plain, paged = ([tokens[name] / each for each in seconds[name]] for name in (PLAIN, PAGED))
    return in_pairs(plain, paged, "tok/s", outcomes[PLAIN].rows == outcomes[PAGED].rows)


def comparison(outcomes: Mapping[str, Outcome], measured: Measured, setting: str) -> Table:
    """Both runs in columns."""
    table = Table(title=f"Plain transformers and hfpaged ({setting})", title_justify="left")
    table.add_column("")
    for name in outcomes:
        table.add_column(name, justify="right")
    table.add_row("identical tokens", "", "yes" if measured.same_tokens else "no")
    table.add_row("tokens per second", *(f"{each:.1f}" for each in (measured.plain, measured.paged)))
    table.add_row("KV live", *(_megabytes(outcome.kv_bytes.live) for outcome in outcomes.values()))
    table.add_row("KV reserved", *(_megabytes(outcome.kv_bytes.reserved) for outcome in outcomes.values()))
    table.add_row("blocks used", *(outcome.blocks for outcome in outcomes.values()))
    return table


def verdict(outcomes: Mapping[str, Outcome], measured: Measured) -> str:
    """One sentence; no ratio unless the tokens agree, for a wrong answer has no speed."""
    plain, paged = outcomes[PLAIN], outcomes[PAGED]
    if not measured.same_tokens:
        rows = sum(a != b for a, b in zip(plain.rows, paged.rows, strict=True))
        return f"The tokens differ in {rows} of {len(plain.rows)} rows, so speed and memory are not compared."
    memory = paged.kv_bytes.reserved / plain.kv_bytes.reserved
    low, high = min(measured.values), max(measured.values)
    return (
        f"Same tokens as plain transformers, at {measured.value:.2f} times its speed "
        f"({low:.2f} to {high:.2f} in {len(measured.values)} turns), with {memory:.2f} times its KV memory reserved."
    )


def quantized_verdict(outcomes: Mapping[str, Outcome], name: str) -> str:
    """One sentence, without a ratio: a few other tokens are what quantizing costs, and only quality can weigh them."""
    plain, paged = outcomes[PLAIN], outcomes[PAGED]
    same = sum(a == b for a, b in zip(plain.rows, paged.rows, strict=True))
    return (
        f"With keys and values as {name}, {same} of {len(plain.rows)} rows have the same tokens as plain transformers, "
        f"in {_megabytes(paged.kv_bytes.live)} of KV memory for {_megabytes(plain.kv_bytes.live)}; "
        f"`hfpaged quality --kv {name}` tells what that costs."
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"
