"""One file per topic: what is asked of a learner's function, and what is said about what it does.

A file's diagnosing functions are pure: they take what the ranks brought back. What runs on the ranks is in
`nbddp.worker.exercise`, and how it is run (deadline, deadlocks, errors) in `nbddp.teach.running`.
"""
