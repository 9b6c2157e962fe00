"""The pool once more: one object a page, plain lists, linear searches. Slow and obvious."""

from __future__ import annotations

from dataclasses import dataclass, field

Key = int
ROOT = 0


@dataclass(eq=False)
class Page:
    """A page in use: what it is called, and who keeps it."""

    key: Key | None = None
    parent: Key = ROOT
    owners: int = 1
    pins: int = 0
    reset: bool = False

    @property
    def idle(self) -> bool:
        """Whether nobody keeps it."""
        return self.owners + self.pins == 0


@dataclass(eq=False)
class Run:
    """Pages of one handle, in order."""

    pages: list[Page]
    lifetime: int = 0
    named: int = 0
    boundary: bool = False  # of a hold: its last page is a partial one
    sources: list[Page] = field(default_factory=list)  # of copies still to be made
    reset_from: int | None = None

    @property
    def full(self) -> int:
        """Full pages."""
        return len(self.pages) - int(self.boundary)


@dataclass
class ReferencePool:
    """Counts, names and eviction order of a pool with `total` usable pages."""

    total: int
    retention: bool = True
    free: int = 0
    named: dict[Key, list[Page]] = field(default_factory=dict)  # primary, then duplicates, newest first
    order: list[Page] = field(default_factory=list)  # cached pages, next to be evicted first
    promises: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = self.total

    @property
    def entitled(self) -> int:
        """What admitted requests may still draw."""
        return sum(run.lifetime - len(run.pages) for run in self.promises)

    @property
    def available(self) -> int:
        """Free and cached pages."""
        return self.free + len(self.order)

    def issue(self, count: int) -> list[Page]:
        """New pages, evicting the first in order as needed."""
        while self.free < count:
            self.evict(self.order[0])
        self.free -= count
        return [Page() for _ in range(count)]

    def evict(self, page: Page) -> None:
        """Free a cached page."""
        self.order.remove(page)
        self.forget(page)

    def forget(self, page: Page) -> None:
        """Free a page and take its name out."""
        if page.key is not None:
            self.named[page.key].remove(page)
            if not self.named[page.key]:
                del self.named[page.key]
        self.free += 1

    def match(self, keys: list[Key], partial: Key | None = None) -> Run:
        """Own the longest resident prefix that promises leave room for, a partial page after it included."""
        pages: list[Page] = []
        room = self.available - self.entitled
        for key in keys if partial is None else [*keys, partial]:
            if key not in self.named:
                break
            page = self.named[key][0]
            room -= page.idle
            if room < 0:
                break
            self.own(page)
            pages.append(page)
        return Run(pages, named=len(pages), boundary=len(pages) > len(keys))

    def rooms_without(self, holds: list[Run]) -> list[int]:
        """Room as more and more holds are let go."""
        rooms = []
        for count in range(len(holds) + 1):
            gone = [page for hold in holds[:count] for page in hold.pages]
            freed = {id(page) for page in gone if page.owners + page.pins == gone.count(page)}
            rooms.append(self.available - self.entitled + len(freed))
        return rooms

    def own(self, page: Page) -> None:
        """One more owner of a resident page."""
        if page in self.order:
            self.order.remove(page)
        page.owners += 1

    def disown(self, pages: list[Page]) -> None:
        """One owner less of each page of a run, its last page first."""
        for page in reversed(pages):
            page.owners -= 1
            if page.idle:
                self.settle(page, before=None)
        self.sweep()

    def settle(self, page: Page, before: Page | None) -> None:
        """A page that nobody keeps is cached or freed."""
        copies = self.named.get(page.key, []) if page.key is not None else []
        if self.retention and copies == [page] and not page.reset:
            self.order.insert(self.order.index(before) if before else len(self.order), page)
        else:
            self.forget(page)

    def sweep(self) -> None:
        """Free cached pages that hang on nothing."""
        for page in [each for each in self.order if not self.reachable(each)]:
            self.evict(page)

    def reachable(self, page: Page) -> bool:
        """Whether a chain of resident pages leads to an owned page or the start."""
        parent = page.parent
        while parent != ROOT:
            if parent not in self.named:
                return False
            ancestor = self.named[parent][0]
            if ancestor.owners:
                break
            parent = ancestor.parent
        return True

    def reserve(self, count: int) -> Run | None:
        """Pages for a restore, if promises leave that many."""
        return Run(self.issue(count)) if self.available - self.entitled >= count else None

    def commit(self, staged: Run, keys: list[Key], base: Run, parent: Key) -> Run:
        """Own the restored pages, or those that came first under their keys."""
        # Look before freeing anything, as one step.
        present = [self.named.get(key, [None])[0] for key in keys]
        for page in present:
            if page is not None:
                self.own(page)
        pages = list(base.pages)
        for at, (key, holder) in enumerate(zip(keys, present, strict=True)):
            page = staged.pages[at]
            if holder is None:
                self.name(page, key, parent)
                pages.append(page)
            else:
                self.free += 1
                pages.append(holder)
            parent = key
        self.free += len(staged.pages) - len(keys)
        return Run(pages, named=len(pages))

    def commit_late(self, staged: Run, keys: list[Key], parent: Key) -> None:
        """Cache the restored pages, if what they continue is still there."""
        if parent != ROOT and parent not in self.named:
            keys = []
        run = self.commit(staged, keys, Run([]), parent)
        for page in run.pages:
            page.owners -= 1
            if page.idle:
                self.settle_loose(page)

    def name(self, page: Page, key: Key, parent: Key) -> None:
        """Give a page its name; an idle holder of the name makes way, an owned one stays first."""
        page.key, page.parent = key, parent
        copies = self.named.setdefault(key, [])
        if copies and copies[0].idle:
            self.evict(copies[0])
            copies = self.named.setdefault(key, [])
        copies.insert(1, page)

    def admit(self, lifetime: int, hold: Run | None) -> Run | None:
        """Promise `lifetime` pages, the first of which are there already."""
        full = hold.full if hold else 0
        if lifetime - full > self.available - self.entitled:
            return None
        run = Run(list(hold.pages[:full]) if hold else [], lifetime, full)
        self.promises.append(run)
        if hold and hold.boundary:
            self.copy(run, hold.pages[full:])
            self.disown(hold.pages[full:])
        return run

    def fork(self, parent: Run, lifetime: int, shared: int, copied: int) -> Run | None:
        """Promise a branch its pages, the first of which it shares."""
        if lifetime - shared > self.available - self.entitled:
            return None
        run = Run(parent.pages[:shared], lifetime, shared)
        for page in run.pages:
            page.owners += 1
        self.promises.append(run)
        self.copy(run, parent.pages[shared : shared + copied])
        return run

    def copy(self, run: Run, sources: list[Page]) -> None:
        """Pages of its own for what is to be copied."""
        run.sources = list(sources)
        self.pin(sources)
        run.pages += self.issue(len(sources))

    def copied(self, run: Run) -> None:
        """Copies are made."""
        sources, run.sources = run.sources, []
        self.unpin(sources)

    def draw(self, run: Run, count: int) -> None:
        """Promised pages."""
        run.pages += self.issue(count)

    def register(self, run: Run, keys: list[Key]) -> None:
        """Name the next pages."""
        parent = run.pages[run.named - 1].key if run.named else ROOT
        for key in keys:
            self.name(run.pages[run.named], key, parent or ROOT)
            run.named += 1
            parent = key

    def retract(self, run: Run, count: int) -> None:
        """The last pages go back and are promised again."""
        tail = run.pages[len(run.pages) - count :]
        del run.pages[len(run.pages) - count :]
        self.disown(tail)

    def end(self, run: Run) -> None:
        """Pages and the rest of the promise go back."""
        self.promises.remove(run)
        for page in run.pages[run.reset_from :] if run.reset_from is not None else []:
            page.reset = True
        self.copied(run)
        self.disown(run.pages)

    def pin(self, pages: list[Page]) -> None:
        """Keep pages."""
        for page in pages:
            page.pins += 1

    def unpin(self, pages: list[Page]) -> None:
        """Keep pages no longer; duplicates first, then what shares its name, then the rest in order."""
        copies = [page for page in pages if page.key and self.named[page.key][0] is not page]
        marked = [page for page in pages if page not in copies and page.reset]
        for group in (copies[::-1], marked[::-1], [p for p in pages if p not in [*copies, *marked]]):
            for page in group:
                self.unpin_one(page)
            self.sweep()

    def unpin_one(self, page: Page) -> None:
        """One pin less."""
        page.pins -= 1
        if page.idle:
            self.settle_loose(page)

    def settle_loose(self, page: Page) -> None:
        """Settle a page whose ancestors may be cached or gone."""
        if not self.retention or page.key is None or page.reset or self.named[page.key] != [page]:
            self.settle(page, before=None)
            return
        parent = page.parent
        while parent != ROOT:
            if parent not in self.named:
                self.forget(page)
                return
            ancestor = self.named[parent][0]
            if ancestor.idle:
                self.settle(page, before=ancestor)
                return
            if ancestor.owners:
                break
            parent = ancestor.parent
        self.settle(page, before=None)

    def set_retention(self, *, on: bool) -> None:
        """Off drains the cache."""
        self.retention = on
        while not on and self.order:
            self.evict(self.order[0])

    @property
    def clearable(self) -> bool:
        """Whether nobody uses or is about to fill a named page."""
        return not self.promises and not any(
            page.owners + page.pins for run in self.named.values() for page in run
        )

    def clear(self) -> None:
        """Forget everything."""
        while self.order:
            self.evict(self.order[0])
