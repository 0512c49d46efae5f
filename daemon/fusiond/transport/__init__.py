"""Messages between nodes: connections, authentication, flow control, and detection of silent nodes."""
