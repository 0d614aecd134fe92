"""`hfpaged support`: what it prints, how it exits, and that it needs no weights."""

from __future__ import annotations

import json

import pytest
import torch
from family_models import OVERRIDES
from tiny_configs import tiny_config
from transformers import AutoConfig, PreTrainedConfig

from hfpaged import cli, model_classes, verdict
from hfpaged.errors import InvalidConfigError
from hfpaged.support import find_config


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = cli.main(["support", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("llama", 0, ["fast", "LlamaForCausalLM", "32 x full attention", "PagedCache(model)"]),
        ("gemma3_text", 0, ["fast", "sliding window of 4096"]),
        ("gemma3", 0, ["fast", "a picture may see all of it"]),
        ("qwen3_next", 0, ["fast", "linear attention, convolution or state space (not paged)"]),
        ("deepseek_v3", 0, ["correct", "changes keys and values between the cache and the attention function"]),
        ("deepseek_v32", 0, ["correct", "only under the names of transformers' own attention"]),
        ("bloom", 0, ["correct", "attention code of its own", "keeps its own code"]),
        ("llama4", 0, ["correct", "chunked attention, chunks of 8192", "longer than a chunk of 8192 tokens"]),
        ("t5", 0, ["correct", "EncoderDecoderCache", "position bias"]),
        ("mamba", 1, ["no cache", "32 LinearAttentionLayer", "UnsupportedModelError"]),
        ("minimax", 1, ["refused", "a cache of a class of its own", "leave the cache to generate()"]),
    ],
)
def test_it_says_what_happens_and_why(capsys, model, code, words):
    exit_code, out, _ = run(capsys, model)
    assert exit_code == code
    assert not [word for word in words if word not in out], out


def test_it_answers_in_json(capsys):
    code, out, _ = run(capsys, "jamba", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["outcome"] == "fast"
    assert answer["layers"]["full attention"] == 4
    assert answer["reasons"] == []


def test_it_reads_a_folder_and_a_file(capsys, tmp_path):
    tiny_config("gemma2").save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        code, out, _ = run(capsys, str(path), "--json")
        assert code == 0
        assert sum(json.loads(out)["layers"].values()) == 4


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "{}",
        '{"model_type": "no such type"}',
        '{"model_type": "llama", "num_attention_heads": 0}',
        '{"model_type": "vit"}',
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    code, out, err = run(capsys, str(path))
    assert (code, out) == (2, "")
    assert err.startswith("hfpaged: error: ")
    assert str(path) in err or "ViT" in err


def test_a_config_of_which_transformers_makes_no_model_is_told(capsys, tmp_path):
    tiny_config("llama", {"hidden_act": "no such function"}).save_pretrained(tmp_path)
    code, _, err = run(capsys, str(tmp_path))
    assert code == 2
    assert "transformers cannot build a model" in err


def test_it_takes_no_memory_for_weights(monkeypatch):
    built = []
    build = model_classes.build

    def noted(config, model_class):
        built.append(build(config, model_class))
        return built[-1]

    monkeypatch.setattr(model_classes, "build", noted)
    config, _ = find_config("mistral")
    assert verdict.examine(config).outcome == "fast"
    (model,) = built
    assert sum(p.numel() for p in model.parameters()) > 7e9
    assert {p.device for p in model.parameters()} == {torch.device("meta")}


def test_without_a_library_for_pictures_the_text_model_is_told(monkeypatch):
    build = model_classes.build

    def needs_more(config, model_class):
        if hasattr(config, "vision_config"):
            raise ImportError("pictures need another library")
        return build(config, model_class)

    monkeypatch.setattr(model_classes, "build", needs_more)
    told = verdict.examine(tiny_config("gemma3", OVERRIDES.get("gemma3")))
    assert (told.outcome, told.model_class) == ("fast", "Gemma3ForCausalLM")
    with pytest.raises(ImportError):
        verdict._on_meta(type("Config", (PreTrainedConfig,), {"vision_config": 1})(), object)  # no text to fall back on


def test_a_model_type_stands_for_its_default_config():
    config, source = find_config("qwen3")
    assert type(config) is type(AutoConfig.for_model("qwen3"))
    assert "default config" in source
    with pytest.raises(InvalidConfigError, match="no such model"):
        find_config("./no such model")
