"""`hfpaged plan --sweep`: what fits by context and format, and hits by the size of the pool."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from hfpaged import cli
from hfpaged.errors import InvalidConfigError
from hfpaged.planner.case import Case, Choices, Machine, Workload
from hfpaged.planner.cost_model import CostModel
from hfpaged.planner.fit import fit
from hfpaged.planner.miss_ratio import miss_ratio_curve
from hfpaged.planner.model_reading import facts_of
from hfpaged.planner.replay import replay
from hfpaged.planner.sizes import Sizes
from hfpaged.planner.sweep import concurrency, contexts_of
from hfpaged.planner.sweep_hits import HitsByPool, hits_by_pool, sentences
from hfpaged.planner.trace import Trace, TraceRequest
from hfpaged.planner.variant import Variant

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
TOKEN = 2 * 32 * 8 * 128 * 2  # bytes of one token's keys and values


def planned(pool=TOKEN * 10_000, config=LLAMA, **choices):
    """A plan whose pool is given."""
    workload = Workload(prompt=512, output=512, context=1024)
    case = Case(Sizes(facts_of(config, "a model")), workload, Machine("a card", 1 << 36), Choices(pool=pool, **choices))
    return fit(case)


def conversations(count, seed=0, chunk=16):
    """Requests that begin with one of a few texts, or go on where an earlier one ended."""
    rng, fresh = random.Random(seed), iter(range(10**9))
    begun = [[next(fresh) for _ in range(20)] for _ in range(30)]
    requests = []
    for index in range(count):
        which = rng.randrange(len(begun))
        hashes = begun[which] + [next(fresh) for _ in range(rng.randrange(1, 6))]
        begun[which] = hashes if len(hashes) < 60 else hashes[:20]
        requests.append(TraceRequest(index * 0.5, len(hashes) * chunk + 3, 20, tuple(hashes)))
    return Trace(requests, chunk)


def test_requests_that_fit_are_the_pool_by_the_bytes_of_their_tokens():
    fits = concurrency(planned())
    assert fits.contexts == (512, 1024, 2048, 4096, 8192)
    assert fits.counts["auto"] == tuple(10_000 // tokens for tokens in fits.contexts)
    assert fits.counts["int8"][0] > 1.9 * fits.counts["auto"][0]
    assert fits.counts["int4"][0] > fits.counts["int8"][0]


def test_each_count_is_what_a_plan_of_that_context_says():
    found = planned()
    for tokens, count in zip(concurrency(found).contexts, concurrency(found).counts["int8"], strict=True):
        case = replace(found.case, workload=Workload(prompt=tokens, output=0, context=tokens))
        assert count == fit(case.choosing(kv_format="int8")).sequences


def test_formats_that_a_model_cannot_have_are_left_out_with_a_reason():
    fits = concurrency(planned(config=LLAMA | {"head_dim": 100}))
    assert "auto" in fits.counts
    assert {"auto", "int8"} <= set(fits.counts) | set(fits.left_out)
    assert not set(fits.counts) & set(fits.left_out)


def test_contexts_end_at_what_the_model_is_made_for():
    assert contexts_of(planned(config=LLAMA | {"max_position_embeddings": 3000})) == (512, 1024, 2048, 3000)


def test_hits_grow_with_the_pool_and_sentences_say_what_more_is_worth():
    found = planned(pool=TOKEN * 2000)
    hits = hits_by_pool(conversations(300), found)
    ratios = [hits.at(size) for size in hits.points()]
    assert ratios == sorted(ratios)
    assert ratios[0] == 0
    extra, then = hits.more()
    now = hits.at(hits.pool)
    assert then == hits.at(hits.pool + extra) >= now + (hits.curve.most - now) / 2
    said = list(sentences(hits))
    assert f"more would give +{100 * (then - now):.1f} % hits ({now:.1%} to {then:.1%})" in said[1]
    assert said[2].startswith("int8 in the same pool would give +")


def test_a_pool_that_holds_everything_needs_no_more():
    hits = hits_by_pool(conversations(100), planned(pool=TOKEN * 10**6))
    assert hits.more() is None
    assert "more would give no more hits" in list(sentences(hits))[1]
    assert hits.at(hits.enough) == hits.at(hits.pool) == hits.curve.most
    assert hits.at(hits.enough - 16 * TOKEN) < hits.curve.most


@pytest.mark.parametrize("tokens", [1500, 3000, 6000, 20_000])
def test_the_curve_is_near_what_the_real_scheduler_and_pool_find(tokens):
    """Requests come one after another, so that little is pinned; the real pool has blocks of running requests, too."""
    trace = conversations(400)
    hits = HitsByPool(miss_ratio_curve(trace), TOKEN * tokens, "auto", TOKEN)
    cost = CostModel(step=1e-3, prefill=1e-6, decode=1e-6, context=0.0)
    outcome = replay(trace, Variant(tokens // 16, 16, max_num_batched_tokens=4096), cost)
    assert outcome.finished == 400
    assert hits.at(TOKEN * tokens) == pytest.approx(outcome.hit_rate, abs=0.03)


def test_what_has_no_hits_is_refused():
    with pytest.raises(InvalidConfigError, match="does not say which prompts begin alike"):
        hits_by_pool(Trace([TraceRequest(0.0, 100, 1)], 16), planned())


class Page(HTMLParser):
    """Texts of cells, and what a page asks of elsewhere."""

    def __init__(self):
        super().__init__()
        self.cells, self.links, self.tags, self._in_cell = [], [], set(), False

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self._in_cell = tag in ("td", "th")
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value[0] != "#"]

    def handle_data(self, data):
        if self._in_cell:
            self.cells.append(data)


@pytest.fixture
def files(tmp_path):
    """A config, and a trace of 60 requests with one line that is none."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    lines = [json.dumps({"format": "hfpaged-trace", "version": 1, "chunk": 16})]
    lines += [
        json.dumps({"arrival": r.arrival, "prompt_tokens": r.prompt_tokens, "output_tokens": 20, "hashes": r.hashes})
        for r in conversations(60).requests
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join([*lines, "{broken"]) + "\n")
    return tmp_path


