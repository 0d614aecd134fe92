"""Where the memory goes: a live line while requests run, and a map of which of them holds which block."""

import hfpaged
from hfpaged import demo_model

model, tokenizer = demo_model.load()
rules = "You are a careful assistant. Answer in one short sentence, and say so when you do not know. " * 4
questions = ["Why is the sky blue?", "What is a prime number?", "Who wrote Faust?", "How deep is the sea?"]
prompts = [f"{rules}\nQ: {question}\nA:" for question in questions]

with hfpaged.ContinuousBatcher(model, tokenizer, num_blocks=64) as batcher:
    with hfpaged.watch(batcher):
        batcher.generate(prompts * 2, max_new_tokens=16, do_sample=False)

    for prompt, question in zip(prompts, questions, strict=True):
        batcher.add_request(prompt, request_id=question, max_new_tokens=16, do_sample=False)
    for _ in range(12):
        batcher.step()
    memory = batcher.memory_map()
    print(memory)
    memory.plot("memory_map.png")  # needs matplotlib: pip install 'hfpaged[plot]'
