"""`nbddp.capabilities.hosts.remote_agent` that gives a silent owner up after two seconds."""

from nbddp.capabilities.hosts import remote_agent

remote_agent.PATIENCE = 2.0
remote_agent.main()
