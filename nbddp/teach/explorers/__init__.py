"""One file per explorer: its controls, its two settings, and the figure that it shows."""
