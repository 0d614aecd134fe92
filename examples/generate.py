"""Change one argument: a batch of prompts through PagedCache, and what its pool holds afterwards."""

import hfpaged
from hfpaged import demo_model

model, tokenizer = demo_model.load()
prompts = ["The three primary colours are", "Water boils at", "A haiku about rain:"]
inputs = tokenizer(prompts, return_tensors="pt", padding=True)

cache = hfpaged.PagedCache(model, memory="1GiB")
output = model.generate(**inputs, past_key_values=cache, max_new_tokens=24, do_sample=False)

for text in tokenizer.batch_decode(output, skip_special_tokens=True):
    print(text, "\n")
print(cache.stats())
