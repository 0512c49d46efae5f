"""Elastic jobs: hosts and workers come and go, from one membership epoch to the next (docs/design.md, Elastic).

The launcher's side: `epochs` decides and does no I/O, with `places` (who gets which rank) and `blacklist` (which hosts
are left out, and how long); `launch` carries it out, and `discovery` runs the script that finds the hosts. On each
host, `agent` keeps the workers from one epoch to the next, and `workers` talks to them.
"""
