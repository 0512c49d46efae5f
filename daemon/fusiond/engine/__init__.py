"""The engine of a node, which joins operations, shards and control."""
