"""`hfpaged plan`: what it takes, what it says, how it exits, and that it needs nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from plan_cases import GB, GIB, case, config, llama

from hfpaged import cli
from hfpaged.planner import question, report
from hfpaged.planner.fit import fit
from hfpaged.planner.model_facts import LayerKV
from hfpaged.planner.units import binary, both, decimal
from hfpaged.planner.words import layers as lines_of_layers

SEVERAL = ("--replicas", "2", "--weights", "1GB", "--swap-space", "1GiB", "--prefix-store-size", "4GiB")
CARD = ("--device", "80GB", "--overhead", "0", "--activations", "0")


@pytest.fixture
def path(tmp_path):
    return write(tmp_path)


def write(folder, **changes):
    found = folder / "config.json"
    found.write_text(json.dumps(config(**changes)), encoding="utf-8")
    return str(found)


def run(capsys, *words):
    code = cli.main(["plan", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def planned(capsys, *words):
    code, out, _ = run(capsys, *words, "--json")
    told = json.loads(out)
    assert told["exit_code"] == code == (0 if told["fits"] else 1)
    return told


def refused(capsys, *words):
    """What is said of a command line that is an error."""
    try:
        code = cli.main(["plan", *map(str, words)])
    except SystemExit as left:
        code = left.code
    assert code == 2
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err


def test_the_answers_that_everybody_can_work_out(capsys, path):
    told = planned(capsys, path, *CARD, "--weights", "14GB", "--prompt", 512, "--output", 1024)
    assert told["memory"]["pool_bytes"] == 54 * GB
    assert told["kv"]["request_bytes"] == 3 * GIB // 4
    assert told["sequences"] == 67
    many = planned(capsys, path, *CARD, "--weights", "14GB", "--context", 2048, "--concurrency", 32)
    assert many["kv"]["needed_bytes"] == 34_359_738_368


def test_the_table_shows_where_the_memory_goes_and_the_verdict(capsys, path):
    code, out, _ = run(capsys, path, *CARD, "--weights", "14GB", "--prompt", 512, "--output", 1024)
    assert code == 0
    for words in ("usable", "68 GB", "- weights", "14 GB", "= pool", "54 GB", "0.805 GB", "0.75 GiB", "67"):
        assert words in out
    assert out.splitlines()[-1] == "fits: 67 requests of 1,536 tokens take 54 GB of the pool's 54 GB"


def test_what_is_short_comes_with_ways_out_and_exit_code_1(capsys, path):
    code, out, _ = run(capsys, path, "--device", "24GiB", "--prompt", 512, "--output", 1024, "--concurrency", 32)
    assert code == 1
    assert "does not fit: 32 requests of 1,536 tokens need 25.8 GB" in out
    assert "Ways out, the cheapest first" in out
    for way in ("requests at once instead of 32", "another card: ", "--tp 2", "--window"):
        assert way in out


def test_weights_that_are_too_large_alone_are_said_to_be_with_what_would_hold_them(capsys, path):
    code, out, _ = run(capsys, path, "--device", "24GiB", "--weights", "140GB")
    assert code == 1
    assert "does not fit: the weights alone take 140 GB, more than the 21.9 GB that may be used" in out
    assert "nothing is left" in out
    assert "another card: " in out
    assert "--tp 8 on 8 such cards" in out


def test_nothing_helps_against_a_hundred_terabytes(capsys, path):
    code, out, _ = run(capsys, path, "--device", "24GiB", "--weights", "100TB")
    assert code == 1
    assert out.splitlines()[-1].startswith("no way out was found")


def test_json_has_what_the_table_has_with_units_in_the_names(capsys, path):
    told = planned(capsys, path, "--device", "l4", "--prompt", 512, "--output", 512)
    _, table, _ = run(capsys, path, "--device", "l4", "--prompt", 512, "--output", 512)
    assert f"{told['memory']['pool_blocks']:,} blocks" in table
    assert f"{told['kv']['request_blocks']} blocks" in table
    assert told["kv"]["token_bytes"] == 2 * 32 * 4096 * 2
    assert told["machine"]["bandwidth_gb_per_second"] == 300
    units = ("bytes", "tokens", "blocks", "gb_per_second")
    bare = {
        "concurrency",
        "count",
        "tp",
        "utilization",
        "block_size",
        "token_budget",
        "sequences",
        "exit_code",
        "replicas",
    }
    for part in (told, told["machine"], told["choices"], told["workload"], told["memory"], told["kv"]):
        numbers = {name for name, value in part.items() if type(value) in (int, float)}
        assert {name for name in numbers if not name.removesuffix("_outside_blocks").endswith(units)} <= bare


def test_a_model_alone_is_enough(capsys, path):
    told = planned(capsys, path)
    assert told["workload"] == {
        "prompt_tokens": 8192, "output_tokens": 0, "context_tokens": 8192, "concurrency": None,
        "shared_prefix_tokens": 0, "encoder_tokens": 0,
    }  # fmt: skip
    assert told["machine"]["origin"] == "found here"


@pytest.mark.parametrize(
    ("words", "lengths"),
    [
        ((), (4096, 0, 4096)),
        (("--context", "100"), (100, 0, 100)),
        (("--prompt", "60", "--output", "40"), (60, 40, 100)),
        (("--prompt", "60", "--context", "100"), (60, 40, 100)),
        (("--output", "60", "--context", "100"), (40, 60, 100)),
        (("--prompt", "10", "--output", "20", "--context", "100"), (10, 20, 100)),
    ],
)
def test_two_lengths_tell_the_third(capsys, tmp_path, words, lengths):
    path = write(tmp_path, max_position_embeddings=4096)
    told = planned(capsys, path, *CARD, *words)["workload"]
    assert (told["prompt_tokens"], told["output_tokens"], told["context_tokens"]) == lengths


def test_what_is_chosen_reaches_the_plan(capsys, path):
    plain = planned(capsys, path, *CARD)
    for words, ratio in (("--kv-dtype int8", 130 / 256), ("--dtype float32", 2), ("--tp 2", 0.5)):
        assert (
            planned(capsys, path, *CARD, *words.split())["kv"]["request_bytes"] == ratio * plain["kv"]["request_bytes"]
        )
    # Sinks, the window and the quarter of it that is computed at a time: 16 + 1024 + 256 tokens, and one block more,
    # as they seldom begin where a block does.
    last = planned(capsys, path, *CARD, "--window", 1024)
    assert last["kv"]["request_bytes"] * 512 == plain["kv"]["request_bytes"] * 82
    light = planned(capsys, path, *CARD, "--weights-dtype", "int4")
    assert light["memory"]["weights_bytes"] < 0.4 * plain["memory"]["weights_bytes"]
    shared = planned(capsys, path, *CARD, "-n", 4, "--shared-prefix", 4096)
    assert shared["kv"]["needed_bytes"] == 2.5 * plain["kv"]["request_bytes"]


def test_names_of_flags_are_those_of_serve_too(capsys, path):
    words = "--max_model_len=2K --max-num-seqs 4 --kv-cache-dtype int8 --gpu-memory-utilization 0.5 " \
            "--max-num-batched-tokens 8K --tensor-parallel-size 2"  # fmt: skip
    told = planned(capsys, path, *CARD, *words.split())
    chosen = told["choices"]
    assert (told["workload"]["context_tokens"], told["workload"]["concurrency"]) == (2048, 4)
    assert (chosen["kv_format"], chosen["utilization"], chosen["token_budget"], chosen["tp"]) == ("int8", 0.5, 8192, 2)


def test_more_tokens_in_a_step_leave_less_for_the_pool(capsys, path):
    few = planned(capsys, path, "--device", "80GB")["memory"]
    many = planned(capsys, path, "--device", "80GB", "--token-budget", 16384)["memory"]
    assert many["activations_bytes"] > few["activations_bytes"] > 0
    assert many["pool_bytes"] < few["pool_bytes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--prompt 10", "--prompt alone leaves the length of a request open; add --output or --context"),
        ("--prompt 10 --output 10 --context 15", "raise --context"),
        ("--device gaudi", "is no card that is known here"),
        ("--utilization 1.5", "is no share"),
        ("--block-size 24", "use 16 or 32"),
        ("--overhead lots", "is no size; write 0, bytes"),
        ("--concurrency 0", "is no number of at least 1"),
        ("--kv-dtype int3", "invalid choice"),
        ("--json --for serve", "not allowed with"),
        ("--for serve --window 64", "leave it out, or lower --context"),
        ("--tp 2 --swap-space 1GiB", "--swap-space with --tp 2: each rank would decide"),
        ("--tp 2 --prefix-store somewhere", "--prefix-store with --tp 2"),
        ("--for serve --tp 2 --replicas 2", "does one of the two"),
        ("--for serve --prefix-store-size 1GiB", "add --prefix-store DIR"),
        ("--for serve --weights-dtype int4", "give the quantized checkpoint as MODEL"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(capsys, path, words, said):
    assert said in refused(capsys, path, *words.split())


def test_a_missing_model_is_an_error(capsys, tmp_path):
    assert str(tmp_path / "none") in refused(capsys, tmp_path / "none")


def test_remarks_warn_of_what_figures_do_not_say(capsys, path):
    told = planned(capsys, path, *CARD, "--context", 9000, "--window", 64)
    assert any("beyond the 8,192 positions" in remark for remark in told["remarks"])
    assert any("keeps all tokens of a request" in remark for remark in told["remarks"])
    assert planned(capsys, path, *CARD)["remarks"] == []


def test_few_kv_heads_are_told_as_part_of_multi_head_attention(capsys, tmp_path):
    _, out, _ = run(capsys, write(tmp_path, num_key_value_heads=8), *CARD)
    assert "8 KV heads for 32 heads: a quarter of the keys and values of multi-head attention" in out


def test_help_has_examples_and_exit_codes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    out = capsys.readouterr().out
    assert "examples:" in out
    assert "exit codes: 0 when it fits, 1 when it does not, 2" in out


@pytest.mark.parametrize("words", [(), ("--json",), ("--for", "serve"), ("--device", "80GB", "-n", "10000"), SEVERAL])
def test_it_imports_neither_torch_nor_transformers_nor_numpy(path, words):
    heavy = "{'torch', 'transformers', 'numpy', 'numba', 'huggingface_hub'}"
    line = ["plan", path, *words]
    code = f"import sys; from hfpaged import cli; cli.main({line!r}); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_shares_of_devices_are_those_of_the_engine():
    from hfpaged.engine import sizing

    assert (question.SHARE_ON_GPU, question.SHARE_ON_CPU) == (sizing.SHARE_ON_GPU, sizing.SHARE_ON_CPU)


@pytest.mark.parametrize(
    ("count", "gb", "gib"),
    [
        (0, "0 B", "0 B"),
        (524288, "0.524 MB", "0.5 MiB"),
        (805306368, "0.805 GB", "0.75 GiB"),
        (34359738368, "34.4 GB", "32 GiB"),
        (2 * 10**12, "2,000 GB", "1,863 GiB"),
        (-3 * 10**9, "-3 GB", "-2.79 GiB"),
    ],
)
def test_sizes_are_written_in_both_units(count, gb, gib):
    assert (decimal(count), binary(count), both(count)) == (gb, gib, f"{gb} ({gib})")


def test_layers_with_windows_are_told_apart(capsys):
    full, sliding = LayerKV("full", 8, 64, 64), LayerKV("sliding", 8, 64, 64, window=512)
    report.show(fit(case(llama(layers=(sliding, full) * 16))), [])
    out = capsys.readouterr().out
    assert "16 x sliding, 512 tokens, 8 KV heads x 64" in out
    assert "16 x full attention, 8 KV heads x 64" in out
    assert "(1 of a window of 512, 1 of full attention)" in out


def test_a_model_without_keys_has_no_blocks_to_tell_of(capsys):
    report.show(fit(case(llama(layers=(LayerKV("state", state_bytes=10**6),)))), [])
    out = capsys.readouterr().out
    assert "no blocks" in out
    assert "a block " not in out


def test_a_layer_without_attention_keeps_nothing_and_a_state_is_all_of_its_parts():
    layers = (LayerKV("none"), LayerKV("borrowed"), LayerKV("state", state_dim=1000, state_bytes=500))
    assert lines_of_layers(llama(layers=layers)) == [
        "1 x nothing, as they attend to no text",
        "1 x what another layer keeps",
        "1 x a state for each sequence (2.5 kB)",
    ]


def test_a_config_that_an_editor_of_windows_has_saved_is_read(capsys, tmp_path, path):
    marked = tmp_path / "marked.json"
    marked.write_bytes(b"\xef\xbb\xbf" + (tmp_path / "config.json").read_bytes())
    assert planned(capsys, marked, *CARD)["kv"] == planned(capsys, path, *CARD)["kv"]


@pytest.mark.parametrize(
    ("words", "tokens", "encoder"),
    [((), 512, 512), (("--prompt", "100"), 512, 100), (("--prompt", "100", "--output", "50"), 50, 100),
     (("--output", "50", "--encoder-tokens", "70"), 50, 70)],
)  # fmt: skip
def test_an_encoder_reads_the_prompts_and_answers_alone_grow(words, tokens, encoder):
    layer = LayerKV("full", 8, 64, 64)
    facts = llama(layers=(layer,), cross_layers=(layer,), max_positions=512, config={"is_encoder_decoder": True})
    args = cli.build_parser(["plan"]).parse_args(["plan", "t5", *words])
    asked = question.workload_of(args, facts)
    assert (asked.tokens, asked.encoder) == (tokens, encoder)


@pytest.mark.parametrize(
    ("model", "words", "tokens", "encoder"),
    [("whisper", "--prompt 4 --output 50", 54, 1500), ("whisper", "--output 50", 50, 1500),
     ("whisper", "--output 50 --encoder-tokens 70", 50, 70), ("mllama", "--prompt 2048 --output 512", 2560, 4 * 1601),
     ("mllama", "--prompt 2048 --output 512 --encoder-tokens 0", 2560, 0)],
)  # fmt: skip
def test_sound_and_pictures_are_no_part_of_the_prompt(model, words, tokens, encoder):
    layer = LayerKV("full", 8, 64, 64)
    eyes = {"vision_config": {"image_size": 560, "patch_size": 14, "max_num_tiles": 4}}
    ears = {"is_encoder_decoder": model == "whisper", "max_source_positions": 1500}
    facts = llama(layers=(layer,), cross_layers=(layer,), model_type=model, config=ears, whole=eyes)
    args = cli.build_parser(["plan"]).parse_args(["plan", model, *words.split()])
    asked = question.workload_of(args, facts)
    assert (asked.tokens, asked.encoder) == (tokens, encoder)