def plan(files, *flags):
    pool = ["--kv-cache-memory", str(TOKEN * 3000)]
    return cli.main(["plan", str(files), *pool, *flags])


def test_the_command_prints_tables_and_what_more_memory_is_worth(files, capsys):
    assert plan(files, "--sweep", "--replay", str(files / "trace.jsonl"), "--jobs", "1") == 0
    out = capsys.readouterr().out
    assert "Requests that fit at once, by their tokens and the KV format" in out
    assert "auto, replayed" in out
    assert "1 line of the trace could not be read" in out
    assert "more would give" in out


def test_a_sweep_says_what_it_leaves_out(files, capsys):
    assert plan(files, "--sweep", "--replicas", "3", "--json") == 0
    assert any("one of 3 replicas" in note for note in json.loads(capsys.readouterr().out)["notes"])
    assert plan(files, "--sweep", "--prefix-store", "kept") == 0
    assert "note: tiers below the pool are left out" in capsys.readouterr().out


def test_the_command_prints_json(files, capsys):
    assert plan(files, "--sweep", "--json", "--replay", str(files / "trace.jsonl"), "--jobs", "1") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["concurrency"]["counts"]["auto"][0] == 3000 // 512
    assert told["skipped_lines"] == 1
    assert told["hits"]["pool_bytes"] == TOKEN * 3000
    misses = [point["miss_ratio"] for point in told["hits"]["curve"]]
    assert misses == sorted(misses, reverse=True)


def test_the_command_draws_a_png_and_a_page_that_needs_nothing_else(files, capsys):
    pytest.importorskip("matplotlib")
    trace = ("--replay", str(files / "trace.jsonl"), "--jobs", "1")
    assert plan(files, "--sweep", str(files / "a.png")) == 0
    assert (files / "a.png").read_bytes().startswith(b"\x89PNG")
    assert plan(files, "--sweep", str(files / "a.html"), *trace) == 0
    page = Page()
    page.feed((files / "a.html").read_text())
    assert "svg" in page.tags
    assert page.links == []
    assert {"tokens", "512", "1,024", "pool", "auto, replayed"} <= set(page.cells)
    assert "written to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "reason"), [("a.pdf", "ends with .png or .html"), ("nowhere/a.png", "its folder does not exist")]
)
def test_a_file_that_cannot_be_written_is_refused_first(files, capsys, name, reason):
    assert plan(files, "--sweep", str(files / name), "--replay", "missing.jsonl") == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--device", "4GiB"), "leave no room for a pool"),
        (("--device", "80GiB", "--for", "serve"), "use one of the two"),
    ],
)
def test_what_cannot_be_swept_is_refused(files, capsys, flags, reason):
    assert cli.main(["plan", str(files), "--sweep", *flags]) == 2
    assert reason in capsys.readouterr().err


def test_the_last_line_says_what_fits(files, capsys):
    assert plan(files, "--sweep") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "5 requests of 512 tokens or 1 request of 2,048 tokens at once"


def test_a_sweep_imports_no_torch(files):
    code = (
        "import sys; from hfpaged import cli; code = cli.main(sys.argv[1:]); "
        "assert not {'torch', 'transformers'} & set(sys.modules), 'imported'; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "plan", str(files), "--device", "80GiB", "--sweep"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).returncode == 0
