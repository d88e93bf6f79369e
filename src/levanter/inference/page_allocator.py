"""`PagePool`: who holds which page of the cache, on the host, without JAX.

A page is *free*, *held* by rows (several, if they have a prefix in common), or *idle*: held by nobody, but with
contents that a later prompt may begin with. Idle pages are given away when there are no free ones, those that were used
longest ago first.
"""

from collections.abc import Iterable, Sequence


class OutOfPagesError(Exception):
    """More pages were asked for than are free or idle."""


class PagePool:
    """The pages of one shard of the cache.

    A pool is changed by whoever works on it; `copy` is for whoever wants to keep a value.

    Attributes:
        size: how many pages there are.
    """

    def __init__(self, size: int):
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._holders: dict[int, int] = {}
        self._idle: dict[int, None] = {}  # in the order in which they are given away
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    def copy(self) -> "PagePool":
        """The same pool, to be changed by itself."""
        other = PagePool(0)
        other.size = self.size
        other._free = self._free.copy()
        other._holders = self._holders.copy()
        other._idle = self._idle.copy()
        other._page_of = self._page_of.copy()
        other._name_of = self._name_of.copy()
        return other

    @property
    def available(self) -> int:
        """Pages that can be taken: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Pages that rows hold."""
        return len(self._holders)

    @property
    def idle(self) -> int:
        """Pages that nobody holds and whose contents are known."""
        return len(self._idle)

    def holders(self, page: int) -> int:
        """How many rows hold a page."""
        return self._holders.get(page, 0)

    def take(self, count: int) -> tuple[int, ...]:
        """Pages for one row; what idle ones among them held is forgotten.

        Raises:
            OutOfPagesError: there are not so many; nothing has changed.
        """
        if count > self.available:
            raise OutOfPagesError(f"{count} pages wanted, {self.available} of {self.size} available")
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._forget(next(iter(self._idle)))
            self._holders[page] = 1
            pages.append(page)
        return tuple(pages)

    def _forget(self, page: int) -> int:
        del self._idle[page]
        del self._page_of[self._name_of.pop(page)]
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Lets one more row hold pages whose contents are known."""
        for page in pages:
            assert page in self._name_of, f"page {page} is shared, and nobody knows what it holds"
            self._idle.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Lets a row's pages go; those that nobody else holds become idle, or free if their contents are not known.

        The last page is given away first: a page is of no use without those before it.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._name_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def name(self, page: int, name: bytes) -> None:
        """Says what a held page has in it from now on; nothing changes if another page has the same."""
        assert self._holders.get(page), f"page {page} gets a name, and nobody holds it"
        if name not in self._page_of and page not in self._name_of:
            self._page_of[name] = page
            self._name_of[page] = name

    def find(self, name: bytes) -> int | None:
        """The page that has certain contents; None if there is none."""
        return self._page_of.get(name)

    def is_idle(self, page: int) -> bool:
        """Whether nobody holds a page whose contents are known."""
        return page in self._idle

    def check(self) -> None:
        """Asserts that every page is in exactly one place; for tests."""
        places = [*self._free, *self._holders, *self._idle]
        assert sorted(places) == list(range(self.size)), "a page is lost, or in two places"
        assert all(count > 0 for count in self._holders.values())
        assert {page: name for name, page in self._page_of.items()} == self._name_of
        assert self._idle.keys() <= self._name_of.keys()
        assert not self._name_of.keys() & set(self._free)
