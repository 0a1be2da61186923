"""The documentation: its pages, the site that `python -m docs` makes of them, and what draws its pictures."""
