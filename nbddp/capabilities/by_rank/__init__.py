"""A page of a cell's output with a tab for each rank, while the cell runs and when it has ended."""
