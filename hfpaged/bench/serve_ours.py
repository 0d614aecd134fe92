"""`hfpaged serve` with a pool of a given size, as a process of its own.

python -m hfpaged.bench.serve_ours MODEL DTYPE DEVICE PORT TOKENS [--trust-remote-code]
"""

from __future__ import annotations

import sys

from hfpaged import demo_model
from hfpaged.bench.batch_ours import BLOCK
from hfpaged.serve import run


def main() -> int:
    """Until it is told to stop."""
    name, dtype, device, port, tokens, *trust = sys.argv[1:]
    model, tokenizer = demo_model.load(name, dtype, device, trust_remote_code=bool(trust))
    return run(model, tokenizer, port=int(port), block_size=BLOCK, num_blocks=-(-int(tokens) // BLOCK))


if __name__ == "__main__":
    sys.exit(main())
