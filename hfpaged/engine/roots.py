"""By what the tokens of new requests are found."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedModel

from hfpaged.engine.adapter_routing import AdapterRouter
from hfpaged.engine.request import Request
from hfpaged.errors import AdapterLostError
from hfpaged.kv_pool import KVPool
from hfpaged.prefix_block import Root
from hfpaged.prefix_sharing import root_keys


def give_roots(
    pool: KVPool, model: PreTrainedModel, router: AdapterRouter, requests: Iterable[Request]
) -> dict[Request, AdapterLostError]:
    """Each request gets the root of its salt and adapter, that of a PagedCache on the model as it is with this adapter.
    The model is asked anew each time: weights may have changed since the last requests came.

    Returns those whose adapter is gone.
    """
    roots: dict[tuple[str | None, str | None], Root] = {}
    lost: dict[Request, AdapterLostError] = {}
    for request in requests:
        asked = request.salt, request.adapter
        if asked not in roots:
            try:
                with router.chosen(request.adapter):
                    keys = root_keys(model, request.salt)
            except AdapterLostError as error:
                lost[request] = error
                continue
            with pool.changing():
                roots[asked] = pool.prefixes.index.root(keys)
        request.root = roots[asked]
    return lost
