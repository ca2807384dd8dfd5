"""The page at /: agents, their slots, what waits and why. Plain HTML, CSS and JavaScript; nothing to build."""
