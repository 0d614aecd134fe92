"""Writes blocks into a prefix store until it is killed: prefix_store_worker.py DIRECTORY SEED LIMIT."""

from __future__ import annotations

import sys
from itertools import count

from prefix_store_blocks import addresses, contents, facts, layers

from hfpaged.prefix_store import PrefixStore


def main(path, seed, limit):
    store = PrefixStore(path, facts(), limit)
    print("ready", flush=True)
    for chain in count(seed):
        for address in addresses(chain, 8):
            for group in range(2):
                store.put(address, group, layers(group), contents(address, group))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
