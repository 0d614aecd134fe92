"""Under torchrun: a rank that ends in the middle of a generation, "killed" or because it "raises"."""

import os
import signal
import sys

import tiny_models
import torch.distributed as dist
from transformers import LogitsProcessor, LogitsProcessorList

import hfpaged
from hfpaged import tensor_parallel
from hfpaged.compat import cache_argument

WAY, FOLDER = sys.argv[1:]
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    tiny_models.shared("llama").save_pretrained(FOLDER)
dist.barrier()
model = tensor_parallel.load_model(FOLDER)
model.generation_config.eos_token_id = None


class Ends(LogitsProcessor):
    """Rank 1 does not come back from its 20th token."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == 25 and dist.get_rank() == 1:
            print("rank 1 ends here", flush=True)
            if WAY == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("what rank 1 says")
        return scores


cache = hfpaged.PagedCache(model, num_blocks=64)
model.generate(
    **tiny_models.prompts([5]), **{cache_argument(): cache}, max_new_tokens=200, do_sample=False,
    logits_processor=LogitsProcessorList([Ends()]),
)  # fmt: skip
print("nobody comes here", flush=True)
