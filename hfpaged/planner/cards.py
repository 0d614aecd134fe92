"""Common cards: the memory that a program gets to see, and how fast it is read.

Memory is the total capacity that torch names when it is out of memory, the least of what people's reports of such
errors on these cards show, rounded down: less than the data sheet says, for the driver and error correction take their
part. Bandwidth is from the makers' data sheets, of the slower one where a card is sold with two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hfpaged.errors import InvalidConfigError

# GB/s of 16 lanes in one direction, by generation; and of NVLink-C2C.
PCIE = {3: 16, 4: 32, 5: 64}
LINKS = {"GH200": 450}


@dataclass(frozen=True)
class Card:
    """`gib` GiB, read at `bandwidth` GB/s. `names`: how else people write it, the first words of what drivers say;
    `pcie`: the generation of PCI Express.
    """

    name: str
    gib: float
    bandwidth: int
    names: tuple[str, ...] = ()
    pcie: int = 4

    @property
    def link(self) -> int:
        """GB/s to the host's memory in one direction, by data sheets: 16 lanes of PCI Express, or the maker's own."""
        return LINKS.get(self.name, PCIE[self.pcie])

    @property
    def memory(self) -> int:
        """Bytes."""
        return int(self.gib * (1 << 30))


# By memory. Where a bare name is sold in several sizes it means the smallest, with which no plan promises too much.
CARDS = (
    Card("RTX 3060", 11.6, 360, ("RTX 3060 12GB",)),
    Card("T4", 14.5, 320, pcie=3),
    Card("RTX 5080", 15.4, 960, pcie=5),
    Card("RTX 4080", 15.6, 717),
    Card("V100-16GB", 15.7, 900, ("V100", "V100 SXM2 16GB", "V100 PCIE 16GB"), pcie=3),
    Card("A10", 21.9, 600),
    Card("A10G", 21.9, 600),
    Card("L4", 22.0, 300),
    Card("RTX 3090", 23.5, 936, ("RTX 3090 Ti",)),
    Card("RTX 4090", 23.5, 1008),
    Card("A30", 23.5, 933),
    Card("RX 7900 XTX", 23.9, 960),
    Card("RTX 5090", 31.3, 1792, pcie=5),
    Card("V100-32GB", 31.7, 900, ("V100 SXM2 32GB", "V100 PCIE 32GB"), pcie=3),
    Card("A100-40GB", 39.3, 1555, ("A100", "A100 SXM4 40GB", "A100 PCIE 40GB")),
    Card("A40", 44.3, 696),
    Card("L40", 44.3, 864),
    Card("L40S", 44.3, 864),
    Card("RTX 6000 Ada", 47.2, 960, ("RTX 6000 Ada Generation",)),
    Card("RTX A6000", 47.2, 768, ("A6000",)),
    Card("MI210", 63.4, 1638),
    Card("MI250", 63.4, 1638, ("MI250X",)),  # one of its two dies, each a device of its own
    Card("A100-80GB", 79.1, 1935, ("A100 SXM4 80GB", "A100 PCIE 80GB", "A800")),
    Card("H100", 79.1, 3350, ("H100 80GB", "H100 80GB HBM3", "H100 SXM", "H100 SXM5", "H800"), pcie=5),
    Card("H100 PCIe", 79.1, 2000, (), pcie=5),
    Card("H100 NVL", 93.0, 3900, ("H100 94GB",), pcie=5),
    Card("GH200", 94.5, 4000, ("GH200 480GB", "GH200 96GB"), pcie=5),
    Card("RTX PRO 6000", 94.9, 1597, ("RTX PRO 6000 Blackwell", "RTX 6000 Pro"), pcie=5),
    Card("H200", 139.7, 4800, ("H200 141GB", "H200 NVL"), pcie=5),
    Card("B200", 178.3, 7700, pcie=5),
    Card("MI300X", 191.6, 5300, pcie=5),
    Card("MI325X", 255.6, 6000, pcie=5),
    Card("MI355X", 287.9, 8000, ("MI350X",), pcie=5),
)

_MAKERS = re.compile(r"\b(nvidia|amd|geforce|tesla|instinct|radeon|quadro)\b")


def find_card(name: str) -> Card | None:
    """The card that people, or a driver, call `name`: "h100", "A100-80GB", "rtx4090", "NVIDIA H100 80GB HBM3"."""
    return _BY_NAME.get(_plain(name))


def card_named(name: str) -> Card:
    """The same. Raises InvalidConfigError, which names those that are known."""
    found = find_card(name)
    if found is None:
        known = ", ".join(card.name for card in CARDS)
        raise InvalidConfigError(
            f"device={name!r} is no card that is known here, and no size; give its memory, such as 24GiB, or one of: "
            f"{known}; or detect, or cpu"
        )
    return found


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _MAKERS.sub("", name.lower()))


_BY_NAME = {_plain(name): card for card in CARDS for name in (card.name, *card.names)}
