"""One long prompt, many questions: each question forks the prompt's cache and shares its blocks."""

import copy

import hfpaged
from hfpaged import demo_model

model, tokenizer = demo_model.load()
notes = "The meeting is on Tuesday at ten, in the green room. Anna brings the plans, Bert the coffee. " * 8
prompt = tokenizer(notes, return_tensors="pt")

shared = hfpaged.PagedCache(model)
model.generate(**prompt, past_key_values=shared, max_new_tokens=1)

forks = []
for question in ("\nQ: Who brings coffee?\nA:", "\nQ: When is the meeting?\nA:"):
    fork = copy.deepcopy(shared)
    forks.append(fork)
    inputs = tokenizer(notes + question, return_tensors="pt")
    output = model.generate(**inputs, past_key_values=fork, max_new_tokens=12, do_sample=False)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]).strip())

stats = shared.stats()
print(f"{stats.blocks_used} blocks for {1 + len(forks)} caches, {stats.blocks_shared} of them shared")
