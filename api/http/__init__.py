"""The HTTP API: writes become records on Kafka and are answered from the log, reads come from Postgres."""
