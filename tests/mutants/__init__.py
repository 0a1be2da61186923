"""Wrong answers made systematically: every exercise's solution, changed in one place at a time, goes through its check.

`generate` makes the mutants from the notebooks' sources, `survivors` runs them and keeps the table of those that pass,
each with the reason why it is a right answer as well (`survivors.json`). `tests/lessons/test_mutants.py` holds
the table to it.
"""
