"""The shell of the stream processor: the only part of ``streams`` that talks to Kafka."""
