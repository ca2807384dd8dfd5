"""The rules of admission: pure functions and values. No clock, id source, I/O or Kafka is known here."""
