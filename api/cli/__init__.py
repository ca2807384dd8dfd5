"""The commands of ``berth``, one module each, and the servers that ``berth up`` embeds."""
