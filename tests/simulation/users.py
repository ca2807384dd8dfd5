"""What people and other programs ask of a simulated cluster: one method per command, its details drawn at random."""

from typing import Any

from streams import CONTROLS, TRIGGERS
from tests.simulation.cluster import Cluster

FOLDERS = ("/a", "/a/b", "/a/bc", "/a/b/c", "/", "/d")
BURST = 60
"""More than one step changes."""


class Users:
    """Each public method sends something to the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.random = cluster.random
        self.bursting: str | None = None
        """Who was asked for more than a step does, if anybody was."""

    def act(self, command: str) -> None:
        getattr(self, command)()

    # What a command is about

    def _agent(self) -> str:
        return f"A{self.random.randrange(4)}"

    def _conversation(self) -> str:
        return f"c{self.random.randrange(3)}"

    def _someone(self) -> str:
        """A trigger, more often a late one: the early ones have ended."""
        ids = self.cluster.trigger_ids
        return self.random.choice(ids[-15:]) if ids else "t0"

    def _resources(self) -> dict[str, Any]:
        """A worker, a folder of an environment, or both, for an organization."""
        needs: dict[str, Any] = {"organization_id": self.random.choice(["o1", "o2"])}
        if self.random.random() < 0.5:
            needs["department_id"] = "d1"
        if self.random.random() < 0.3:
            return needs | {"worker": True}
        where = {"environment_id": "e1", "folder": self.random.choice(FOLDERS)}
        return needs | where | {"worker": self.random.random() < 0.6}

    # Triggers

    def trigger(self) -> None:
        self.cluster.trigger(self._agent(), conversation_id=self._conversation())

    def site_trigger(self) -> None:
        needs = self._resources()
        self.cluster.trigger(self._agent(), conversation_id=self._conversation(), heartbeat_seconds=60, **needs)

    def http_trigger(self) -> None:
        agent = self.random.choice([self._agent(), "nobody"])
        self.cluster.trigger(agent, via="http", conversation_id=self._conversation())

    def future(self) -> None:
        self.cluster.trigger(self._agent(), conversation_id=self._conversation(), available_at=self.cluster.at(25))

    def _interactive(self, on_busy: str, **fields: Any) -> None:
        fields |= {"conversation_id": self._conversation(), "interactive": True, "kind": "chat", "on_busy": on_busy}
        self.cluster.trigger(self._agent(), **fields)

    def _urgent(self, on_busy: str) -> None:
        fields = self._resources() if self.random.random() < 0.5 else {}
        draw = self.random.random()
        if draw < 0.05:
            fields["approval_required"] = True
        elif draw < 0.1:
            fields["available_at"] = self.cluster.at(10)
        elif draw < 0.15:
            fields["depends_on"] = [{"agent_id": self._agent(), "conversation_id": self._conversation()}]
        self._interactive(on_busy, decide_before=self.cluster.at(4), **fields)

    def ask(self) -> None:
        self._urgent("ask")

    def force(self) -> None:
        self._urgent("force")

    def interrupt(self) -> None:
        self._interactive("interrupt", **(self._resources() if self.random.random() < 0.5 else {}))

    def reply(self) -> None:
        self._interactive("queue")

    def expiring(self) -> None:
        fields = self._resources() if self.random.random() < 0.7 else {}
        self.cluster.trigger(self._agent(), expires_at=self.cluster.at(20), **fields)

    def depends(self) -> None:
        on = {"agent_id": self._agent(), "conversation_id": f"{self.random.choice('cd')}{self.random.randrange(3)}"}
        self.cluster.trigger(self._agent(), conversation_id=f"d{self.random.randrange(3)}", depends_on=[on])

    def approval(self) -> None:
        agent = self._agent()
        id = self.cluster.trigger(agent, conversation_id=self._conversation(), approval_required=True)
        self.cluster.control(agent, "approve", trigger_id=self.random.choice([id, self._someone()]))

    def unknown_site(self) -> None:
        self.cluster.trigger(self._agent(), site="elsewhere", worker=True)
        if self.random.random() < 0.2:
            self.cluster.site_control("elsewhere", self.random.choice(["pause_site", "configure_site"]))

    def bad_input(self) -> None:
        agent, id = self._agent(), self._someone()
        about = {"type": "trigger", "v": 1, "id": id, "agent_id": agent, "conversation_id": "other"}
        bad = [{"on_busy": "whenever", "id": f"{id}-b"}, {"expires_at": "today", "id": f"{id}-i"}, {}]
        self.cluster.send(TRIGGERS.name, agent, about | self.random.choice(bad))
        self.cluster.send(TRIGGERS.name, agent, {"nothing": "known"})

    def burst(self) -> None:
        """More work than one step may take away again."""
        self.bursting = agent = self._agent()
        fields: dict[str, Any] = {"worker": True, "organization_id": "o1"} if self.random.random() < 0.6 else {}
        if self.random.random() < 0.5:
            fields["conversation_id"] = "b1"
        for _ in range(BURST):
            self.cluster.trigger(agent, **fields)
        if fields.get("worker"):
            self.cluster.control(agent, "configure", parallelism_limit="unlimited")

    def burst_ends(self) -> None:
        agent = self.bursting or self._agent()
        match self.random.choice(["archive", "pause", "stop", "gate", "limit", "capacity"]):
            case "archive":
                self.cluster.control(agent, "archive")
            case "pause":
                self.cluster.control(agent, "pause")
            case "stop":
                self.cluster.stop(agent, conversation_id="b1")
            case "gate":
                self.cluster.site_control("default", "gate", scope="organization", name="o1", enabled=False)
            case "limit":
                self.cluster.control(agent, "configure", parallelism_limit="unlimited")
            case _:
                self.cluster.site_control("default", "configure_site", capacity=100)

    # Stops and controls

    def stop(self) -> None:
        self.cluster.stop(self._agent(), trigger_id=self._someone())

    def stop_conversation(self) -> None:
        self.cluster.stop(self._agent(), conversation_id=self._conversation())

    def limit(self) -> None:
        limit = self.random.choice([1, 2, 3, "unlimited"])
        self.cluster.control(self._agent(), "configure", parallelism_limit=limit)

    def serial(self) -> None:
        fields = {"parallelism_limit": 2} if self.random.random() < 0.2 else {}
        self.cluster.control(self._agent(), "configure", serial=self.random.random() < 0.6, **fields)

    def small_backlog(self) -> None:
        self.cluster.control(self._agent(), "configure", max_backlog_depth=self.random.choice([0, 2, 1000]))

    def budget(self) -> None:
        self.cluster.control(self._agent(), "configure", run_budget=self.random.choice([0, 1, 5]))

    def pause(self) -> None:
        self.cluster.control(self._agent(), self.random.choice(["pause", "resume"]))

    def archive(self) -> None:
        self.cluster.control(self._agent(), self.random.choice(["archive", "configure"]))

    def resume_trigger(self) -> None:
        on_busy = self.random.choice(["queue", "ask", "force"])
        self.cluster.control(self._agent(), "resume_trigger", trigger_id=self._someone(), on_busy=on_busy)

    def reschedule(self) -> None:
        when = self.cluster.at(self.random.choice([-1000, 0, 15]))
        self.cluster.control(self._agent(), "reschedule", trigger_id=self._someone(), available_at=when)

    def late_control(self) -> None:
        self.cluster.control(self._agent(), "pause", decide_before=self.cluster.at(0))

    def conflict(self) -> None:
        about = {"v": 1, "id": "k-again", "agent_id": "A0", "requested_by": "someone"}
        self.cluster.send(CONTROLS.name, "A0", {"type": self.random.choice(["pause", "resume"]), **about})

    # Sites

    def gate(self) -> None:
        scope, name = self.random.choice([("organization", "o1"), ("department", "d1")])
        self.cluster.site_control("default", "gate", scope=scope, name=name, enabled=self.random.random() < 0.5)

    def site_budget(self) -> None:
        budget = self.random.choice([0, 1, 3, None])
        self.cluster.site_control("default", "gate", scope="organization", name="o2", run_budget=budget)

    def site_pause(self) -> None:
        self.cluster.site_control("default", self.random.choice(["pause_site", "resume_site"]))

    def capacity(self) -> None:
        self.cluster.site_control("default", "configure_site", capacity=self.random.choice([0, 1, 3]))

    def delete_folder(self) -> None:
        path = self.random.choice(FOLDERS)
        self.cluster.site_control("default", "delete_folder", environment_id="e1", path=path)

    def delete_environment(self) -> None:
        self.cluster.site_control("default", "delete_environment", environment_id="e1")


COMMANDS = tuple(name for name in vars(Users) if not name.startswith("_") and name != "act")
