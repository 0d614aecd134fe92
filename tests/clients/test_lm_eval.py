"""lm-eval: loglikelihoods and texts over HTTP are those of plain transformers."""

from __future__ import annotations

import json

import client_tools
import pytest
import torch
import yaml

from hfpaged import demo_model

pytestmark = [pytest.mark.demo_model, pytest.mark.clients, pytest.mark.timeout(3600)]
LM_EVAL = client_tools.Tool(
    "lm-eval", "HFPAGED_LM_EVAL", ("lm_eval[api]", "transformers"), ("torch", "transformers")
)  # fmt: skip
DOCS = [
    {"question": "The capital of France is", "choices": [" Paris.", " London.", " a large potato"], "gold": 0},
    {"question": "Water boils at one hundred degrees", "choices": [" Celsius", " of separation", " north"], "gold": 0},
]
MOST_TOKENS = 8
TASK = {
    "dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}", "target_delimiter": "",
}  # fmt: skip
CHOICES = TASK | {
    "task": "served_choices", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{gold}}", "metric_list": [{"metric": "acc"}],
}  # fmt: skip
TEXTS = TASK | {
    "task": "served_texts", "output_type": "generate_until", "doc_to_target": "{{choices[gold]}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": MOST_TOKENS, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def lm_eval(tools_folder):
    return client_tools.find(LM_EVAL, tools_folder)


@pytest.fixture
def samples(lm_eval, product, tmp_path):
    """What a task's documents got, by `samples(how, path, task)`."""
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    for task in (CHOICES, TEXTS):
        given = task | {"dataset_kwargs": {"data_files": {"test": str(docs)}}}
        (tmp_path / f"{task['task']}.yaml").write_text(yaml.safe_dump(given))

    def ask(how, path, task, *flags):
        about = f"model={product.model},base_url={product.api}/{path},num_concurrent=2,max_length=2048"
        command = [
            lm_eval, "run", "--model", how, "--model_args", f"{about},tokenizer={demo_model.path()}", "--tasks", task,
            "--include_path", str(tmp_path), "--output_path", "out", "--log_samples", *flags,
        ]  # fmt: skip
        env = {"OPENAI_API_KEY": product.key, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
        print(client_tools.run(command, tmp_path, **env).stdout)
        (found,) = tmp_path.glob(f"out/**/samples_{task}_*.jsonl")
        return sorted(map(json.loads, found.read_text().splitlines()), key=lambda sample: sample["doc_id"])

    return ask


def test_loglikelihoods_are_those_of_a_plain_forward(samples, demo):
    got = [float(answer[0][0]) for sample in samples("local-completions", "completions", "served_choices")
           for answer in sample["resps"]]  # fmt: skip
    expected = [loglikelihood(demo, doc["question"], choice) for doc in DOCS for choice in doc["choices"]]
    assert got == pytest.approx(expected, abs=1e-3)


def loglikelihood(demo, context, choice):
    """Of the tokens of `choice` behind `context`, by one forward of all of them."""
    model, tokenizer = demo
    before = len(tokenizer(context)["input_ids"])
    token_ids = tokenizer(context + choice, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logprobs = model(token_ids).logits[0, :-1].log_softmax(-1)
    return float(logprobs.gather(1, token_ids[0, 1:, None])[before - 1 :].sum())


def test_texts_of_completions_are_those_of_plain_transformers(samples, demo):
    model, tokenizer = demo
    for sample in samples("local-completions", "completions", "served_texts"):
        prompt = tokenizer(sample["doc"]["question"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            output = model.generate(prompt, max_new_tokens=MOST_TOKENS, do_sample=False)
        text = tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
        assert sample["resps"] == [[text.split(".")[0]]]


def test_texts_of_chats_are_those_of_plain_transformers(samples, plain):
    for sample in samples("local-chat-completions", "chat/completions", "served_texts", "--apply_chat_template"):
        text = plain([{"role": "user", "content": sample["doc"]["question"]}], MOST_TOKENS)
        assert sample["resps"] == [[text.split(".")[0]]]
