"""Messages between the launcher and the agents of hosts, and the pipes and child processes that carry them."""
