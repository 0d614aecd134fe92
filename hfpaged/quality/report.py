"""The figures as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from hfpaged.quality.contexts import Context
from hfpaged.quality.figures import Figures
from hfpaged.quality.heads import HeadEffect
from hfpaged.quality.layers import SHOWN, LayerEffect
from hfpaged.quality.thresholds import Thresholds
from hfpaged.quality.verdict import Judged, exit_code, sentence

HEADERS = ("length", "KV format", "bytes/token", "of bf16", "perplexity", "change", "KL", "p99", "top-1", "parts at")


@dataclass(frozen=True)
class Report:
    """Everything that one run has found. `layers` and `heads` are ranked, the worst first."""

    header: Mapping[str, Any]
    thresholds: Thresholds
    judged: Sequence[Judged]
    layers: Sequence[LayerEffect] = field(default_factory=list)
    heads: Sequence[HeadEffect] = field(default_factory=list)
    exempting: Mapping[str, Any] | None = None

    @property
    def exit_code(self) -> int:
        return exit_code(self.judged)

    @property
    def last_line(self) -> str:
        return sentence(self.judged)

    def as_json(self) -> dict[str, Any]:
        """All of it, and the exit code; numbers that are none (NaN) as null, which JSON has no word for."""
        return {
            "header": dict(self.header),
            "thresholds": asdict(self.thresholds),
            "figures": [_record(one) for one in self.judged],
            "layers": [effect._asdict() for effect in self.layers],
            "heads": [effect._asdict() for effect in self.heads],
            "exempting": self.exempting,
            "failures": [failure for one in self.judged for failure in _failures(one)],
            "verdict": self.last_line,
            "exit_code": self.exit_code,
        }


def table(judged: Sequence[Judged]) -> Table:
    """One line for each length and format; a column for this project's targets where the demo model is judged."""
    result = Table(title="Native KV cache and others, on the same texts", title_justify="left")
    for name in (*HEADERS, "ROUGE-L", "fit"):
        result.add_column(name, justify="left" if name in HEADERS[:2] else "right", no_wrap=True)
    has_targets = any(one.target for one in judged)
    if has_targets:
        result.add_column("target: bytes, change, top-1", no_wrap=True)
    for one in judged:
        result.add_row(*_cells(one.figures), "yes" if one.is_fit else "NO", *([_target(one)] if has_targets else []))
    return result


def notes(contexts: Sequence[Context], texts: Mapping[str, int]) -> list[str]:
    """What was measured at each length, in words."""
    lines = []
    for context in contexts:
        count, cut = texts[context.name], f" ({context.note})" if context.note else ""
        lines.append(
            f"{context.name}: {count} texts of {context.cached} tokens{cut}, {context.fed} of each fed one by one: "
            f"{count * context.fed:,} scored"
        )
    return lines


def residual_notes(judged: Sequence[Judged]) -> list[str]:
    """What formats keep besides their blocks, once for each format."""
    kept = {one.figures.format: one.figures.bytes_per_sequence for one in judged if one.figures.bytes_per_sequence}
    return [
        f"{name}: besides its blocks, {count:,} bytes for each sequence, whose unfilled block stays as it was computed"
        for name, count in kept.items()
    ]


def layer_table(effects: Sequence[LayerEffect]) -> Table:
    """The worst layers, each quantized alone."""
    result = Table(title="Worst layers, each quantized alone", title_justify="left")
    for name in ("layer", "KL", "part of all layers' KL", "top-1"):
        result.add_column(name, justify="right")
    total = sum(effect.kl_mean for effect in effects) or 1.0
    for effect in effects[:SHOWN]:
        part = f"{100 * effect.kl_mean / total:.1f} %"
        result.add_row(str(effect.layer), f"{effect.kl_mean:.2e}", part, f"{100 * effect.top1:.1f} %")
    return result


def head_table(effects: Sequence[HeadEffect]) -> Table:
    """The KV heads that come back worst from the blocks."""
    result = Table(title="Worst KV heads: error of what is stored", title_justify="left")
    for name in ("layer", "head", "keys", "values", "largest key", "against their RMS"):
        result.add_column(name, justify="right")
    for effect in effects[:SHOWN]:
        errors = (f"{100 * effect.key_error:.2f} %", f"{100 * effect.value_error:.2f} %")
        sizes = (f"{effect.key_amax:.2f}", f"{effect.key_outlier:.1f}x")
        result.add_row(str(effect.layer), str(effect.head), *errors, *sizes)
    return result


def _cells(figures: Figures) -> tuple[str, ...]:
    parts = f"none in {figures.generated}" if figures.parts_at is None else f"token {figures.parts_at}"
    return (
        figures.context.name,
        figures.format,
        f"{figures.bytes_per_token:,.0f}",
        f"{100 * figures.of_bfloat16:.1f} %",
        f"{figures.perplexity_native:.2f} -> {figures.perplexity:.2f}",
        f"{100 * figures.ppl_change:+.2f} ± {100 * figures.ppl_error:.2f} %",
        f"{figures.kl_mean:.2e}",
        f"{figures.kl_p99:.2e}",
        f"{100 * figures.top1:.1f} %",
        parts,
        f"{figures.rouge_l:.3f}",
    )


def _target(one: Judged) -> str:
    if one.target is None or one.target_missed is None:
        return "-"
    return f"{one.target}: {'MISSED ' + ', '.join(one.target_missed) if one.target_missed else 'met'}"


def _record(one: Judged) -> dict[str, Any]:
    target = {"target": one.target, "target_missed": one.target_missed}
    figures = {name: _plain(value) for name, value in asdict(one.figures).items()}
    return figures | {"fit": one.is_fit, "misses": [str(miss) for miss in one.misses]} | target


def _failures(one: Judged) -> list[dict[str, Any]]:
    """Each limit that a format broke, for machines."""
    where = {"format": one.figures.format, "context": one.figures.context.name}
    return [where | miss.as_json() | {"reason": str(miss)} for miss in one.misses]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and value - value != 0 else value  # NaN and infinity
