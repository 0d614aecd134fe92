"""Run with TRITON_INTERPRET=1: a tiny model generates through the Triton kernels, on a machine without a GPU."""

import torch
from hfpaged_kernels import api, triton_form
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hfpaged
from hfpaged import attention
from hfpaged.compat import cache_argument

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 60, "head_dim": 16}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
for parameter in model.parameters():
    parameter.data *= 3
ids = torch.randint(3, 60, (2, 21))
mask = torch.ones_like(ids)
mask[1, :6] = 0
api._form.cache_clear()
api._numba_or_torch = lambda: triton_form
assert api.backend(torch.device("cpu")) == "triton"

for options in ({}, {"num_beams": 2}, {"prefill_chunk_size": 5}):
    options |= {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    caches = (DynamicCache(config=model.config), hfpaged.PagedCache(model, block_size=4))
    plain, paged = (model.generate(ids, attention_mask=mask, **{cache_argument(): c}, **options) for c in caches)
    assert torch.equal(plain, paged), (options, plain, paged)
    caches[1].pool.check_integrity()
assert not attention.dense_calls, attention.dense_calls
print("same tokens")
