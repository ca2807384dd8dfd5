"""Audits: pure folds over the log of decisions. Nothing here decides, sends or reads Kafka."""
