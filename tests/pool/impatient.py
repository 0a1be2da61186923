"""`nbddp.agent.reached` that gives a silent owner up after two seconds."""

from nbddp.agent import reached

reached.PATIENCE = 2.0
reached.main()
