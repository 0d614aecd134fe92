"""Many requests at once around one model object: prompts of all lengths, each with settings of its own."""

import hfpaged
from hfpaged import demo_model

model, tokenizer = demo_model.load()
prompts = ["The three primary colours are", "Water boils at", "A haiku about rain:", "Once upon a time"]
settings = [
    {"max_new_tokens": 12, "do_sample": False},
    {"max_new_tokens": 8, "do_sample": False, "stop": ["."]},
    {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "seed": 7},
    {"max_new_tokens": 16, "num_beams": 3},
]

with hfpaged.ContinuousBatcher(model, tokenizer, memory="1GiB") as batcher:
    for output in batcher.generate(prompts, settings):
        metrics = output.metrics
        print(f"{output.prompt}|{output.text}")
        print(f"  {output.finish_reason}, first token after {metrics.time_to_first_token * 1000:.0f} ms\n")
    print(batcher.pool.stats())
