"""Plans and their buckets: memory, recipes, state of codecs."""
