"""An agent's rows as they are stored in the changelog: which key each has, and its bytes."""

from streams import codec
from streams.rules.agent.rows import RowRef
from streams.rules.agent.state import Agent


def rows_of(agent: Agent) -> dict[bytes, bytes]:
    """All of an agent's rows but its triggers' texts, in no order that means anything."""
    refs = [RowRef("agent"), *(RowRef("trigger", id) for id in agent.triggers)]
    refs += [RowRef("conversation", id) for id in agent.conversations]
    refs += [RowRef("remembered", id, kind) for kind, id in agent.remembered]
    refs += [RowRef("watch", id, None, watcher) for id, watchers in agent.watches.items() for watcher in watchers]
    rows = {key_of(agent.agent_id, ref): value_of(agent, ref) for ref in refs}
    return {key: value for key, value in rows.items() if value is not None}


def key_of(agent_id: str, ref: RowRef) -> bytes:
    """The changelog's key of one row."""
    return codec.write_key(_key_of(agent_id, ref))


def _key_of(agent_id: str, ref: RowRef) -> codec.Key:
    match ref.kind:
        case "agent":
            return ("agent", agent_id)
        case "remembered":
            assert ref.remembered is not None
            return ("remembered", agent_id, ref.remembered, ref.id)
        case "trigger" | "conversation":
            return (ref.kind, agent_id, ref.id)
        case "watch":
            assert ref.watcher is not None
            return ("watch", agent_id, ref.id, *ref.watcher)


def value_of(agent: Agent, ref: RowRef) -> bytes | None:
    """The row's bytes; None: there is no such row any more."""
    match ref.kind:
        case "agent":
            return codec.write_agent(agent.row)
        case "trigger":
            trigger = agent.triggers.get(ref.id)
            return None if trigger is None else codec.write_trigger(trigger)
        case "conversation":
            conversation = agent.conversations.get(ref.id)
            return None if conversation is None else codec.write_conversation(conversation)
        case "remembered":
            assert ref.remembered is not None
            remembered = agent.remembered.get((ref.remembered, ref.id))
            return None if remembered is None else codec.write_remembered(remembered)
        case "watch":
            assert ref.watcher is not None
            watch = agent.watches.get(ref.id, {}).get(ref.watcher)
            return None if watch is None else codec.write_watch(watch)
