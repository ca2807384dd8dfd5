"""The agent's decider: its limit, its queue, and the life of its attempts."""
