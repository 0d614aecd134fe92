"""`hfpaged bench prefix`, run quickly on a tiny model: figures that fit each other, no times."""

from __future__ import annotations

import json

import hfpaged_kernels
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hfpaged
from hfpaged import cli
from hfpaged.bench import prefix_batch, prefix_cost, prefix_prompts
from hfpaged.bench.catalog import PREFIX_ROWS, choose
from hfpaged.bench.generation import generate
from hfpaged.bench.positions import counted
from hfpaged.bench.result import Measured, Outcome
from hfpaged.bench.setting import Setting
from hfpaged.bench.shape import Shape
from hfpaged.cache import PagedCache

COMMAND = ["bench", "prefix", "--quick"]
ROW = {row.name: row for row in choose(None, PREFIX_ROWS)}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=120,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    return str(path)


@pytest.fixture
def setting(model):
    yield Setting(model, None, 1, True)
    hfpaged.unpatch(model)
    prefix_batch._runs.cache_clear()


def run(folder, tmp_path, *words):
    path = tmp_path / "figures.json"
    code = cli.main([*COMMAND, "--model", folder, "--json", str(path), *words])
    return code, json.loads(path.read_text())


def test_every_row_is_measured_and_compares_tokens(folder, tmp_path, capsys):
    code, figures = run(folder, tmp_path)
    assert code == 0
    assert [row["name"] for row in figures["rows"]] == list(ROW)
    assert all(row["same_tokens"] is True and row["met"] is None for row in figures["rows"])
    assert "hfpaged: prefill-batch (1 of 8)" in capsys.readouterr().err


def test_a_batch_computes_its_common_part_once_and_stores_it_once(setting):
    shape = Shape(3, 64, 4, own=16)
    prompts = prefix_prompts.prompts_of(setting, shape)
    longest = max(map(len, prompts))
    assert all(prompt[:64] == prompts[0][:64] for prompt in prompts)
    with torch.inference_mode():
        positions = prefix_batch.prefill(setting, shape)
        memory = prefix_batch.memory(setting, shape)
    tail = longest - 64
    assert positions.plain == 3 * longest
    assert 64 + sum(len(prompt) - 64 for prompt in prompts) <= positions.paged <= longest + 3 * tail
    assert positions.value == positions.paged / positions.plain
    assert round(memory.plain * 1e6) == 3 * (longest + 3) * 2 * 2 * 2 * 8 * 4  # k and v, layers, heads, dim, bytes
    assert memory.paged < memory.plain


def test_a_stream_computes_the_common_part_with_its_first_request_only(folder, tmp_path):
    _, figures = run(folder, tmp_path, "--only", "prefill-stream")
    (row,) = figures["rows"]
    own = row["plain"] - 2 * 64
    assert row["shape"] == {"batch": 2, "prompt": 64, "new": 8, "own": 16}
    assert row["paged"] == 64 + own
    assert row["value"] == row["paged"] / row["plain"]


def test_without_sharing_nothing_is_found_and_nothing_is_published(setting):
    prompt = torch.tensor([list(range(3, 60))])
    pool = PagedCache(setting.model).pool
    counts = []
    for shares in (False, True, False, True):
        cache = PagedCache(setting.model, pool=pool, prefix_sharing=shares)
        with counted(setting.model) as positions, torch.inference_mode():
            generate(setting.model, prompt, cache, 2, watch=positions)
        counts.append(positions.count)
        cache.free()
    assert counts == [57, 57, 57, 9]  # 3 full blocks were published
    assert pool.stats().prefix_queries == 2 * 57


def test_prompts_that_must_not_match_begin_with_different_tokens(setting):
    ids = prefix_prompts.unlike(setting, 8, 5)
    assert ids.shape == (8, 5)
    assert len(set(ids[:, 0].tolist())) == 8


def test_a_wrong_cache_exits_1_and_earns_no_ratio(folder, tmp_path, monkeypatch, capsys):
    update = PagedCache.update
    monkeypatch.setattr(PagedCache, "update", lambda self, k, v, *args, **kw: update(self, k, -v, *args, **kw))
    code, figures = run(folder, tmp_path, "--only", "prefill-stream,first-token")
    assert code == 1
    assert all(row["value"] is None and row["paged"] is None for row in figures["rows"])
    assert "tokens differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "target", "good", "bad"),
    [
        ("prefill-batch", "<= 10 %", 0.1, 0.101),
        ("prefill-stream", "<= 10 %", 0.1, 0.101),
        ("memory", "<= 20 %", 0.2, 0.201),
        ("first-token", "<= 12.5 %", 0.125, 0.126),
        ("no-match", "< 1 %", 0.0099, 0.01),
        ("attention", ">= 3x", 3.0, 2.99),
    ],
)
def test_targets(name, target, good, bad):
    row = ROW[name]
    assert str(row.target) == target
    assert Outcome(row, row.shape, Measured(good)).is_met is True
    assert Outcome(row, row.shape, Measured(bad)).is_met is False


def test_a_row_for_information_is_never_judged():
    outcome = Outcome(ROW["decode"], ROW["decode"].shape, Measured(1.5))
    assert outcome.is_met is None
    assert ROW["decode"].format(1.5) == "1.50x"


def test_help_lists_the_rows_of_this_kind(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "prefix", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "prefill-batch prompt positions computed, 32 rows, 1000 tokens in common, target <= 10 %" in out
    assert "beam-memory" not in out.split("rows:")[1].split("options:")[0]


def test_the_attention_row_reads_common_blocks_once_and_compares_the_outputs(folder, tmp_path, monkeypatch):
    told = []
    decode = hfpaged_kernels.decode

    def seen(query, key, value, tables, lengths, *, shared_blocks=0, **options):
        if shared_blocks:
            told.append((shared_blocks, len(set(tables[:, :shared_blocks].unique(dim=0).flatten().tolist()))))
            assert len(set(tables[:, shared_blocks:].flatten().tolist())) == tables[:, shared_blocks:].numel()
        return decode(query, key, value, tables, lengths, shared_blocks=shared_blocks, **options)

    monkeypatch.setattr(hfpaged_kernels, "decode", seen)
    code, figures = run(folder, tmp_path, "--only", "attention")
    assert code == 0
    assert figures["rows"][0]["same_tokens"] is True
    assert set(told) == {(4, 4)}


def test_an_attention_that_reads_other_blocks_earns_no_ratio(folder, tmp_path, monkeypatch):
    decode = hfpaged_kernels.decode

    def wrong(*args, shared_blocks=0, **options):
        return decode(*args, shared_blocks=shared_blocks, **options) + 0.01 * shared_blocks

    monkeypatch.setattr(hfpaged_kernels, "decode", wrong)
    code, figures = run(folder, tmp_path, "--only", "attention")
    assert code == 1
    assert figures["rows"][0]["value"] is None


def test_the_cost_of_sharing_is_free_of_where_the_blocks_of_a_pool_lie():
    # Steps of 10, 1 and 1; sharing costs 1, 0.5 and 0; pool A is slower by 3.
    on_a, off_b = [14.0, 4.5, 4.0], [10.0, 1.0, 1.0]
    on_b, off_a = [11.0, 1.5, 1.0], [13.0, 4.0, 4.0]
    disturbed = [900.0, 1.5, 1.0]
    times = [{True: on, False: off} for on, off in 2 * [(on_a, off_b), (on_b, off_a)] + [(on_a, off_b)]]
    cost, base = prefix_cost.cost_of([*times, {True: disturbed, False: off_a}])
    assert (cost, base) == (1.5, 11.5 + 2.5 + 2.5)
