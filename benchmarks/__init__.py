"""Side-by-side measurements against the peers, and `netlab`, which makes several hosts out of one machine."""
