"""The line of a conversation: its live triggers, those that have a place in the order of their places (B6)."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Line:
    """The live triggers of one conversation. The first is its head, unless one runs: an interrupt stands before it."""

    placed: list[tuple[tuple[int, int], str]] = field(default_factory=list)
    unplaced: set[str] | None = None
    """None while it is empty, as it is for most conversations: 200 bytes less for each."""
    running: str | None = None

    @property
    def head(self) -> str | None:
        if self.running is not None:
            return self.running
        return self.placed[0][1] if self.placed else None

    def __len__(self) -> int:
        return len(self.placed) + len(self.unplaced or ())

    def add_unplaced(self, trigger_id: str) -> None:
        if self.unplaced is None:
            self.unplaced = set()
        self.unplaced.add(trigger_id)

    def discard_unplaced(self, trigger_id: str) -> None:
        if self.unplaced is not None:
            self.unplaced.discard(trigger_id)
            if not self.unplaced:
                self.unplaced = None
