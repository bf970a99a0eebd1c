"""Slots and entry pages: who owns what. Slot 0 and page 0 are the bin and are never handed out."""

from __future__ import annotations

from trtllm_v4tree.errors import CapacityError
from trtllm_v4tree.sizes import EngineSizes


class FreeList:
    """Numbers 1 .. count - 1, lowest first; taking none or giving back what is free is a bug."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, 0, -1))
        self._taken: set[int] = set()

    def __len__(self) -> int:
        return len(self._free)

    @property
    def taken(self) -> frozenset[int]:
        return frozenset(self._taken)

    def take(self, count: int) -> list[int]:
        """Raises CapacityError if fewer are free."""
        if count > len(self._free):
            raise CapacityError(f"{count} needed, {len(self._free)} free.")
        got = [self._free.pop() for _ in range(count)]
        self._taken.update(got)
        return got

    def give_back(self, numbers: list[int]) -> None:
        for number in numbers:
            self._taken.remove(number)
            self._free.append(number)


class Pools:
    """Slots and pages of an engine, reserved for a request's whole life when it is admitted."""

    def __init__(self, sizes: EngineSizes) -> None:
        self.sizes = sizes
        self.slots = FreeList(sizes.num_slots)
        self.pages = FreeList(sizes.num_pages)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.sizes.page_tokens)

    def can_admit(self, tokens: int) -> bool:
        return len(self.slots) > 0 and self.pages_for(tokens) <= len(self.pages)

    def admit(self, tokens: int) -> tuple[int, list[int]]:
        """A slot and the pages for `tokens` tokens."""
        pages = self.pages.take(self.pages_for(tokens))
        return self.slots.take(1)[0], pages

    def release(self, slot: int, pages: list[int]) -> None:
        self.slots.give_back([slot])
        self.pages.give_back(pages)
