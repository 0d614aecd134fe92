"""What attention is told of one layer in one step, and the dense view of it for those who do not read blocks."""

from __future__ import annotations

import hfpaged_kernels as kernels
import torch
from torch import Tensor

from hfpaged.errors import CacheMismatchError
from hfpaged.graph import with_graph
from hfpaged.kv_storage import LayerStore
from hfpaged.layer_groups import visible_offset
from hfpaged.rows import Rows
from hfpaged.step import Step


class LayerStep:
    """One layer in one step: the new keys and values, and where all earlier ones lie. Positions offset .. length - 1
    are visible.
    """

    __slots__ = ("_steps", "group", "key", "length", "offset", "rows", "sees_new", "step", "store", "value", "window")

    def __init__(
        self, rows: Rows, step: Step, store: LayerStore, key: Tensor, value: Tensor, window: int | None, group: int
    ) -> None:
        self.rows, self.step, self.store, self.group = rows, step, store, group
        self.key, self.value, self.window = key, value, window
        self.offset, self.length = visible_offset(rows.past_length, window), rows.length
        # Where nothing came before, attention sees the new keys and values as the model computed them, whatever the
        # pool makes of them: in all models and by all ways alike. Later forwards see what is stored.
        self.sees_new = step.is_first and not rows.past_length
        self._steps = rows.steps

    @property
    def stores_as_computed(self) -> bool:
        """Whether what is stored is what the model computed."""
        pairs = ((self.store.key, self.key), (self.store.value, self.value))
        return all(isinstance(stored, Tensor) and stored.dtype == new.dtype for stored, new in pairs)

    def sees_more(self, window: int | None) -> bool:
        """Whether a mask with this window would see positions that a cache with ours does not show any more. What is
        stored depends then on the pieces in which the tokens came, and is for nobody else.
        """
        is_wider = self.window is not None and (window is None or window > self.window)
        if is_wider:
            self.rows.see_later_tokens()
        return is_wider and self.offset > 0

    def dense(self, is_key: bool, past_had_graph: bool = False) -> Tensor:
        """[batch, num_kv_heads, visible length, dim], zeros where padding was not stored.

        Raises CacheMismatchError where blocks may have left the window since: after the forward; StreamingError.
        """
        new = self.key if is_key else self.value
        if self.sees_new:
            return new
        stored = self.store.key if is_key else self.store.value
        self.rows.check_whole(self.group)
        if self.window is not None and self._steps is not self.rows.steps:
            raise CacheMismatchError(
                f"keys or values of {self.length} positions of a layer with a window of {self.window} were read after "
                "their forward, when blocks that left the window may hold something else; read them in the forward, "
                "or those of cache.layers[i] now"
            )
        full = dense_rows(self.rows, self.step, stored, self.offset, self.length).to(new.dtype)
        return with_graph(full, new, past_had_graph) if new.requires_grad or past_had_graph else full


def dense_rows(rows: Rows, step: Step, cache: kernels.Cache, offset: int, length: int) -> Tensor:
    """[batch, num_kv_heads, length - offset, dim]: positions offset .. length - 1 of the padded rows, all of whose
    tokens must lie in blocks that are held; padding is zeros.
    """
    packed = kernels.gather(cache, step.block_tables, step.context_lengths, step.residuals)
    if rows.kept is None:
        if bool((step.context_lengths == packed.shape[2]).all()):
            return packed[:, :, packed.shape[2] - (length - offset) :]
        kept = torch.ones(len(packed), length - offset, dtype=torch.bool, device=cache.device)
    else:
        kept = torch.from_numpy(rows.kept[:, offset:length]).to(cache.device)
    padded = packed.new_zeros(*packed.shape[:2], length - offset, packed.shape[3])
    # Of each row the last tokens that are held, as many as positions from `offset` on are no padding.
    ends = step.context_lengths[:, None]
    places = torch.arange(packed.shape[2], device=cache.device)
    visible = (places >= ends - kept.sum(dim=1, keepdim=True)) & (places < ends)
    padded.transpose(1, 2)[kept] = packed.transpose(1, 2)[visible]
    return padded


def flat_tokens(states: Tensor) -> Tensor:
    """[batch, heads, length, dim] -> [batch * length, heads, dim], without a copy where the model laid it out so."""
    if states.shape[2] == 1:  # a decode step: one operation is enough
        return states.squeeze(2)
    return states.transpose(1, 2).reshape(-1, states.shape[1], states.shape[3])
