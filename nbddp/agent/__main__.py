"""`python -m nbddp.agent HOME OWNER_PID DESCRIPTOR [--controls-only]`. The module of the agent keeps its own name, by
which capabilities import it."""

from nbddp.agent.server import main

main()
