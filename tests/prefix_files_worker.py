"""A process of its own: it makes a model, loads prefixes if it is told to, generates, and saves what it has.

prefix_files_worker.py NAME SALT LOAD_FROM SAVE_TO RESULTS        ("-": not)
"""

import dataclasses
import sys

import tiny_models
import torch

import hfpaged
from hfpaged.compat import cache_argument

name, salt, load_from, save_to, results = sys.argv[1:]
torch.set_num_threads(1)
model = tiny_models.make(name)
cache = hfpaged.PagedCache(model, num_blocks=64, block_size=4, salt=None if salt == "-" else salt)
loaded = cache.pool.load_prefixes(load_from) if load_from != "-" else None
options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
options |= {cache_argument(): cache, "output_logits": True}
output = model.generate(**tiny_models.prompts([37, 30]), **options)
hits = cache.stats().prefix_hits
cache.free()
cache.pool.check_integrity()
if save_to != "-":
    cache.pool.save_prefixes(save_to)
record = dataclasses.asdict(loaded) if loaded else {}
torch.save({"tokens": output.sequences, "logits": output.logits, "hits": hits, "loaded": record}, results)
