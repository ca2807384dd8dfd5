"""Everything that an agent's decider handles: from topics, from other deciders, and from its own partition."""

from typing import Annotated

from pydantic import Field

from streams.rules.messages import (
    Approve,
    Archive,
    Configure,
    Continue,
    Invalid,
    LosePayload,
    Park,
    Pause,
    Reschedule,
    Resume,
    ResumeTrigger,
    Status,
    Stop,
    Timer,
    Trigger,
)
from streams.rules.site_messages import Degraded, Denied, Granted, Recall, Resolved, Unwatch, Waiting, Watch

SiteAnswer = Granted | Waiting | Denied | Recall | Degraded

AgentInput = (
    Trigger
    | Stop
    | Status
    | Configure
    | Pause
    | Resume
    | Archive
    | Approve
    | Reschedule
    | ResumeTrigger
    | Granted
    | Waiting
    | Denied
    | Recall
    | Degraded
    | Watch
    | Unwatch
    | Resolved
)
"""What comes from topics and other deciders, as it was meant."""

AgentCommand = Annotated[AgentInput | Invalid | Timer | Continue | Park | LosePayload, Field(discriminator="type")]
