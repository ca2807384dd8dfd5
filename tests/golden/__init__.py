"""Recorded logs: what was written once must be written again, byte for byte, for ever.

``scenarios.py`` says what is recorded, ``python -m tests.golden.record`` writes the files once, and
``python -m tests.golden.replay`` reads the commands of each file, decides them anew and compares every byte.
"""
