"""The read side: what the log decided, in PostgreSQL. It can be thrown away and built again from the log."""
