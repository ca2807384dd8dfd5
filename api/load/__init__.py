"""Load for Berth and what is needed to watch it: arrivals, a runner's loop, and the progress of a run."""
