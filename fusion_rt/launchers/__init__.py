"""A worker's way into its job under any launcher: its rank, the meeting of the nodes, and the start of daemons."""
