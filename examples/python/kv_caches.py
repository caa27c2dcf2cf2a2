"""Two engines on one device trade the memory of their paged KV caches: what one does not use now, the other may have.

Each engine reserves addresses for all that it could ever use, and commits pages behind them as its sequences grow. Pages of sequences that have ended stay
as a cache of prefixes until the other engine wants their memory. docs/frameworks.md names the places in vLLM and SGLang where such a cache would go.

    python examples/python/kv_caches.py
"""
# SPDX-License-Identifier: Apache-2.0
import collections
import threading

import numpy

import gpushare

CAPACITY = 64 << 20


class PagedCache:
    """Pages of keys and values in an elastic range. A page is a granule of the device."""

    def __init__(self, session, name):
        with session.range("1M") as probe:
            self.page_bytes = probe.info()["granule_bytes"]
        self.pages = CAPACITY // self.page_bytes  # addresses for all of the device: the other engine's part, too
        self._mutex = threading.Lock()
        self._empty = collections.deque(range(self.pages))  # without memory
        self._cached = collections.deque()  # of ended sequences, the oldest first
        self.given = 0
        self._range = session.range(self.pages * self.page_bytes, self._give_back, name=name, answer=60.0)

    def take(self):
        """A page with memory behind it. Waits while the other engine gives some back."""
        with self._mutex:
            if not self._empty:
                return self._cached.popleft()  # it has memory
            page = self._empty.popleft()
        self._range.commit(page * self.page_bytes, self.page_bytes, timeout=60)
        return page

    def array(self, page):
        """The page as an array: numpy's here, one for torch.from_dlpack on a GPU."""
        return self._range.array((self.page_bytes // 2,), numpy.float16, offset=page * self.page_bytes)

    def end(self, pages):
        """A sequence has ended: its pages may help a later one with the same beginning."""
        with self._mutex:
            self._cached.extend(pages)

    def _give_back(self, nbytes, seconds):
        """The other engine needs room: the oldest cached pages go. Called on a thread of the range."""
        with self._mutex:
            pages = [self._cached.popleft() for _ in range(min(len(self._cached), -(-nbytes // self.page_bytes)))]
        for page in pages:
            self._range.decommit(page * self.page_bytes, self.page_bytes)
        with self._mutex:
            self._empty.extend(pages)
            self.given += len(pages)
        return len(pages) * self.page_bytes

    def committed(self):
        return self._range.info()["committed_bytes"] // self.page_bytes

    def close(self):
        self._range.close()


def decode(session, cache, mark, length):
    """A sequence of `length` pages: each iteration fills one and reads all before it."""
    pages = []
    for step in range(length):
        pages.append(cache.take())
        with session.iteration():
            cache.array(pages[-1])[:] = mark + step
            assert all(cache.array(page)[0] == mark + number for number, page in enumerate(pages)), "somebody else wrote into a page"
    cache.end(pages)


def main():
    with gpushare.Runtime("host", policy="fair", capacity_bytes=CAPACITY) as runtime:
        chat, code = (runtime.open_session(name, ephemeral_bytes="1M") for name in ("chat", "code"))
        caches = PagedCache(chat, "chat's cache"), PagedCache(code, "code's cache")
        rows = [("", "chat", "code")]
        many = caches[0].pages * 3 // 4  # more than half of the device
        for when, session, cache in (("chat is busy", chat, caches[0]), ("code is busy", code, caches[1]), ("chat again", chat, caches[0])):
            decode(session, cache, 100, many)
            rows.append((when, *(str(each.committed()) for each in caches)))
        print("\n".join(f"{when:14}{first:>6}{second:>6}" for when, first, second in rows))
        print("pages given to the other:", [cache.given for cache in caches])
        assert all(cache.given > 0 for cache in caches)
        for cache in caches:
            cache.close()


if __name__ == "__main__":
    main()
