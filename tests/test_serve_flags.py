"""The command line: what it takes, what it says, and that it says it soon."""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys

import pytest
from transformers.utils import logging as transformers_logging

import hfpaged.serve
from hfpaged import ContinuousBatcher, cli
from hfpaged.config import parse_bytes
from hfpaged.demo_model import DemoModelError
from hfpaged.errors import InvalidConfigError
from hfpaged.serve import ServeOptions, command, flag_types, launch, start_report


def parsed(*words):
    return cli.build_parser(["serve"]).parse_args([*["serve", *words]])


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    monkeypatch.delenv("HFPAGED_API_KEY", raising=False)


def test_help_comes_without_torch():
    code = (
        "import sys; from hfpaged import cli\n"
        "try: cli.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'fastapi', 'uvicorn', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def flags():
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    actions = parser._subparsers._group_actions[0].choices["serve"]._actions
    return [action for action in actions if action.option_strings and action.dest != "help"]


def test_each_flag_has_a_line_and_the_reason_of_its_default():
    for flag in flags():
        if flag.option_strings[0] != "--no-prefix-caching":
            assert "(default: " in flag.help, flag.option_strings
            assert len(flag.help) > 60, flag.option_strings


def test_the_issue_finds_all_its_flags():
    asked = (
        "host port api-key api-key-file served-model-name dtype device kv-cache-dtype block-size "
        "gpu-memory-utilization kv-cache-memory max-model-len max-num-seqs max-num-batched-tokens "
        "enable-prefix-caching no-enable-prefix-caching no-prefix-caching max-num-queued-requests "
        "scheduling-policy request-timeout window sinks adapter metrics-compat otlp-endpoint log-level "
        "log-json shutdown-timeout send-timeout max-request-bytes record-prompts shadow record "
        "replicas min-replicas max-replicas address num-gpus-per-replica num-cpus-per-replica app-name route-prefix "
        "swap-space prefix-store prefix-store-size tp tensor-parallel-size "
        "trust-remote-code "
        "kv-events-endpoint kv-events-replay-endpoint kv-events-topic kv-events-salted kv-events-config"
    )
    there = {name for flag in flags() for name in flag.option_strings}
    assert there == {f"--{name}" for name in asked.split()}


def test_the_defaults_are_those_of_the_classes_behind():
    args = parsed()
    assert command.options_of(args) == ServeOptions()
    defaults = {name: p.default for name, p in inspect.signature(ContinuousBatcher).parameters.items()}
    # A server must not queue without end, and flags are read as bytes.
    changed = {"max_num_queued_requests": 1024, "prefix_store_size": parse_bytes(defaults["prefix_store_size"])}
    assert command.sizes_of(args) == {name: (defaults | changed)[name] for name in command.sizes_of(args)}


def test_a_line_that_was_made_for_vllm_is_understood(monkeypatch):
    words = "serve org/model --max_model_len 8k --max-num-seqs=64 --gpu_memory_utilization=0.9 --kv_cache_dtype fp8"
    rest = "--no-enable-prefix-caching --served-model-name a b --api-key one --api-key team=two"
    seen = {}
    monkeypatch.setattr(command, "run", lambda args: seen.update(vars(args)) or 0)
    assert cli.main([*words.split(), *rest.split()]) == 0
    args = argparse.Namespace(**seen)
    sizes, options = command.sizes_of(args), command.options_of(args)
    assert args.model == "org/model"
    assert (sizes["max_model_len"], sizes["max_num_seqs"], sizes["memory"]) == (8000, 64, 0.9)
    assert (sizes["kv_dtype"], sizes["prefix_sharing"]) == ("fp8", False)
    assert options.served_model_names == ("a", "b")
    assert options.api_keys == {"key-1": "one", "team": "two"}


def test_bytes_of_the_pool_stand_above_a_share():
    assert command.sizes_of(parsed("--kv-cache-memory", "2GiB"))["memory"] == 2 << 30
    assert command.sizes_of(parsed("--no-prefix-caching"))["prefix_sharing"] is False
    assert [command.sizes_of(parsed("--swap-space", size))["swap_space"] for size in ("4GiB", "0")] == [4 << 30, 0]
    assert command.sizes_of(parsed("--scheduling-policy", "priority"))["policy"] == "priority"
    assert command.options_of(parsed("--adapter", "a=x/y", "--adapter", "b=z")).adapters == {"a": "x/y", "b": "z"}


WRONG = {
    "--port": ["x", "-1", "70000"],
    "--block-size": ["12", "0", "x"],
    "--kv-cache-memory": ["much", "0", "-3"],
    "--swap-space": ["much", "-1"],
    "--gpu-memory-utilization": ["0", "1.5", "x"],
    "--max-model-len": ["0", "x", "-5", "8q"],
    "--request-timeout": ["0", "x", "-1", "nan", "inf"],
    "--kv-cache-dtype": ["int3"],
    "--adapter": ["name", "=path", "name="],
    "--otlp-endpoint": ["localhost:4317", "ftp://x"],
    "--log-level": ["loud"],
    "--api-key": ["", " ", "a b", "k\x01", "schlüssel"],
    "--host": ["a..b", "256.1.1.1.1", ""],
    "--api-key-file": ["/no/such/file"],
    "--window": ["512"],
    "--sinks": ["4"],
    "--no-such-flag": ["1"],
}


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, values in WRONG.items() for value in values])
def test_what_is_wrong_is_told_in_a_line(flag, value, capsys):
    try:
        code = cli.main(["serve", f"{flag}={value}"])
    except SystemExit as end:
        code = end.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hfpaged")
    assert "error: " in line


