"""What learners and teachers use: `explore` shows an idea under sliders, `check` runs an answer, `grade` marks a folder
of answers. What they gather is in `nbddp.lessons`. Importing this package imports nothing.
"""
