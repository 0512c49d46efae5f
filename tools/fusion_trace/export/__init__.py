"""A job's records in the formats of other tools: Chrome's and Perfetto's traces, and CSV."""