KEYS = {
    "plain": ("k", {"key-1": "k"}),
    "of a tenant": ("ann=k", {"ann": "k"}),
    "with = inside": ("ann=k=v=", {"ann": "k=v="}),
    "base64": ("c2VjcmV0a2V5", {"key-1": "c2VjcmV0a2V5"}),
    "padded base64": ("c2VjcmV0a2U=", {"key-1": "c2VjcmV0a2U="}),
    "twice padded base64": ("c2VjcmV0aw==", {"key-1": "c2VjcmV0aw=="}),
}


@pytest.mark.parametrize(("given", "expected"), KEYS.values(), ids=KEYS)
def test_a_key_may_have_a_tenant(given, expected):
    assert flag_types.api_keys([given], None, None) == expected


def test_keys_come_from_flags_a_file_and_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\n\n  two \ncarl=three\n")
    found = flag_types.api_keys(["one"], str(file), "four, dora=five,")
    assert found == {"key-1": "one", "key-2": "two", "carl": "three", "key-4": "four", "dora": "five"}


@pytest.mark.parametrize("given", [["a=x", "a=y"], ["a=x", "b=x"], [""]])
def test_keys_that_cannot_be_told_apart_are_refused(given):
    with pytest.raises(InvalidConfigError):
        flag_types.api_keys(given, None, None)


def test_without_the_extra_the_remedy_is_told(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "hfpaged.serve.launch", None)  # importing it fails from here on
    monkeypatch.delitem(vars(hfpaged.serve), "run", raising=False)
    monkeypatch.setattr(hfpaged.serve, "_EXTRA", ("hfpaged",))
    assert cli.main(["serve"]) == 2
    assert "pip install 'hfpaged[serve]'" in capsys.readouterr().err


def test_a_file_without_keys_does_not_open_the_server(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    with pytest.raises(InvalidConfigError, match="holds no key"):
        flag_types.api_keys([], str(file), None)


def test_a_model_that_a_flag_has_swallowed_is_not_the_demo_model(tmp_path):
    with pytest.raises(InvalidConfigError, match="put the model first"):
        command.options_of(parsed("--served-model-name", "mine", str(tmp_path)))
    assert command.options_of(parsed(str(tmp_path), "--served-model-name", "mine", "my/other")).served_model_names == (
        "mine", "my/other",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "share"), [("1%", 0.01), ("0.01", 0.01), ("100 %", 1.0), ("1", 1.0), (" 0.5% ", 0.005)]
)
def test_a_share_of_the_requests_is_a_percentage_or_a_part_of_one(text, share):
    assert flag_types.sample(text) == pytest.approx(share)
    assert command.sizes_of(parsed("--shadow", text, "--kv-cache-dtype", "int8"))["shadow"] == pytest.approx(share)


@pytest.mark.parametrize("text", ["0", "0%", "-1%", "1.5", "150%", "nan", "some", "%", ""])
def test_a_share_of_the_requests_that_cannot_be_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"write 1% or 0\.01, more than 0 and at most 100%"):
        flag_types.sample(text)


def test_shadowing_a_native_cache_is_refused_before_a_model_is_loaded(capsys):
    assert cli.main(["serve", "no-such-model", "--shadow", "1%"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--shadow 0.01 compares a quantized KV cache with the native one" in line
    assert "give --kv-cache-dtype int8" in line


def test_the_start_tells_of_shadow_decoding_where_it_is_on():
    told = dict.fromkeys(("weights_bytes", "pool_bytes", "num_blocks", "block_size", "pool_tokens", "max_num_seqs"), 1)
    told |= {"activation_peak_bytes": None, "kv_format": "int8", "max_model_len": None, "requests_of_max_length": None}
    told |= {
        "swap_bytes": 0,
        "prefix_store": None,
        "ranks": 1,
        "tenants": 0,
        "kv_events": None,
        "url": "http://127.0.0.1:1",
    }
    assert ("shadow decoding", "1 % of the requests") in start_report._rows(told | {"shadow": 0.01})
    assert "shadow decoding" not in dict(start_report._rows(told | {"shadow": 0.0}))


@pytest.mark.parametrize("log_json", [True, False])
def test_no_bar_of_transformers_stands_between_lines_of_json(log_json, monkeypatch):
    shown = []

    def load(*args, **kwargs):
        shown.append(transformers_logging.is_progress_bar_enabled())
        raise DemoModelError("enough")

    transformers_logging.enable_progress_bar()
    monkeypatch.setattr(launch.demo_model, "load", load)
    with pytest.raises(DemoModelError, match="enough"):
        launch.run("model", port=0, log_json=log_json)
    assert shown == [not log_json]
    assert transformers_logging.is_progress_bar_enabled()
