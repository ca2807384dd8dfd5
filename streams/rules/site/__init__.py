"""The site's decider: its worker pool, its folders, its gates (site protocol)."""
