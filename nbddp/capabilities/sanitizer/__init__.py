"""`--sanitize`: silent mistakes of data-parallel training, found while a program runs.

On each rank a part records digests of what training does (`on_rank`), and calls no collective. In the notebook rules
compare them across ranks (`kinds`), and what they find is shown after the cell (`findings`).
"""
