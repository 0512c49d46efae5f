"""Messages between nodes: connections, authentication, flow control, and who is silent."""
