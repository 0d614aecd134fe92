"""Quantizing and its inverse in plain torch, obvious and slow: the judge of all other forms.

Float32 arithmetic in this order, so that every form gives the same bytes: products with 1 / largest, quotients
1 / scale (rounded correctly), then round to nearest even. A NaN or an infinity in what shares a scale makes the scale
NaN or infinite and all of it NaN: never a number that looks right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfpaged_kernels.encoding import Encoding
from hfpaged_kernels.quantized import QuantizedCache

# The smallest scale that is used, float32's smallest normal number.
SMALLEST = 2.0**-126


def write_tokens(rows: Tensor, cache: QuantizedCache, slots: Tensor) -> None:
    """Quantize rows [num_tokens, num_kv_heads, dim] into slots [num_tokens], each by itself; -1 is skipped."""
    kept = slots >= 0
    blocks, offsets = slots[kept] // cache.block_size, slots[kept] % cache.block_size
    codes, scales = quantize_tokens(rows[kept].float(), cache.encoding, cache.scales)
    cache.codes[blocks, :, offsets] = codes
    if scales is not None:
        cache.token_scales[blocks, :, offsets] = scales


def write_blocks(rows: Tensor, cache: QuantizedCache, blocks: Tensor, sources: Tensor) -> None:
    """Quantize whole blocks: token t of block blocks[i] is row sources[i, t] of rows [num_rows, num_kv_heads, dim]."""
    contents = rows[sources].float().transpose(1, 2)  # [num_blocks, num_kv_heads, block_size, dim]
    if cache.encoding.scales == "channel":
        codes, channel_codes, steps = quantize_channels(contents, cache.encoding)
        cache.channel_codes[blocks], cache.channel_steps[blocks] = channel_codes, steps
    else:
        tokens = contents.transpose(1, 2).flatten(0, 1)
        codes, scales = quantize_tokens(tokens, cache.encoding, cache.scales)
        codes = codes.unflatten(0, contents.shape[0:1] + contents.shape[2:3]).transpose(1, 2)
        if scales is not None:
            cache.token_scales[blocks] = scales.unflatten(0, (-1, cache.block_size)).transpose(1, 2)
    cache.codes[blocks] = codes


def read_blocks(cache: QuantizedCache, blocks: Tensor) -> Tensor:
    """float32 [num_blocks, num_kv_heads, block_size, dim] of whole blocks; residuals are not looked at."""
    encoding, codes = cache.encoding, _unpack(cache.codes[blocks], cache.encoding)
    if encoding.scales == "head":
        assert cache.scales is not None
        return codes * cache.scales[:, None, None]
    if encoding.scales == "channel":
        scales, lows = channel_values(cache.channel_codes[blocks], cache.channel_steps[blocks])
        return codes * scales[:, :, None] + lows[:, :, None]
    scales = cache.token_scales[blocks].float()
    if not encoding.has_low:
        return codes * scales[..., None]
    grouped = codes.unflatten(-1, (encoding.groups(cache.dim), -1))
    return (grouped * scales[..., :1] + scales[..., 1:]).flatten(-2)


def quantize_tokens(rows: Tensor, encoding: Encoding, head_scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(codes uint8 [num_tokens, num_kv_heads, row bytes], scales as `token_scales` has them; None for scales of heads)
    of float32 [num_tokens, num_kv_heads, dim].
    """
    if encoding.scales == "head":
        assert head_scales is not None
        return _codes(rows, 1 / head_scales[:, None], encoding), None
    if not encoding.has_low:
        scales = up(rows.abs().amax(-1) * (1 / encoding.largest))
        return _codes(rows, _inverse(scales)[..., None], encoding), scales.bfloat16()
    grouped = rows.unflatten(-1, (encoding.groups(rows.shape[-1]), -1))
    low = down(grouped.amin(-1))
    scale = up((grouped.amax(-1) - low) * (1 / encoding.largest))
    codes = _codes(grouped - low[..., None], _inverse(scale)[..., None], encoding, pack=False)
    return _pack(codes.flatten(-2), encoding), torch.stack([scale, low], dim=-1).bfloat16()


def quantize_channels(contents: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor, Tensor]:
    """(codes uint8 [.., block_size, row bytes], channel codes uint8 [.., 2, dim], steps bfloat16 [.., 4]) of float32
    [.., block_size, dim]. The scales and lows of the channels are themselves stored in eight bits each.
    """
    lowest, highest = contents.amin(-2), contents.amax(-2)
    base = down(lowest.amin(-1, keepdim=True))
    low_step = up((lowest.amax(-1, keepdim=True) - base) * (1 / 255))
    low_codes = ((lowest - base) * _inverse(low_step)).floor().nan_to_num(0).clamp(0, 255)
    lows = low_codes * low_step + base
    scales = (highest - lows) * (1 / encoding.largest)
    scale_step = up(scales.amax(-1, keepdim=True) * (1 / 255))
    scale_codes = (scales * _inverse(scale_step)).ceil().nan_to_num(0).clamp(0, 255)
    inverse = _inverse(scale_codes * scale_step)
    codes = _codes(contents - lows[..., None, :], inverse[..., None, :], encoding)
    steps = torch.cat([scale_step, base, low_step, torch.zeros_like(base)], dim=-1).bfloat16()
    return codes, torch.stack([scale_codes, low_codes], dim=-2).to(torch.uint8), steps


def channel_values(channel_codes: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """float32 (scales, lows) [.., dim] of channel codes [.., 2, dim] and steps [.., 4]."""
    scale_step, base, low_step, _ = steps.float()[..., None].unbind(-2)
    scales, lows = channel_codes.float().unbind(-2)
    return scales * scale_step, lows * low_step + base


def up(x: Tensor) -> Tensor:
    """float32 rounded to bfloat16 towards plus infinity, as float32."""
    near = x.bfloat16()
    above = torch.nextafter(near, torch.full_like(near, float("inf")))
    return torch.where(near.float() < x, above, near).float()


def down(x: Tensor) -> Tensor:
    """float32 rounded to bfloat16 towards minus infinity, as float32."""
    return -up(-x)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale; 0 where scale is 0 or so small that its inverse could be infinite: all becomes 0 (or the low)."""
    return torch.where(scale < SMALLEST, 0.0, 1 / scale)


def _codes(rows: Tensor, inverse: Tensor, encoding: Encoding, pack: bool = True) -> Tensor:
    """uint8 codes of rows [.., dim] over scales whose inverse is given."""
    lowest = 0.0 if encoding.has_low else -encoding.largest
    scaled = (rows * inverse).clamp(lowest, encoding.largest)
    if encoding.dtype.is_floating_point:
        return scaled.to(encoding.dtype).view(torch.uint8)
    whole = scaled.round().nan_to_num(0).to(torch.int16)
    if encoding.bits == 8:
        return whole.to(torch.int8).view(torch.uint8)
    return _pack(whole.to(torch.uint8), encoding) if pack else whole.to(torch.uint8)


def _pack(codes: Tensor, encoding: Encoding) -> Tensor:
    if encoding.bits == 8:
        return codes
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _unpack(codes: Tensor, encoding: Encoding) -> Tensor:
    """float32 numbers of uint8 codes [.., row bytes]."""
    if encoding.bits == 4:
        return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).float()
    return codes.contiguous().view(encoding.dtype).float()
