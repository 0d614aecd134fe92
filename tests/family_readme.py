"""Writes what became of every model family into README.md: `python tests/family_readme.py`.

With `--measure` all families, or those that are named behind it, are measured anew first, which takes a few minutes,
and `family_results.json` is written.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"
RECORD = Path(__file__).parent / "family_results.json"
BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"
HEADINGS = {
    "fast": "fast: our kernels read the blocks in every layer that has keys and values",
    "correct": "correct: some layers get their keys and values as dense views, the tokens are the same",
    "refused": "refused with `UnsupportedModelError`",
    "no cache": "no keys and values to page",
}


def recorded() -> dict[str, Any]:
    """{"transformers": version, "families": {model type: {"outcome", "reasons"}}}."""
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


def generated(record: dict[str, Any]) -> str:
    """The part of the README between the markers."""
    families = record["families"]
    count = Counter(family["outcome"] for family in families.values())
    with_keys = len(families) - count["no cache"]
    works = count["fast"] + count["correct"]
    summary = (
        f"Of the {len(families)} model types that AutoModelForCausalLM of transformers {record['transformers']} knows, "
        f"{with_keys} have keys and values. {works} of these ({works / with_keys:.1%}) generate the same tokens with a "
        f"PagedCache as with their own cache: greedy, padded, sampled and by beams, patched and unpatched; "
        f"{count['fast']} ({count['fast'] / with_keys:.1%}) through our kernels in all of those layers. Each was built "
        "tiny, with random weights, prompts longer than its windows, and no pictures."
    )
    lines = [
        *textwrap.wrap(summary, 120),
        "",
        *(f"- {count[outcome]} {heading}" for outcome, heading in HEADINGS.items()),
        "",
    ]
    for outcome in HEADINGS:
        lines += _details(outcome, {name: f for name, f in families.items() if f["outcome"] == outcome})
    return "\n".join(lines)


def _details(outcome: str, families: dict[str, Any]) -> list[str]:
    """Names that fold out, by reason where there is one: that of a class without the name of the class."""
    by_reason: dict[str, list[str]] = {}
    for name, family in sorted(families.items()):
        reasons = dict.fromkeys(re.sub(r"^[A-Z]\w+(:| (?=has|makes|changes|does))", "", r) for r in family["reasons"])
        reason = re.sub(r" of \d+ tokens", "", "; ".join(reasons).strip())  # the numbers of a tiny config
        by_reason.setdefault(reason, []).append(name)
    lines = ["<details>", f"<summary>{outcome}: {len(families)}</summary>", ""]
    for reason, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        text = ", ".join(names) if not reason else f"- {', '.join(names)}: {reason}"
        lines += textwrap.wrap(text, 120, subsequent_indent="  " if reason else "", break_on_hyphens=False)
    return [*lines, "", "</details>"]


def with_families(readme: str, part: str) -> str:
    """`readme` with `part` between its markers. Raises ValueError where it has none."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{part}\n{END}{after}"


def measured(model_types: list[str]) -> dict[str, Any]:
    """A record of these families, one line on the screen for each."""
    import transformers
    from family_models import MODEL_TYPES, build, config_of
    from family_runs import measure

    from hfpaged.verdict import examine

    families = {}
    for model_type in model_types or MODEL_TYPES:
        model = build(model_type)
        run, verdict = measure(model), examine(config_of(model_type))
        assert not run.faults, (model_type, run.faults)
        assert run.outcome == verdict.outcome, (model_type, run.outcome, verdict)
        families[model_type] = {"outcome": run.outcome, "reasons": list(verdict.reasons)}
        print(model_type, run.outcome, *verdict.reasons, flush=True)
    return {"transformers": transformers.__version__, "families": families}


def main() -> None:
    """Write the README, and the record first if asked to."""
    if "--measure" in sys.argv[1:]:
        names = sys.argv[2:]
        record = measured(names)
        if names:
            record["families"] = recorded()["families"] | record["families"]
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    README.write_text(with_families(README.read_text(), generated(recorded())))


if __name__ == "__main__":
    main()
