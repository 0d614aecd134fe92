"""Paged caches for the tests of the CPU kernels: shuffled blocks, poisoned unused slots, garbage behind the ends."""

from __future__ import annotations

import torch
from hfpaged_kernels import quantizing, reference
from hfpaged_kernels.encoding import ENCODINGS as ALL_ENCODINGS
from hfpaged_kernels.encoding import Encoding
from hfpaged_kernels.quantized import QuantizedCache
from torch import Tensor

# name: query heads, KV heads, key dim, value dim
SHAPES = {
    "mha 64": (4, 4, 64, 64),
    "gqa 64": (9, 3, 64, 64),
    "mqa 80": (5, 1, 80, 80),
    "gqa 96": (4, 2, 96, 96),
    "gqa 128": (8, 2, 128, 128),
    "mla-like 192/128": (4, 1, 192, 128),
    "gqa 256": (4, 2, 256, 256),
    "odd 20": (6, 2, 20, 20),
    "odd 5": (3, 3, 5, 5),
}
# name: window, softcap, whether there are sinks
VARIANTS = {
    "plain": (None, None, False),
    "window": (7, None, False),
    "softcap": (None, 20.0, False),
    "sinks": (None, None, True),
    "all": (40, 20.0, True),
}
ENCODINGS = {encoding.name: encoding for encoding in ALL_ENCODINGS}
# Of keys and values: those of the product's formats, each encoding by itself, and mixtures.
MIXTURES = {
    **{name: (name, name) for name in ENCODINGS if name != "int4_channel"},
    "k8v4": ("int8", "int4_groups"),
    "int4 by channel": ("int4_channel", "int4"),
    "native keys": (None, "int4"),
    "native values": ("fp8_e4m3", None),
    "two kinds of fp8": ("fp8_e5m2", "fp8_e4m3_static"),
}
BLOCK_SIZES = (1, 8, 16, 32, 256)
LENGTHS = (1, 0, 15, 16, 17, 31, 32, 33, 130)
# Absolute bounds for values of about 1: float32 sums in another order; one unit in the last place otherwise.
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 0.016, torch.float16: 0.002}


class Paged:
    """Key and value caches of some sequences, with everything hostile that a real pool may hold."""

    def __init__(
        self, lengths: tuple[int, ...], shape: str, block_size: int, dtype: torch.dtype, seed: int = 0,
        shared_blocks: int = 0,
    ) -> None:  # fmt: skip
        """The tables of all sequences that are not empty begin with the same `shared_blocks`."""
        self.heads, self.kv_heads, self.key_dim, self.value_dim = SHAPES[shape]
        self.block_size, self.dtype = block_size, dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        counts = [-(-length // block_size) for length in lengths]
        total = sum(counts) + shared_blocks + 3
        self.keys = self.normal(total, self.kv_heads, block_size, self.key_dim)
        self.values = self.normal(total, self.kv_heads, block_size, self.value_dim)
        self.tables = torch.full((len(lengths), max(counts) + 2), -1, dtype=torch.int32)
        self.tables[:, -1] = 2**31 - 1
        free = torch.randperm(total, generator=self.generator).tolist()
        shared = [free.pop() for _ in range(shared_blocks)]
        used = torch.zeros(total, block_size, dtype=torch.bool)
        for seq, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            for index in range(count):
                block = shared[index] if index < shared_blocks else free.pop()
                self.tables[seq, index] = block
                used[block, : length - index * block_size] = True
        self.keys.transpose(1, 2)[~used] = float("nan")
        self.values.transpose(1, 2)[~used] = float("nan")

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def query(self, tokens: int) -> Tensor:
        return self.normal(tokens, self.heads, self.key_dim)

    def options(self, variant: str) -> dict[str, object]:
        window, softcap, with_sinks = VARIANTS[variant]
        sinks = torch.randn(self.heads, generator=self.generator) if with_sinks else None
        return {"scale": self.key_dim**-0.5, "window": window, "softcap": softcap, "sinks": sinks}


def assert_equal_enough(result: Tensor, expected: Tensor) -> None:
    assert result.dtype == expected.dtype
    bound = BOUNDS[result.dtype]
    torch.testing.assert_close(result.float(), expected.float(), atol=bound, rtol=bound)


class Quantized(Paged):
    """The same, quantized: garbage bytes behind the ends, in unused blocks and in those that a residual stands for.

    encodings: of keys and values; None leaves them native. open_seqs: which sequences (modulo their number) keep their
    last, unfilled block in a residual.
    """

    def __init__(
        self, lengths: tuple[int, ...], shape: str, block_size: int, dtype: torch.dtype,
        encodings: tuple[Encoding | None, Encoding | None], open_seqs: tuple[int, ...] = (), shared_blocks: int = 0,
        seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(lengths, shape, block_size, dtype, seed, shared_blocks)
        self.residuals = torch.full((len(lengths),), -1, dtype=torch.int32)
        for number, seq in enumerate(open_seqs):
            self.residuals[seq % len(lengths)] = number
        self.num_residuals = len(open_seqs)
        self.key_scales = 0.005 + torch.rand(self.kv_heads, generator=self.generator) / 100
        self.keys = self.quantize(self.keys, encodings[0])
        self.values = self.quantize(self.values, encodings[1])

    def quantize(self, native: Tensor, encoding: Encoding | None) -> Tensor | QuantizedCache:
        if encoding is None:
            return native
        blocks, heads, block_size, dim = native.shape
        shape = (blocks, heads, encoding.head_bytes(block_size, dim))
        data = torch.randint(0, 256, shape, generator=self.generator, dtype=torch.uint8)
        static = self.key_scales if encoding.scales == "head" else None
        residual = None
        if self.num_residuals:
            residual = torch.full((self.num_residuals, block_size, heads, dim), float("nan"), dtype=self.dtype)
        cache = QuantizedCache(data, encoding, block_size, dim, self.dtype, static, residual)
        clean = native.nan_to_num(0.5)
        for seq, length in enumerate(self.lengths.tolist()):
            for index in range(-(-length // block_size)):
                block, filled = int(self.tables[seq, index]), min(block_size, length - index * block_size)
                rows = clean[block].transpose(0, 1)
                own = int(self.residuals[seq])
                if filled < block_size and own >= 0:
                    residual[own, :filled] = rows[:filled]
                elif filled == block_size or encoding.scales == "channel":
                    sources = torch.arange(block_size)[None]
                    reference.write_blocks(rows, cache, torch.tensor([block]), sources)
                else:
                    slots = block * block_size + torch.arange(filled)
                    quantizing.write_tokens(rows[:filled], cache, slots)
        return cache
