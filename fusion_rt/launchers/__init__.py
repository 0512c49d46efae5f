"""How a worker comes into its job under any launcher: who it is, where the nodes meet, and how their daemons start."""
