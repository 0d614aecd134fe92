"""Models and tokenizers that bring code of their own: it runs where it is trusted, and nobody is asked on stdin."""

from __future__ import annotations

import builtins
import json

import pytest
import serve_models
import tiny_models

from hfpaged import ContinuousBatcher, cli, demo_model, support, tokenizer_loading
from hfpaged.bench import setting
from hfpaged.demo_model import DemoModelError
from hfpaged.errors import InvalidConfigError
from hfpaged.replicas.recipe import Recipe
from hfpaged.serve import ServeOptions

MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZER = "from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast): pass\n"


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("somebody was asked"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def rewrite(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def folder(tmp_path):
    """An ordinary model and its tokenizer."""
    return serve_models.save(tmp_path / "model")


@pytest.fixture
def own_model(folder):
    (folder / "modeling_own.py").write_text(MODEL)
    places = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    rewrite(folder / "config.json", model_type="own", auto_map=places)
    return folder


@pytest.fixture
def own_tokenizer(folder):
    (folder / "tokenization_own.py").write_text(TOKENIZER)
    places = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    rewrite(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=places)
    return folder


def test_code_of_a_model_is_refused_by_its_file_and_runs_where_it_is_trusted(own_model):
    with pytest.raises(DemoModelError, match=r"code of its own \(modeling_own\.py\).*give --trust-remote-code"):
        demo_model.load(own_model)
    model, tokenizer = demo_model.load(own_model, trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"
    plain = tiny_models.make("llama", vocab_size=len(tokenizer))
    found = []
    for each in (model, plain):
        with ContinuousBatcher(each, tokenizer, num_blocks=16) as batcher:
            found += batcher.generate(["the quick"], max_new_tokens=6, do_sample=False, ignore_eos=True)
    assert found[0].token_ids == found[1].token_ids


def test_code_of_a_tokenizer_is_refused_by_its_file_and_runs_where_it_is_trusted(own_tokenizer):
    with pytest.raises(DemoModelError, match=r"code of its own \(tokenization_own\.py\).*give --trust-remote-code"):
        demo_model.load(own_tokenizer)
    assert type(demo_model.load(own_tokenizer, trust_remote_code=True)[1]).__name__ == "OwnTokenizer"


def test_bench_and_stress_take_code_for_code_and_no_tokenizer_for_none(own_tokenizer):
    with pytest.raises(DemoModelError, match="tokenization_own"):
        setting.load(str(own_tokenizer), "float32", "cpu")
    for file in own_tokenizer.glob("*token*"):
        file.unlink()
    assert setting.load(str(own_tokenizer), "float32", "cpu")[1] is None


def test_a_verdict_is_on_code_of_transformers_alone(own_model):
    with pytest.raises(InvalidConfigError, match=r"brings code of its own \(modeling_own\.py\)"):
        support.find_config(str(own_model))


WORDS = ("serve m --port 0", "stress m", "quality m", "demo --model m", "bench generate m")


class EnoughError(Exception):
    pass


def teller(seen):
    """Stands where a model would be loaded."""

    def load(*_, **rest):
        seen.append(rest["trust_remote_code"])
        raise EnoughError

    return load


@pytest.mark.parametrize("words", WORDS)
def test_the_flag_reaches_who_loads(words, monkeypatch):
    seen = []
    for where in (demo_model, setting):
        monkeypatch.setattr(where, "load", teller(seen))
    for flag in ([], ["--trust_remote_code"]):
        with pytest.raises(EnoughError):
            cli.main([*words.split(), *flag])
    assert seen == [False, True]


def test_the_flag_reaches_replicas_and_their_ingress(monkeypatch):
    model_host = pytest.importorskip("hfpaged.replicas.model_host")
    hashing = pytest.importorskip("hfpaged.replicas.hashing")
    seen = []
    monkeypatch.setattr(model_host, "load_model", teller(seen))
    monkeypatch.setattr(tokenizer_loading, "load_tokenizer", teller(seen))
    recipe = Recipe(options=ServeOptions(), model="m", trust_remote_code=True)
    for load in (model_host._load, hashing.load_tokenizer):
        with pytest.raises(EnoughError):
            load(recipe)
    assert seen == [True, True]
