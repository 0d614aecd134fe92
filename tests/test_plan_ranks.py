"""A plan for ranks, replicas and tiers: by hand, and the bytes that two real ranks hold."""

from __future__ import annotations

import json
import re

import pytest
import tiny_models
import two_ranks
from plan_cases import GB, GIB, case, llama
from test_plan import CARD, planned, run
from test_plan_serve import line_for, parsed

from hfpaged import cli
from hfpaged.planner import ways_out
from hfpaged.planner.cards import CARDS
from hfpaged.planner.case import Choices
from hfpaged.planner.fit import fit
from hfpaged.planner.model_facts import LayerKV
from hfpaged.planner.model_reading import facts_of, read_model
from hfpaged.planner.sizes import Sizes
from hfpaged.planner.tiers import tiers
from hfpaged.planner.tp_plan import KEY_PROJECTIONS, split_names, splits_heads, tp_plan
from hfpaged.planner.words import remarks

LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
LAYER = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
WEIGHTS = 80 * LAYER + 2 * 128256 * 8192  # but for norms
NORMS = 161 * 8192


@pytest.fixture
def llama_70b(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B), encoding="utf-8")
    return str(path)


# By hand


def test_eight_ranks_have_one_head_of_llama_70b_each(capsys, llama_70b):
    told = planned(capsys, llama_70b, *CARD, "--tp", 8)
    assert told["kv"]["block_bytes"] == 80 * 16 * 2 * 128 * 2
    assert told["memory"]["weights_bytes"] == 2 * (WEIGHTS // 8 + NORMS)
    assert not told["remarks"]


def test_sixteen_ranks_keep_attention_whole(capsys, llama_70b):
    told = planned(capsys, llama_70b, *CARD, "--tp", 16)
    assert told["kv"]["block_bytes"] == 80 * 16 * 8 * 2 * 128 * 2
    attention = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024)
    assert told["memory"]["weights_bytes"] == 2 * ((WEIGHTS - attention) // 16 + attention + NORMS)
    assert told["remarks"] == [
        "64 heads and 8 KV heads do not all divide by --tp 16: attention, and keys and values with it, is whole on "
        "each rank"
    ]


def test_a_family_that_transformers_does_not_split_is_refused(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    code, _, said = run(capsys, path, *CARD, "--tp", 2)
    assert code == 2
    assert "transformers has no tp_plan for models of type 'gpt2'" in said
    assert "--replicas" in said
    found = fit(case(facts_of({"model_type": "gpt2"}, "gpt2"), memory=GB, weights=GB // 2, concurrency=999))
    assert not {"tp", "cards"} & {kind for way in ways_out.ways_out(found) for kind in way.kinds}


def test_latents_are_whole_and_said_to_be():
    facts = facts_of({"model_type": "deepseek_v3"}, "deepseek")
    assert Sizes(facts).layout(Choices(tp=8)) == Sizes(facts).layout(Choices())
    assert not splits_heads(facts, 8)


def test_replicas_are_counted_together(capsys, llama_70b):
    words = ("--weights", "40GB", "--context", 4096, "-n", 30, "--shared-prefix", 1024, "--replicas", 3)
    told = planned(capsys, llama_70b, *CARD, *words)
    pool = int(80 * GB * 0.85) - 40 * GB
    block, prefix = 80 * 16 * 8 * 2 * 128 * 2, 64
    assert told["kv"]["needed_bytes"] == (prefix + 10 * (256 - prefix)) * block
    sequences = (pool // block - prefix) // (256 - prefix)
    assert told["replicas"] == {
        "count": 3, "devices": 3, "sequences": 3 * sequences, "pools_bytes": 3 * pool,
        "shared_prefix_bytes": 3 * prefix * block,
    }  # fmt: skip
    code, out, _ = run(capsys, llama_70b, *CARD, *words)
    assert code == 0
    assert "What 3 replicas have together" in out
    assert "10 requests of 4,096 tokens on each of 3 replicas" in out


def test_a_tier_keeps_whole_blocks_and_pays_where_its_link_is_faster(capsys, llama_70b):
    """H100: 80 % of 64 GB/s against 140 GB of weights at 100 operations for each byte of 3,350 GB/s."""
    words = ("--device", "h100", "--swap-space", "10GiB", "--prefix-store-size", "20GiB")
    host, disk = planned(capsys, llama_70b, *words)["tiers"]
    block = 80 * 16 * 8 * 2 * 128 * 2
    assert (host["blocks"], host["tokens"]) == (10 * GIB // block, 10 * GIB // block * 16)
    assert disk["blocks"] == 20 * GIB // block
    assert host["back_token_seconds"] == pytest.approx(block / 16 / 51.2e9)
    weights = 2 * (WEIGHTS + NORMS)
    assert host["computed_token_seconds"] == pytest.approx(weights / (3350e9 * 100), rel=1e-6)
    assert host["pays"]
    assert host["gain"] == pytest.approx(weights / 3350e11 / (block / 16 / 51.2e9), rel=1e-3)
    assert disk["back_token_seconds"] == pytest.approx(block / 16 / 2e9)
    (light,) = planned(capsys, llama_70b, *words[:4], "--weights-dtype", "int4")["tiers"]
    assert light["computed_token_seconds"] == pytest.approx(host["computed_token_seconds"])
    out = run(capsys, llama_70b, *words, "--context", 2048)[1]
    assert "an estimate" in out
    assert f"{host['blocks']:,} blocks, {host['tokens']:,} tokens (--swap-space), of each process" in out


def test_a_small_model_is_computed_faster_than_a_disk_reads(capsys, tmp_path):
    path = tmp_path / "config.json"
    small = LLAMA_70B | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 128}
    path.write_text(json.dumps(small), encoding="utf-8")
    (disk,) = planned(capsys, path, "--device", "h100", "--prefix-store", tmp_path)["tiers"]
    assert disk["size_bytes"] == 10 * GIB
    assert not disk["pays"]
    assert "does not pay" in run(capsys, path, "--device", "h100", "--prefix-store", tmp_path)[1]


@pytest.mark.parametrize("flag", ["--swap-space", "--prefix-store-size"])
def test_a_tier_that_holds_no_block_is_refused_as_serve_refuses_it(capsys, llama_70b, flag):
    code, _, err = run(capsys, llama_70b, "--device", "h100", flag, "1MiB")
    assert code == 2
    assert f"{flag} 1048576: so many bytes hold no block, of which one takes {80 * 16 * 8 * 2 * 128 * 2}" in err


def test_a_large_gain_is_a_plain_number(capsys, llama_70b):
    assert re.search(r"pays +\d{2,} x", run(capsys, llama_70b, "--device", "h100", "--swap-space", "10GiB")[1])


def test_half_a_rank_is_none(capsys, llama_70b):
    with pytest.raises(SystemExit):
        run(capsys, llama_70b, "--tp", "2.5")
    assert "'2.5' is no number of at least 1" in capsys.readouterr().err


def test_tiers_of_two_groups_hold_each_token_twice():
    whole = fit(case(swap_space=GIB))
    halves = llama(layers=tuple(layer for layer in llama().layers[:16]) * 2)
    assert tiers(fit(case(halves, swap_space=GIB)))[0].tokens == tiers(whole)[0].tokens
    assert tiers(fit(case())) == []


def test_a_model_with_states_has_no_tier():
    found = fit(
        case(llama(layers=(LayerKV("full", 32, 128, 128), LayerKV("state", state_bytes=10**6))), swap_space=GIB)
    )
    assert tiers(found) == []
    assert any("no tier keeps anything of this model" in remark for remark in remarks(found))


def test_links_of_cards_are_those_of_their_generation():
    links = {card.name: card.link for card in CARDS}
    assert (links["T4"], links["A100-80GB"], links["H100"], links["GH200"]) == (16, 32, 64, 450)
    assert all(card.link < card.bandwidth for card in CARDS)


# Ways out, and the line of a server


def kinds(found):
    return {kind: way for way in ways_out.ways_out(found) if len(way.kinds) == 1 for kind in way.kinds}


def test_more_devices_are_ways_out_with_what_fits_then():
    found = fit(case(concurrency=100))
    ways = kinds(found)
    assert ways["tp"].title == "--tp 2 on 2 such cards"
    assert ways["replicas"].title == "--replicas 2 on 2 such cards"
    assert f"{2 * found.sequences} requests would fit" in ways["replicas"].costs
    assert ways["replicas"].fit.fits
    assert ways["replicas"].fit.asked == 50
    assert not ways["replicas"].is_served
    many = kinds(fit(case(concurrency=1000)))["replicas"]
    assert many.fit.case.choices.replicas == -(-1000 // found.sequences)


def test_no_ranks_are_a_way_out_where_there_are_tiers():
    assert not {"tp", "cards"} & set(kinds(fit(case(concurrency=100, swap_space=GIB))))


def test_cards_that_are_here_are_used_by_the_line_of_a_server():
    asked = case(concurrency=100)
    asked = type(asked)(
        asked.sizes, asked.workload, type(asked.machine)("a device", 80 * GB, overhead=0, count=4), asked.choices
    )
    ways = kinds(fit(asked))
    assert ways["replicas"].is_served
    assert ways["tp"].is_served
    assert "they are here" in ways["tp"].costs


def test_ranks_are_started_by_torchrun(capsys, llama_70b):
    code, line, _ = line_for(capsys, llama_70b, *CARD, "--tp", 8, "-n", 4)
    assert code == 0
    assert line[:5] == ["torchrun", "--nproc-per-node", "8", "-m", "hfpaged.serve"]
    args = cli.build_parser(["serve", *line[5:]]).parse_args(["serve", *line[5:]])
    assert (args.model, args.tensor_parallel_size, args.max_num_seqs) == (llama_70b, 0, 4)
    assert (args.device, args.replicas) == (None, None)


def test_replicas_are_in_the_line(capsys, llama_70b):
    words = ("--weights", "40GB", "--context", 4096, "-n", 30, "--replicas", 3)
    code, line, _ = line_for(capsys, llama_70b, *CARD, *words)
    assert code == 0
    args = parsed(line)
    assert (args.replicas, args.max_num_seqs, args.tensor_parallel_size) == (3, 10, None)


def test_tiers_are_in_the_line(capsys, llama_70b, tmp_path):
    words = ("--weights", "40GB", "--context", 4096, "--swap-space", "2GiB", "--prefix-store", tmp_path / "a store")
    args = parsed(line_for(capsys, llama_70b, *CARD, *words)[1])
    assert (args.swap_space, args.prefix_store, args.prefix_store_size) == (
        2 * GIB,
        str(tmp_path / "a store"),
        10 * GIB,
    )


def test_replicas_on_a_cpu_get_their_bytes(capsys, tmp_path):
    tiny_models.shared("llama").config.save_pretrained(tmp_path)
    words = ("--device", "cpu", "--replicas", 2, "--overhead", 0, "--context", 64)
    pool = planned(capsys, tmp_path, *words)["memory"]["pool_bytes"]
    args = parsed(line_for(capsys, tmp_path, *words)[1])
    assert args.device == "cpu"
    assert args.gpu_memory_utilization is None
    assert args.kv_cache_memory == pytest.approx(pool, rel=0.2)  # others take memory in the meantime


# What transformers does


def test_key_projections_are_those_of_the_engine():
    from hfpaged import compat_sharding

    assert KEY_PROJECTIONS == compat_sharding._KEY_PROJECTIONS


def test_attention_is_left_out_where_heads_do_not_divide():
    facts = llama(kv_heads=8)
    assert split_names(facts, 8) == tp_plan(facts)
    assert {name.split(".")[2] for name in split_names(facts, 16) if "layers" in name} == {"mlp"}


# Grouped heads, a tied head; heads that do not divide; keys that are gathered, not split (Phi-3) and a family of which
# only the embedding is split (gpt-oss); latents and experts.
NAMES = ("llama", "llama_mqa", "phi3", "gpt_oss", "deepseek_v3", "tied")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in NAMES:
        changes = {"vocab_size": 102} | ({"tie_word_embeddings": True} if name == "tied" else {})
        tiny_models.make("llama" if name == "tied" else name, **changes).save_pretrained(root / name)
    return [root / name for name in NAMES]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, folders):
    return two_ranks.run(tmp_path_factory.mktemp("ranks"), "plan_ranks_worker.py", *map(str, folders))


@pytest.mark.parametrize("name", NAMES)
def test_two_real_ranks_hold_what_was_planned(ranks, folders, name):
    facts = read_model(str(folders[NAMES.index(name)]))
    sizes = Sizes(facts)
    held = ranks.of(name)
    assert [rank["block"] for rank in held] == [sizes.layout(Choices(tp=2)).block_bytes] * 2
    planned = sizes.weights(Choices(tp=2)).bytes
    biases = 2 * 8  # of DeepSeek's router: in the file a weight, in the model a buffer
    assert all(0 <= planned - rank["weights"] <= biases for rank in held), (planned, held)
    assert planned < sizes.weights(Choices()).bytes
    counted = Sizes(facts_of(json.loads((folders[NAMES.index(name)] / "config.json").read_text()), name))
    assert counted.layout(Choices(tp=2)) == sizes.layout(Choices(tp=2))
    whole = counted.weights(Choices()).bytes
    assert counted.weights(Choices(tp=2)).bytes / whole == pytest.approx(
        planned / sizes.weights(Choices()).bytes, rel=0.05
    )
