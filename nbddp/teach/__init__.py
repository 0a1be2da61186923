"""What the lessons in `notebooks/` are made with: `explore` shows an idea under sliders, `check` runs an answer.

Behind each explorer is a pure module here (data in, data and words out) and a figure in `nbddp.draw`; behind each
check a file in `checks/`, whose diagnosing part is pure too. Importing this package imports nothing.
"""
