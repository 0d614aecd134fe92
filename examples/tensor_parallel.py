"""One model over several processes, each with the keys and values of its own heads:

torchrun --nproc-per-node 3 examples/tensor_parallel.py
"""

import time

import torch.distributed as dist
from transformers import AutoTokenizer

from hfpaged import PagedCache, demo_model
from hfpaged.tensor_parallel import load_model, ranks_of

SYSTEM = "Answer questions about the planets of our solar system, with one short sentence for each of them. " * 6
QUESTIONS = ["Which planet is the largest?", "Which planet has rings?"]

name = demo_model.path()  # or any other model that has a tp_plan
model, tokenizer = load_model(name).eval(), AutoTokenizer.from_pretrained(name)
ranks = ranks_of(model)  # None in a single process
pool = PagedCache(model, memory="64MiB").pool  # so much on each rank

for question in QUESTIONS:
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    start = time.perf_counter()
    tokens = model.generate(
        **inputs.to(model.device), past_key_values=PagedCache(model, pool=pool), max_new_tokens=24, do_sample=False
    )
    if ranks is None or ranks.is_first:  # all ranks have the same tokens
        answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"{question} {answer.strip()!r}: {time.perf_counter() - start:.1f} s", flush=True)

store = next(iter(pool.layer_stores.values()))[0]
print(f"{pool}: {store.signature[0]} KV heads, {pool.storage.nbytes / 1e6:.1f} MB, {pool.stats().prefix_hits} known")
if dist.is_initialized():
    dist.destroy_process_group()
