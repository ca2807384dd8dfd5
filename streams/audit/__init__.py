"""Audits: pure folds over the log of decisions. Nothing here sends, writes or reads Kafka, and nothing reads a clock.

logged.py     one decision of the log, and all partitions' decisions in an order in which causes come first
past.py       the fold: agents and sites as they were        as_of.py   what that shows: slots, queue, holders
causes.py     why a trigger waits, from that state           explain.py one trigger's life, and why it was first
waiting.py    how long each cause held work up               estimate.py  when waiting work will start
recompute.py  every decision decided again from its command  slices.py  one agent's decisions as a file
what_if.py    recorded traffic through other limits, driven by the real deciders in simulated time
verify*.py    that the rules held and nobody changed the log
"""
