"""Who may have which folder: a tree of folders per environment that knows the oldest claim it could be given to.

A node stands for a folder. It knows its holder, the holders below, the waiting claims for exactly this folder (those
that need a worker apart), and which of these *block*: a claim that was passed too often keeps younger ones from every
overlapping folder. Everything that can keep a claim from its folder lies on the path above it or in the subtree below,
so each node keeps four summaries of its subtree, and a change updates those on one path only:

- the oldest waiting claim, and the oldest blocking one;
- ``best``, without and with a worker: the oldest claim that nothing *in the subtree* keeps from its folder. That is the
  node's own oldest, if nothing below is held and no blocker below is older; or the children's best, if this node is not
  held and has no older blocker itself.

The root's best is the oldest claim of the environment that can be granted. Source: the measured sketch of the site
protocol; the cost of a step is O(depth × log n).
"""

from typing import Final, NamedTuple

from sortedcontainers import SortedList

from streams.rules.folders import Segments


class ClaimKey(NamedTuple):
    """Who is older comes first, across agents."""

    available_at: int
    created_at: int
    id: bytes
    agent_id: bytes


class Place(NamedTuple):
    """A folder of an environment."""

    environment_id: str
    segments: Segments


_OLDEST: Final = 0
_BLOCKER: Final = 1
_BEST: Final = 2
"""Index of ``best`` without a worker; the next one is with."""

Summary = tuple[ClaimKey | None, ClaimKey | None, ClaimKey | None, ClaimKey | None]


def _least(*keys: ClaimKey | None) -> ClaimKey | None:
    return min((key for key in keys if key is not None), default=None)


def _first(keys: "SortedList[ClaimKey]") -> ClaimKey | None:
    return keys[0] if keys else None


class _Node:
    __slots__ = ("blockers", "children", "held_below", "is_held", "name", "of_children", "parent", "summary", "waiting")

    def __init__(self, parent: "_Node | None", name: str) -> None:
        self.parent = parent
        self.name = name
        self.children: dict[str, _Node] = {}
        self.is_held = False
        self.held_below = 0
        """Holders in the subtree, the own one included."""
        self.waiting: tuple[SortedList[ClaimKey], SortedList[ClaimKey]] = (SortedList(), SortedList())
        """Without and with a worker."""
        self.blockers: SortedList[ClaimKey] = SortedList()
        self.summary: Summary = (None, None, None, None)
        self.of_children: tuple[SortedList[tuple[ClaimKey, str]], ...] = tuple(SortedList() for _ in range(4))

    def summarize(self) -> Summary:
        oldest, blocker, *best_below = (entries[0][0] if entries else None for entries in self.of_children)
        own_blocker = _first(self.blockers)
        oldest_blocker = _least(own_blocker, blocker)
        best: list[ClaimKey | None] = []
        for own, below in zip(map(_first, self.waiting), best_below, strict=True):
            own_fits = own is not None and not self.held_below and (oldest_blocker is None or own <= oldest_blocker)
            below_fits = below is not None and not self.is_held and (own_blocker is None or below < own_blocker)
            best.append(_least(own if own_fits else None, below if below_fits else None))
        return _least(*map(_first, self.waiting), oldest), oldest_blocker, best[0], best[1]

    @property
    def is_empty(self) -> bool:
        return not (self.children or self.is_held or self.waiting[0] or self.waiting[1])


class Forest:
    """The folders of all environments of a site."""

    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}
        self._best: tuple[SortedList[tuple[ClaimKey, str]], SortedList[tuple[ClaimKey, str]]] = (
            SortedList(),
            SortedList(),
        )

    def best(self, worker: bool) -> ClaimKey | None:
        """The oldest waiting claim that can have its folder."""
        entries = self._best[worker]
        return entries[0][0] if entries else None

    def wait(self, place: Place, key: ClaimKey, worker: bool, blocks: bool) -> None:
        """A claim begins to wait for its folder."""
        node = self._node(place)
        node.waiting[worker].add(key)
        if blocks:
            node.blockers.add(key)
        self._update(node)

    def leave(self, place: Place, key: ClaimKey, worker: bool, blocks: bool) -> None:
        """A waiting claim waits no longer: granted, gone, or behind a gate."""
        node = self._node(place)
        node.waiting[worker].remove(key)
        if blocks:
            node.blockers.remove(key)
        self._update(node)

    def block(self, place: Place, key: ClaimKey) -> None:
        """A waiting claim was passed too often."""
        node = self._node(place)
        node.blockers.add(key)
        self._update(node)

    def hold(self, place: Place) -> None:
        self._set_held(place, True)

    def free(self, place: Place) -> None:
        self._set_held(place, False)

    def is_busy(self, place: Place, key: ClaimKey) -> bool:
        """Whether somebody holds an overlapping folder, or an older claim blocks it."""
        node = self._node(place)
        above = list(_above(node))
        held = node.held_below > 0 or any(one.is_held for one in above)
        blocker = _least(node.summary[_BLOCKER], *(_first(one.blockers) for one in above))
        self._prune(node)
        return held or (blocker is not None and blocker < key)

    def oldest_waiting(self, place: Place) -> ClaimKey | None:
        """The oldest claim that waits for an overlapping folder."""
        node = self._node(place)
        found = _least(node.summary[_OLDEST], *(_first(keys) for one in _above(node) for keys in one.waiting))
        self._prune(node)
        return found

    def _node(self, place: Place) -> _Node:
        node = self._roots.get(place.environment_id)
        if node is None:
            node = self._roots[place.environment_id] = _Node(None, place.environment_id)
        for name in place.segments:
            child = node.children.get(name)
            if child is None:
                child = node.children[name] = _Node(node, name)
            node = child
        return node

    def _set_held(self, place: Place, held: bool) -> None:
        node = self._node(place)
        assert node.is_held != held, "a folder has one holder"
        node.is_held = held
        change = 1 if held else -1
        node.held_below += change
        for one in _above(node):
            one.held_below += change
        self._update(node, to_the_root=True)

    def _update(self, node: _Node | None, to_the_root: bool = False) -> None:
        """Bring the summaries up to date from this node on upwards, and drop nodes that nobody needs.

        Above a summary that stays as it was nothing changes, but for what is held below.
        """
        while node is not None:
            parent, before, after = node.parent, node.summary, node.summarize()
            if after == before and not to_the_root:
                return
            node.summary = after
            targets = parent.of_children if parent is not None else (None, None, *self._best)
            for target, old, new in zip(targets, before, after, strict=True):
                if target is not None and old != new:
                    if old is not None:
                        target.remove((old, node.name))
                    if new is not None:
                        target.add((new, node.name))
            self._drop_if_empty(node)
            node = parent

    def _prune(self, node: _Node | None) -> None:
        """Take back the nodes that were only made to be asked."""
        while node is not None and node.is_empty:
            parent = node.parent
            self._drop_if_empty(node)
            node = parent

    def _drop_if_empty(self, node: _Node) -> None:
        if node.is_empty:
            if node.parent is None:
                del self._roots[node.name]
            else:
                del node.parent.children[node.name]


def _above(node: _Node) -> list[_Node]:
    found = []
    while node.parent is not None:
        node = node.parent
        found.append(node)
    return found
